// SPDX-License-Identifier: Apache-2.0
//
// Every compiled variant of every CUDA kernel on small problems, with every kind of mask: about two
// tiles of queries and two to three of keys. tests/gpu/run runs it under compute-sanitizer.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>

#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

constexpr double kCheckWork = 2e6;

enum class Kind { kFull, kCausal, kCausalTopLeft, kWindow, kLengths, kPacked, kSinksAndSoftcap };
constexpr int kKinds = 7;

struct HeadDims {
  int64_t d, v;
};
constexpr HeadDims kHeadDims[] = {{64, 64},   {96, 96},   {128, 128},
                                  {192, 192}, {192, 128}, {256, 256}};

// For tiles of `rows` and `keys`.
ProblemSpec Small(Kind kind, const HeadDims& dims, DType dtype, int64_t rows, int64_t keys) {
  const int64_t len_q = rows + rows / 2 + 1;
  const int64_t len_k = 2 * keys + keys / 2 + 3;
  ProblemSpec spec = MakeSpec(2, 4, 2, len_q, len_k, dims.d, dims.v, dtype);
  Problem& p = spec.problem;
  switch (kind) {
    case Kind::kFull:
      break;
    case Kind::kCausal:
      p.mask.right = 0;
      break;
    case Kind::kCausalTopLeft:
      p.mask = {Alignment::kTopLeft, -1, 0};
      break;
    case Kind::kWindow:
      p.mask = {Alignment::kBottomRight, keys, keys / 4};
      break;
    case Kind::kLengths:
      spec.q_lengths = {len_q, rows / 2};
      spec.kv_lengths = {keys + 5, len_k};
      break;
    case Kind::kPacked:
      p.packed = true;
      p.mask.right = 0;
      spec.q_lengths = {len_q, rows / 2};
      spec.kv_lengths = {keys + 5, len_k};
      break;
    case Kind::kSinksAndSoftcap:
      p.has_sinks = true;
      p.softcap = 20.0f;
      break;
  }
  return spec;
}

// All cases at scale 1. Below that a share of them, always including the first of each variant.
class Thinning {
 public:
  explicit Thinning(uint64_t seed) : random_(seed) {}

  bool Takes(const void* variant) {
    const bool first = seen_.insert(variant).second;
    return first || static_cast<double>(random_() % 1000) < 1000 * TestScale();
  }

 private:
  std::mt19937_64 random_;
  std::set<const void*> seen_;
};

// Each compiled variant, with tiles of its own in the problem.
void CheckVariants(KernelId kernel, Kind kind, const HeadDims& dims, DType dtype, uint64_t seed,
                   Thinning* thinning) {
  const ProblemSpec any = Small(kind, dims, dtype, 64, 64);
  if (!CanRun(MakeAttention(any, seed).attention, kernel)) return;
  for (const int config : Configs(any.problem, kernel)) {
    cuda::FlashVariant variant;
    variant.rows = variant.keys = 64;  // those of cuda_naive, which has no variants
    const auto variants = cuda::VariantsFor(kernel, any.problem);
    if (!variants.empty()) variant = variants[config];
    if (!thinning->Takes(variant.kernel)) continue;
    ProblemSpec spec = Small(kind, dims, dtype, variant.rows, variant.keys);
    // Decoding kernels' variants depend on the number of rows.
    const auto own = cuda::VariantsFor(kernel, spec.problem);
    const auto n = static_cast<size_t>(config);
    if (!variants.empty() && (n >= own.size() || own[n].kernel != variant.kernel)) spec = any;
    const Status status = RunAndCheck(spec, kernel, config, seed, kCheckWork);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
}

TEST(CudaSmall, EveryVariantIsRight) {
  const uint64_t seed = FreshSeed();
  Thinning thinning(seed);
  uint64_t turn = seed;  // which kind comes first, and so survives thinning
  for (const HeadDims& dims : kHeadDims) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      for (const KernelId kernel : kCudaKernels) {
        ++turn;
        for (int n = 0; n < kKinds; ++n) {
          const auto kind = static_cast<Kind>((turn + n) % kKinds);
          ASSERT_NO_FATAL_FAILURE(CheckVariants(kernel, kind, dims, dtype, seed, &thinning));
        }
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
