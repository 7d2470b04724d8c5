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
//      for a message, or its caller may not send it any more: nothing is read any more.
//   2  NextLocked: every request that was read is answered or dropped, and no write is under way.
//      One thread is given kFinish.
//
// A request counts as unanswered from its reading until its answer is written, or cannot be.
//
// The transport enters through the On... methods, the engine through Finish. A mutex guards the
// state and is never held across a call of either that may call back.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/rpc/call_context.h"
#include "server/rpc/h2_wire.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/standing_caller.h"
#include "server/transport/server_call.h"
#include "server/wire/message_format.h"

namespace attend {

class StreamCall final : public CallHandler, public Call, public OpenCall {
 public:
  // `format` must outlive the call. `hold`: its place among its tenant's streams, until it ends.
  StreamCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
             std::optional<Pass> asked, H2Wire&& wire, CountHold hold);
  // Makes and begins one of that method, whose name must outlive it too. Without a pass each
  // request says its own. Returns what handles the call, which may have been refused.
  static CallHandler* Open(ServiceContext& context, std::string_view method,
                           const MessageFormat& format, std::optional<Pass> asked,
                           ServerCall& call);

  void Begin();
  // OpenCall. Stops reading.
  void EndWhenIdle() override;
  void Recheck() override;

  // Call
  void OnQueueing(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return wire_.Peer(); }

  // CallHandler
  void OnMessage(InMessage message) override;
  std::shared_ptr<MessagePlaces> Place(std::span<const MessagePiece> begun, int64_t bytes) override;
  void OnHalfClose() override;
  void OnWritten(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Step { kNone, kRead, kFinish };

  ~StreamCall() override = default;
  // What to do now that something has changed; at most one of its results is acted upon at a time.
  Step NextLocked() ATTEND_REQUIRES(mutex_);
  // In the On... functions this object is alive. On other threads it is only while a request
  // of theirs is unanswered, or for kFinish, which only one thread is given.
  void Do(Step step);
  void Respond(std::unique_ptr<Request> request);
  // The answer of the request that is at that place of the stream.
  void Answer(uint64_t place, OutMessage answer);
  // Makes the answer, or nothing, what is at the place, and queues what may now be written.
  void QueueLocked(uint64_t place, std::optional<OutMessage> answer) ATTEND_REQUIRES(mutex_);
  // Nothing is written any more: what waits for earlier answers goes.
  void BreakLocked(std::map<uint64_t, std::optional<OutMessage>>& dropped) ATTEND_REQUIRES(mutex_);
  // Drops the message, takes no more of them, and ends so when the earlier ones are answered.
  void Stop(uint64_t place, Status status);
  // The next answer, if none is being written; it is the caller's to write.
  std::optional<OutMessage> TakeNextLocked() ATTEND_REQUIRES(mutex_);
  void Write(std::optional<OutMessage> answer);

  ServiceContext& context_;
  const CallFacts facts_;
  const MessageFormat& format_;
  const std::optional<Pass> asked_;
  const H2Wire wire_;
  const TimePoint deadline_;
  StandingCaller caller_{context_, wire_, facts_, Scope::kCompute};
  CountHold hold_;  // who is given kFinish releases it
  const WatchedRef watched_ = std::make_shared<WatchedCall>();

  Mutex mutex_;
  std::deque<OutMessage> answers_ ATTEND_GUARDED_BY(mutex_);  // to be written
  // If answers have an order: those that wait for earlier ones, by place.
  std::map<uint64_t, std::optional<OutMessage>> early_ ATTEND_GUARDED_BY(mutex_);
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
  std::optional<Status> stopped_ ATTEND_GUARDED_BY(mutex_);
  bool finished_ ATTEND_GUARDED_BY(mutex_) = false;
  bool admitted_ ATTEND_GUARDED_BY(mutex_) = false;  // any of its requests
};

}  // namespace attend
