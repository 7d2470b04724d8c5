// SPDX-License-Identifier: Apache-2.0
//
// Each lane has a thread that sleeps until a batch arrives, so a batch costs one wake-up from
// Submit to its first tile. A batch smaller than a wake-up runs on the caller's thread instead. The
// lane's thread works in an arena of the shared pool and gets the pool's idle threads.

#include "kernels/cpu/cpu_backend.h"

#include <tbb/blocked_range.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <mutex>
#include <span>
#include <thread>

#include "kernels/cpu/append_keys.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/cpu/guarded.h"
#include "kernels/cpu/parallel_reference.h"
#include "kernels/cpu/tile_unit.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/reference_gradients.h"
#include "kernels/util/host_mapping.h"
#include "kernels/util/mutex.h"
#include "kernels/util/processors.h"
#include "kernels/util/thread_name.h"

namespace attend {
namespace {

// Appending more rows of K and V takes longer than waking the lane's thread.
constexpr int64_t kInlineAppendRowsMax = 16;

int64_t Nanoseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

bool RunsInFlash(const WorkItem& item) {
  const KernelId kernel = item.selection.kernel;
  return (kernel == KernelId::kCpuFlash || kernel == KernelId::kCpuFlashAmx) && !item.gradients;
}

// Fills the item's outputs with NaN, until `stop` is set.
void Poison(const WorkItem& item) {
  if (!item.gradients) return PoisonOutput(item.attention, item.stop);
  for (const HostSpan& span : item.outputs) {
    if (Stopped(item.stop)) return;
    std::memset(span.data, 0xff, static_cast<size_t>(span.bytes));
  }
}

class CpuLane : public Lane {
 public:
  explicit CpuLane(int threads) : arena_(threads), thread_([this] { Loop(); }) {}

  ~CpuLane() override {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }

  Status Submit(std::span<const WorkItem> items, Done done) override {
    {
      const MutexLock lock(mutex_);
      if (busy_) {
        return Status(Code::kFailedPrecondition,
                      "a batch was submitted to a CPU lane that still runs one");
      }
      ATTEND_RETURN_IF_ERROR(Guarded([&] { TakeItems(items); }));
      busy_ = true;
      if (!RunsOnCaller()) {
        done_ = std::move(done);
        pending_ = true;
        wake_.NotifyOne();
        return Status();
      }
    }
    BatchOutcome outcome = Run();
    {
      const MutexLock lock(mutex_);
      busy_ = false;
    }
    done(std::move(outcome));
    return Status();
  }

 private:
  void Loop();
  // Copies the items, and allocates all memory that Run needs besides that of the kernels.
  void TakeItems(std::span<const WorkItem> items);
  bool RunsOnCaller();
  BatchOutcome Run();
  // Runs an item that is not in flash_.
  Status RunAlone(const WorkItem& item);

  tbb::task_arena arena_;
  Mutex mutex_;
  CondVar wake_;
  // A batch is waiting for the lane's thread.
  bool pending_ ATTEND_GUARDED_BY(mutex_) = false;
  // From Submit until just before Done.
  bool busy_ ATTEND_GUARDED_BY(mutex_) = false;
  bool stopping_ ATTEND_GUARDED_BY(mutex_) = false;
  Done done_ ATTEND_GUARDED_BY(mutex_);
  std::vector<WorkItem> items_;          // written while idle, read by the lane's thread while busy
  std::vector<const Attention*> flash_;  // as items_
  std::vector<const StopFlag*> stops_;   // of flash_
  std::vector<Status> statuses_;         // as items_
  std::thread thread_;                   // last: starts when all else is ready
};

void CpuLane::Loop() {
  NameThread("attend-cpu-lane");
  MutexLock lock(mutex_);
  while (true) {
    while (!pending_ && !stopping_) wake_.Wait(mutex_);
    if (!pending_) return;
    pending_ = false;
    lock.Unlock();
    BatchOutcome outcome = Run();
    lock.Lock();
    // Idle before Done is called, since Done may submit the next batch.
    const Done done = std::move(done_);
    done_ = nullptr;
    busy_ = false;
    lock.Unlock();
    done(std::move(outcome));
    lock.Lock();
  }
}

void CpuLane::TakeItems(std::span<const WorkItem> items) {
  items_.assign(items.begin(), items.end());
  flash_.reserve(items.size());
  stops_.reserve(items.size());
  statuses_.assign(items.size(), Status());
}

// Whether the batch takes tens of microseconds at most, about the cost of waking the lane's thread.
bool CpuLane::RunsOnCaller() {
  flash_.clear();
  for (const WorkItem& item : items_) {
    if (!RunsInFlash(item)) return false;
    if (item.append.rows > kInlineAppendRowsMax) return false;
    flash_.push_back(&item.attention);
  }
  return CpuFlashRunsInline(flash_);
}

BatchOutcome CpuLane::Run() {
  BatchOutcome outcome;
  const auto begin = std::chrono::steady_clock::now();
  outcome.statuses = std::move(statuses_);
  flash_.clear();
  stops_.clear();
  for (const WorkItem& item : items_) {
    if (item.poison_output) Poison(item);
    if (item.append.rows > 0) AppendKeys(item.attention, item.append);
  }
  size_t amx_from = 0;
  for (const KernelId kernel : {KernelId::kCpuFlash, KernelId::kCpuFlashAmx}) {
    amx_from = flash_.size();
    for (const WorkItem& item : items_) {
      if (!RunsInFlash(item) || item.selection.kernel != kernel) continue;
      flash_.push_back(&item.attention);
      stops_.push_back(item.stop);
    }
  }
  const Status flash = Guarded([&] {
    if (CpuFlashRunsInline(flash_)) {
      CpuFlash(flash_, stops_, amx_from);
    } else {
      arena_.execute([&] { CpuFlash(flash_, stops_, amx_from); });
    }
  });
  for (size_t n = 0; n < items_.size(); ++n) {
    const WorkItem& item = items_[n];
    outcome.statuses[n] = RunsInFlash(item) ? flash : RunAlone(item);
    if (Stopped(item.stop)) {
      outcome.statuses[n] = Status(Code::kCancelled, "stopped");
    }
  }
  outcome.kernel_ns = Nanoseconds(std::chrono::steady_clock::now() - begin);
  outcome.span_ns = outcome.kernel_ns;
  return outcome;
}

Status CpuLane::RunAlone(const WorkItem& item) {
  const Attention& a = item.attention;
  const auto run = [&](const auto& work) {
    return Guarded([&] { arena_.execute([&] { work(); }); });
  };
  switch (item.selection.kernel) {
    case KernelId::kCpuFlash:
      return run([&] { CpuFlashGradients(a, *item.gradients, item.stop); });
    case KernelId::kCpuFlashAmx:
      return run([&] { CpuFlashAmxGradients(a, *item.gradients, item.stop); });
    case KernelId::kCpuReference:
      if (!item.gradients) return run([&] { ParallelReference(a, item.stop); });
      return run([&] { CpuReferenceGradients(a, *item.gradients, item.stop); });
    default:
      return Internal("kernel " + std::string(KernelName(item.selection.kernel)) +
                      " was sent to the CPU backend");
  }
}

class CpuAllocator : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t bytes) override { return MapHostMemory(bytes); }
  void Free(void* data, int64_t bytes) override { UnmapHostMemory(data, bytes); }
  Status Register(void*, int64_t) override { return Status(); }  // any memory will do
  void Unregister(void*, int64_t) override {}
};

