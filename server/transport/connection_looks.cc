// SPDX-License-Identifier: Apache-2.0
//
// Checks of a connection in use: its client is still trusted, reads, and sends what it has begun.
// One timer of the loop looks at all of its connections.

#include <sys/epoll.h>

#include <algorithm>

#include "server/transport/connection.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

using std::chrono::milliseconds;

// Checks per timeout: a call or a connection ends at most so much of it late.
constexpr int kLooksPerWriteTimeout = 8, kLooksPerMessageTimeout = 4;
// After a standstill of such a part of the shorter timeout, clients have their time again.
constexpr int kStandstillPart = 4;

}  // namespace

void LoopShare::BeginLooks() {
  if (options.write_timeout + options.message_timeout == Duration::zero()) return;
  look_at_ = clock.Now();
  OnTime();
}

void LoopShare::OnTime() {
  const auto part = [](Duration timeout, int looks) {
    return timeout == Duration::zero() ? Duration::max()
                                       : std::max<Duration>(timeout / looks, milliseconds(1));
  };
  const Duration pause = std::min(part(options.write_timeout, kLooksPerWriteTimeout),
                                  part(options.message_timeout, kLooksPerMessageTimeout));
  const TimePoint now = clock.Now();
  const bool late = now - look_at_ > std::min(part(options.write_timeout, kStandstillPart),
                                              part(options.message_timeout, kStandstillPart));
  for (Connection* const connection : connections) connection->Look(now, late);
  look_at_ = now + pause;
  loop.Set(*this, look_at_);
}

void Connection::Recheck() {
  if (!channel_->IsTrusted()) Close(Status());
}

void Connection::Look(TimePoint now, bool late) {
  if (closed_ || closing_) return;
  if (share_.options.message_timeout > Duration::zero()) EndStalled(now, late);
  if (share_.options.write_timeout > Duration::zero()) EndUnread(now, late);
}

// Clients interleave messages, so one has not stalled if enough comes for each that has begun.
void Connection::EndStalled(TimePoint now, bool late) {
  const Duration timeout = share_.options.message_timeout;
  // A client that is not read, because its output is full, cannot be late as long as it takes that.
  const bool reads = (events_ & EPOLLIN) != 0;
  const TimePoint taken =
      unread_pace_.Since(static_cast<int64_t>(session_->output().gone()),
                         thresholds::kAnswerBytesPerTimeout, late || reads, now);
  const bool restart = late || (!reads && now - taken < timeout);
  const int64_t waiting = std::count_if(calls_.begin(), calls_.end(), [](const CallStream* call) {
    return call->waits_for_message();
  });
  const TimePoint since =
      message_pace_.Since(came_bytes_, MessagePace::kProgressBytes * waiting, restart, now);
  for (CallStream* const call : calls_) {
    if (!call->IsStalled(restart, now, timeout) || now - since < timeout) continue;
    return EndFor(
        Status(Code::kDeadlineExceeded, "a message made no progress (--message-timeout)"));
  }
}

void Connection::EndUnread(TimePoint now, bool late) {
  const Duration timeout = share_.options.write_timeout;
  const OutputQueue& output = session_->output();
  const TimePoint since =
      pace_.Since(static_cast<int64_t>(output.gone()), 1, late || output.empty(), now);
  const bool takes_any = now - since < timeout;
  bool any_told = false;
  for (CallStream* const call : calls_) {
    if (call->IsRead(late, now, timeout)) continue;
    call->Cancel();
    share_.options.on_unread(peer_->address);
    any_told = true;
  }
  if (takes_any) return;
  if (!any_told) share_.options.on_unread(peer_->address);
  EndFor(Status());
}

bool Connection::waits_for_client() {
  return !closed_ && (!session_->output().empty() ||
                      std::any_of(calls_.begin(), calls_.end(),
                                  [](const CallStream* call) { return call->waits_for_client(); }));
}

}  // namespace attend
