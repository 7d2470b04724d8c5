// SPDX-License-Identifier: Apache-2.0
//
// A device's memory for tests: host memory, whatever it claims to be. Thread-safe.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>

#include "kernels/contract/backend.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

class TestArena final : public DeviceArena {
 public:
  explicit TestArena(int64_t bytes, bool on_host = true)
      : memory_(test::MakeBlock(bytes)), bytes_(bytes), on_host_(on_host) {}

  HostSpan memory() const override { return {memory_.get(), bytes_}; }
  bool on_host() const override { return on_host_; }
  Status Copy(std::span<const HostPiece> pieces) override {
    if (on_copy) on_copy();
    if (lost_) return Unavailable("the device is lost");
    for (const HostPiece& piece : pieces) {
      std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
      copied_bytes_ += piece.bytes;
    }
    return Status();
  }

  // Copies fail from now on.
  void Lose() { lost_ = true; }
  int64_t copied_bytes() const { return copied_bytes_; }

  std::function<void()> on_copy;  // called in the middle of a copy

 private:
  const test::Block memory_;
  const int64_t bytes_;
  const bool on_host_;
  std::atomic<bool> lost_{false};
  std::atomic<int64_t> copied_bytes_{0};
};

}  // namespace attend::test
