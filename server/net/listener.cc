// SPDX-License-Identifier: Apache-2.0
//
// A loop of the transport with one timer. Every wake-up runs all checks and sets the timer to the
// earliest deadline: no timer per connection. A spare descriptor is kept for EMFILE, so that
// connections can still be accepted and closed.

#include "server/net/listener.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "server/net/peer.h"
#include "server/net/tcp_listener.h"
#include "server/util/assign.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The pause after accept fails for lack of descriptors or memory.
constexpr Duration kRest = milliseconds(100);
// The pause while connections that were ended are yet to be closed.
constexpr Duration kClosingPause = milliseconds(1);
// Accepting counts as failing after it has failed for this long.
constexpr Duration kFailing = seconds(1);
// At the bound, new connections trigger a sweep of the table at most this often.
constexpr Duration kSweepInterval = milliseconds(20);
// A tick late by this part of a stranger's time means that the process was suspended.
constexpr int kLooks = 4;
constexpr int kAcceptsInTurn = 64;

// Errors of a single connection, aborted before accept or forbidden by a firewall; accept(2) says
// to retry, since the next one may succeed.
bool IsOfOneConnection(int error) {
  constexpr std::array kErrors = {ECONNABORTED, EPROTO, ENETDOWN,     ENOPROTOOPT,
                                  EHOSTDOWN,    ENONET, EHOSTUNREACH, ENETUNREACH,
                                  EOPNOTSUPP,   EPERM,  EINTR};
  return std::find(kErrors.begin(), kErrors.end(), error) != kErrors.end();
}

}  // namespace

Listener::Listener(const Options& options, const std::vector<int>& sockets, Callbacks callbacks,
                   Metrics& metrics, Logger& logger, const Clock& clock)
    : options_(options),
      callbacks_(std::move(callbacks)),
      metrics_(metrics),
      logger_(logger),
      clock_(clock),
      spare_(OpenSpare()),
      table_(options.limits.connections, options.limits.per_peer),
      memory_(*this, options.message_memory == nullptr ? -1 : options.message_memory->look()) {
  for (const int fd : sockets) sockets_.emplace_back(*this, fd);
}

Result<std::unique_ptr<Listener>> Listener::Start(const Options& options,
                                                  const std::vector<int>& sockets,
                                                  Callbacks callbacks, Metrics& metrics,
                                                  Logger& logger, const Clock& clock) {
  std::unique_ptr<Listener> listener(
      new Listener(options, sockets, std::move(callbacks), metrics, logger, clock));
  ATTEND_RETURN_IF_ERROR(Assign(listener->loop_, Loop::Start("attend-listener", clock)));
  Status watched;
  listener->loop_->RunAndWait([&] {
    const auto watch = [&](Watched& each) {
      if (watched.ok()) watched = listener->loop_->Watch(each.fd, EPOLLIN, each);
    };
    for (Watched& each : listener->sockets_) watch(each);
    if (listener->memory_.fd >= 0) watch(listener->memory_);
    listener->loop_->Set(*listener, clock.Now());  // later it allocates nothing
  });
  if (!watched.ok()) return watched;
  return listener;
}

int64_t Listener::CountOpen() {
  const MutexLock lock(mutex_);
  table_.Sweep();
  return table_.size();
}

void Listener::FindStrangers() {
  {
    const MutexLock lock(mutex_);
    table_.FindStrangers(clock_.Now());
  }
  loop_->Post(*this);  // the deadline that the thread waits for may have changed
}

void Listener::Serve(int fd) {
  {
    const MutexLock lock(mutex_);
    try {
      ServeLocked(fd);
    } catch (const std::bad_alloc&) {
      metrics_.RecordAcceptError();
      Rest(kRest);
    }
    SetTimer();
  }
  const bool accepts = accepting();
  if (std::exchange(told_, accepts) != accepts) callbacks_.changed(accepts);
}

void Listener::ServeLocked(int fd) {
  if (resting_ && clock_.Now() >= rest_until_) {
    Watch(true);
    // Try at once: if no client is waiting, no event comes, and accepting() would stay false.
    for (const Watched& each : sockets_) Accept(each.fd);
  }
  if (fd == memory_.fd && fd >= 0) {
    eventfd_t times = 0;
    eventfd_read(fd, &times);
    EndLargest();
  } else if (fd >= 0 && !resting_) {
    Accept(fd);
  }
  ForgetStandstill();
  EndStrangers();
  if (!spare_.valid() && !resting_) spare_ = OpenSpare();
}

void Listener::SetTimer() {
  TimePoint until = resting_ ? rest_until_ : kNever;
  const auto stranger = table_.OldestStranger();
  if (stranger) until = std::min(until, stranger->since + options_.first_call_timeout);
  due_ = until == kNever ? kNever : std::min<TimePoint>(until, clock_.Now() + seconds(60));
  if (due_ == kNever) return loop_->Clear(*this);
  loop_->Set(*this, due_);
}

void Listener::Accept(int listener) {
  int refused = 0;
  for (int i = 0; i < kAcceptsInTurn; ++i) {
    // Clients wait unaccepted, so that a flood is no faster than its connections are closed.
    if (!MayAdd()) return Rest(kClosingPause);
    UniqueFd socket = attend::Accept(listener);
    if (socket.valid()) {
      failing_since_.reset();
      SetAccepting(true);
      Admit(std::move(socket));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      failing_since_.reset();
      SetAccepting(true);
      return;
    }
    if (!IsOfOneConnection(errno)) return AcceptFailed(listener);
    // Bounds this loop if every waiting connection fails.
    if (++refused == kAcceptsInTurn) return AcceptFailed(listener);
  }
}

