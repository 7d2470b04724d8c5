// SPDX-License-Identifier: Apache-2.0
//
// An engine on a real GPU: an upload staged while it arrives gives the same bits as one copied when
// complete, and leaves no memory behind, however it ends.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/engine.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

// One request at a time.
class LastEnd final : public Responder {
 public:
  void Finish(std::unique_ptr<Request> request) override {
    const std::lock_guard lock(mutex_);
    ended_ = std::move(request);
    changed_.notify_all();
  }
  std::unique_ptr<Request> Take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ != nullptr; });
    return std::move(ended_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Request> ended_;
};

class CudaStagingTest : public ::testing::Test {
 protected:
  void Start(const StagingOptions& staging, int64_t budget_bytes) {
    Result<std::unique_ptr<Backend>> backend = MakeBackend("cuda:0", BackendOptions{});
    ASSERT_TRUE(backend.ok()) << backend.status().ToString();
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::move(*backend));
    EngineOptions options;
    options.memory_budget_bytes = budget_bytes;
    options.staging = staging;
    options.worker.batcher.batch_flops_max = 2e12;
    Result<std::unique_ptr<Engine>> engine =
        Engine::Make(std::move(backends), options, metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().ToString();
    engine_ = std::move(*engine);
    if (engine_->staging().limit(0).bytes_max == 0) GTEST_SKIP() << "no memory pools here";
  }

  struct Upload {
    std::unique_ptr<Request> request;
    std::vector<HostSpan> places;
    std::vector<const char*> bytes;
  };

  // `owned` is contiguous; lengths, if any, come after the tensors.
  Upload Begin(const test::OwnedAttention& owned, bool staged) {
    Upload upload;
    upload.request = std::make_unique<Request>();
    Request& request = *upload.request;
    request.id = ++last_id_;
    request.responder = &end_;
    request.attention = owned.attention;
    Attention& a = request.attention;
    const Problem& p = a.problem;
    const int64_t size = DTypeBytes(p.dtype);
    const std::array<int64_t, 3> bytes = {p.batch * p.heads_q * p.len_q * p.dim * size,
                                          p.batch * p.heads_kv * p.len_k * p.dim * size,
                                          p.batch * p.heads_kv * p.len_k * p.dim_v * size};
    const std::array<const void**, 3> tensors = {&a.q.data, &a.k.data, &a.v.data};
    std::array<int64_t, 4> at{};
    for (size_t t = 0; t < 3; ++t) at[t + 1] = (at[t] + bytes[t] + 255) / 256 * 256;
    const int64_t o_bytes = ElementsO(p) * size;
    Result<Admission> admission = engine_->Admit(p, "", at[3] + p.batch * 8, o_bytes, 0);
    if (!admission.ok()) {
      ADD_FAILURE() << admission.status().ToString();
      return upload;
    }
    request.input = std::move(admission->input);
    request.output = std::move(admission->output);
    char* const block = static_cast<char*>(request.input.data());
    std::memset(block, 0xFF, static_cast<size_t>(at[3]));
    for (size_t t = 0; t < 3; ++t) {
      upload.bytes.push_back(static_cast<const char*>(*tensors[t]));
      upload.places.push_back({block + at[t], bytes[t]});
      *tensors[t] = block + at[t];
    }
    std::memcpy(block + at[3], a.kv_lengths, static_cast<size_t>(p.batch) * 8);
    a.kv_lengths = reinterpret_cast<const int64_t*>(block + at[3]);
    a.o.data = request.output.data();
    request.input_spans = {{block, request.input.bytes()}};
    request.output_spans = {{request.output.data(), request.output.bytes()}};
    const Status placed = engine_->Place(request);
    EXPECT_TRUE(placed.ok()) << placed.ToString();
    if (staged) engine_->Stage(request, upload.places);
    return upload;
  }

  static void Came(Request& request, const char* data, int64_t bytes) {
    if (DeviceCopy* const copy = request.source.copy()) copy->Arrived(data, bytes);
  }

