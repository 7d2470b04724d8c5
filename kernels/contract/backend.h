// SPDX-License-Identifier: Apache-2.0
//
// The interface between the server and the kernels. A Backend is one device. A Lane is where
// batches of one device run one after another: a CUDA stream with events and workspace, or a share
// of the CPU's threads. Lanes are created at start; batches on different lanes overlap.

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

// A copy: within host memory or, by a DeviceArena, between host and device.
struct HostPiece {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t bytes = 0;
};

// A small fixed-capacity list of spans, which do not overlap (except in WorkItem::in_place). Empty
// spans are dropped.
class SpanList {
 public:
  // The largest list is a backward pass in place: q, k, v, bias, O, LSE, their gradients dO and
  // dLSE, and the five computed gradients. Inputs have at most the first eight and the small
  // arrays, each in its own memory.
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
  // Whether a single span contains all of these bytes.
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

// Work enqueued on a device that may not have finished. Created by the device's backend, which
// knows the concrete type (a recorded cudaEvent_t). Immutable; any thread.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// New rows at the end of every sequence's paged K and V. A lane writes them before anything reads
// them.
struct KeyAppend {
  int64_t rows = 0;  // per sequence; already counted in its length
  ConstTensorView k, v;
};

// One attention of a batch, or its backward pass. Every input pointer of `attention` is inside one
// of `inputs` and every output pointer inside one of `outputs` (or at its end, if nothing is read
// or written there); these are host memory, which a device lane copies. Alternatively, the pointer
// is inside one of `in_place`. All memory must stay valid and unchanged until Done. Any host memory
// works, but only with memory that the device's HostAllocator allocated or registered does a lane
// copy many small spans in one go and never block in Submit.
struct WorkItem {
  Attention attention;
  Selection selection;
  SpanList inputs;
  SpanList outputs;
  // Parts of the input spans whose bytes are elsewhere, in page-locked memory, and are gathered
  // from there. `to` is an address inside one of the spans (an offset would not say which) and only
  // names a position; the memory there is not read. Pieces are sorted by `to`, do not overlap, do
  // not straddle spans, and live until Done. Only if the backend Gathers(), and not for items that
  // it RunsInParts().
  std::span<const HostPiece> gathered = {};
  // Fill the output with NaN (all bits set) before the kernel runs, so that a row the kernel fails
  // to write cannot pass for an earlier answer.
  bool poison_output = false;
  // Memory that the device reads and writes in place, at device addresses: nothing is copied, and
  // only O and LSE are written. Whole tensors, slopes and sinks may be there; inputs may overlap.
  // Lengths and offsets may not, because the host reads them too. The selection must fit these
  // pointers and strides (Select with their MemoryTraits): INVALID_ARGUMENT if the kernel cannot
  // address them. The answer is bit-identical to that of a copied item. On the CPU this is ordinary
  // memory.
  SpanList in_place = {};
  // Rows to append to K and V first; their pages are in place.
  KeyAppend append = {};
  // Set: the item is the backward pass of `attention`. O, LSE, dO and dLSE are inputs; the
  // gradients that are not null are the outputs. Selected by SelectBackward, passes Check
  // (gradients.h), and is never run in parts.
  std::optional<Gradients> gradients = {};
  // Events of this backend (or null) that must complete on the device before anything of this item
  // starts; they live until Done. They delay the whole batch and block the lane, so submit such an
  // item alone and keep another lane free. An event that never completes blocks the lane forever.
  std::array<const DeviceEvent*, SpanList::kMax> after{};
  // Once set, the item may end with CANCELLED before it is computed; its output is then undefined.
  // The other items of the batch go on, bit-identical to a batch without it. Lives until Done. CPU
  // lanes stop within milliseconds; a GPU lane finishes the item.
  const StopFlag* stop = nullptr;
};

// Result of a batch. Times cover the whole batch on its lane: total copy-in, kernel and copy-out
// time. These overlap if a large item was cut into parts, so that their sum may exceed span_ns.
struct BatchOutcome {
  std::vector<Status> statuses;  // one per item, in the order of `items`
  int64_t copy_in_ns = 0;
  int64_t kernel_ns = 0;
  int64_t copy_out_ns = 0;
  int64_t span_ns = 0;       // from the first byte in to the last byte out
  int64_t cut_parts = 0;     // number of parts, over all items that were cut
  bool device_lost = false;  // the device is unusable from now on
};

// Called exactly once per accepted batch: on a thread of the backend, in Poll, or in Submit if the
// batch is so small that a hand-over would cost more than running it. Must not block for long.
using Done = std::function<void(BatchOutcome outcome)>;

class Lane {
 public:
  virtual ~Lane() = default;

  // Starts the batch and returns without waiting for it (but see Done). Not OK: nothing was
  // started, and `done` is not called. One batch at a time: submit again only after Done. `items`
  // is copied; the memory it points to is not.
  virtual Status Submit(std::span<const WorkItem> items, Done done) = 0;

  // Submit for a caller that will poll for completion, which saves waking a thread. If OK, the
  // caller calls Poll next, from the same thread; the batch need not complete before that.
  virtual Status SubmitPolled(std::span<const WorkItem> items, Done done) {
    return Submit(items, std::move(done));
  }
  // Polls for completion for at most `at_most`, without sleeping. If the batch completes in that
  // time, calls Done, after which another thread may use the lane at once. Otherwise the batch
  // completes as after Submit.
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
  // Unregister. RESOURCE_EXHAUSTED if the system does not allow that much locked memory. Both may
  // be slow and may wait for the device.
  virtual Status Register(void* data, int64_t bytes) = 0;
  virtual void Unregister(void* data, int64_t bytes) = 0;
};

// A device copy of host memory that is still being filled: complete ranges are copied while the
// rest is still arriving.
class Staging {
 public:
  // Does not wait: enqueued copies may go on reading host memory and writing device memory. `owner`
  // of MakeStaging is released once they have completed. Work that uses data() must have completed
  // before destruction.
  virtual ~Staging() = default;

