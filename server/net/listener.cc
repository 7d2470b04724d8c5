// SPDX-License-Identifier: Apache-2.0
//
// One level-triggered epoll loop. A connection is in the epoll set until its first byte. Every
// wake-up runs all checks, and WaitMs sleeps to the earliest deadline: no timer per connection.
// A spare descriptor is kept for EMFILE, so that connections can still be accepted and closed.

#include "server/net/listener.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/util/thread_name.h"
#include "server/net/peer.h"
#include "server/net/tcp_listener.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The pause after accept fails for lack of descriptors or memory.
constexpr Duration kRest = milliseconds(100);
// Accepting counts as failing after it has failed for this long.
constexpr Duration kFailing = seconds(1);
// At the bound, new connections trigger a sweep of the table at most this often.
constexpr Duration kSweepInterval = milliseconds(20);
// Checks per stall timeout. A tick late by one such interval means that the process was suspended.
constexpr int kLooks = 4;
constexpr int kAcceptsInTurn = 64;
constexpr int kEventsInTurn = 64;

bool IsOpenSocket(int fd, ino_t inode) {
  struct stat about {};
  return fstat(fd, &about) == 0 && S_ISSOCK(about.st_mode) && about.st_ino == inode;
}

// Errors of a single connection, aborted before accept or forbidden by a firewall; accept(2) says
// to retry, since the next one may succeed.
bool IsOfOneConnection(int error) {
  constexpr std::array kErrors = {ECONNABORTED, EPROTO, ENETDOWN,     ENOPROTOOPT,
                                  EHOSTDOWN,    ENONET, EHOSTUNREACH, ENETUNREACH,
                                  EOPNOTSUPP,   EPERM,  EINTR};
  return std::find(kErrors.begin(), kErrors.end(), error) != kErrors.end();
}

}  // namespace

Listener::Listener(const Options& options, std::vector<int> sockets, Callbacks callbacks,
                   Metrics& metrics, Logger& logger, const Clock& clock)
    : options_(options),
      sockets_(std::move(sockets)),
      callbacks_(std::move(callbacks)),
      metrics_(metrics),
      logger_(logger),
      clock_(clock),
      events_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spare_(OpenSpare()),
      table_(options.limits.connections, options.limits.per_peer) {}

Result<std::unique_ptr<Listener>> Listener::Start(const Options& options, std::vector<int> sockets,
                                                  Callbacks callbacks, Metrics& metrics,
                                                  Logger& logger, const Clock& clock) {
  std::unique_ptr<Listener> listener(
      new Listener(options, std::move(sockets), std::move(callbacks), metrics, logger, clock));
  if (!listener->events_.valid() || !listener->wake_.valid() || !listener->spare_.valid()) {
    return Internal(std::string("cannot create descriptors for accepting connections: ") +
                    std::strerror(errno));
  }
  bool watched = listener->Watch(EPOLL_CTL_ADD, listener->wake_.get(), true);
  for (const int fd : listener->sockets_) watched &= listener->Watch(EPOLL_CTL_ADD, fd, true);
  const MessageMemory* const memory = options.message_memory.get();
  if (memory != nullptr) watched &= listener->Watch(EPOLL_CTL_ADD, memory->look(), true);
  if (!watched)
    return Internal(std::string("cannot watch the listening sockets: ") + std::strerror(errno));
  listener->thread_ = std::thread([raw = listener.get()] { raw->Run(); });
  return listener;
}

Listener::~Listener() {
  if (thread_.joinable()) {
    ending_ = true;
    eventfd_write(wake_.get(), 1);
    thread_.join();
  }
  while (const std::optional<int> fd = table_.OldestSilent()) Close(*fd);
}

int64_t Listener::CountOpen() {
  const MutexLock lock(mutex_);
  table_.Sweep(IsOpenSocket);
  return table_.size();
}

void Listener::FindStrangers() {
  const MutexLock lock(mutex_);
  table_.FindStrangers(clock_.Now());
  eventfd_write(wake_.get(), 1);  // the deadline that the thread waits for may have changed
}

