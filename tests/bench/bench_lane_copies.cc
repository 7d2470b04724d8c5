// SPDX-License-Identifier: Apache-2.0
//
// bench_lane: ways to copy, alone and in batches of small attentions.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "kernels/cuda/lane/engine_copy.h"
#include "kernels/cuda/lane/span_copier.h"
#include "tests/bench/bench_lane.h"

namespace attend::bench {
namespace {

constexpr int kRounds = 60;
constexpr int kWarmUp = 5;

struct Way {
  const char* name;
  cuda::LaneTuning tuning;
};

std::vector<Way> Ways() {
  std::vector<Way> ways(3);
  ways[0] = {"cudaMemcpyAsync each", {}};
  ways[0].tuning.copy_kernel_bytes_max = 0;
  ways[1] = {"cudaMemcpyBatchAsync", ways[0].tuning};
  ways[1].tuning.batch_copies = true;
  ways[2] = {"copy kernel", {}};
  ways[2].tuning.copy_kernel_bytes_max = std::numeric_limits<int64_t>::max();
  return ways;
}

struct CopyTime {
  double total_us = 0;
  double submit_us = 0;
};

// Host blocks of `bytes` that are copied to the device and back.
class CopyCase {
 public:
  CopyCase(int items, int64_t bytes)
      : items_(items), bytes_(bytes), room_((bytes + 511) / 256 * 256) {
    host_ = std::make_unique<test::PinnedBlock>(items * room_, &pinned_);
    if (host_->get() == nullptr) throw std::runtime_error("no page-locked memory");
    RequireCuda(cudaMalloc(&device_, static_cast<size_t>(items * room_)));
    RequireCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    RequireCuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  ~CopyCase() {
    (void)cudaEventDestroy(event_);
    (void)cudaStreamDestroy(stream_);
    (void)cudaFree(device_);
  }
  CopyCase(const CopyCase&) = delete;
  CopyCase& operator=(const CopyCase&) = delete;

  // Copies to the device and back to zeroed memory, which must then be the same.
  void Check(const Way& way) {
    for (int64_t n = 0; n < items_ * room_; ++n)
      host_->get()[n] = static_cast<char>(n * 7 + n / 251);
    const std::vector<char> wanted(host_->get(), host_->get() + items_ * room_);
    (void)Copy(way, cudaMemcpyHostToDevice);
    for (int n = 0; n < items_; ++n) {
      std::memset(host_->get() + n * room_, 0, static_cast<size_t>(bytes_));
    }
    (void)Copy(way, cudaMemcpyDeviceToHost);
    if (std::memcmp(wanted.data(), host_->get(), wanted.size()) != 0) {
      throw std::runtime_error(std::string(way.name) + " copied wrongly");
    }
  }

  CopyTime Median(const Way& way, cudaMemcpyKind kind) {
    std::vector<double> total, submit;
    for (int n = 0; n < kRounds + kWarmUp; ++n) {
      const CopyTime time = Copy(way, kind);
      if (n < kWarmUp) continue;
      total.push_back(time.total_us);
      submit.push_back(time.submit_us);
    }
    return {bench::Median(total), bench::Median(submit)};
  }

 private:
  CopyTime Copy(const Way& way, cudaMemcpyKind kind) {
    const double begin = MicrosecondsNow();
    cuda::SpanCopier copier(pinned_, way.tuning, kind);
    for (int n = 0; n < items_; ++n) {
      copier.Add({host_->get() + n * room_, bytes_}, static_cast<char*>(device_) + n * room_,
                 static_cast<size_t>(n));
    }
    copier.Enqueue(stream_, [](size_t, cudaError_t error) { RequireCuda(error); });
    RequireCuda(cudaEventRecord(event_, stream_));
    const double submitted = MicrosecondsNow();
    cudaError_t error = cudaErrorNotReady;
    while (error == cudaErrorNotReady) error = cudaEventQuery(event_);
    RequireCuda(error);
    return {MicrosecondsNow() - begin, submitted - begin};
  }

  const int items_;
  const int64_t bytes_;
  const int64_t room_;
  cuda::PinnedRanges pinned_;
  std::unique_ptr<test::PinnedBlock> host_;
  void* device_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

// The cost of finding out whether memory is page-locked.
void PrintLookups() {
  cuda::PinnedRanges ranges;
  const test::PinnedBlock known(4096, &ranges), unknown(4096, nullptr);
  std::vector<char> pageable(4096);
  const auto time = [&](char* data) {
    constexpr int kCalls = 20000;
    int mapped = 0;
    const double begin = MicrosecondsNow();
    for (int n = 0; n < kCalls; ++n) mapped += cuda::IsMapped(ranges, {data, 4096}) ? 1 : 0;
    const double ns = (MicrosecondsNow() - begin) * 1000 / kCalls;
    std::printf("| %s | %.0f ns |\n", mapped == 0 ? "no" : "yes", ns);
  };
  std::printf("\n| page-locked (by our allocator; by another; not) | lookup |\n|---|---|\n");
  for (char* data : {known.get(), unknown.get(), pageable.data()}) time(data);
}

}  // namespace

void BenchCopies(test::LaneHarness*) {
  std::printf("\n### Copies of a batch: us until done, us of CPU in the call\n\n");
  std::printf("| items | bytes | way | in us | CPU us | GB/s | out us | CPU us | GB/s |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|\n");
  for (const int items : {1, 4, 16, 64}) {
    for (const int64_t kib : {1, 16, 128, 256, 512}) {
      CopyCase copies(items, kib << 10);
      for (const Way& way : Ways()) {
        copies.Check(way);
        const CopyTime in = copies.Median(way, cudaMemcpyHostToDevice);
        const CopyTime out = copies.Median(way, cudaMemcpyDeviceToHost);
        const double bytes = static_cast<double>(items) * static_cast<double>(kib << 10);
        std::printf("| %d | %lld KiB | %s | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n", items,
                    static_cast<long long>(kib), way.name, in.total_us, in.submit_us,
                    bytes / in.total_us / 1e3, out.total_us, out.submit_us,
                    bytes / out.total_us / 1e3);
      }
    }
  }
  PrintLookups();
}

void BenchStrides() {
  std::printf(
      "\n### Strided copies to the device: rows of `width` bytes, with a stride of 16 times the "
      "width\n\n");
  std::printf("| width | GB/s |\n|---|---|\n");
  constexpr int64_t kBytes = int64_t{16} << 20, kPitches = 16;
  const test::PinnedBlock host(kBytes * kPitches, nullptr);
  if (host.get() == nullptr) throw std::runtime_error("no page-locked memory");
  void* device = nullptr;
  RequireCuda(cudaMalloc(&device, static_cast<size_t>(kBytes * kPitches)));
  cudaStream_t stream = nullptr;
  RequireCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const int64_t width : {128, 256, 512, 1024, 4096, 65536}) {
    std::vector<double> rates;
    for (int n = 0; n < 10; ++n) {
      const double begin = MicrosecondsNow();
      RequireCuda(cuda::EnqueueCopy(
          {static_cast<char*>(device), host.get(), width, kBytes / width, width * kPitches},
          cudaMemcpyHostToDevice, stream));
      RequireCuda(cudaStreamSynchronize(stream));
      rates.push_back(static_cast<double>(kBytes) / (MicrosecondsNow() - begin) / 1e3);
    }
    std::printf("| %lld | %.1f |\n", static_cast<long long>(width), Median(rates));
  }
  RequireCuda(cudaStreamDestroy(stream));
  RequireCuda(cudaFree(device));
}

void BenchSmallBatches(test::LaneHarness* harness) {
  std::printf("\n### Batches of small attentions through a lane, Submit to Done\n\n");
  std::printf("| items | each | way | us | CPU us in Submit | copy in | kernel | copy out |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  const std::pair<const char*, Problem> shapes[] = {{"B1 H1 L16 D64", HalfProblem(1, 1, 16, 64)},
                                                    {"B1 H8 L128 D64", HalfProblem(1, 8, 128, 64)},
                                                    {"B1 H8 L512 D64", HalfProblem(1, 8, 512, 64)}};
  for (const auto& [name, problem] : shapes) {
    for (const int count : {1, 4, 16, 64}) {
      std::vector<LaneItem> owned;
      std::vector<WorkItem> items;
      for (int n = 0; n < count; ++n) owned.emplace_back(harness, problem);
      for (const LaneItem& each : owned) items.push_back(each.item());
      for (const Way& way : Ways()) {
        const std::unique_ptr<Lane> lane = MakeBenchLane(harness, way.tuning, 256 << 20);
        for (const LaneItem& each : owned) each.Poison();
        (void)TimeBatch(lane.get(), items);
        owned.front().Check();
        owned.back().Check();
        std::vector<double> total, submit, in, kernel, out;
        for (int n = 0; n < kRounds; ++n) {
          const BatchTime time = TimeBatch(lane.get(), items);
          total.push_back(time.total_us);
          submit.push_back(time.submit_us);
          in.push_back(static_cast<double>(time.outcome.copy_in_ns) / 1e3);
          kernel.push_back(static_cast<double>(time.outcome.kernel_ns) / 1e3);
          out.push_back(static_cast<double>(time.outcome.copy_out_ns) / 1e3);
        }
        std::printf("| %d | %s | %s | %.1f | %.1f | %.1f | %.1f | %.1f |\n", count, name, way.name,
                    Median(total), Median(submit), Median(in), Median(kernel), Median(out));
      }
    }
  }
}

void BenchGrowth(test::LaneHarness* harness) {
  std::printf("\n### Growth of a lane's memory: CPU us in Submit\n\n");
  std::printf("| batch of | first on this backend | again | on a lane that grows, pool warm |\n");
  std::printf("|---|---|---|---|\n");
  cuda::LaneTuning whole;
  whole.cut.parts_max = 1;
  for (const int64_t length : {2048, 8192, 32768}) {
    const LaneItem item(harness, HalfProblem(1, 8, length, 128));
    const auto submit = [&](Lane* lane) { return TimeBatch(lane, {&item.item(), 1}).submit_us; };
    std::unique_ptr<Lane> lane = MakeBenchLane(harness, whole, 1 << 20);
    const double first = submit(lane.get());
    const double again = submit(lane.get());
    item.Check();
    lane = MakeBenchLane(harness, whole, 1 << 20);
    std::printf("| %.0f MiB | %.0f | %.0f | %.0f |\n", item.bytes() / (1 << 20), first, again,
                submit(lane.get()));
  }
}

}  // namespace attend::bench
