// SPDX-License-Identifier: Apache-2.0

#include "client/cli/call_flags.h"

#include <cmath>
#include <map>
#include <utility>

#include "client/cli/commands.h"
#include "client/tool/bool_bits.h"
#include "client/tool/call_spec.h"
#include "client/tool/file_io.h"
#include "client/tool/npy.h"
#include "client/tool/safetensors.h"

namespace attend::client {
namespace {

struct Input {
  const char* name;
  const std::string* path;
  bool needed;
  TensorRef* target;
};

Status LoadFromSafetensors(const CallFlags& flags, const std::vector<Input>& inputs, bool with_bias,
                           AttentionCall* call) {
  const Result<std::map<std::string, HostTensor>> tensors =
      ReadSafetensors(flags.safetensors, {"q", "k", "v", "bias"});
  if (!tensors.ok()) return tensors.status();
  for (const Input& input : inputs) {
    const auto found = tensors->find(input.name);
    if (found != tensors->end()) {
      ATTEND_RETURN_IF_ERROR(MustBeNumbers(flags.safetensors + ": " + input.name, found->second));
      *input.target = found->second;
    } else if (input.needed) {
      return InvalidArgument(flags.safetensors + ": has no tensor '" + input.name + "'");
    }
  }
  const auto bias = tensors->find("bias");
  if (with_bias && bias != tensors->end()) call->bias = bias->second;
  return Status();
}

Status LoadFromNpy(const std::vector<Input>& inputs) {
  for (const Input& input : inputs) {
    if (input.path->empty()) {
      if (!input.needed) continue;
      std::string all;
      for (const Input& each : inputs) {
        if (!each.needed) continue;
        const char* const before = all.empty() ? "" : &each == &inputs.back() ? " and " : ", ";
        all += std::string(before) + "--" + each.name;
      }
      return InvalidArgument(std::string("--") + input.name + " is missing: give " + all +
                             ", or --safetensors");
    }
    const Result<HostTensor> tensor = ReadNpy(*input.path);
    if (!tensor.ok()) return tensor.status();
    ATTEND_RETURN_IF_ERROR(MustBeNumbers(*input.path, *tensor));
    *input.target = *tensor;
  }
  return Status();
}

Status LoadTensors(const CallFlags& flags, const NeededTensors& needed, AttentionCall* call) {
  std::vector<Input> inputs = {{"k", &flags.k, needed.keys, &call->k},
                               {"v", &flags.v, needed.keys, &call->v}};
  if (needed.q) inputs.insert(inputs.begin(), {"q", &flags.q, true, &call->q});
  if (flags.safetensors.empty()) {
    ATTEND_RETURN_IF_ERROR(LoadFromNpy(inputs));
  } else if (!flags.q.empty() || !flags.k.empty() || !flags.v.empty()) {
    return InvalidArgument("--safetensors excludes --q, --k and --v");
  } else {
    ATTEND_RETURN_IF_ERROR(LoadFromSafetensors(flags, inputs, needed.q, call));
  }
  if (call->k.shape.empty() != call->v.shape.empty()) {
    return InvalidArgument(std::string(call->k.shape.empty() ? "K" : "V") +
                           " is missing: K and V go together");
  }
  for (const auto& [path, target] :
       {std::pair{&flags.bias, &call->bias}, std::pair{&flags.tree, &call->tree}}) {
    if (path->empty()) continue;
    const Result<HostTensor> tensor = ReadNpy(*path);
    if (!tensor.ok()) return tensor.status();
    *target = *tensor;
  }
  if (!call->tree) return Status();
  const std::vector<int64_t>& shape = call->tree->shape;
  if (call->tree->dtype == DType::kBit && shape.size() == 3 && shape[1] == shape[2]) {
    return Status();
  }
  return InvalidArgument(flags.tree + ": " + std::string(DTypeName(call->tree->dtype)) + " " +
                         ShapeText(shape) + ", must be bool [B|1, T, T]");
}

Status FillMask(const CallFlags& flags, MaskOption* mask) {
  if (flags.causal && mask->window_right) {
    return InvalidArgument("--causal excludes --window-right");
  }
  mask->kind = MaskKind(flags.causal, mask->window_left || mask->window_right, flags.top_left);
  return Status();
}

void AddKeyLengths(CLI::App* command, AttentionCall& call) {
  for (const auto& [flag, target, help] :
       {std::tuple{"--kv-lengths", &call.kv_lengths,
                   "True key lengths, B numbers, comma-separated"},
        std::tuple{"--cu-q", &call.cu_q, "Packed: cumulative query lengths, B + 1 numbers"},
        std::tuple{"--cu-kv", &call.cu_kv, "Packed: cumulative key lengths, B + 1 numbers"}}) {
    command->add_option(flag, *target, help)->delimiter(',');
  }
}

void AddDropout(CLI::App* command, AttentionCall& call) {
  command
      ->add_option("--dropout", call.dropout_p,
                   "Probability that a weight is dropped, in [0, 1 - 2^-17); 0 = off")
      ->capture_default_str();
  command
      ->add_option("--dropout-seed", call.dropout_seed,
                   "Selects the weights that are dropped: the same ones for the same seed")
      ->capture_default_str();
}

}  // namespace

Result<AttentionCall> MakeCall(const CallFlags& flags, const NeededTensors& needed) {
  AttentionCall call = flags.call;
  ATTEND_RETURN_IF_ERROR(LoadTensors(flags, needed, &call));
  call.layout = ParseLayout(flags.layout).value();
  ATTEND_RETURN_IF_ERROR(FillMask(flags, &call.mask));
  call.return_lse |= !flags.lse_out.empty();
  return call;
}

CallOptions CallOptionsOf(const CallFlags& flags) {
  CallOptions options;
  options.timeout =
      std::chrono::nanoseconds(static_cast<int64_t>(std::ceil(flags.deadline_ms * 1e6)));
  options.tenant = flags.tenant;
  return options;
}

Status CheckOutputs(const CallFlags& flags, const AttentionCall& call) {
  for (const auto& [flag, path] :
       {std::pair{"--out ", flags.out}, std::pair{"--lse-out ", flags.lse_out}}) {
    if (path.empty()) continue;
    if (!path.ends_with(".npy") && !IsSafetensors(path)) {
      return InvalidArgument(flag + path + ": the name must end in .npy or .safetensors");
    }
    ATTEND_RETURN_IF_ERROR(CheckWritable(path));
  }
  if (!flags.out.empty() && flags.out == flags.lse_out) {
    return InvalidArgument("--out and --lse-out are both " + flags.out +
                           (IsSafetensors(flags.out) ? ", which holds the LSE without --lse-out"
                                                     : ", must be two files"));
  }
  if (AnswerDType(call) == DType::kBFloat16 && !flags.out.empty() && !IsSafetensors(flags.out)) {
    return InvalidArgument("--out " + flags.out +
                           ": .npy has no bfloat16; give a name that ends in .safetensors");
  }
  return Status();
}

Status WriteOutputs(const CallFlags& flags, const AttentionResult& result) {
  if (IsSafetensors(flags.out)) {
    std::map<std::string, HostTensor> tensors = {{"o", result.o}};
    if (result.lse) tensors["lse"] = *result.lse;
    ATTEND_RETURN_IF_ERROR(WriteSafetensors(flags.out, tensors));
  } else if (!flags.out.empty()) {
    ATTEND_RETURN_IF_ERROR(WriteNpy(flags.out, result.o));
  }
  if (flags.lse_out.empty()) return Status();
  if (IsSafetensors(flags.lse_out)) return WriteSafetensors(flags.lse_out, {{"lse", *result.lse}});
  return WriteNpy(flags.lse_out, *result.lse);
}

std::string DescribeOutputs(const CallFlags& flags, const AttentionResult& result) {
  std::string text = "o " + std::string(DTypeName(result.o.dtype)) + " " +
                     ShapeText(result.o.shape) +
                     (flags.out.empty() ? " not kept (no --out)" : " in " + flags.out);
  if (!result.lse) return text;
  const std::string& lse_out =
      flags.lse_out.empty() && IsSafetensors(flags.out) ? flags.out : flags.lse_out;
  return text + ", lse " + ShapeText(result.lse->shape) +
         (lse_out.empty() ? " not kept (no --lse-out, no --out FILE.safetensors)"
                          : " in " + lse_out);
}

void AddFiles(CLI::App* command, CallFlags* o, const NeededTensors& needed) {
  command->option_defaults()->group("Files");
  if (needed.q) {
    command->add_option("--q", o->q,
                        "Queries: .npy, float16 or float32, in the shape that --layout says");
  }
  const std::string keys = needed.q && needed.keys ? "" : " to append, in the shape of --layout";
  command->add_option("--k", o->k, "Keys" + keys + ": .npy");
  command->add_option("--v", o->v, "Values" + keys + ": .npy");
  command->add_option("--safetensors", o->safetensors,
                      !needed.q ? "One .safetensors file with k and v, instead of --k and --v; "
                                  "bfloat16 too"
                      : !needed.keys ? "One .safetensors file with q and optionally k, v and bias, "
                                       "instead of --q, --k and --v; bfloat16 too"
                                     : "One .safetensors file with q, k, v and optionally bias, "
                                       "instead of --q, --k and --v; bfloat16 too");
  if (!needed.q) return;
  command->add_option("--bias", o->bias,
                      "Additive bias [B|1, Hq|1, Lq|1, Lk], or a mask of bool, true keeps: .npy");
  command->add_option("--tree", o->tree,
                      "Mask of a draft whose tokens are a tree, bool [B|1, T, T], true sees: .npy");
  command
      ->add_option("--tree-lengths", o->call.tree_lengths,
                   "Tokens of each sequence's draft, B numbers, comma-separated; default: T")
      ->delimiter(',');
  command->add_option("--out,-o", o->out,
                      "Write O to this file: .npy, or .safetensors, which holds the LSE too");
  command->add_option("--lse-out", o->lse_out,
                      "Write the log-sum-exp to this file; implies --return-lse");
}

void AddLayout(CLI::App* command, CallFlags* o, bool packed) {
  command
      ->add_option("--layout", o->layout,
                   packed ? "bhld, blhd, or lhd (packed; needs --cu-q, --cu-kv)" : "bhld or blhd")
      ->check(packed ? CLI::IsMember({"bhld", "blhd", "lhd"}) : CLI::IsMember({"bhld", "blhd"}))
      ->capture_default_str();
}

void AddMeaning(CLI::App* command, CallFlags* o, bool packed) {
  AttentionCall& call = o->call;
  command->option_defaults()->group("Attention");
  AddLayout(command, o, packed);
  command->add_flag("--causal", o->causal, "Causal mask, aligned bottom-right");
  command->add_flag("--top-left", o->top_left, "Align mask and ALiBi top-left (as PyTorch's SDPA)");
  command->add_option("--window-left", call.mask.window_left,
                      "Keys visible to the left of the diagonal; -1 = no limit");
  command->add_option("--window-right", call.mask.window_right,
                      "Keys visible to the right of the diagonal; -1 = no limit");
  command->add_option("--scale", call.scale, "Factor of q.k; default 1/sqrt(D)");
  command->add_option("--softcap", call.softcap, "Soft cap on the scores; 0 disables it")
      ->capture_default_str();
  command
      ->add_option("--alibi", call.alibi_slopes,
                   "ALiBi slopes, Hq or B*Hq numbers, comma-separated")
      ->delimiter(',');
  command->add_option("--sinks", call.sinks, "Sink logits, Hq numbers, comma-separated")
      ->delimiter(',');
  command
      ->add_option("--q-lengths", call.q_lengths, "True query lengths, B numbers, comma-separated")
      ->delimiter(',');
  if (packed) {
    AddKeyLengths(command, call);
    AddDropout(command, call);
  }
  command->add_flag(
      "--return-lse", call.return_lse,
      "Also return the log-sum-exp, written to --lse-out or, with O, to --out FILE.safetensors");
  command->add_flag("--o-float32", call.o_float32,
                    "O in float32 regardless of Q's type, as needed to merge partial answers");
}

void AddCallOptions(CLI::App* command, CallFlags* o) {
  AttentionCall& call = o->call;
  command->option_defaults()->group("Options");
  command->add_option("--kernel", call.kernel,
                      "Kernel by name (see info); default: the server's choice");
  command->add_flag("--check", call.check, "Let the server check a sample of rows");
  command->add_option("--priority", call.priority, "Priority in [-100, 100]; higher runs first")
      ->check(CLI::Range(-100, 100))
      ->capture_default_str();
  command->add_option("--request-id", call.request_id,
                      "Id of the request in answers and logs; default: generated");
}

void AddDeadline(CLI::App* command, CallFlags* o) {
  command->add_option("--deadline-ms", o->deadline_ms, "Deadline in milliseconds; 0 = none")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
}

}  // namespace attend::client
