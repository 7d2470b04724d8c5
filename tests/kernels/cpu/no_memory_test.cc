// SPDX-License-Identifier: Apache-2.0
//
// The heap is empty at each allocation in turn: the CPU's lanes and the C ABI report
// RESOURCE_EXHAUSTED, and the next batch has its bits.

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <semaphore>
#include <string>
#include <vector>

#include "kernels/c/attend_c.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/support/c_params.h"
#include "tests/kernels/support/counted_new.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr int64_t kAllocationsMost = 2000;  // in one batch; otherwise the test might never end

class NoMemoryTest : public testing::Test {
 protected:
  // Calls `run`, which returns its outcome, with each allocation failing in turn, until it makes no
  // further ones. Each time it ends as `wanted` or for lack of memory.
  template <class Run>
  void FailEachAllocation(const Run& run, Code wanted = Code::kOk) {
    for (int64_t nth = 1; nth < kAllocationsMost; ++nth) {
      Code code;
      bool reached;
      {
        const HeapFault fault(nth);
        code = run();
        reached = fault.reached();
      }
      ASSERT_TRUE(code == wanted || code == Code::kResourceExhausted)
          << "allocation " << nth << ": " << CodeName(code);
      if (reached) continue;
      EXPECT_EQ(code, wanted);
      return;
    }
    FAIL() << "more than " << kAllocationsMost << " allocations";
  }

  // A row of a short sequence, which runs on the caller's thread, or many rows.
  OwnedAttention Make(int64_t rows) const {
    ProblemSpec spec;
    spec.problem.batch = 2;
    spec.problem.heads_q = spec.problem.heads_kv = 2;
    spec.problem.len_q = spec.problem.len_k = rows;
    spec.problem.dim = spec.problem.dim_v = 16;
    spec.problem.scale = 0.25f;
    spec.problem.return_lse = true;
    return MakeAttention(spec, seed_);
  }

  const uint64_t seed_ = FreshSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    "ATTEND_TEST_SEED=" + std::to_string(seed_)};
};

// Runs one item on a lane. It makes no allocation itself that could fail instead.
struct OneRun {
  Lane* lane;
  const WorkItem* item;
  Code code = Code::kOk;
  std::binary_semaphore done{0};

  Code Run() {
    const Status status = lane->Submit({item, 1}, [this](BatchOutcome outcome) {
      code = outcome.statuses[0].code();
      done.release();
    });
    if (!status.ok()) return status.code();
    done.acquire();
    return code;
  }
};

TEST_F(NoMemoryTest, ALaneAnswersAndServesTheNextBatch) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend(BackendOptions{.cpu_threads = 2});
  for (const int64_t rows : {1, 120}) {
    for (const KernelId kernel : {KernelId::kCpuFlash, KernelId::kCpuReference}) {
      SCOPED_TRACE(std::to_string(rows) + " rows, " + std::string(KernelName(kernel)));
      const std::unique_ptr<Lane> lane = backend->MakeLane(LaneOptions()).value();
      OwnedAttention made = Make(rows);
      const WorkItem item = made.Item(Selection{kernel, "test", 0});
      OneRun run{lane.get(), &item};
      FailEachAllocation([&] { return run.Run(); });
      ASSERT_FALSE(HasFatalFailure());
      const std::vector<std::byte> last = made.OutputBytes();
      made.ResetOutput();
      ASSERT_EQ(run.Run(), Code::kOk);
      EXPECT_EQ(made.OutputBytes(), last);
    }
  }
}

TEST_F(NoMemoryTest, TheCInterfaceReturnsACode) {
  for (const char* const kernel : {"cpu_flash", "cpu_reference"}) {
    SCOPED_TRACE(kernel);
    OwnedAttention made = Make(40);
    attend_params params = ParamsOf(made.attention);
    params.device = ATTEND_CPU;
    params.kernel = kernel;
    FailEachAllocation([&] { return static_cast<Code>(attend_run(&params, nullptr)); });
    FailEachAllocation([&] {
      int64_t bytes = 0;
      return static_cast<Code>(attend_workspace_bytes(&params, &bytes));
    });
    const OwnedGradients gradients(made.attention, seed_);
    attend_backward_params backward = ToParams(made.attention, gradients.get());
    backward.attention.device = ATTEND_CPU;
    backward.attention.kernel = kernel;
    FailEachAllocation([&] { return static_cast<Code>(attend_run_backward(&backward, nullptr)); });
  }
}

// A tree is expanded by a call that allocates only for its messages.
TEST_F(NoMemoryTest, ATreeIsExpandedRefusedOrReportedAsTooLarge) {
  const uint8_t bits[] = {0b01, 0b11};
  const int64_t lengths[] = {2, 1}, lengths_beyond[] = {2, 3};
  attend_params params = {};
  params.struct_bytes = sizeof(params);
  params.batch = 2;
  params.len_q = 2;
  params.len_k = 9;
  uint8_t bias[8];
  for (const int64_t* drafts : {lengths, lengths_beyond}) {
    const Code wanted = drafts == lengths ? Code::kOk : Code::kInvalidArgument;
    const attend_tree tree = {sizeof(tree), bits, 2, 0, drafts};
    int calls = 0;
    FailEachAllocation(
        [&] {
          ++calls;
          return static_cast<Code>(attend_write_tree(&tree, &params, bias, sizeof(bias)));
        },
        wanted);
    EXPECT_GT(calls, 1) << "nothing was allocated";
  }
}

TEST_F(NoMemoryTest, TheCInterfaceNamesTheFailure) {
  void* data = nullptr;
  int32_t code;
  {
    const HeapFault fault(1);
    code = attend_malloc(-7, 1, &data);
  }
  EXPECT_EQ(static_cast<Code>(code), Code::kResourceExhausted);
  EXPECT_STREQ(attend_last_error(), "out of memory");
}

}  // namespace
}  // namespace attend::test
