// SPDX-License-Identifier: Apache-2.0
//
// Uploads into an engine whose devices have staging that the test controls: the engine's part of
// AttendChunked, without the wire.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "server/upload/staging.h"
#include "tests/server/support/engine_fixture.h"

namespace attend {

class StagingTest : public EngineTest {
 protected:
  StagingTest() {
    options_.memory_budget_bytes = int64_t{1} << 22;
    options_.staging = {int64_t{1} << 20, 1, 700};  // pieces that cut across everything
  }

  void StartStaging(int devices = 1) {
    std::vector<std::unique_ptr<test::FakeBackend>> fakes;
    for (int i = 0; i < devices; ++i) {
      fakes.push_back(
          std::make_unique<test::FakeBackend>("cuda:" + std::to_string(i), DeviceKind::kCuda));
      fakes.back()->MoveSpans();
      fakes.back()->AddStaging();
    }
    StartOn(std::move(fakes));
  }

  // A request whose header has arrived, with its tensors but not their bytes.
  struct Upload {
    uint64_t id = 0;
    std::unique_ptr<Request> request;
    test::OwnedAttention* owned = nullptr;
    std::vector<HostSpan> tensors;   // destinations
    std::vector<const void*> bytes;  // the bytes for them
  };

  static test::ProblemSpec Spec() {
    test::ProblemSpec spec = test::MakeSpec(2, 2, 1, 21, 33, 16, 8);
    spec.kv_lengths = {33, 20};
    return spec;
  }

  Upload Begin(const test::ProblemSpec& spec = Spec()) {
    Upload upload;
    upload.request = NewRequest(spec);
    upload.id = upload.request->id;
    upload.owned = memory_.back().get();
    Attention& a = upload.request->attention;
    const Problem& p = a.problem;
    const std::array<int64_t, 3> bytes = {p.batch * p.heads_q * p.len_q * p.dim * 4,
                                          p.batch * p.heads_kv * p.len_k * p.dim * 4,
                                          p.batch * p.heads_kv * p.len_k * p.dim_v * 4};
    const std::array<const void**, 3> tensors = {&a.q.data, &a.k.data, &a.v.data};
    const auto aligned = [](int64_t n) { return (n + 255) / 256 * 256; };
    const int64_t lengths = aligned(bytes[0]) + aligned(bytes[1]) + aligned(bytes[2]);
    Result<Admission> admission = engine_->Admit(p, "", lengths + p.batch * 8, 1024, 0);
    if (!admission.ok()) {
      ADD_FAILURE() << admission.status().ToString();
      return upload;
    }
    upload.request->input = std::move(admission->input);
    upload.request->output = std::move(admission->output);
    char* const block = static_cast<char*>(upload.request->input.data());
    std::memset(block, 0xFF, static_cast<size_t>(lengths));
    upload.request->input_spans = {{block, upload.request->input.bytes()}};
    int64_t at = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      upload.bytes.push_back(*tensors[t]);
      upload.tensors.push_back({block + at, bytes[t]});
      *tensors[t] = block + at;
      at += aligned(bytes[t]);
    }
    if (a.kv_lengths != nullptr) {
      std::memcpy(block + lengths, a.kv_lengths, static_cast<size_t>(p.batch) * 8);
      a.kv_lengths = reinterpret_cast<const int64_t*>(block + lengths);
    }
    upload.request->placement = std::move(admission->placement);
    const Status placed = engine_->Place(*upload.request);
    EXPECT_TRUE(placed.ok()) << placed.ToString();
    engine_->Stage(*upload.request, upload.tensors);
    return upload;
  }

  // A fraction `share` of the bytes arrives, in ranges of any size and order, from several threads
  // at once.
  void Arrive(Upload& upload, double share = 1, int threads = 3) {
    struct Chunk {
      char* to;
      const char* from;
      int64_t bytes;
    };
    std::vector<Chunk> chunks;
    for (size_t t = 0; t < upload.tensors.size(); ++t) {
      const HostSpan& tensor = upload.tensors[t];
      for (int64_t at = 0; at < tensor.bytes;) {
        const int64_t bytes =
            std::min(tensor.bytes - at, static_cast<int64_t>(1 + random_() % 1500));
        chunks.push_back({static_cast<char*>(tensor.data) + at,
                          static_cast<const char*>(upload.bytes[t]) + at, bytes});
        at += bytes;
      }
    }
    std::shuffle(chunks.begin(), chunks.end(), random_);
    chunks.resize(static_cast<size_t>(share * static_cast<double>(chunks.size())));
    std::vector<std::thread> copiers;
    for (int i = 0; i < threads; ++i) {
      copiers.emplace_back([&, i] {
        for (size_t n = static_cast<size_t>(i); n < chunks.size(); n += threads) {
          const Chunk& chunk = chunks[n];
          std::memcpy(chunk.to, chunk.from, static_cast<size_t>(chunk.bytes));
          Came(upload, chunk.to, chunk.bytes);
        }
      });
    }
    for (std::thread& copier : copiers) copier.join();
  }

  // Bytes of a tensor have arrived.
  static void Came(Upload& upload, const char* data, int64_t bytes) {
    if (DeviceCopy* const copy = upload.request->source.copy()) copy->Arrived(data, bytes);
  }

  void MustSend(Upload& upload) {
    const Status status = engine_->Submit(upload.request);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  // The request has ended with the reference's answer, bit for bit.
  void ExpectRight(const Upload& upload) {
    const Request& ended = collector_.WaitFor(upload.id);
    EXPECT_TRUE(ended.status.ok()) << ended.status.ToString();
    const std::vector<std::byte> came = upload.owned->OutputBytes();
    upload.owned->ResetOutput();
    CpuReference(upload.owned->attention);
    EXPECT_EQ(came, upload.owned->OutputBytes());
  }

  // Waits until nothing is held any more.
  void AwaitNothingHeld() {
    EXPECT_TRUE(engine_->WaitIdle(kNever));
    for (size_t i = 0; i < devices_.size(); ++i) {
      while (engine_->staging().held_bytes(static_cast<int>(i)) > 0) std::this_thread::yield();
      EXPECT_EQ(devices_[i]->staging().counts().device_bytes, 0);
    }
    EXPECT_EQ(engine_->host_pool().used_bytes(), 0) << "the block goes before its hold";
  }
  void AwaitCopies(int device = 0) {
    while (devices_[device]->staging().counts().enqueued > 0) std::this_thread::yield();
  }

  int64_t Ends(StagingEnd end) { return engine_->staging().ends(end); }

  std::mt19937_64 random_{seed_};
};

}  // namespace attend
