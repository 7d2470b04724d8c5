// SPDX-License-Identifier: Apache-2.0
//
// in_process: the same kernels without a server, on this machine's CPU. All values of V are equal,
// so every output is that value.

#include <attend/attend_c.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  constexpr int64_t kHeads = 8, kLength = 256, kDim = 64;
  std::vector<float> q(kHeads * kLength * kDim), k(q.size()), v(q.size(), 0.75F), o(q.size());
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(i));
  }
  const auto tensor = [](std::vector<float>& values) {
    return attend_tensor{values.data(), kHeads * kLength * kDim, kLength * kDim, kDim};
  };
  attend_params params = {};
  params.struct_bytes = sizeof(params);
  params.device = ATTEND_CPU;
  params.dtype = ATTEND_FLOAT32;
  params.batch = 1;
  params.heads_q = params.heads_kv = kHeads;
  params.len_q = params.len_k = kLength;
  params.dim = params.dim_v = kDim;
  params.window_left = -1;
  params.window_right = 0;  // causal
  params.scale = 1 / std::sqrt(static_cast<double>(kDim));
  params.config = -1;
  params.q = tensor(q);
  params.k = tensor(k);
  params.v = tensor(v);
  params.o = tensor(o);
  if (attend_run(&params, /*stream=*/nullptr) != ATTEND_OK) {
    std::fprintf(stderr, "in_process: %s\n", attend_last_error());
    return 1;
  }
  // A mean of kLength equal values may differ by rounding only.
  const float allowed = kLength * 0x1p-24F;
  float worst = 0;
  for (const float value : o) {
    const float error = std::abs(value - 0.75F);
    if (!(error <= worst)) worst = error;  // NaN too
  }
  const char* kernel = "";
  attend_select(&params, &kernel, /*why=*/nullptr);
  std::printf("%s: off by %.1e at most, %.1e allowed\n", kernel, worst, allowed);
  return worst <= allowed ? 0 : 1;
}
