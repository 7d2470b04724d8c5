// SPDX-License-Identifier: Apache-2.0
//
// Memory for the backward pass.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "kernels/util/host_mapping.h"

namespace attend::cpu_flash {

// Memory for sums, aligned for any vector and not zeroed.
class Floats {
 public:
  void Reserve(int64_t count) {
    if (count <= held_) return;
    floats_.reset();  // first, so that both never exist at once
    held_ = 0;
    floats_.reset(static_cast<float*>(
        ::operator new(static_cast<size_t>(count) * sizeof(float), kAlignment)));
    held_ = count;
    // Else threads would spend a third of the time in page faults of small pages.
    AdviseHugePages(floats_.get(), count * static_cast<int64_t>(sizeof(float)));
  }
  float* at(int64_t n) { return floats_.get() + n; }

 private:
  static constexpr std::align_val_t kAlignment{128};
  struct Delete {
    void operator()(float* floats) const { ::operator delete(floats, kAlignment); }
  };
  std::unique_ptr<float[], Delete> floats_;
  int64_t held_ = 0;
};

}  // namespace attend::cpu_flash
