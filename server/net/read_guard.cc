// SPDX-License-Identifier: Apache-2.0

#include "server/net/read_guard.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <memory>
#include <optional>
#include <span>

namespace attend {
namespace {

struct Entry {
  std::optional<Http2Frames> frames;
  const Clock* clock = nullptr;
  std::atomic<ino_t> inode = 0;
  std::atomic<bool> open = false;                             // nobody has called close() so far
  size_t looked_at = 0;                                       // of what is sent next
  std::atomic<const ReadGuard::OnWrong*> on_wrong = nullptr;  // null: no connection of gRPC's
};

// By descriptor, in pages that are made when they are needed and never freed. Only one thread at a
// time reads a connection, and one writes it; whoever hands it over was before them, and whoever
// closes it is after them: the entries need no lock.
//
// But for `open` and `inode`, which threads that end a client's connection read while gRPC's may
// close it: `open` becomes false with `closing` locked, and `inode` changes while it is false.
constexpr int kPageEntries = 1024;
constexpr int kPages = 1024;
using Page = std::array<Entry, kPageEntries>;
std::array<std::atomic<Page*>, kPages> pages;
constinit Mutex closing;

Entry* Find(int socket, bool make) {
  if (socket < 0 || socket >= kPages * kPageEntries) return nullptr;
  std::atomic<Page*>& slot = pages[static_cast<size_t>(socket / kPageEntries)];
  Page* page = slot.load(std::memory_order_acquire);
  if (page == nullptr) {
    if (!make) return nullptr;
    auto made = std::make_unique<Page>();
    if (slot.compare_exchange_strong(page, made.get(), std::memory_order_acq_rel)) {
      page = made.release();
    }
  }
  return &(*page)[static_cast<size_t>(socket % kPageEntries)];
}

// Calls look(piece) for the first `bytes` of the message, until one says what is wrong.
template <class Look>
const char* ForEachPiece(const msghdr& message, ssize_t bytes, const Look& look) {
  for (size_t i = 0; i < message.msg_iovlen && bytes > 0; ++i) {
    const size_t length = std::min(message.msg_iov[i].iov_len, static_cast<size_t>(bytes));
    const auto* const data = static_cast<const uint8_t*>(message.msg_iov[i].iov_base);
    if (const char* const wrong = look(std::span(data, length))) return wrong;
    bytes -= static_cast<ssize_t>(length);
  }
  return nullptr;
}

}  // namespace

bool ReadGuard::Begin(int socket, ino_t inode, const Http2Frames::Limits& limits,
                      const Clock& clock, const OnWrong* on_wrong) {
  Entry* const entry = Find(socket, true);
  if (entry == nullptr) return false;
  End(socket);
  entry->frames.emplace(limits);
  entry->clock = &clock;
  entry->inode = inode;
  entry->looked_at = 0;
  entry->on_wrong = on_wrong;
  entry->open = true;
  return true;
}

void ReadGuard::BeginUnread(int socket, ino_t inode) {
  Entry* const entry = Find(socket, true);
  if (entry == nullptr) return;
  End(socket);
  entry->inode = inode;
  entry->open = true;
}

void ReadGuard::WhileOpen(int socket, ino_t inode, const std::function<void()>& then) {
  const Entry* const entry = Find(socket, false);
  if (entry == nullptr) return;
  const MutexLock lock(closing);
  if (entry->open && entry->inode == inode) then();
}

ino_t ReadGuard::InodeOf(int socket) {
  const Entry* const entry = Find(socket, false);
  return entry != nullptr && entry->on_wrong != nullptr ? entry->inode.load() : 0;
}

void ReadGuard::End(int socket) {
  Entry* const entry = Find(socket, false);
  if (entry != nullptr && entry->open) {
    const MutexLock lock(closing);
    entry->open = false;
  }
  // What went wrong is looked at no longer, but its calls are open until now.
  if (entry == nullptr || (entry->on_wrong == nullptr && !entry->frames)) return;
  entry->frames.reset();
  entry->on_wrong = nullptr;
}

bool ReadGuard::Passes(int socket, const msghdr& message, ssize_t bytes) {
  Entry* const entry = Find(socket, false);
  if (entry == nullptr || entry->on_wrong == nullptr) return true;
  const TimePoint now = entry->clock->Now();
  const char* const wrong = ForEachPiece(message, bytes, [&](std::span<const uint8_t> piece) {
    return entry->frames->Read(piece, now);
  });
  if (wrong == nullptr) return true;
  const OnWrong* const on_wrong = entry->on_wrong.exchange(nullptr);
  // close() was not called, or End would have been. Should the descriptor be another's all the same
  // (dup2), nobody else loses a connection for it.
  struct stat about {};
  if (fstat(socket, &about) != 0 || about.st_ino != entry->inode) return true;
  (*on_wrong)(socket, wrong);
  return false;
}

void ReadGuard::Sending(int socket, const msghdr& message) {
  Entry* const entry = Find(socket, false);
  if (entry == nullptr || entry->on_wrong == nullptr) return;
  size_t skip = entry->looked_at;
  ForEachPiece(message, SSIZE_MAX, [&](std::span<const uint8_t> piece) -> const char* {
    const size_t skipped = std::min(skip, piece.size());
    skip -= skipped;
    entry->frames->Written(piece.subspan(skipped));
    entry->looked_at += piece.size() - skipped;
    return nullptr;
  });
}

void ReadGuard::Sent(int socket, ssize_t bytes) {
  Entry* const entry = Find(socket, false);
  if (entry == nullptr || entry->on_wrong == nullptr) return;
  entry->looked_at -= std::min(entry->looked_at, static_cast<size_t>(bytes));
}

}  // namespace attend
