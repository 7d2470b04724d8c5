// SPDX-License-Identifier: Apache-2.0
//
// One call with many requests, such as AttendStream. It reads only while fewer than
// stream_requests_max of its requests are unanswered; beyond that, what the client sends waits in
// the client. Answers are written one at a time, in the order in which they were ready, or, if the
// format says so, in that of their requests.
//
//   reading --1--> over --2--> finished
//
//   1  The client half-closed or cancelled, a write failed, the server drains, no memory is left
//   for
//      a message, or its caller may not send it any more: nothing is read any more.
//   2  NextLocked: every request that was read is answered or dropped, and no write is under way.
//      One thread is given kFinish.
//
// A request counts as unanswered from its reading until its answer is written, or cannot be.
//
// The wire's threads enter through the On... methods, the server's through Finish. A mutex guards
// the state and is never held across a call to the wire or the engine that may call back.

#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/rpc/call_context.h"
#include "server/rpc/data_wire.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/standing_caller.h"
#include "server/wire/message_format.h"

namespace attend {

class StreamCall final : public StreamHandler, public Call, public OpenCall {
 public:
  // `format` must outlive the call, `wire` its OnDone. `hold`: its place among its tenant's
  // streams, until it ends.
  StreamCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
             std::optional<Pass> asked, StreamWire& wire, CountHold hold);
  // Makes and begins one of that method, whose name must outlive it too. Without a pass each
  // request says its own. An error: there is none, and the call is to end so.
  static Status Open(ServiceContext& context, std::string_view method, const MessageFormat& format,
                     std::optional<Pass> asked, StreamWire& wire);

  void Begin();
  // OpenCall. Stops reading.
  void EndWhenIdle() override;
  void Recheck() override;

  // Call
  void OnQueueing(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return wire_.call().Peer(); }

  // StreamHandler
  void OnReadDone(bool ok) override;
  bool OnLent(std::string_view message) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Step { kNone, kRead, kFinish };

  ~StreamCall() override = default;
  // What to do now that something has changed; at most one of its results is acted upon at a time.
  Step NextLocked() ATTEND_REQUIRES(mutex_);
  // In the wire's On... functions this object is alive. On other threads it is only while a request
  // of theirs is unanswered, or for kFinish, which only one thread is given.
  void Do(Step step);
  // A message came, in incoming_ unless it is lent.
  void OnMessage(std::string_view lent);
  void Respond(std::unique_ptr<Request> request);
  // The answer of the request that is at that place of the stream.
  void Answer(uint64_t place, grpc::ByteBuffer& answer);
  // Makes the answer, or nothing, what is at the place, and queues what may now be written.
  void QueueLocked(uint64_t place, grpc::ByteBuffer* answer) ATTEND_REQUIRES(mutex_);
  // Nothing is written any more: what waits for earlier answers goes.
  void BreakLocked(std::map<uint64_t, std::optional<grpc::ByteBuffer>>& dropped)
      ATTEND_REQUIRES(mutex_);
  // Drops the message, takes no more of them, and ends so when the earlier ones are answered.
  void Stop(uint64_t place, grpc::Status status);
  void Write(const grpc::ByteBuffer* answer, bool hurries = true);

  ServiceContext& context_;
  const CallFacts facts_;
  const MessageFormat& format_;
  const std::optional<Pass> asked_;
  StreamWire& wire_;
  const TimePoint deadline_;
  StandingCaller caller_{context_, wire_.call(), facts_, Scope::kCompute};
  CountHold hold_;  // who is given kFinish releases it
  const WatchedRef watched_ = std::make_shared<WatchedCall>();

  Mutex mutex_;
  grpc::ByteBuffer incoming_;  // the wire's while reading_, else the mutex's
  // The first is the wire's while writing_.
  std::deque<grpc::ByteBuffer> answers_ ATTEND_GUARDED_BY(mutex_);
  // If answers have an order: those that wait for earlier ones, by place.
  std::map<uint64_t, std::optional<grpc::ByteBuffer>> early_ ATTEND_GUARDED_BY(mutex_);
  uint64_t read_ ATTEND_GUARDED_BY(mutex_) = 0;        // messages: the next one's place
  uint64_t next_place_ ATTEND_GUARDED_BY(mutex_) = 0;  // of the first that is not in answers_ yet
  // Requests that may be queued in the engine.
  std::vector<uint64_t> queued_ ATTEND_GUARDED_BY(mutex_);
  int64_t unanswered_ ATTEND_GUARDED_BY(mutex_) = 0;  // read, and their answer not yet written
  bool reading_ ATTEND_GUARDED_BY(mutex_) = false;
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool half_closed_ ATTEND_GUARDED_BY(mutex_) = false;  // the client sends no more
  bool broken_ ATTEND_GUARDED_BY(mutex_) = false;       // the answers are not read any more
  bool ending_ ATTEND_GUARDED_BY(mutex_) = false;       // the server is ending the stream
  // Why a message that arrived was dropped, and no other is taken.
  std::optional<grpc::Status> stopped_ ATTEND_GUARDED_BY(mutex_);
  bool finished_ ATTEND_GUARDED_BY(mutex_) = false;
  bool admitted_ ATTEND_GUARDED_BY(mutex_) = false;  // any of its requests
};

}  // namespace attend
