// SPDX-License-Identifier: Apache-2.0
//
// served HOST:PORT: one attention on a server, and its error against double precision.

#include <attend/client/client.h>
#include <attend/kernels/reference/check_rows.h>

#include <cstdio>
#include <random>

using attend::client::AttentionCall;
using attend::client::HostTensor;

namespace {

// [1, 8, 256, 64] of float32.
HostTensor RandomTensor(std::mt19937& random) {
  HostTensor tensor = HostTensor::Make("tensor", attend::DType::kFloat32, {1, 8, 256, 64}).value();
  std::normal_distribution<float> normal;
  float* const values = reinterpret_cast<float*>(tensor.data.get());
  for (int64_t i = 0; i < 1 * 8 * 256 * 64; ++i) values[i] = normal(random);
  return tensor;
}

int Fail(const attend::Status& status) {
  std::fprintf(stderr, "served: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  attend::client::ClientOptions options;
  if (argc > 1) options.server = argv[1];
  const auto client = attend::client::Client::Make(options);
  if (!client.ok()) return Fail(client.status());

  std::mt19937 random{std::random_device{}()};
  AttentionCall call;
  call.q = RandomTensor(random);
  call.k = RandomTensor(random);
  call.v = RandomTensor(random);
  call.mask.kind = attend::v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT;
  attend::client::CallOptions call_options;
  call_options.timeout = std::chrono::seconds(10);
  const auto result = (*client)->Call(call, call_options);
  if (!result.ok()) return Fail(result.status());

  const auto described = Describe(call, &result->o, /*lse=*/nullptr);
  if (!described.ok()) return Fail(described.status());
  const attend::RowsReport report = attend::CheckAllRows(*described);
  std::printf("%s on %s: off by %.1e at most, %.1e allowed\n", result->kernel.c_str(),
              result->device.c_str(), report.max_abs_error, report.bound);
  return report.ok ? 0 : 1;
}