// Pages are allocated by the system on first use.
class CpuArena : public DeviceArena {
 public:
  explicit CpuArena(HostSpan memory) : memory_(memory) {}
  ~CpuArena() override { UnmapHostMemory(memory_.data, memory_.bytes); }
  HostSpan memory() const override { return memory_; }
  bool on_host() const override { return true; }
  Status Copy(std::span<const HostPiece> pieces) override {
    for (const HostPiece& piece : pieces) {
      std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    }
    return Status();
  }

 private:
  const HostSpan memory_;
};

// The "model name" of /proc/cpuinfo, or the architecture if there is none.
std::string CpuModel() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
#if defined(__aarch64__)
  return "aarch64";
#else
  return "unknown CPU";
#endif
}

DeviceInfo MakeInfo(int threads) {
  DeviceInfo info;
  info.kind = DeviceKind::kCpu;
  info.name = "cpu";
  info.not_amx = cpu_flash::WhyNoAmx();
  info.description = CpuModel() + ", " + CpuFlashTarget() + cpu_flash::AmxText() + ", " +
                     std::to_string(threads) + (threads == 1 ? " thread" : " threads");
  info.units = threads;
  info.memory_bytes = PhysicalMemoryBytes();
  return info;
}

// Throws if the process cannot create `count` more threads.
void TryThreads(int count) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::jthread> threads;  // wait for `end`, then are joined
  try {
    for (int i = 0; i < count; ++i) threads.emplace_back([ended] { ended.wait(); });
  } catch (...) {
    end.set_value();
    throw;
  }
  end.set_value();
}

// Creates all threads of the pool. oneTBB would create each when first needed, on another thread,
// where its failure could not be caught.
void MakeThreads(int threads, tbb::task_arena& pool) {
  constexpr std::chrono::seconds kPatience(2);  // wall time, for a busy machine; then go on without
  // Another backend of this process may have set a lower limit.
  threads = std::min(threads, static_cast<int>(tbb::global_control::active_value(
                                  tbb::global_control::max_allowed_parallelism)));
  TryThreads(threads - 1);
  pool.initialize(threads);
  std::atomic<int> here{0};
  const auto until = std::chrono::steady_clock::now() + kPatience;
  pool.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<int>(0, threads),
        [&](const tbb::blocked_range<int>&) {
          ++here;
          while (here < threads && std::chrono::steady_clock::now() < until) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
          }
        },
        tbb::simple_partitioner());
  });
}

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int threads)
      : threads_(threads),
        limit_(tbb::global_control::max_allowed_parallelism, static_cast<size_t>(threads)),
        info_(MakeInfo(threads)) {}

  const DeviceInfo& info() const override { return info_; }
  HostAllocator& host_allocator() override { return allocator_; }

  Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions&) override {
    const Status threads =
        Guarded([&] { std::call_once(threads_made_, [this] { MakeThreads(threads_, pool_); }); });
    if (!threads.ok()) {
      return ResourceExhausted("the CPU backend cannot create its " + std::to_string(threads_) +
                               " threads: " + threads.message());
    }
    std::unique_ptr<Lane> lane;
    const Status made = Guarded([&] { lane = std::make_unique<CpuLane>(threads_); });
    if (!made.ok()) return made;
    return lane;
  }
  Result<std::unique_ptr<DeviceArena>> MakeArena(int64_t bytes) override {
    const Result<void*> mapped = MapHostMemory(bytes);
    if (!mapped.ok()) return mapped.status();
    return std::unique_ptr<DeviceArena>(new CpuArena({*mapped, bytes}));
  }

 private:
  const int threads_;
  const tbb::global_control limit_;  // of the pool that all lanes share
  std::once_flag threads_made_;
  tbb::task_arena pool_;  // keeps the threads alive
  const DeviceInfo info_;
  CpuAllocator allocator_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const BackendOptions& options) {
  return std::make_unique<CpuBackend>(options.cpu_threads > 0 ? options.cpu_threads : Processors());
}

}  // namespace attend
