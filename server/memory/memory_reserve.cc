// SPDX-License-Identifier: Apache-2.0

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

// Several pieces, because several threads may run out of memory at once. Each is freed by itself,
// and some only for threads that wait, so that new requests cannot use up the memory that accepted
// ones need to end.
constexpr size_t kPieces = 8;
constexpr size_t kPiecesOfAll = 4;

std::array<std::atomic<void*>, kPieces> pieces;
std::atomic<size_t> piece_bytes{0};
std::atomic<bool> used{false};

thread_local OnNoMemory::Then then = OnNoMemory::kWait;

// False if this thread has already waited so long that waiting is of no use.
bool WaitForMemory() {
  using Clock = std::chrono::steady_clock;  // operator new is given no clock
  constexpr std::chrono::milliseconds kPause(1);
  // An allocation that fails again comes back here sooner.
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
    return;  // operator new tries again
  }
  if (then == OnNoMemory::kThrow || !WaitForMemory()) throw std::bad_alloc();
}

// Returns false if there is no memory for it.
bool FillUp() {
  for (std::atomic<void*>& piece : pieces) {
    if (piece.load(std::memory_order_relaxed) != nullptr) continue;
    void* const memory = std::malloc(piece_bytes.load(std::memory_order_relaxed));
    if (memory == nullptr) return false;
    std::memset(memory, 1, piece_bytes.load(std::memory_order_relaxed));  // commits its pages
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

Status OutOfMemory() { return ResourceExhausted("the server's process is out of memory"); }

bool MemoryIsShort() {
  if (!used.load(std::memory_order_relaxed)) return false;
  // First, because a piece that is used meanwhile sets it again.
  used.store(false, std::memory_order_relaxed);
  if (!FillUp()) used.store(true, std::memory_order_relaxed);
  return used.load(std::memory_order_relaxed);
}

OnNoMemory::OnNoMemory(Then next) : before_(std::exchange(then, next)) {}
OnNoMemory::~OnNoMemory() { then = before_; }

}  // namespace attend
