// SPDX-License-Identifier: Apache-2.0
//
// The allocator of one nghttp2 session. Memory freed by a stream, its frames and headers is reused
// for the next one, which needs the same sizes; at most 16 KiB are kept. Used by one thread at a
// time.

#pragma once

#include <nghttp2/nghttp2.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace attend {

class Http2Memory {
 public:
  Http2Memory() = default;
  // Nothing may be in use.
  ~Http2Memory() {
    for (Block* block : free_) {
      while (block != nullptr) std::free(std::exchange(block, block->next));
    }
  }
  Http2Memory(const Http2Memory&) = delete;
  Http2Memory& operator=(const Http2Memory&) = delete;

  nghttp2_mem Functions() {
    return {this, [](size_t bytes, void* self) { return Of(self).Take(bytes); },
            [](void* data, void* self) { Of(self).Give(data); },
            [](size_t count, size_t bytes, void* self) { return Of(self).TakeZeros(count, bytes); },
            [](void* data, size_t bytes, void* self) { return Of(self).Resize(data, bytes); }};
  }

 private:
  static constexpr size_t kStepBytes = 64;
  static constexpr size_t kStepsMax = 8;  // larger blocks are not kept
  static constexpr size_t kKeptBytesMax = size_t{16} << 10;

  // Header before each allocation.
  struct alignas(std::max_align_t) Block {
    size_t steps;
    Block* next;  // while it is kept
  };

  static Http2Memory& Of(void* self) { return *static_cast<Http2Memory*>(self); }
  void* Take(size_t bytes) {
    const size_t steps = std::max<size_t>(1, (bytes + kStepBytes - 1) / kStepBytes);
    if (steps <= kStepsMax && free_[steps] != nullptr) {
      Block* const block = free_[steps];
      free_[steps] = block->next;
      kept_bytes_ -= steps * kStepBytes;
      ASAN_UNPOISON_MEMORY_REGION(block + 1, steps * kStepBytes);
      return block + 1;
    }
    auto* const block = static_cast<Block*>(std::malloc(sizeof(Block) + steps * kStepBytes));
    if (block == nullptr) return nullptr;
    block->steps = steps;
    return block + 1;
  }
  void Give(void* data) {
    if (data == nullptr) return;
    Block* const block = static_cast<Block*>(data) - 1;
    const size_t bytes = block->steps * kStepBytes;
    if (block->steps > kStepsMax || kept_bytes_ + bytes > kKeptBytesMax) return std::free(block);
    ASAN_POISON_MEMORY_REGION(data, bytes);
    block->next = std::exchange(free_[block->steps], block);
    kept_bytes_ += bytes;
  }
  void* TakeZeros(size_t count, size_t bytes) {
    size_t all = 0;
    void* const data = __builtin_mul_overflow(count, bytes, &all) ? nullptr : Take(all);
    return data == nullptr ? nullptr : std::memset(data, 0, all);
  }
  void* Resize(void* data, size_t bytes) {
    const size_t had = data == nullptr ? 0 : (static_cast<Block*>(data) - 1)->steps * kStepBytes;
    if (had >= bytes && had > 0) return data;
    void* const larger = Take(bytes);
    if (larger == nullptr) return nullptr;
    if (had > 0) std::memcpy(larger, data, had);
    Give(data);
    return larger;
  }

  std::array<Block*, kStepsMax + 1> free_{};  // by steps
  size_t kept_bytes_ = 0;
};

}  // namespace attend
