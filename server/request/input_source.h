// SPDX-License-Identifier: Apache-2.0
//
// Where a request's inputs are, and so what a lane reads: where they were placed when the request
// came; or in its input block and a device's copy of that, which are made while it comes in chunks;
// or in those of an upload that the request is a part of. In the first two cases K and V may be in
// sessions, and what came of them is to be appended there. One type, so that code that asks what a
// request waits for, or which device it is bound to, need not know the cases.

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

#include "kernels/contract/attention_slice.h"
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
// with its place in the request's input block, to which it is not copied. A device that gathers
// reads the pieces.
struct GatheredInput {
  std::vector<HostPiece> pieces;      // in ascending order of their places
  std::shared_ptr<const void> owner;  // keeps the pieces' memory alive

  int64_t bytes() const {
    int64_t sum = 0;
    for (const HostPiece& piece : pieces) sum += piece.bytes;
    return sum;
  }
};

class UploadRun;

// A chunked request's inputs: all in the input block, of which a device has a copy.
struct StagedUpload {
  std::unique_ptr<DeviceCopy> copy;  // never null
  std::shared_ptr<UploadRun> run;    // computes the request while it arrives; null: nothing does
};

// The inputs of a request that is a part of a chunked one, begun while the rest may still be
// arriving (upload_run.h).
struct UploadPart {
  DeviceCopy* copy = nullptr;          // the whole's, where it reads its tensors; null: on the host
  const DeviceEvent* after = nullptr;  // with it: the event after which they are there
  std::vector<AttentionSlice> parts = {};  // WorkItem::parts
  bool has_slot = false;  // its upload has a queue slot already, which its parts share
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
  // All that came, or all inputs of a part, must still be in the input block.
  void Stage(std::unique_ptr<DeviceCopy> copy);
  void SetPart(UploadPart part);

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
  StagedUpload* staged() { return std::get_if<StagedUpload>(&inputs_); }
  UploadPart* part() { return std::get_if<UploadPart>(&inputs_); }
  const UploadPart* part() const { return std::get_if<UploadPart>(&inputs_); }
  const SharedTensors* shared() const;
  CacheHold* cache() const;
  // The copy of staged().
  DeviceCopy* copy() { return staged() == nullptr ? nullptr : staged()->copy.get(); }
  UploadRun* run() { return staged() == nullptr ? nullptr : staged()->run.get(); }

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
  bool InBlockOnly() const;

  std::variant<PlacedInputs, StagedUpload, UploadPart> inputs_;
  std::optional<SessionKeys> keys_;  // none: K and V are not in sessions
};

}  // namespace attend