void Listener::Run() {
  NameThread("attend-listener");
  const MessageMemory* const memory = options_.message_memory.get();
  std::array<epoll_event, kEventsInTurn> events;
  std::vector<int> readable;
  int wait_ms = -1;
  for (bool told = true;;) {
    const int ready = epoll_wait(events_.get(), events.data(), kEventsInTurn, wait_ms);
    readable.clear();
    for (int i = 0; i < ready; ++i) {
      const int fd = events[i].data.fd;
      const bool look = memory != nullptr && fd == memory->look();
      if (!look && fd != wake_.get()) {
        readable.push_back(fd);
        continue;
      }
      look_ |= look;
      eventfd_t times = 0;
      eventfd_read(fd, &times);
      if (ending_) return;
    }
    {
      const MutexLock lock(mutex_);
      try {
        Serve(readable);
      } catch (const std::bad_alloc&) {
        metrics_.RecordAcceptError();
        Rest(true);
      }
      wait_ms = WaitMs();
    }
    if (told == accepting()) continue;
    told = accepting();
    callbacks_.changed(told);
  }
}

void Listener::Serve(const std::vector<int>& readable) {
  if (resting_ && clock_.Now() >= rest_until_) {
    Rest(false);
    // Try at once: if no client is waiting, no event comes, and accepting() would stay false.
    for (const int fd : sockets_) Accept(fd);
  }
  for (const int fd : readable) {
    if (!IsListener(fd)) {
      IsSilent(fd);
    } else if (!resting_) {
      Accept(fd);
    }
  }
  ForgetStandstill();
  EndSilent();
  EndStrangers();
  EndStalled();
  if (std::exchange(look_, false)) EndLargest();
  if (!spare_.valid() && !resting_) spare_ = OpenSpare();
}

int Listener::WaitMs() {
  TimePoint until = resting_ ? rest_until_ : kNever;
  const TimePoint since = table_.OldestSilentSince();
  if (since != kNever) until = std::min(until, since + options_.first_byte_timeout);
  const auto stranger = table_.OldestStranger();
  if (stranger) until = std::min(until, stranger->since + options_.first_call_timeout);
  if (table_.size() > 0) until = std::min(until, looked_ + options_.message_timeout / kLooks);
  due_ = until;
  if (until == kNever) return -1;
  const TimePoint now = clock_.Now();
  due_ = std::min(until, now + seconds(60));
  const auto left = std::chrono::ceil<milliseconds>(due_ - now).count();
  return static_cast<int>(std::max<int64_t>(left, 0));
}

bool Listener::IsListener(int fd) const {
  return std::find(sockets_.begin(), sockets_.end(), fd) != sockets_.end();
}

bool Listener::Watch(int operation, int fd, bool readable) {
  epoll_event event{};
  event.events = readable ? uint32_t{EPOLLIN} : 0;
  event.data.fd = fd;
  return epoll_ctl(events_.get(), operation, fd, &event) == 0;
}

