// SPDX-License-Identifier: Apache-2.0
//
// The reserve is a set of malloc'ed pieces. The new-handler frees one piece, so that operator new
// succeeds on its next attempt. It must not allocate or lock; atomics suffice.

#include "server/memory/memory_reserve.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

namespace attend {
namespace {

// Several threads may run out at once, so each takes a piece. The last pieces are for waiting
// threads only: new requests must not use up the memory that accepted ones need to finish.
constexpr size_t kPieces = 8;
constexpr size_t kPiecesOfAll = 4;

std::array<std::atomic<void*>, kPieces> pieces;
std::atomic<size_t> piece_bytes{0};
std::atomic<bool> used{false};

thread_local OnNoMemory::Then then = OnNoMemory::kWait;

// False if this thread has waited too long already.
bool WaitForMemory() {
  using Clock = std::chrono::steady_clock;  // operator new takes no clock
  constexpr std::chrono::milliseconds kPause(1);
  // A retry that fails comes back sooner than this, and belongs to the same wait.
  constexpr std::chrono::milliseconds kApart(1);
  constexpr std::chrono::seconds kWaitMost(1);
  thread_local Clock::time_point since;
  thread_local Clock::time_point last;
  const Clock::time_point now = Clock::now();
  if (now - last > kApart) since = now;
  if (now - since > kWaitMost) return false;
  std::this_thread::sleep_for(kPause);
  last = Clock::now();
  return true;
}

void GiveBack() {
  used.store(true, std::memory_order_relaxed);
  const size_t mine = then == OnNoMemory::kThrow ? kPiecesOfAll : kPieces;
  for (size_t i = 0; i < mine; ++i) {
    void* const memory = pieces[i].exchange(nullptr);
    if (memory == nullptr) continue;
    std::free(memory);
    return;  // operator new retries
  }
  if (then == OnNoMemory::kThrow || !WaitForMemory()) throw std::bad_alloc();
}

// False if there is not enough memory.
bool FillUp() {
  for (std::atomic<void*>& piece : pieces) {
    if (piece.load(std::memory_order_relaxed) != nullptr) continue;
    void* const memory = std::malloc(piece_bytes.load(std::memory_order_relaxed));
    if (memory == nullptr) return false;
    std::memset(memory, 1, piece_bytes.load(std::memory_order_relaxed));  // commits the pages
    void* none = nullptr;
    if (!piece.compare_exchange_strong(none, memory)) std::free(memory);
  }
  return true;
}

}  // namespace

void KeepMemoryReserve(int64_t bytes) {
  for (std::atomic<void*>& piece : pieces) std::free(piece.exchange(nullptr));
  piece_bytes.store(static_cast<size_t>(bytes) / kPieces + 1);
  used.store(!FillUp());
  std::set_new_handler(GiveBack);
}

Status OutOfMemory() { return ResourceExhausted("the server is out of memory"); }

bool MemoryIsShort() {
  if (!used.load(std::memory_order_relaxed)) return false;
  // Cleared first, because a piece taken during the refill sets it again.
  used.store(false, std::memory_order_relaxed);
  if (!FillUp()) used.store(true, std::memory_order_relaxed);
  return used.load(std::memory_order_relaxed);
}

OnNoMemory::OnNoMemory(Then next) : before_(std::exchange(then, next)) {}
OnNoMemory::~OnNoMemory() { then = before_; }

}  // namespace attend
