// SPDX-License-Identifier: Apache-2.0
//
// The interface between the server and the kernels. A Backend is one device. A Lane is one place on
// it where batches run one after another (a CUDA stream with events and workspace, or a share of
// the CPU's threads). Lanes are made at start; batches on different lanes overlap.

#pragma once

#include <array>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/util/status.h"

namespace attend {

struct HostSpan {
  void* data = nullptr;
  int64_t bytes = 0;
};

// Bytes to be copied: within the host's memory or, by a DeviceArena, to and from a device's.
struct HostPiece {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t bytes = 0;
};

// A few spans, which do not overlap (except in WorkItem::in_place). Empty ones are dropped.
class SpanList {
 public:
  // Most are in place: of a backward pass q, k, v, bias, O, LSE, their gradients dO and dLSE, and
  // the five that are computed. Inputs: the first eight and the small arrays, each in its own
  // memory.
  static constexpr int kMax = 13;

  SpanList() = default;
  SpanList(std::initializer_list<HostSpan> spans) {
    for (const HostSpan& span : spans) Add(span);
  }
  void Add(const HostSpan& span) {
    if (span.bytes == 0) return;
    assert(size_ < kMax);
    spans_[size_++] = span;
  }
  const HostSpan* begin() const { return spans_.data(); }
  const HostSpan* end() const { return spans_.data() + size_; }
  const HostSpan& operator[](int n) const { return spans_[n]; }
  int size() const { return size_; }
  // Whether one of them holds all of these bytes.
  bool Contains(const void* data, int64_t bytes) const {
    const auto address = reinterpret_cast<uintptr_t>(data);
    for (const HostSpan& span : *this) {
      const auto begin = reinterpret_cast<uintptr_t>(span.data);
      if (address < begin) continue;
      const uintptr_t offset = address - begin;
      if (offset <= static_cast<uintptr_t>(span.bytes) &&
          bytes <= span.bytes - static_cast<int64_t>(offset)) {
        return true;
      }
    }
    return false;
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const HostSpan& span : *this) sum += span.bytes;
    return sum;
  }

 private:
  std::array<HostSpan, kMax> spans_{};
  int size_ = 0;
};

// Work that a device has been given and may not have finished. Made by the device's backend, which
// knows its real type (a recorded cudaEvent_t). Immutable; any thread.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// New rows for the end of every sequence's K and V, which are in pages. A lane writes them there
// before anything reads them.
struct KeyAppend {
  int64_t rows = 0;  // to each sequence; counted in its length already
  // [B, Hkv, rows, D] and [B, Hkv, rows, Dv], each in one of the item's inputs or in place.
  ConstTensorView k, v;
};

// One attention of a batch, or its backward pass. Every input pointer of `attention` is inside one
// of `inputs` and every output pointer inside one of `outputs` (or at its end, if nothing is read
// or written there); these are host memory, which a device lane copies. Or the pointer is inside
// one of `in_place`. All must stay alive and untouched until Done. Any host memory will do, but
// only with memory that the device's HostAllocator allocated or registered does a lane copy many
// small spans at once and never wait in Submit.
struct WorkItem {
  Attention attention;
  Selection selection;
  SpanList inputs;
  SpanList outputs;
  // Bytes of the input spans that are elsewhere, in page-locked memory, and are gathered from
  // there. `to` is in one of the spans (an offset would not say in which) and names a position;
  // what is there is not read. Pieces are in rising order of `to`, do not overlap, are each inside
  // one span, and live until Done. Only for devices that gather, and not for items that run in
  // parts there.
  std::span<const HostPiece> gathered = {};
  // Fill the output with NaN (all bits set) where the kernel writes, before it runs: a row that it
  // forgets then cannot be mistaken for an earlier answer.
  bool poison_output = false;
  // Memory that the lane's device reads and writes in place, at the device's addresses: nothing is
  // copied, and only O and LSE are written. Tensors, slopes and sinks may be there, each as a
  // whole; inputs may overlap. Lengths and offsets, which the host reads too, may not. The
  // selection must fit the pointers and strides as they are (Select with their MemoryTraits):
  // INVALID_ARGUMENT if the kernel cannot address them. The answer has the same bits as if the item
  // were copied. On the CPU this is ordinary memory.
  SpanList in_place = {};
  // Rows to be written to K and V first; their pages are in place.
  KeyAppend append = {};
  // Set: the item is the backward pass of `attention`, whose O and LSE are inputs, as dO and dLSE
  // are; the gradients that are not null are the outputs. Selected by SelectBackward, passes Check
  // (gradients.h), and is computed as one.
  std::optional<Gradients> gradients = {};
  // Events that must have ended on the device before anything of this item begins: events of this
  // backend that live until Done, or null. They hold back every item of the batch, and the lane:
  // submit such an item alone, and leave another lane free. Work that never ends holds the lane
  // forever.
  std::array<const DeviceEvent*, SpanList::kMax> after{};
  // Once set, the item may end with CANCELLED before it is computed; its output is then undefined.
  // The other items of its batch go on, with the same bits as without it. Lives until Done. The
  // CPU's lanes stop within milliseconds; a GPU's finish the item.
  const StopFlag* stop = nullptr;
};

