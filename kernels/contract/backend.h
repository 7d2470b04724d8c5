// SPDX-License-Identifier: Apache-2.0
//
// What stands between the server and the kernels: a Backend is one device, a Lane is one place on
// it where batches run one after another (a CUDA stream with events and workspace; a share of the
// CPU's threads). Lanes are made at start; batches on different lanes overlap.

#pragma once

#include <array>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/util/status.h"

namespace attend {

struct HostSpan {
  void* data = nullptr;
  int64_t bytes = 0;
};

// Bytes on the host, and where they belong.
struct HostPiece {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t bytes = 0;
};

// A few spans, which do not overlap (but for WorkItem::in_place). Empty ones are not kept.
class SpanList {
 public:
  // q, k, v, bias and the small arrays, each in memory of its own, and offsets made for a part.
  static constexpr int kMax = 6;

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

// Work that a device has been given and may not have ended; made by the device's backend, which
// knows what it is (a cudaEvent_t that was recorded). Immutable; any thread.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// One attention of a batch. Every input pointer of `attention` lies inside one of `inputs` and
// every output pointer inside one of `outputs` (or at its end, if nothing is read or written
// there), which are the host's and which a device lane moves; or inside one of `in_place`. All must
// stay alive and untouched until Done. Any host memory will do; but only of what the device's
// HostAllocator allocated or registered does a lane move many small spans at once and never waits
// in Submit.
struct WorkItem {
  Attention attention;
  Selection selection;
  SpanList inputs;
  SpanList outputs;
  // Bytes of the input spans that lie elsewhere, in page-locked memory: the span is then but the
  // place that they are named by, and is not read there. By rising places, not overlapping, each
  // inside one span; they live until Done. Only for devices that gather, and not for what runs in
  // parts there.
  std::span<const HostPiece> scattered = {};
  // Fill the output with NaN (all bits set) where the kernel writes, before it runs: a row that it
  // forgets then cannot pass for an answer that lay there before.
  bool poison_output = false;
  // Memory that the lane's device reads and writes where it lies, at addresses of its own: nothing
  // of it is copied, and nothing is written but O and LSE. Tensors, slopes and sinks may lie there,
  // each whole, inputs overlapping or not; lengths and offsets, which the host reads too, may not.
  // The selection must fit the pointers and strides as they are (Select with their MemoryTraits):
  // INVALID_ARGUMENT, if the kernel cannot address them. The bits of the answer are those of the
  // same item copied. On the CPU this is memory like any other.
  SpanList in_place = {};
  // What must have ended on the device before anything of this item begins: events of this backend
  // that live until Done, or null. They hold back every item of the batch, and the lane: submit
  // such an item alone, and leave a lane to others. Work that never ends holds the lane forever.
  std::array<const DeviceEvent*, SpanList::kMax> after{};
  // Not empty: the parts to compute it in, which live until Done, in place of what the backend
  // would cut it into; together they are the whole. So some of an attention's parts
  // (Backend::Parts) can be an item of their own, an attention that was cut out of it, with the
  // bits that they have in it.
  std::span<const AttentionSlice> parts = {};
  // Once set, the item may end with CANCELLED before it is computed, its output then undefined; the
  // others of its batch go on and have the bits that they have without it. Lives until Done. The
  // CPU's lanes end it within milliseconds; a GPU's compute it.
  const StopFlag* stop = nullptr;
};

// What became of a batch. Times are of the whole batch on its lane: how long copies in, kernels and
// copies out were under way, each summed up. Where a large item was cut into parts they overlap,
// and the sum of the three is more than span_ns.
struct BatchOutcome {
  std::vector<Status> statuses;  // one per item, in order
  int64_t copy_in_ns = 0;
  int64_t kernel_ns = 0;
  int64_t copy_out_ns = 0;
  int64_t span_ns = 0;       // from the first byte in to the last byte out
  int64_t cut_parts = 0;     // parts of all items that were cut
  bool device_lost = false;  // this device can answer nothing more
};

// Called exactly once per accepted batch, on a thread of the backend, in Watch or, for a batch so
// small that handing it over would cost more than running it, in Submit. Must not block for long.
using Done = std::function<void(BatchOutcome outcome)>;

class Lane {
 public:
  virtual ~Lane() = default;

  // Starts the batch and returns without waiting for it (but see Done). Not OK: nothing was
  // started, `done` will not be called. One batch at a time: the caller submits again only after
  // Done. `items` is copied; the memory it points to is not.
  virtual Status Submit(std::span<const WorkItem> items, Done done) = 0;

  // For a caller that would rather look for the end itself than have a thread woken up for it: as
  // Submit; if OK, the caller calls Watch next, from the same thread, and the batch need not end
  // before.
  virtual Status SubmitWatched(std::span<const WorkItem> items, Done done) {
    return Submit(items, std::move(done));
  }
  // Looks for the end of the batch, without sleeping, for at most that long. If it sees it, it
  // calls Done, and the lane may be somebody else's at once; what ends later ends as Submit's do.
  virtual void Watch([[maybe_unused]] std::chrono::nanoseconds at_most) {}
};

// Where tensors wait on the host: page-locked for CUDA so that copies run at bus speed, plain
// aligned memory for the CPU. Thread-safe. Blocks are at least 256-byte aligned.
class HostAllocator {
 public:
  virtual ~HostAllocator() = default;
  virtual Result<void*> Allocate(int64_t bytes) = 0;  // RESOURCE_EXHAUSTED when there is none
  virtual void Free(void* data, int64_t bytes) = 0;
  // Makes whole pages that the caller has mapped as fast to copy from as Allocate's, until
  // Unregister. RESOURCE_EXHAUSTED if the system does not let so much be locked. Both may take long
  // and may wait for the device.
  virtual Status Register(void* data, int64_t bytes) = 0;
  virtual void Unregister(void* data, int64_t bytes) = 0;
};

// A copy, on a device, of memory on the host that is still being filled: what is complete there
// goes on to the device while the rest is on its way.
class Staging {
 public:
  // Ends it and waits for nothing: copies that were enqueued may go on reading the host's memory
  // and writing to the device's, and whoever owns the former is let go of when they have ended.
  // What was given data() must have ended before.
  virtual ~Staging() = default;

