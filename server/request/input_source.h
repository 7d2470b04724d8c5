// SPDX-License-Identifier: Apache-2.0
//
// Where a request's inputs are, and so where the lane reads them: placed when the request arrived,
// or in the input block and its device copy, both filled by a chunked upload. In either case K and
// V may be in sessions, with new rows to append there. One type covers all cases, so that code that
// asks what a request waits for, or which device it is bound to, need not distinguish them.

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

// In the order of their entries in `raw`; the last four belong to a backward pass.
inline constexpr int kTensorsMax = 8;
inline constexpr std::array<const char*, kTensorsMax> kInputNames = {
    "q", "k", "v", "bias", "backward.o", "backward.lse", "backward.d_o", "backward.d_lse"};
enum { kInputO = 4, kInputLse, kInputDO, kInputDLse };  // inputs of a backward pass only

// How tensors were transferred: a metrics label and a field of the response.
enum class Transport : int32_t { kInline = 0, kChunked = 1, kSharedMemory = 2, kCudaIpc = 3 };
inline constexpr int kTransportCount = 4;
inline constexpr std::array<std::string_view, kTransportCount> kTransportNames = {
    "inline", "chunked", "shm", "cuda-ipc"};
constexpr std::string_view TransportName(Transport transport) {
  return kTransportNames[static_cast<size_t>(transport)];
}

// The place of one tensor in a shared region.
struct RegionPlace {
  RegionRef region;  // null: not in a region
  int64_t offset = 0;
  int64_t bytes = 0;
  // Null if the tensor is empty.
  char* data() const { return bytes == 0 ? nullptr : region->data + offset; }
};

// The tensors of a request that are in shared regions. Keeps the regions alive until the request
// has ended.
struct SharedTensors {
  std::array<RegionPlace, kTensorsMax> inputs;
  std::array<RegionPlace, kOutputsMax> outputs;  // indexed by Output
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  // The GPU whose memory holds some of them, and which must compute the request; kHost: none.
  int device = SharedRegion::kHost;
  std::string device_name;
  int64_t device_input_bytes = 0;  // of input_bytes
  int64_t device_output_bytes = 0;
  SpanList in_place;                                       // for WorkItem::in_place
  std::array<const DeviceEvent*, SpanList::kMax> after{};  // for WorkItem::after

  // Bytes transferred by `way`, one of the two shared transports.
  int64_t BytesIn(Transport way) const {
    return way == Transport::kCudaIpc ? device_input_bytes : input_bytes - device_input_bytes;
  }
  int64_t BytesOut(Transport way) const {
    return way == Transport::kCudaIpc ? device_output_bytes : output_bytes - device_output_bytes;
  }
};

// Tensors left where their message arrived: pieces of the transport's page-locked memory, each with
// its place in the input block, to which it is not copied. Some pieces may already be in place. A
// device that supports gathering reads the pieces directly.
struct GatheredInput {
  std::vector<HostPiece> pieces;      // ordered by place
  std::shared_ptr<const void> owner;  // keeps the pieces' memory alive

  // Bytes that are not in their place.
  int64_t bytes() const {
    int64_t sum = 0;
    for (const HostPiece& piece : pieces) sum += piece.from == piece.to ? 0 : piece.bytes;
    return sum;
  }
};

// K and V in session pages, and the rows to write there first.
struct SessionKeys {
  std::unique_ptr<CacheHold> hold;  // never null
  KeyAppend append = {};
};

// The inputs of a request that is not staged. Tensors sent in messages are in the input block,
// unless they are gathered; tensors in regions stay there. The two are independent: a request may
// use either or both.
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
  // After SetCache: sets the rows to write to the sessions' pages first.
  void SetAppend(const KeyAppend& append);
  // Attaches a device copy of the input block, which must still hold everything that arrived.
  void Stage(std::unique_ptr<DeviceCopy> copy);

  // The attention has been computed: the appended rows now belong to the sessions.
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

  // The only device that can read the inputs, or kAnyDevice.
  int pinned_device() const;
  // Whether the reference check can read the inputs: all are in host memory, or in session pages,
  // which the check copies.
  bool CanBeChecked() const {
    return shared() == nullptr || shared()->device == SharedRegion::kHost;
  }
  // Whether the lane must first wait for an event on the device: the client's own work, or the last
  // copies of an upload.
  bool Awaits() const;
  // Called by the lane: makes `item`, whose spans are set, read these inputs.
  void ApplyTo(WorkItem& item);

 private:
  PlacedInputs& placed() { return std::get<PlacedInputs>(inputs_); }

  std::variant<PlacedInputs, std::unique_ptr<DeviceCopy>> inputs_;
  std::optional<SessionKeys> keys_;  // none: K and V are not in sessions
};

}  // namespace attend