// How a batch ended. The times are for the whole batch on its lane: the total time of copies in, of
// kernels and of copies out. If a large item was cut into parts these overlap, and the sum of the
// three exceeds span_ns.
struct BatchOutcome {
  std::vector<Status> statuses;  // one per item, in order
  int64_t copy_in_ns = 0;
  int64_t kernel_ns = 0;
  int64_t copy_out_ns = 0;
  int64_t span_ns = 0;       // from the first byte in to the last byte out
  int64_t cut_parts = 0;     // number of parts, of all items that were cut
  bool device_lost = false;  // this device can answer nothing more
};

// Called exactly once per accepted batch: on a thread of the backend, in Poll, or in Submit if the
// batch is so small that handing it over would cost more than running it. Must not block for long.
using Done = std::function<void(BatchOutcome outcome)>;

class Lane {
 public:
  virtual ~Lane() = default;

  // Starts the batch and returns without waiting for it (but see Done). Not OK: nothing was
  // started, and `done` will not be called. One batch at a time: submit again only after Done.
  // `items` is copied; the memory it points to is not.
  virtual Status Submit(std::span<const WorkItem> items, Done done) = 0;

  // As Submit, for a caller that prefers to poll for the end rather than have a thread woken for
  // it. If OK, the caller calls Poll next, from the same thread; the batch need not end before
  // that.
  virtual Status SubmitPolled(std::span<const WorkItem> items, Done done) {
    return Submit(items, std::move(done));
  }
  // Polls for the end of the batch, without sleeping, for at most that long. If the batch ends in
  // that time, calls Done, after which another thread may use the lane at once. A batch that ends
  // later ends as with Submit.
  virtual void Poll([[maybe_unused]] std::chrono::nanoseconds at_most) {}
};

// Allocates host memory for tensors: page-locked for CUDA, so that copies run at bus speed; plain
// aligned memory for the CPU. Thread-safe. Blocks are at least 256-byte aligned.
class HostAllocator {
 public:
  virtual ~HostAllocator() = default;
  virtual Result<void*> Allocate(int64_t bytes) = 0;  // RESOURCE_EXHAUSTED if there is none
  virtual void Free(void* data, int64_t bytes) = 0;
  // Makes whole pages that the caller has mapped as fast to copy from as Allocate's, until
  // Unregister. RESOURCE_EXHAUSTED if the system does not allow that much to be locked. Both may
  // take long and may wait for the device.
  virtual Status Register(void* data, int64_t bytes) = 0;
  virtual void Unregister(void* data, int64_t bytes) = 0;
};

// A device copy of host memory that is still being filled: complete ranges are copied to the device
// while the rest is still arriving.
class Staging {
 public:
  // Does not wait: enqueued copies may go on reading the host memory and writing to the device. The
  // host memory's owner is released when they have ended. Work that was given data() must have
  // ended before.
  virtual ~Staging() = default;

  // Enqueues the copy of host bytes [offset, offset + bytes), which are complete and do not change
  // any more. Thread-safe; each byte once. Not OK: the staging is unusable.
  virtual Status Copy(int64_t offset, int64_t bytes) = 0;
  // Call once, when every Copy has returned. Not OK: as for Copy.
  virtual Status Finish() = 0;

  // The device address of the host's first byte; the same modulo 256 as the host's.
  virtual char* data() const = 0;
  // After Finish: the event that ends when the copy is complete. Lives as long as the staging.
  virtual const DeviceEvent* after() const = 0;
};

