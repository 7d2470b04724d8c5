// SPDX-License-Identifier: Apache-2.0
//
// attend-client check: sends a grid of shapes, dtypes and features to the server. Every answer is
// compared with double precision, here and by the server itself.

#include <array>
#include <cstdio>

#include "client/call/random.h"
#include "client/call/shared_call.h"
#include "client/cli/commands.h"
#include "client/forward_pass.h"
#include "client/tool/call_spec.h"
#include "client/tool/verify.h"
#include "kernels/util/host_mapping.h"
#include "kernels/util/printable.h"

namespace attend::client {
namespace {

struct CheckOptions {
  bool quick = false;
  bool backward = false;
  std::vector<std::string> dtypes;
  std::vector<std::string> shapes;
  std::string kernel;
  uint64_t seed = 1;
  double deadline_s = 300;
  TransportOptions transport;
  std::string tenant;
};

// Sizes on both sides of tile edges, every head grouping, odd and largest head dims.
constexpr const char* kQuickShapes[] = {
    "B1,H1,L1,D1",
    "B1,H1,L16,D64",
    "B2,H4,Hkv2,L65,D64,causal",
    "B1,H8,Hkv1,Lq7,Lk129,D80,Dv96,causal,lse",
    "B1,H2,L128,D128,window=17:5,lse",
    "B3,H2,L50,D40,ragged,causal,layout=blhd,lse",
    "B4,H2,L33,D64,ragged,layout=lhd,causal,lse",
    "B1,H4,L70,D32,bias,alibi,sinks,softcap=20,lse",
    "B2,H4,Hkv2,L70,D64,bits,dropout=0.2,causal,lse",
};
constexpr const char* kFullShapes[] = {
    "B1,H3,L2,D3",
    "B1,H1,L127,D17",
    "B1,H2,L63,D256",
    "B1,H2,L64,D255,Dv1",
    "B2,H6,Hkv3,L257,D96",
    "B1,H4,L512,D128,causal",
    "B1,H2,L1024,D64,causal,lse",
    "B1,H8,Hkv2,Lq1,Lk2048,D128,lse",
    "B1,H2,Lq200,Lk100,D64,causal,lse",
    "B1,H2,Lq200,Lk100,D64,causal,top-left,lse",
    "B1,H2,Lq100,Lk200,D64,causal,top-left",
    "B1,H2,L300,D64,causal,window=64:-1,lse",
    "B1,H2,L300,D64,window=32:32,top-left",
    "B1,H2,L96,D64,window=0:0,lse",
    "B2,H2,L96,D64,bias",
    "B2,H2,L101,D64,bits,lse",
    "B2,H4,Hkv2,Lq24,Lk101,D64,tree=19,ragged,causal,lse",
    "B2,H2,L96,D64,dropout=0.5",
    "B4,H4,Hkv2,L120,D128,ragged,layout=lhd,dropout=0.1,lse",
    "B1,H8,L96,D64,alibi,causal",
    "B1,H4,L96,D64,sinks,causal,lse",
    "B1,H2,L96,D64,softcap=5",
    "B1,H2,L96,D64,scale=0.5,lse",
    "B2,H2,L96,D64,layout=blhd",
    "B8,H4,Hkv2,L120,D128,ragged,layout=lhd,lse",
    "B8,H4,Hkv2,L120,D128,ragged,lse",
    "B2,H2,L60,D64,ragged,bias,alibi,sinks,softcap=30,causal,window=20:-1,layout=blhd,lse",
    "B1,H1,Lq0,Lk8,D8,lse",
    "B1,H1,Lq8,Lk0,D8,lse",
    "B1,H1,L4096,D64,causal",
};

Result<std::vector<CallSpec>> Grid(const CheckOptions& options) {
  std::vector<std::string> texts = options.shapes;
  if (texts.empty()) {
    texts.assign(std::begin(kQuickShapes), std::end(kQuickShapes));
    if (!options.quick) texts.insert(texts.end(), std::begin(kFullShapes), std::end(kFullShapes));
  }
  std::vector<CallSpec> specs;
  for (const std::string& dtype : options.dtypes) {
    const Result<DType> parsed = ParseDType(dtype);
    if (!parsed.ok()) return parsed.status();
    for (const std::string& text : texts) {
      Result<CallSpec> spec = ParseCallSpec(text);
      if (!spec.ok()) return spec.status();
      spec->dtype = *parsed;
      spec->backward |= options.backward;
      if (!options.kernel.empty()) spec->call.kernel = options.kernel;
      specs.push_back(std::move(*spec));
    }
  }
  return specs;
}

// Where calls' tensors are placed: in `memory`, which is the server's, unless it is null.
struct Place {
  std::shared_ptr<SharedMemory> memory;
  std::string server;
};

enum class Verdict { kOk, kUnjudged, kFailed };

// Checks one call and prints its row of the table.
Verdict CheckOne(Client& client, const Place& place, const CallSpec& spec, uint64_t seed,
                 const CheckOptions& options) {
  const auto row = [&](const char* kernel, double error, double bound, const char* verdict,
                       const std::string& detail) {
    std::printf("%-9s %-60s %-18s %10.3g %10.3g  %s%s%s\n",
                std::string(DTypeName(spec.dtype)).c_str(), spec.text.c_str(),
                Printable(kernel).c_str(), error, bound, verdict, detail.empty() ? "" : ": ",
                Printable(detail).c_str());
  };
  Result<AttentionCall> call = MakeRandomCall(spec, seed);
  CallOptions call_options;
  call_options.timeout = std::chrono::nanoseconds(static_cast<int64_t>(options.deadline_s * 1e9));
  call_options.transport = options.transport.transport;
  call_options.tenant = options.tenant;
  if (call.ok()) {
    const Status forward = AddForwardPass(client, call_options, &*call);
    if (!forward.ok()) call = forward;
  }
  if (call.ok() && place.memory != nullptr) {
    call = ShareCall(*place.memory, *call);
    call_options.server = place.server;
  }
  if (!call.ok()) {
    row("-", 0, 0, "FAILED", call.status().ToString());
    return Verdict::kFailed;
  }
  call->check = true;
  const Result<AttentionResult> result = client.Call(*call, call_options);
  if (!result.ok()) {
    row("-", 0, 0, "FAILED", result.status().ToString());
    return Verdict::kFailed;
  }
  const Result<RowsReport> report = VerifyAnswer(*call, *result, seed);
  if (!report.ok()) {
    row(result->kernel.c_str(), 0, 0, "FAILED", report.status().ToString());
    return Verdict::kFailed;
  }
  std::string detail = report->detail;
  if (!result->check) detail = "the server sent no check report";
  if (result->check && !result->check->ok) detail = "the server's check: " + result->check->detail;
  const bool failed = report->failed() || !result->check || result->check->failed();
  const Verdict verdict = failed                            ? Verdict::kFailed
                          : report->ok && result->check->ok ? Verdict::kOk
                                                            : Verdict::kUnjudged;
  constexpr const char* kWords[] = {"ok", "NOT JUDGED", "FAILED"};
  row(result->kernel.c_str(), report->max_abs_error, report->bound,
      kWords[static_cast<size_t>(verdict)], detail);
  return verdict;
}

int Run(const CheckOptions& options, const CommonOptions& common) {
  if (options.transport.cuda_ipc) {
    return Fail(InvalidArgument("--transport cuda-ipc is not for check: the server cannot check "
                                "tensors in a GPU's memory; run and load --verify can"),
                kExitUsage);
  }
  const Result<std::vector<CallSpec>> specs = Grid(options);
  if (!specs.ok()) return Fail(specs.status(), kExitUsage);
  for (const CallSpec& spec : *specs) {
    int64_t bytes_max = PhysicalMemoryBytes();
    const Status fits = TakeInputBytes(spec, 1, &bytes_max);
    if (!fits.ok()) {
      return Fail(InvalidArgument("shape \"" + spec.text + "\": " + fits.message()), kExitUsage);
    }
  }
  const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
  if (!client.ok()) return Fail(client.status(), kExitUsage);
  const Result<KnownServer> server = AskServer(**client, std::chrono::seconds(5));
  if (!server.ok()) return Fail(server.status(), kExitFailed);
  WarnOfTenant(options.tenant, server->info);
  const Result<std::shared_ptr<SharedMemory>> memory =
      ConnectShared(options.transport, *server, **client, options.tenant);
  if (!memory.ok()) return Fail(memory.status(), kExitFailed);
  const Place place{*memory, server->address};
  std::printf("%-9s %-60s %-18s %10s %10s  %s\n", "dtype", "shape", "kernel", "max error", "bound",
              "verdict");
  std::array<size_t, 3> counts{};  // by verdict
  uint64_t seed = options.seed;
  for (const CallSpec& spec : *specs) {
    const Verdict verdict = CheckOne(**client, place, spec, SplitMix64(&seed), options);
    ++counts[static_cast<size_t>(verdict)];
    if (!FlushOutput()) return kExitFailed;  // no one reads the rest
  }
  const auto [passed, unjudged, failed] = counts;
  std::printf("%zu of %zu passed, ", passed, specs->size());
  if (unjudged > 0) std::printf("%zu could not be judged, ", unjudged);
  std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
  return failed == 0 ? kExitOk : kExitFailed;
}

}  // namespace

Command AddCheck(CLI::App& app, const CommonOptions& common) {
  const auto options = std::make_shared<CheckOptions>();
  options->dtypes = {"float32", "float16", "bfloat16"};
  CLI::App* command =
      app.add_subcommand("check", "Check a grid of shapes and features against double precision");
  command->add_flag("--quick", options->quick, "Check a small grid only");
  command->add_flag("--backward", options->backward,
                    "Check gradients, from the O and LSE that the server computes first");
  command->add_option("--dtype", options->dtypes, "float32, float16, bfloat16; comma-separated")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--shape", options->shapes,
                   "Check this shape instead of the grid; written as for `load`, repeatable")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--kernel", options->kernel,
                      "Kernel by name (see info); default: the server's choice");
  command->add_option("--seed", options->seed, "Seed of the inputs")->capture_default_str();
  command->add_option("--deadline-s", options->deadline_s, "Deadline of each call, in seconds")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  AddTransport(command, &options->transport);
  AddTenant(command, &options->tenant);
  return [options, &common] { return Run(*options, common); };
}

}  // namespace attend::client