  void Arrive(Upload& upload, int64_t chunk_bytes_max, double share = 1) {
    struct Chunk {
      size_t tensor;
      int64_t begin;
      int64_t bytes;
    };
    std::vector<Chunk> chunks;
    for (size_t t = 0; t < upload.places.size(); ++t) {
      for (int64_t at = 0; at < upload.places[t].bytes; at += chunks.back().bytes) {
        const auto bytes = static_cast<int64_t>(1 + random_() % chunk_bytes_max);
        chunks.push_back({t, at, std::min(bytes, upload.places[t].bytes - at)});
      }
    }
    std::shuffle(chunks.begin(), chunks.end(), random_);
    chunks.resize(static_cast<size_t>(share * static_cast<double>(chunks.size())));
    std::vector<std::thread> threads;
    constexpr size_t kThreads = 4;
    for (size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        for (size_t n = i; n < chunks.size(); n += kThreads) {
          const auto& [tensor, begin, bytes] = chunks[n];
          char* const to = static_cast<char*>(upload.places[tensor].data) + begin;
          std::memcpy(to, upload.bytes[tensor] + begin, static_cast<size_t>(bytes));
          Came(*upload.request, to, bytes);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // The bytes of O.
  std::string Run(const test::OwnedAttention& owned, bool staged, int64_t chunk_bytes_max) {
    Upload upload = Begin(owned, staged);
    EXPECT_EQ(upload.request->source.copy() != nullptr, staged);
    std::memset(upload.request->output.data(), 0xFF,
                static_cast<size_t>(upload.request->output.bytes()));
    Arrive(upload, chunk_bytes_max);
    const Status status = engine_->Submit(upload.request);
    EXPECT_TRUE(status.ok()) << status.ToString();
    if (!status.ok()) return "";
    const std::unique_ptr<Request> ended = end_.Take();
    EXPECT_TRUE(ended->status.ok()) << ended->status.ToString();
    return std::string(static_cast<const char*>(ended->output.data()),
                       static_cast<size_t>(ended->output.bytes()));
  }

  void AwaitNothingHeld() {
    while (engine_->staging().held_bytes(0) > 0) std::this_thread::yield();
    EXPECT_EQ(engine_->host_pool().used_bytes(), 0);
  }

  const uint64_t seed_ = test::FreshSeed();
  std::mt19937_64 random_{seed_};
  SteadyClock clock_;
  Metrics metrics_{"test"};
  LastEnd end_;
  std::unique_ptr<Engine> engine_;
  uint64_t last_id_ = 0;
};

test::ProblemSpec Spec(int64_t batch, int64_t heads, int64_t length, int64_t dim, DType dtype) {
  test::ProblemSpec spec = test::MakeSpec(batch, heads, heads, length, length, dim, dim, dtype);
  spec.problem.return_lse = false;
  for (int64_t b = 0; b < batch; ++b)
    spec.kv_lengths.push_back(std::max<int64_t>(1, length - 3 * b));
  return spec;
}

TEST_F(CudaStagingTest, StagedUploadsGiveTheSameBitsAsOneCopy) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  Start({int64_t{1} << 30, 1, 5000}, int64_t{256} << 20);
  if (IsSkipped() || HasFatalFailure()) return;
  int64_t used = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t length : {1, 77, 600}) {
      for (const int64_t dim : {16, 64, 80, 128}) {
        SCOPED_TRACE("length " + std::to_string(length) + ", dim " + std::to_string(dim));
        const test::OwnedAttention owned =
            test::MakeAttention(Spec(2, 3, length, dim, dtype), seed_ + dim);
        const std::string ordinary = Run(owned, false, 100'000);
        EXPECT_EQ(Run(owned, true, 20'000) == ordinary, true) << "bits differ";
        EXPECT_EQ(engine_->staging().ends(StagingEnd::kUsed), ++used);
        AwaitNothingHeld();
      }
    }
  }
}

// 64 MiB each of Q, K and V, cut into parts by the lane.
TEST_F(CudaStagingTest, LargeUploadsFromSeveralThreadsAreWhole) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  Start(StagingOptions{}, int64_t{1} << 30);
  if (IsSkipped() || HasFatalFailure()) return;
  const test::OwnedAttention owned =
      test::MakeAttention(Spec(1, 16, 16384, 128, DType::kFloat16), seed_);
  const std::string ordinary = Run(owned, false, int64_t{4} << 20);
  for (const int64_t chunk_bytes_max : {int64_t{4} << 20, int64_t{200'000}}) {
    EXPECT_EQ(Run(owned, true, chunk_bytes_max) == ordinary, true) << "bits differ";
  }
  EXPECT_EQ(engine_->staging().ends(StagingEnd::kUsed), 2);
  EXPECT_GE(engine_->staging().copied_bytes(), 2 * (int64_t{192} << 20));
  AwaitNothingHeld();
}

TEST_F(CudaStagingTest, CancelledUploadsLeaveNothingBehind) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  Start({int64_t{64} << 20, 1, int64_t{1} << 20}, int64_t{256} << 20);
  if (IsSkipped() || HasFatalFailure()) return;
  const test::OwnedAttention owned =
      test::MakeAttention(Spec(1, 8, 4096, 64, DType::kFloat32), seed_);
  const std::string ordinary = Run(owned, false, int64_t{1} << 20);
  for (int i = 0; i < 20; ++i) {
    Upload upload = Begin(owned, true);
    Arrive(upload, int64_t{3} << 20, static_cast<double>(random_() % 5) / 4);
    upload.request.reset();  // copies are in progress; the memory will be reused soon
    if (i % 4 == 0) {
      EXPECT_EQ(Run(owned, false, int64_t{1} << 20) == ordinary, true) << "bits differ";
    }
  }
  AwaitNothingHeld();
  EXPECT_EQ(Run(owned, true, int64_t{1} << 20) == ordinary, true) << "bits differ";
  AwaitNothingHeld();
}

}  // namespace
}  // namespace attend
