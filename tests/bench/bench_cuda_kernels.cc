// SPDX-License-Identifier: Apache-2.0
//
// The speed of the CUDA kernels through the C ABI, without Python. Each is checked against the
// reference on sampled rows first; a wrong result prints no time. For rivals and targets see
// bench_kernels.py.

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/c/attend_c.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/c_params.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {
namespace {

constexpr double kCheckWork = 3e7;         // multiply-adds of the reference, per kernel and case
constexpr double kNaiveBytesMax = 8e9;     // bytes of scores
constexpr int64_t kWorkspaceZero = 16384;  // zeros at its start, see attend_c.h
constexpr int64_t kTokens = 16384;

// Throws the C ABI's error.
void Require(int32_t code) {
  if (code != ATTEND_OK) throw std::runtime_error(attend_last_error());
}

void RequireCuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory with a copy of a host block, or zeros.
class Memory {
 public:
  Memory(const void* from, int64_t bytes) : bytes_(bytes) {
    Require(attend_malloc(0, bytes, &data_));
    if (from != nullptr) {
      Require(attend_memcpy(0, data_, from, bytes, ATTEND_HOST_TO_DEVICE, nullptr));
    } else {
      Require(attend_memset(0, data_, 0, bytes, nullptr));
    }
    Require(attend_synchronize(0, nullptr));
  }
  ~Memory() { (void)attend_free(0, data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void CopyTo(void* host) const {
    Require(attend_memcpy(0, host, data_, bytes_, ATTEND_DEVICE_TO_HOST, nullptr));
    Require(attend_synchronize(0, nullptr));
  }
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

struct Case {
  std::string name;
  test::ProblemSpec spec;
};

std::vector<Case> Cases() {
  const auto make = [](const std::string& name, int64_t b, int64_t hq, int64_t hkv, int64_t l,
                       int64_t d, bool causal, DType dtype) {
    test::ProblemSpec spec = test::MakeSpec(b, hq, hkv, l, l, d, d, dtype);
    spec.problem.return_lse = false;
    if (causal) spec.problem.mask.right = 0;
    return Case{name, spec};
  };
  std::vector<Case> cases;
  for (const int64_t dim : {64, 96, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      const std::string name = "fp16 B2 H8 L8192 D" + std::to_string(dim);
      cases.push_back(make(name + (causal ? " causal" : " full"), kTokens / 8192, 8, 8, 8192, dim,
                           causal, DType::kFloat16));
    }
  }
  cases.push_back(
      make("bf16 B2 H32/8 L4096 D128 causal", 2, 32, 8, 4096, 128, true, DType::kBFloat16));
  cases.push_back(make("fp16 B4 H8 L512 D64 full", 4, 8, 8, 512, 64, false, DType::kFloat16));
  cases.push_back(make("fp32 B2 H8 L2048 D128 full", 2, 8, 8, 2048, 128, false, DType::kFloat32));
  Case window =
      make("fp16 B1 H8 L16384 D128 window 1023", 1, 8, 8, kTokens, 128, true, DType::kFloat16);
  window.spec.problem.mask.left = 1023;
  cases.push_back(window);
  return cases;
}

// A case with its device memory.
class Run {
 public:
  explicit Run(const Case& c)
      : owned_(test::MakeAttention(c.spec, test::FreshSeed())),
        input_(owned_.input.data, owned_.input.bytes),
        output_(owned_.output.data, owned_.output.bytes) {
    Attention moved = owned_.attention;
    const void* const from = owned_.input.data;
    for (ConstTensorView* view : {&moved.q, &moved.k, &moved.v}) {
      view->data = test::Moved(view->data, from, input_.get());
    }
    moved.o.data = test::Moved(moved.o.data, owned_.output.data, output_.get());
    params_ = ParamsOf(moved);
  }

  // Runs `kernel` once and judges sampled rows of its answer.
  RowsReport Check(const std::string& kernel) {
    kernel_ = kernel;
    params_.kernel = kernel_.c_str();
    Require(attend_workspace_bytes(&params_, &params_.workspace_bytes));
    workspace_ = std::make_unique<Memory>(nullptr, params_.workspace_bytes + kWorkspaceZero);
    params_.workspace = workspace_->get();
    owned_.ResetOutput();
    Require(attend_memcpy(0, output_.get(), owned_.output.data, owned_.output.bytes,
                          ATTEND_HOST_TO_DEVICE, nullptr));
    Enqueue();
    output_.CopyTo(owned_.output.data);
    return CheckRows(owned_.attention, SampleRows(owned_.attention, 1, kCheckWork));
  }

  void Enqueue() { Require(attend_run(&params_, nullptr)); }

  attend_params& params() { return params_; }
  double flops() const { return Flops(owned_.attention); }

 private:
  test::OwnedAttention owned_;
  Memory input_;
  Memory output_;
  std::unique_ptr<Memory> workspace_;
  attend_params params_;
  std::string kernel_;
};

// Median time of a call, ms: rounds of back-to-back calls between events.
double TimeMs(Run* run, int rounds, double round_ms) {
  cudaEvent_t begin, end;
  RequireCuda(cudaEventCreate(&begin));
  RequireCuda(cudaEventCreate(&end));
  const auto time = [&](int calls) {
    RequireCuda(cudaEventRecord(begin));
    for (int n = 0; n < calls; ++n) run->Enqueue();
    RequireCuda(cudaEventRecord(end));
    RequireCuda(cudaEventSynchronize(end));
    float ms = 0;
    RequireCuda(cudaEventElapsedTime(&ms, begin, end));
    return static_cast<double>(ms) / calls;
  };
  const double once = std::max(time(2), 1e-3);
  const int calls = std::clamp(static_cast<int>(round_ms / once), 1, 200);
  std::vector<double> times;
  for (int n = 0; n < rounds; ++n) times.push_back(time(calls));
  RequireCuda(cudaEventDestroy(begin));
  RequireCuda(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// One kernel on one case; "skipped" if the kernel does not support it.
nlohmann::json Measure(Run* run, const std::string& kernel, int rounds, double round_ms) {
  nlohmann::json result = {{"kernel", kernel}};
  run->params().kernel = kernel.c_str();
  const char* selected = nullptr;
  if (const int32_t code = attend_select(&run->params(), &selected, nullptr); code != ATTEND_OK) {
    result["skipped"] = attend_last_error();
    return result;
  }
  result["selected"] = selected;
  int64_t bytes = 0;
  Require(attend_workspace_bytes(&run->params(), &bytes));
  if (static_cast<double>(bytes) > kNaiveBytesMax) {
    result["skipped"] = "needs " + std::to_string(bytes) + " bytes of workspace";
    return result;
  }
  const RowsReport report = run->Check(kernel);
  result["workspace_bytes"] = bytes;
  result["rows_checked"] = report.rows_checked;
  result["max_abs_error"] = report.max_abs_error;
  result["ok"] = report.ok;
  if (!report.ok) {
    result["detail"] = report.detail;
    return result;
  }
  const double ms = TimeMs(run, rounds, round_ms);
  result["ms"] = ms;
  result["tflops"] = run->flops() / ms * 1e-9;
  return result;
}

void Print(const std::string& name, const nlohmann::json& r) {
  const std::string kernel = r["kernel"];
  std::printf("%-36s %-16s ", name.c_str(), kernel.c_str());
  if (r.contains("skipped")) {
    std::printf("skipped: %s\n", r["skipped"].get<std::string>().c_str());
  } else if (!r["ok"]) {
    std::printf("WRONG: %s\n", r["detail"].get<std::string>().c_str());
  } else {
    std::printf("%10.3f ms %8.1f TFLOP/s  error %.1e  %s\n", r["ms"].get<double>(),
                r["tflops"].get<double>(), r["max_abs_error"].get<double>(),
                r["selected"].get<std::string>().c_str());
  }
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  std::vector<std::string> kernels = {"auto", "cuda_flash_sm90", "cuda_flash_sm80",
                                      "cuda_flash_fp32", "cuda_naive"};
  int rounds = 7;
  double round_ms = 3;
  std::string filter, json_path;
  CLI::App app("Checks and times the CUDA kernels on the first GPU");
  app.add_option("--kernel", kernels, "Kernels to time")->capture_default_str();
  app.add_option("--rounds", rounds, "Rounds; medians are reported")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--round-ms", round_ms, "Milliseconds of a round")->capture_default_str();
  app.add_option("--filter", filter, "Run only cases whose name contains this");
  app.add_option("--json", json_path, "Also write the results to this file");
  CLI11_PARSE(app, argc, argv);

  int32_t devices = 0;
  if (attend_device_count(&devices) != ATTEND_OK || devices == 0) {
    std::printf("skipped: %s\n", attend_last_error());
    return 77;
  }
  nlohmann::json results = nlohmann::json::array();
  bool ok = true;
  for (const Case& c : Cases()) {
    if (c.name.find(filter) == std::string::npos) continue;
    Run run(c);
    for (const std::string& kernel : kernels) {
      nlohmann::json result = Measure(&run, kernel, rounds, round_ms);
      Print(c.name, result);
      ok = ok && (result.contains("skipped") || result["ok"].get<bool>());
      result["case"] = c.name;
      results.push_back(result);
    }
  }
  if (!json_path.empty()) std::ofstream(json_path) << results.dump(2) << "\n";
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) {
  try {
    return attend::bench::Main(argc, argv);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "bench_cuda_kernels: %s\n", failure.what());
    return 1;
  }
}