  // Enqueues the copy of host bytes [offset, offset + bytes), which are complete and stay as they
  // are. Any threads at once; each byte once. Not OK: this staging is good for nothing any more,
  // but for what was marked.
  virtual Status Copy(int64_t offset, int64_t bytes) = 0;
  // What must have ended before all that Copy was given, in calls that had returned before this one
  // began, is there. Lives as long as the staging. Any threads at once, beside Copy too, but before
  // Finish. Not OK: there is no telling, of this part.
  virtual Result<const DeviceEvent*> Mark() = 0;
  // Once, when every Copy has returned. Not OK: as of Copy.
  virtual Status Finish() = 0;

  // Where the host's first byte is copied to, at the same address modulo 256.
  virtual char* data() const = 0;
  // After Finish: what must have ended before the copy is whole. Lives as long as the staging.
  virtual const DeviceEvent* after() const = 0;
};

struct LaneOptions {
  // Device memory taken at start, and kept. Batches that need more get more: in stream order, from
  // what the backend's lanes have given up or from the driver. RESOURCE_EXHAUSTED if there is none.
  int64_t workspace_bytes = int64_t{256} << 20;
};

// The device's memory that lanes and stagings hold: spans, workspace, lists. Zeros where lanes
// compute in the host's.
struct DeviceMemoryUse {
  int64_t used_bytes = 0;
  int64_t limit_bytes = 0;  // what all lanes together can hold at most
};

// Memory of a device that another process has and lends, as this process has it.
struct LentMemory {
  char* data = nullptr;  // of the whole allocation; 256-byte aligned
  int64_t bytes = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;  // after all its lanes, stagings, lent memory and events
  virtual const DeviceInfo& info() const = 0;
  virtual HostAllocator& host_allocator() = 0;
  virtual Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions& options) = 0;
  // The parts that a lane computes it in, one after the other, those of the same sequences and
  // heads side by side; none: it computes it as one. Cheap; any thread. Follows from the arguments
  // alone. The odd item whose memory then turns out not to be movable in parts is computed as one
  // all the same.
  virtual std::vector<AttentionSlice> Parts(const Attention& attention,
                                            const Selection& selection) const {
    static_cast<void>(attention);
    static_cast<void>(selection);
    return {};
  }
  // Whether there are any: what shares a batch with it waits for all of them.
  virtual bool RunsInParts(const Attention& attention, const Selection& selection) const {
    return !Parts(attention, selection).empty();
  }
  // Whether lanes take WorkItem::scattered.
  virtual bool Gathers() const { return false; }
  // Now, to be looked at; any thread, at any time, without asking the device.
  virtual DeviceMemoryUse memory_use() const { return {}; }

  // What another process on this machine lends of this device's memory (WorkItem::in_place), and an
  // event of its own (WorkItem::after), by handles that are the device's: for CUDA the 64 bytes of
  // cudaIpcMemHandle_t and cudaIpcEventHandle_t. Only devices with a uuid do; UNIMPLEMENTED
  // otherwise. INVALID_ARGUMENT says what is wrong with a handle. Thread-safe; all may wait for the
  // device. What is borrowed twice is to be returned twice, and nothing may use it any more. The
  // lender must keep it until then: CUDA does not define what happens if it frees it before.
  virtual Result<LentMemory> BorrowMemory(std::string_view) {
    return Unimplemented("device " + info().name + " takes no other process's memory");
  }
  virtual void ReturnMemory(char*) {}
  virtual Result<std::unique_ptr<DeviceEvent>> BorrowEvent(std::string_view) {
    return Unimplemented("device " + info().name + " takes no other process's events");
  }

  // Whether there is MakeStaging; not where kernels read the host's memory.
  virtual bool CanStage() const { return false; }
  // A staging of `host`, page-locked memory that `owner` keeps: it is held until no copy reads
  // there any more, and let go of on any thread. RESOURCE_EXHAUSTED: there is no device memory. May
  // wait for a driver.
  virtual Result<std::unique_ptr<Staging>> MakeStaging(const HostSpan& host,
                                                       std::shared_ptr<void> owner) {
    static_cast<void>(host), static_cast<void>(owner);
    return Unimplemented("device " + info().name + " has no staging");
  }
};

struct BackendOptions {
  int cpu_threads = 0;                              // 0 = all hardware threads
  int64_t workspace_bytes_max = int64_t{16} << 30;  // per lane on a GPU, beside what it holds
};

// "cpu" or "cuda:N". NOT_FOUND names what there is.
Result<std::unique_ptr<Backend>> MakeBackend(const std::string& name,
                                             const BackendOptions& options);

// Usable CUDA devices: 0 without a GPU, without a driver, or in a build without CUDA; `why`, if
// not null, then says which.
int CudaDeviceCount(std::string* why = nullptr);

// "13.0", or "none" in a build without CUDA.
std::string CudaBuildVersion();

}  // namespace attend