void Listener::Accept(int listener) {
  int refused = 0;
  for (int i = 0; i < kAcceptsInTurn; ++i) {
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
  Rest(true);
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

void Listener::Rest(bool rest) {
  if (rest) rest_until_ = clock_.Now() + kRest;
  if (rest == resting_) return;
  resting_ = rest;
  for (const int fd : sockets_) Watch(EPOLL_CTL_MOD, fd, !rest);
}

void Listener::SetAccepting(bool accepting) {
  if (accepting_.load(std::memory_order_relaxed) == accepting) return;
  accepting_.store(accepting, std::memory_order_release);
  metrics_.SetAccepting(accepting);
  if (accepting) logger_.info("connections are accepted again");
}

void Listener::Admit(UniqueFd socket) {
  const std::string peer = PeerOf(socket.get());
  struct stat about {};
  if (peer.empty() || fstat(socket.get(), &about) != 0) return;  // already closed
  if (callbacks_.admits != nullptr && !callbacks_.admits(socket.get())) return;
  if (!MakeRoom(socket.get(), peer)) return;
  const int fd = socket.get();
  table_.Add({fd, about.st_ino, peer}, clock_.Now());
  (void)socket.Release();
  // Most clients send at once; only the others need epoll.
  if (!IsSilent(fd) || Watch(EPOLL_CTL_ADD, fd, true)) return;
  CountRefused(fd, ConnectionRefusal::kDescriptors);
  Close(fd);
}

bool Listener::MakeRoom(int socket, const std::string& peer) {
  using Room = ConnectionTable::Room;
  if (table_.RoomFor(peer) == Room::kFree) return true;
  SweepOften();
  for (;;) {
    const Room room = table_.RoomFor(peer);
    if (room == Room::kFree) return true;
    const std::optional<int> oldest =
        room == Room::kPeerFull ? table_.OldestSilent(peer) : table_.OldestSilent();
    if (!oldest) {
      if (EndStrangerFor(room, peer)) continue;
      CountRefused(socket, room == Room::kPeerFull ? ConnectionRefusal::kPeerLimit
                                                   : ConnectionRefusal::kLimit);
      return false;
    }
    if (!IsSilent(*oldest)) continue;
    CountRefused(*oldest, ConnectionRefusal::kSilent);
    Close(*oldest);
  }
}

bool Listener::EndStrangerFor(ConnectionTable::Room room, const std::string& peer) {
  if (!table_.MayEnd(room, peer)) return false;
  const auto stranger = room == ConnectionTable::Room::kPeerFull ? table_.OldestStranger(peer)
                                                                 : table_.OldestStranger();
  if (stranger) End(stranger->fd, stranger->inode, ClientRefusal::kStranger);
  return stranger.has_value();
}

void Listener::SweepOften() {
  const TimePoint now = clock_.Now();
  if (now - swept_ < kSweepInterval) return;
  swept_ = now;
  table_.Sweep(IsOpenSocket);
}

bool Listener::IsSilent(int fd) {
  if (!table_.IsSilent(fd)) return false;  // a stale event
  char byte;
  ssize_t got;
  do {
    got = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
  if (got <= 0) {
    Close(fd);
    return false;
  }
  Watch(EPOLL_CTL_DEL, fd, false);
  table_.Spoke(fd);
  std::shared_ptr<const ConnectionUse> use;
  try {
    use = callbacks_.take(fd);
  } catch (const std::bad_alloc&) {  // not yet taken over
    close(fd);
  }
  if (use == nullptr) {
    table_.Remove(fd);
  } else {
    table_.Begin(fd, std::move(use), clock_.Now());
  }
  return false;
}

void Listener::Close(int fd) {
  table_.Remove(fd);
  close(fd);  // also removes it from the epoll set
}

void Listener::ForgetStandstill() {
  // Bytes sent in the meantime are still unread. (EndSilent peeks before it closes a connection.)
  const TimePoint now = clock_.Now();
  const Duration late = now - due_;
  if (late > options_.message_timeout / kLooks) table_.RestartMessages(now);
  if (late > options_.first_call_timeout / kLooks) table_.RenewStrangers(now);
}

void Listener::EndSilent() {
  const TimePoint now = clock_.Now();
  while (table_.OldestSilentSince() != kNever &&
         now - table_.OldestSilentSince() >= options_.first_byte_timeout) {
    const int fd = *table_.OldestSilent();
    if (!IsSilent(fd)) continue;
    CountRefused(fd, ConnectionRefusal::kSilent);
    Close(fd);
  }
}

void Listener::EndStrangers() {
  const TimePoint now = clock_.Now();
  for (;;) {
    const auto oldest = table_.OldestStranger();
    if (!oldest || now - oldest->since < options_.first_call_timeout) return;
    if (oldest->stays) {
      table_.Renew(oldest->fd, now);
    } else {
      End(oldest->fd, oldest->inode, ClientRefusal::kStranger);
    }
  }
}

void Listener::EndStalled() {
  const TimePoint now = clock_.Now();
  if (now < looked_ + options_.message_timeout / kLooks) return;
  looked_ = now;
  for (const auto& [fd, inode] : table_.Stalled(now, options_.message_timeout)) {
    End(fd, inode, ClientRefusal::kStalled);
  }
}

void Listener::EndLargest() {
  for (const auto& [fd, inode] : table_.Largest(options_.message_memory->most())) {
    End(fd, inode, ClientRefusal::kMessages);
  }
}

void Listener::End(int fd, ino_t inode, ClientRefusal reason) {
  table_.End(fd);
  callbacks_.end(fd, inode, reason);
}

void Listener::CountRefused(int socket, ConnectionRefusal reason) {
  metrics_.RecordConnectionRefused(reason);
  const std::string peer = PeerText(socket);
  const std::string_view why = ConnectionRefusalName(reason);
  logger_.Log(LogLevel::warn, "connection closed", {{"reason", why}, {"peer", peer}}, why);
}

}  // namespace attend