// Memory of a device that stays: pages of K and V, which items use in place.
class DeviceArena {
 public:
  // No item uses it any more.
  virtual ~DeviceArena() = default;
  // At the device's addresses, 256-byte aligned; all its bytes can be addressed, and may be random.
  virtual HostSpan memory() const = 0;
  // Whether the host can read and write it.
  virtual bool on_host() const = 0;
  // Copies within the memory, and between it and the host's; when it returns, it has done so.
  // Thread-safe. UNAVAILABLE: the device is lost.
  virtual Status Copy(std::span<const HostPiece> pieces) = 0;
};

struct LaneOptions {
  // Device memory allocated at start, and kept. Batches that need more get it in stream order, from
  // what the backend's lanes have given up or from the driver. RESOURCE_EXHAUSTED if there is none.
  int64_t workspace_bytes = int64_t{256} << 20;
};

// Device memory that lanes and stagings hold: spans, workspace, lists. Zero if lanes compute in
// host memory.
struct DeviceMemoryUse {
  int64_t used_bytes = 0;
  int64_t limit_bytes = 0;  // the most that they can hold: what arenas have is not theirs
};

// Device memory of another process, as mapped in this one.
struct ImportedMemory {
  char* data = nullptr;  // of the whole allocation; 256-byte aligned
  int64_t bytes = 0;
};

class Backend {
 public:
  // After all its lanes, arenas, stagings, imported memory and events.
  virtual ~Backend() = default;
  virtual const DeviceInfo& info() const = 0;
  virtual HostAllocator& host_allocator() = 0;
  virtual Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions& options) = 0;
  // Whether a lane computes the attention in parts, one after the other: items that share its batch
  // wait for all of them. Cheap; any thread. Depends on the arguments alone. The rare item whose
  // memory turns out not to be movable in parts is still computed as one.
  virtual bool RunsInParts(const Attention& attention, const Selection& selection) const {
    static_cast<void>(attention);
    static_cast<void>(selection);
    return false;
  }
  // Whether lanes take WorkItem::gathered.
  virtual bool Gathers() const { return false; }
  // The current use, for monitoring. Any thread, at any time; does not ask the device.
  virtual DeviceMemoryUse memory_use() const { return {}; }

  // Import memory of this device (WorkItem::in_place), and an event (WorkItem::after), of another
  // process on this machine. Handles are the device's: for CUDA the 64 bytes of cudaIpcMemHandle_t
  // and cudaIpcEventHandle_t. Only devices with a uuid do this; UNIMPLEMENTED otherwise.
  // INVALID_ARGUMENT says what is wrong with a handle. Thread-safe; all may wait for the device.
  // Memory imported twice must be released twice, and no longer be in use then. Its owner must keep
  // it until then: CUDA does not define what happens if it is freed before.
  virtual Result<ImportedMemory> ImportMemory(std::string_view) {
    return Unimplemented("device " + info().name + " cannot open another process's memory");
  }
  virtual void ReleaseMemory(char*) {}
  virtual Result<std::unique_ptr<DeviceEvent>> ImportEvent(std::string_view) {
    return Unimplemented("device " + info().name + " cannot open another process's events");
  }

  // RESOURCE_EXHAUSTED: there is not that much memory.
  virtual Result<std::unique_ptr<DeviceArena>> MakeArena(int64_t) {
    return Unimplemented("device " + info().name + " has no arenas");
  }

  // Whether MakeStaging is supported; not on devices whose kernels read host memory.
  virtual bool CanStage() const { return false; }
  // Makes a staging of `host`, page-locked memory that `owner` keeps alive. `owner` is held until
  // no copy reads there any more, and released on any thread. RESOURCE_EXHAUSTED: there is no
  // device memory. May wait for a driver.
  virtual Result<std::unique_ptr<Staging>> MakeStaging(const HostSpan& host,
                                                       std::shared_ptr<void> owner) {
    static_cast<void>(host), static_cast<void>(owner);
    return Unimplemented("device " + info().name + " has no staging");
  }
};

struct BackendOptions {
  int cpu_threads = 0;                              // 0 = all hardware threads
  int64_t workspace_bytes_max = int64_t{16} << 30;  // per lane on a GPU, besides what it holds
};

// `name` is "cpu" or "cuda:N". NOT_FOUND names the devices that exist.
Result<std::unique_ptr<Backend>> MakeBackend(const std::string& name,
                                             const BackendOptions& options);

// Number of usable CUDA devices: 0 without a GPU, without a driver, or in a build without CUDA;
// `why`, if not null, then says which.
int CudaDeviceCount(std::string* why = nullptr);

// "13.0", or "none" in a build without CUDA.
std::string CudaBuildVersion();

}  // namespace attend