void Listener::AcceptFailed(int listener) {
  const int error = errno;
  const TimePoint now = clock_.Now();
  metrics_.RecordAcceptError();
  if (!failing_since_) failing_since_ = now;
  logger_.Log(LogLevel::err, "no connection can be accepted", {{"error", std::strerror(error)}});
  if (error == EMFILE || error == ENFILE) Shed(listener);
  if (now - *failing_since_ >= kFailing) SetAccepting(false);
  Rest(kRest);
}

void Listener::Shed(int listener) {
  if (!spare_.valid()) spare_ = OpenSpare();
  for (int i = 0; i < kAcceptsInTurn && spare_.valid(); ++i) {
    spare_.Reset();
    UniqueFd socket = attend::Accept(listener);
    const bool shed = socket.valid();
    if (shed) CountRefused(socket.get(), ConnectionRefusal::kDescriptors);
    socket.Reset();
    spare_ = OpenSpare();
    if (!shed) break;
  }
}

void Listener::Rest(Duration pause) {
  rest_until_ = clock_.Now() + pause;
  Watch(false);
}

void Listener::Watch(bool watch) {
  if (watch != resting_) return;
  resting_ = !watch;
  for (Watched& each : sockets_) loop_->Rewatch(each.fd, watch ? uint32_t{EPOLLIN} : 0, each);
}

void Listener::SetAccepting(bool accepting) {
  if (accepting_.load(std::memory_order_relaxed) == accepting) return;
  accepting_.store(accepting, std::memory_order_release);
  metrics_.SetAccepting(accepting);
  if (accepting) logger_.info("connections are accepted again");
}

void Listener::Admit(UniqueFd socket) {
  const std::string peer = PeerOf(socket.get());
  if (peer.empty()) return;  // already closed
  if (callbacks_.admits != nullptr && !callbacks_.admits(socket.get())) return;
  if (!MakeRoom(socket.get(), peer)) return;
  const int fd = socket.Release();
  const std::shared_ptr<const ConnectionUse> use = callbacks_.take(fd);
  if (use == nullptr) return;
  try {
    table_.Add(fd, peer, use, clock_.Now());
  } catch (const std::bad_alloc&) {
    use->WhileOpen([](int taken) { shutdown(taken, SHUT_RDWR); });
    throw;
  }
}

bool Listener::MakeRoom(int socket, const std::string& peer) {
  using Room = ConnectionTable::Room;
  if (table_.RoomFor(peer) == Room::kFree) return true;
  SweepOften();
  for (;;) {
    const Room room = table_.RoomFor(peer);
    if (room == Room::kFree) return true;
    if (EndStrangerFor(room, peer) || table_.SweepEnded()) continue;
    CountRefused(socket, room == Room::kPeerFull ? ConnectionRefusal::kPeerLimit
                                                 : ConnectionRefusal::kLimit);
    return false;
  }
}

bool Listener::MayAdd() {
  if (table_.MayAdd() || (table_.SweepEnded() && table_.MayAdd())) return true;
  SweepOften();
  return table_.MayAdd();
}

bool Listener::EndStrangerFor(ConnectionTable::Room room, const std::string& peer) {
  if (!table_.MayAdd()) return false;
  const auto stranger = room == ConnectionTable::Room::kPeerFull ? table_.OldestStranger(peer)
                                                                 : table_.OldestStranger();
  if (stranger) End(*stranger);
  return stranger.has_value();
}

void Listener::SweepOften() {
  const TimePoint now = clock_.Now();
  if (now - swept_ < kSweepInterval) return;
  swept_ = now;
  table_.Sweep();
}

void Listener::ForgetStandstill() {
  // Bytes sent in the meantime are still unread.
  const TimePoint now = clock_.Now();
  const Duration late = now - due_;
  if (late > options_.first_call_timeout / kLooks) table_.RenewStrangers(now);
}

void Listener::EndStrangers() {
  const TimePoint now = clock_.Now();
  for (;;) {
    const auto oldest = table_.OldestStranger();
    if (!oldest || now - oldest->since < options_.first_call_timeout) return;
    if (oldest->stays) {
      table_.Renew(oldest->fd, now);
    } else {
      End(*oldest);
    }
  }
}

void Listener::EndLargest() {
  for (const int fd : table_.Largest(options_.message_memory->most())) {
    callbacks_.end(*table_.End(fd), ConnectionRefusal::kMessages);
  }
}

void Listener::End(const ConnectionTable::Stranger& stranger) {
  callbacks_.end(*table_.End(stranger.fd),
                 stranger.silent ? ConnectionRefusal::kSilent : ConnectionRefusal::kStranger);
}

void Listener::CountRefused(int socket, ConnectionRefusal reason) {
  metrics_.RecordConnectionRefused(reason);
  const std::string peer = PeerText(socket);
  const std::string_view why = ConnectionRefusalName(reason);
  logger_.Log(LogLevel::warn, "connection closed", {{"reason", why}, {"peer", peer}}, why);
}

}  // namespace attend
