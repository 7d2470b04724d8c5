// SPDX-License-Identifier: Apache-2.0
//
// A call with many requests, such as AttendStream. It reads only while fewer than
// stream_requests_max of its requests are unanswered; beyond that, requests wait in the client.
// Answers are written one at a time, in the order in which they become ready, or in request order
// if the format requires it.
//
//   reading --1--> over --2--> finished
//
// 1  The client half-closed or cancelled, a write failed, the server drains, there is no memory for
//    a message, or the caller lost its right: reading stops.
// 2  Every request that was read is answered or dropped, and no write is in progress.
//
// A request counts as unanswered until its answer has been written, or cannot be.
//
// The transport enters through the On... methods, the engine through Finish. A mutex guards the
// state; the transport's functions are called with it held.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/standing_caller.h"
#include "server/rpc/wire_call.h"
#include "server/transport/server_call.h"
#include "server/wire/message_format.h"

namespace attend {

class StreamCall final : public SharedHandler, public Call, public OpenCall {
 public:
  // `format` must outlive the call. `hold`: its place among its tenant's streams, until it ends.
  StreamCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
             std::optional<Pass> asked, WireCall&& wire, CountHold hold);
  // Adds a method. Without a pass each request names its own. The arguments must outlive the
  // table's calls.
  static void Add(CallTable& table, const char* method, const MessageFormat& format,
                  std::optional<Pass> asked);

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
  // Does what the state now allows: writes the next answer, reads the next message, or ends the
  // call.
  void AdvanceLocked() ATTEND_REQUIRES(mutex_);
  void EndLocked() ATTEND_REQUIRES(mutex_);
  void Respond(std::unique_ptr<Request> request);
  // Records the answer at `place`, or that there is none.
  void QueueLocked(uint64_t place, std::optional<OutMessage> answer) ATTEND_REQUIRES(mutex_);
  // Nothing can be written any more: drops the answers that wait.
  void BreakLocked() ATTEND_REQUIRES(mutex_);
  // Drops the message and stops reading; the call ends with `status` once earlier ones are
  // answered.
  void Stop(uint64_t place, Status status);

  ServiceContext& context_;
  const CallFacts facts_;
  const MessageFormat& format_;
  const std::optional<Pass> asked_;
  const WireCall wire_;
  const TimePoint deadline_;
  StandingCaller caller_{context_, wire_, facts_, Scope::kCompute};
  CountHold hold_;  // until the end

  Mutex mutex_;
  // Those not written yet, by place, or by when they were ready if answers are not ordered. Empty:
  // the request was dropped.
  std::map<uint64_t, std::optional<OutMessage>> answers_ ATTEND_GUARDED_BY(mutex_);
  uint64_t ready_ ATTEND_GUARDED_BY(mutex_) = 0;  // number of answers queued
  uint64_t read_ ATTEND_GUARDED_BY(mutex_) = 0;   // number of messages read; place of the next one
  uint64_t next_ ATTEND_GUARDED_BY(mutex_) = 0;   // key of the next answer to write
  // Requests that may be queued in the engine.
  std::vector<uint64_t> queued_ ATTEND_GUARDED_BY(mutex_);
  int64_t unanswered_ ATTEND_GUARDED_BY(mutex_) = 0;  // read, but answer not written
  bool reading_ ATTEND_GUARDED_BY(mutex_) = false;
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool half_closed_ ATTEND_GUARDED_BY(mutex_) = false;  // the client sends no more
  bool broken_ ATTEND_GUARDED_BY(mutex_) = false;       // answers can no longer be written
  bool ending_ ATTEND_GUARDED_BY(mutex_) = false;       // the server is ending the stream
  // Why a message was dropped and no more are accepted.
  std::optional<Status> stopped_ ATTEND_GUARDED_BY(mutex_);
  bool finished_ ATTEND_GUARDED_BY(mutex_) = false;
  bool admitted_ ATTEND_GUARDED_BY(mutex_) = false;  // whether any request was admitted
};

}  // namespace attend