  // Enqueues the copy of host bytes [offset, offset + bytes), which must be complete and not change
  // any more. Thread-safe; each byte once. Not OK: the staging is unusable.
  virtual Status Copy(int64_t offset, int64_t bytes) = 0;
  // Call once, after every Copy has returned. Not OK: as for Copy.
  virtual Status Finish() = 0;

  // Device address of the host's first byte, congruent to the host address modulo 256.
  virtual char* data() const = 0;
  // After Finish: completes with the copy. Lives as long as the staging.
  virtual const DeviceEvent* after() const = 0;
};

// Long-lived device memory: pages of K and V, which items use in place.
class DeviceArena {
 public:
  // Only when no item uses the memory any more.
  virtual ~DeviceArena() = default;
  // Device addresses, 256-byte aligned. All bytes can be addressed; they are uninitialised.
  virtual HostSpan memory() const = 0;
  // Whether the host can read and write the memory directly.
  virtual bool on_host() const = 0;
  // Copies within the arena, and between it and host memory; returns when the copies are complete.
  // Thread-safe. UNAVAILABLE: the device is lost.
  virtual Status Copy(std::span<const HostPiece> pieces) = 0;
};

struct LaneOptions {
  // Device memory allocated at start, and kept. Batches that need more get it in stream order, from
  // memory that the backend's lanes have given up or from the driver. RESOURCE_EXHAUSTED if there
  // is none.
  int64_t workspace_bytes = int64_t{256} << 20;
};

// Device memory held by lanes and stagings: spans, workspace, lists. Zero if lanes compute in host
// memory.
struct DeviceMemoryUse {
  int64_t used_bytes = 0;
  int64_t limit_bytes = 0;  // upper bound of used_bytes; excludes the arenas' memory
};

// Device memory of another process, mapped into this one.
struct ImportedMemory {
  char* data = nullptr;  // start of the whole allocation; 256-byte aligned
  int64_t bytes = 0;
};

class Backend {
 public:
  // After all lanes, arenas, stagings, imported memory and events of the backend.
  virtual ~Backend() = default;
  virtual const DeviceInfo& info() const = 0;
  virtual HostAllocator& host_allocator() = 0;
  virtual Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions& options) = 0;
  // Whether a lane computes the attention in parts, one after another: items in the same batch wait
  // for all of them. Cheap; any thread; a function of the arguments alone. The rare item whose
  // memory turns out not to be divisible is still computed as one.
  virtual bool RunsInParts(const Attention& attention, const Selection& selection) const {
    static_cast<void>(attention);
    static_cast<void>(selection);
    return false;
  }
  // Whether lanes accept WorkItem::gathered.
  virtual bool Gathers() const { return false; }
  // Current use, for monitoring. Any thread, any time; does not call the device.
  virtual DeviceMemoryUse memory_use() const { return {}; }

  // Import memory (WorkItem::in_place) and events (WorkItem::after) of this device from another
  // process on this machine. Handles are the device's: for CUDA the 64 bytes of a
  // cudaIpcMemHandle_t or cudaIpcEventHandle_t. UNIMPLEMENTED on devices without a uuid;
  // INVALID_ARGUMENT says what is wrong with a handle. Thread-safe; all may wait for the device.
  // Memory imported twice must be released twice, when no longer in use. Its owner must not free it
  // earlier: CUDA does not define what happens then.
  virtual Result<ImportedMemory> ImportMemory(std::string_view) {
    return Unimplemented("device " + info().name + " cannot open another process's memory");
  }
  virtual void ReleaseMemory(char*) {}
  virtual Result<std::unique_ptr<DeviceEvent>> ImportEvent(std::string_view) {
    return Unimplemented("device " + info().name + " cannot open another process's events");
  }

  // RESOURCE_EXHAUSTED: not enough memory.
  virtual Result<std::unique_ptr<DeviceArena>> MakeArena(int64_t) {
    return Unimplemented("device " + info().name + " has no arenas");
  }

  // Whether MakeStaging is supported; not on devices whose kernels read host memory.
  virtual bool CanStage() const { return false; }
  // Makes a staging of `host`, page-locked memory that `owner` keeps alive. `owner` is held until
  // no copy reads the memory any more, and may be released on any thread. RESOURCE_EXHAUSTED: not
  // enough device memory. May wait for the driver.
  virtual Result<std::unique_ptr<Staging>> MakeStaging(const HostSpan& host,
                                                       std::shared_ptr<void> owner) {
    static_cast<void>(host), static_cast<void>(owner);
    return Unimplemented("device " + info().name + " has no staging");
  }
};

struct BackendOptions {
  int cpu_threads = 0;                              // 0 = all hardware threads
  int64_t workspace_bytes_max = int64_t{16} << 30;  // per lane on a GPU, besides its own workspace
};

// `name` is "cpu" or "cuda:N". NOT_FOUND names the devices that exist.
Result<std::unique_ptr<Backend>> MakeBackend(const std::string& name,
                                             const BackendOptions& options);

// Number of usable CUDA devices. 0 without a GPU, without a driver, or in a build without CUDA;
// `why`, if not null, then says which.
int CudaDeviceCount(std::string* why = nullptr);

// "13.0", or "none" in a build without CUDA.
std::string CudaBuildVersion();

}  // namespace attend
