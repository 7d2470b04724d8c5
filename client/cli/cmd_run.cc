// SPDX-License-Identifier: Apache-2.0
//
// attend-client run: computes one attention on tensors from files and writes its answer to files.

#include <cstdio>

#include "client/call/shared_call.h"
#include "client/cli/commands.h"
#include "client/memory/cuda_memory.h"
#include "client/tool/file_io.h"
#include "client/tool/npy.h"
#include "client/tool/safetensors.h"
#include "client/tool/verify.h"

namespace attend::client {
namespace {

struct RunOptions {
  std::string q, k, v, bias, safetensors, out, lse_out;
  std::string layout = "bhld";
  bool causal = false;
  bool top_left = false;
  std::optional<int64_t> window_left, window_right;
  std::optional<float> scale;
  float softcap = 0;
  std::vector<float> alibi, sinks;
  std::vector<int64_t> q_lengths, kv_lengths, cu_q, cu_kv;
  bool return_lse = false;
  std::string kernel;
  bool check = false;
  bool verify = false;
  int32_t priority = 0;
  double deadline_ms = 0;
  TransportOptions transport;
  std::string tenant;
  std::string request_id;
};

bool IsSafetensors(const std::string& path) { return path.ends_with(".safetensors"); }

Status LoadFromSafetensors(const RunOptions& options, AttentionCall* call) {
  const Result<std::map<std::string, HostTensor>> tensors =
      ReadSafetensors(options.safetensors, {"q", "k", "v", "bias"});
  if (!tensors.ok()) return tensors.status();
  for (const auto& [name, target] :
       {std::pair{"q", &call->q}, std::pair{"k", &call->k}, std::pair{"v", &call->v}}) {
    const auto found = tensors->find(name);
    if (found == tensors->end()) {
      return InvalidArgument(options.safetensors + ": has no tensor '" + name + "'");
    }
    *target = found->second;
  }
  const auto bias = tensors->find("bias");
  if (bias != tensors->end()) call->bias = bias->second;
  return Status();
}

Status LoadTensors(const RunOptions& options, AttentionCall* call) {
  if (!options.safetensors.empty()) {
    if (!options.q.empty() || !options.k.empty() || !options.v.empty()) {
      return InvalidArgument("--safetensors excludes --q, --k and --v");
    }
    ATTEND_RETURN_IF_ERROR(LoadFromSafetensors(options, call));
  } else {
    for (const auto& [flag, path, target] :
         {std::tuple{"--q", &options.q, &call->q}, std::tuple{"--k", &options.k, &call->k},
          std::tuple{"--v", &options.v, &call->v}}) {
      if (path->empty()) {
        return InvalidArgument(std::string(flag) +
                               " is missing: give --q, --k and --v, or "
                               "--safetensors");
      }
      const Result<HostTensor> tensor = ReadNpy(*path);
      if (!tensor.ok()) return tensor.status();
      *target = *tensor;
    }
  }
  if (options.bias.empty()) return Status();
  const Result<HostTensor> bias = ReadNpy(options.bias);
  if (!bias.ok()) return bias.status();
  call->bias = *bias;
  return Status();
}

Status FillMask(const RunOptions& options, AttentionCall* call) {
  if (options.causal) {
    if (options.window_right) return InvalidArgument("--causal excludes --window-right");
    call->mask.kind =
        options.top_left ? v1::Mask::KIND_CAUSAL_TOP_LEFT : v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT;
  } else if (options.window_left || options.window_right || options.top_left) {
    call->mask.kind =
        options.top_left ? v1::Mask::KIND_WINDOW_TOP_LEFT : v1::Mask::KIND_WINDOW_BOTTOM_RIGHT;
  }
  call->mask.window_left = options.window_left;
  call->mask.window_right = options.window_right;
  return Status();
}

Result<AttentionCall> MakeCall(const RunOptions& options) {
  AttentionCall call;
  ATTEND_RETURN_IF_ERROR(LoadTensors(options, &call));
  call.layout = options.layout == "bhld"   ? v1::LAYOUT_BHLD
                : options.layout == "blhd" ? v1::LAYOUT_BLHD
                                           : v1::LAYOUT_LHD;
  ATTEND_RETURN_IF_ERROR(FillMask(options, &call));
  call.request_id = options.request_id;
  call.q_lengths = options.q_lengths;
  call.kv_lengths = options.kv_lengths;
  call.cu_q = options.cu_q;
  call.cu_kv = options.cu_kv;
  call.scale = options.scale;
  call.softcap = options.softcap;
  call.alibi_slopes = options.alibi;
  call.sinks = options.sinks;
  call.return_lse = options.return_lse || !options.lse_out.empty();
  call.kernel = options.kernel;
  call.check = options.check;
  call.priority = options.priority;
  return call;
}

// Checked before the call, so that nothing is computed that cannot be written.
Status CheckOutputs(const RunOptions& options, const AttentionCall& call) {
  for (const auto& [flag, path] :
       {std::pair{"--out ", options.out}, std::pair{"--lse-out ", options.lse_out}}) {
    if (path.empty()) continue;
    if (!path.ends_with(".npy") && !IsSafetensors(path)) {
      return InvalidArgument(flag + path + ": the name must end in .npy or .safetensors");
    }
    ATTEND_RETURN_IF_ERROR(CheckWritable(path));
  }
  if (call.q.dtype == DType::kBFloat16 && !options.out.empty() && !IsSafetensors(options.out)) {
    return InvalidArgument("--out " + options.out +
                           ": .npy has no bfloat16; give a name that ends in .safetensors");
  }
  return Status();
}

Status WriteOutputs(const RunOptions& options, const AttentionResult& result) {
  if (IsSafetensors(options.out)) {
    std::map<std::string, HostTensor> tensors = {{"o", result.o}};
    if (result.lse) tensors["lse"] = *result.lse;
    ATTEND_RETURN_IF_ERROR(WriteSafetensors(options.out, tensors));
  } else if (!options.out.empty()) {
    ATTEND_RETURN_IF_ERROR(WriteNpy(options.out, result.o));
  }
  if (options.lse_out.empty()) return Status();
  if (IsSafetensors(options.lse_out))
    return WriteSafetensors(options.lse_out, {{"lse", *result.lse}});
  return WriteNpy(options.lse_out, *result.lse);
}

// Says where the answer's tensors were written.
std::string DescribeOutputs(const RunOptions& options, const AttentionResult& result) {
  std::string text = "o " + std::string(DTypeName(result.o.dtype)) + " " +
                     ShapeText(result.o.shape) +
                     (options.out.empty() ? " not kept (no --out)" : " in " + options.out);
  if (!result.lse) return text;
  const std::string& lse_out =
      options.lse_out.empty() && IsSafetensors(options.out) ? options.out : options.lse_out;
  return text + ", lse " + ShapeText(result.lse->shape) +
         (lse_out.empty() ? " not kept (no --lse-out, no --out FILE.safetensors)"
                          : " in " + lse_out);
}

// Puts the call into shared memory if the transport asks for it.
Status Share(const RunOptions& options, Client& client, AttentionCall* call) {
  if (!options.transport.shared_memory) return Status();
  const auto info = client.GetServerInfo(std::chrono::seconds(5));
  if (!info.ok()) return info.status();
  const Result<std::shared_ptr<SharedMemory>> memory = ConnectShared(options.transport, *info);
  if (!memory.ok()) return memory.status();
  MakeRegion make_region = [&](int64_t bytes) { return (*memory)->Create(bytes); };
  if (options.transport.cuda_ipc) {
    const Result<std::vector<std::string>> devices = CudaDevices(*info);
    if (!devices.ok()) return devices.status();
    make_region = [&memory, uuids = *devices](int64_t bytes) {
      Result<std::shared_ptr<DeviceMemory>> device = LendableMemory(uuids, bytes);
      if (!device.ok()) return Result<std::shared_ptr<SharedRegion>>(device.status());
      return (*memory)->Lend(std::move(*device));
    };
  }
  Result<AttentionCall> shared = ShareCall(make_region, *call);
  if (!shared.ok()) return shared.status();
  *call = std::move(*shared);
  return Status();
}

int Run(const RunOptions& options, const CommonOptions& common) {
  Result<AttentionCall> call = MakeCall(options);
  if (!call.ok()) return Fail(call.status(), kExitUsage);
  const Status outputs = CheckOutputs(options, *call);
  if (!outputs.ok()) return Fail(outputs, kExitUsage);
  const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
  if (!client.ok()) return Fail(client.status(), kExitUsage);
  WarnOfTenant(options.tenant, **client);
  const Status shared = Share(options, **client, &*call);
  if (!shared.ok()) return Fail(shared, kExitFailed);
  CallOptions call_options;
  call_options.timeout = std::chrono::nanoseconds(static_cast<int64_t>(options.deadline_ms * 1e6));
  call_options.transport = options.transport.transport;
  call_options.tenant = options.tenant;
  const Result<AttentionResult> result = (*client)->Call(*call, call_options);
  if (!result.ok()) return Fail(result.status(), kExitFailed);
  const Status written = WriteOutputs(options, *result);
  if (!written.ok()) return Fail(written, kExitUsage);
  std::string line = DescribeOutputs(options, *result) + ", " + DescribeAnswer(*result);
  bool ok = true;
  if (result->check) {
    ok = result->check->ok;
    line += ", server check " + DescribeCheck(*result->check);
  }
  if (options.verify) {
    const Result<RowsReport> report = VerifyAnswer(*call, *result, /*seed=*/1);
    if (!report.ok()) return Fail(report.status(), kExitFailed);
    ok = ok && report->ok;
    line += ", client check " + DescribeCheck(*report);
  }
  std::printf("%s\n", line.c_str());
  return ok ? kExitOk : kExitFailed;
}

void AddFiles(CLI::App* command, RunOptions* o) {
  command->option_defaults()->group("Files");
  command->add_option("--q", o->q,
                      "Queries: .npy, float16 or float32, in the shape that --layout says");
  command->add_option("--k", o->k, "Keys: .npy");
  command->add_option("--v", o->v, "Values: .npy");
  command->add_option("--safetensors", o->safetensors,
                      "One .safetensors file with q, k, v and optionally bias, instead of --q, --k "
                      "and --v; bfloat16 too");
  command->add_option("--bias", o->bias, "Additive bias [B|1, Hq|1, Lq|1, Lk]: .npy");
  command->add_option("--out,-o", o->out,
                      "Write O to this file: .npy, or .safetensors, which holds the LSE too");
  command->add_option("--lse-out", o->lse_out,
                      "Write the log-sum-exp to this file; implies --return-lse");
}

void AddMeaning(CLI::App* command, RunOptions* o) {
  command->option_defaults()->group("Attention");
  command->add_option("--layout", o->layout, "bhld, blhd, or lhd (packed; needs --cu-q, --cu-kv)")
      ->check(CLI::IsMember({"bhld", "blhd", "lhd"}))
      ->capture_default_str();
  command->add_flag("--causal", o->causal, "Causal mask, aligned bottom-right");
  command->add_flag("--top-left", o->top_left, "Align mask and ALiBi top-left (as PyTorch's SDPA)");
  command->add_option("--window-left", o->window_left,
                      "Keys visible to the left of the diagonal; -1 = no limit");
  command->add_option("--window-right", o->window_right,
                      "Keys visible to the right of the diagonal; -1 = no limit");
  command->add_option("--scale", o->scale, "Factor of q.k; default 1/sqrt(D)");
  command->add_option("--softcap", o->softcap, "Soft cap on the scores; 0 disables it")
      ->capture_default_str();
  command->add_option("--alibi", o->alibi, "ALiBi slopes, Hq or B*Hq numbers, comma-separated")
      ->delimiter(',');
  command->add_option("--sinks", o->sinks, "Sink logits, Hq numbers, comma-separated")
      ->delimiter(',');
  for (const auto& [flag, target, help] :
       {std::tuple{"--q-lengths", &o->q_lengths, "True query lengths, B numbers, comma-separated"},
        std::tuple{"--kv-lengths", &o->kv_lengths, "True key lengths, B numbers, comma-separated"},
        std::tuple{"--cu-q", &o->cu_q, "Packed: cumulative query lengths, B + 1 numbers"},
        std::tuple{"--cu-kv", &o->cu_kv, "Packed: cumulative key lengths, B + 1 numbers"}}) {
    command->add_option(flag, *target, help)->delimiter(',');
  }
  command->add_flag(
      "--return-lse", o->return_lse,
      "Also return the log-sum-exp, written to --lse-out or, with O, to --out FILE.safetensors");
}

}  // namespace

Command AddRun(CLI::App& app, const CommonOptions& common) {
  const auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Compute one attention on tensors from files");
  AddFiles(command, options.get());
  AddMeaning(command, options.get());
  command->option_defaults()->group("Options");
  command->add_option("--kernel", options->kernel,
                      "Kernel by name (see info); default: the server's choice");
  command->add_flag("--check", options->check, "Let the server check a sample of rows");
  command->add_flag("--verify", options->verify,
                    "Check a sample of rows here, in double precision");
  command->add_option("--priority", options->priority, "Priority in [-100, 100]; higher runs first")
      ->check(CLI::Range(-100, 100))
      ->capture_default_str();
  command->add_option("--deadline-ms", options->deadline_ms, "Deadline in milliseconds; 0 = none")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  AddTransport(command, &options->transport);
  AddTenant(command, &options->tenant);
  command->add_option("--request-id", options->request_id,
                      "Id of the request in answers and logs; default: generated");
  return [options, &common] { return Run(*options, common); };
}

}  // namespace attend::client
