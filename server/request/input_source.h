// SPDX-License-Identifier: Apache-2.0
//
// Where a request's inputs are, and so what a lane reads: where they were placed when the request
// came; or in its input block and a device's copy of that, which are made while it comes in chunks.
// In both cases K and V may be in sessions, and what came of them is to be appended there. One
// type, so that code that asks what a request waits for, or which device it is bound to, need not
// know the cases.

#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/contract/backend.h"
#include "server/regions/region.h"
#include "server/request/device_copy.h"
#include "server/request/output_tensors.h"
#include "server/request/placement.h"
#include "server/sessions/cache_hold.h"

namespace attend {

// In the order of their raw entries; the last four are a backward pass's.
inline constexpr int kTensorsMax = 8;
inline constexpr std::array<const char*, kTensorsMax> kInputNames = {
    "q", "k", "v", "bias", "backward.o", "backward.lse", "backward.d_o", "backward.d_lse"};
enum { kInputO = 4, kInputLse, kInputDO, kInputDLse };  // those of a backward pass

// How tensors were transferred; a metrics label and a field of the answer.
enum class Transport : int32_t { kInline = 0, kChunked = 1, kSharedMemory = 2, kCudaIpc = 3 };
inline constexpr int kTransportCount = 4;
inline constexpr std::array<std::string_view, kTransportCount> kTransportNames = {
    "inline", "chunked", "shm", "cuda-ipc"};
constexpr std::string_view TransportName(Transport transport) {
  return kTransportNames[static_cast<size_t>(transport)];
}

// Where one tensor is in a shared region.
struct RegionPlace {
  RegionRef region;  // null: it is not in one
  int64_t offset = 0;
  int64_t bytes = 0;
  // Null if the tensor is empty.
  char* data() const { return bytes == 0 ? nullptr : region->data + offset; }
};

// A request's tensors that are in regions, which this keeps alive until the request has ended.
struct SharedTensors {
  std::array<RegionPlace, kTensorsMax> inputs;
  std::array<RegionPlace, kOutputsMax> outputs;  // by Output
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  // The GPU that has some of them in its memory, and computes the request; kHost: none.
  int device = SharedRegion::kHost;
  std::string device_name;
  int64_t device_input_bytes = 0;  // of input_bytes
  int64_t device_output_bytes = 0;
  SpanList in_place;                                       // WorkItem's
  std::array<const DeviceEvent*, SpanList::kMax> after{};  // the same

  // Bytes by one of the two transports.
  int64_t BytesIn(Transport way) const {
    return way == Transport::kCudaIpc ? device_input_bytes : input_bytes - device_input_bytes;
  }
  int64_t BytesOut(Transport way) const {
    return way == Transport::kCudaIpc ? device_output_bytes : output_bytes - device_output_bytes;
  }
};

// Tensors still where their message arrived: pieces of the transport's page-locked memory, each
// with its place in the request's input block, to which it is not copied; but a few may lie at
// their place. A device that gathers reads the pieces.
struct GatheredInput {
  std::vector<HostPiece> pieces;      // in ascending order of their places
  std::shared_ptr<const void> owner;  // keeps the pieces' memory alive

  // That were not copied.
  int64_t bytes() const {
    int64_t sum = 0;
    for (const HostPiece& piece : pieces) sum += piece.from == piece.to ? 0 : piece.bytes;
    return sum;
  }
};

// K and V in sessions' pages, and the rows to be written there first.
struct SessionKeys {
  std::unique_ptr<CacheHold> hold;  // never null
  KeyAppend append = {};
};

// The inputs of a request that is not uploaded in advance. What came in messages is in its input
// block, unless it is gathered. What is in regions stays there. The two are independent: a request
// may have either, or both.
struct PlacedInputs {
  std::optional<GatheredInput> gathered;
  std::unique_ptr<SharedTensors> shared;  // null: no tensor is in a region
};

class InputSource {
 public:
  // Until one of these is called, all inputs are in the input block.
  void Gather(GatheredInput input) { placed().gathered = std::move(input); }
  void SetShared(std::unique_ptr<SharedTensors> shared) { placed().shared = std::move(shared); }
  void SetCache(std::unique_ptr<CacheHold> cache) {
    assert(cache != nullptr);
    keys_ = {std::move(cache)};
  }
  // After SetCache: the rows that are to be written to the sessions' pages first.
  void SetAppend(const KeyAppend& append);
  // A device has a copy of the input block, where all that came must still be.
  void Stage(std::unique_ptr<DeviceCopy> copy);

  // The attention has been computed: what it appended is the sessions'.
  void Commit() {
    if (cache() != nullptr) cache()->Commit();
  }
  // Nothing reads the inputs any more.
  void End() {
    if (cache() != nullptr) cache()->End();
  }

  // Null if the inputs are elsewhere.
  const GatheredInput* gathered() const;
  const SharedTensors* shared() const;
  CacheHold* cache() const;
  DeviceCopy* copy() const;

  // The only device that can read them, or kAnyDevice.
  int pinned_device() const;
  // Whether the reference check can read them: all are in the host's memory, or in pages of
  // sessions, which the check copies.
  bool CanBeChecked() const {
    return shared() == nullptr || shared()->device == SharedRegion::kHost;
  }
  // Whether the lane begins by waiting for something on the device: a client's own work, or the
  // last copies of an upload.
  bool Awaits() const;
  // For the lane: makes `item`, whose spans are set, read them.
  void ApplyTo(WorkItem& item);

 private:
  PlacedInputs& placed() { return std::get<PlacedInputs>(inputs_); }

  std::variant<PlacedInputs, std::unique_ptr<DeviceCopy>> inputs_;
  std::optional<SessionKeys> keys_;  // none: K and V are not in sessions
};

}  // namespace attend
