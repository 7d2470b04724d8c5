// SPDX-License-Identifier: Apache-2.0

#include "client/cli/backward_flags.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "client/tool/bool_bits.h"
#include "client/tool/npy.h"
#include "client/tool/safetensors.h"

namespace attend::client {
namespace {

constexpr std::array<v1::TensorName, 5> kGradients = {v1::TENSOR_NAME_D_Q, v1::TENSOR_NAME_D_K,
                                                      v1::TENSOR_NAME_D_V, v1::TENSOR_NAME_D_BIAS,
                                                      v1::TENSOR_NAME_D_SINKS};

// The tensor from `path` or, without a path, from `tensors`; without a shape if it is in neither.
Status Load(const std::string& path, const char* name,
            const std::map<std::string, HostTensor>& tensors, TensorRef* to) {
  if (!path.empty()) {
    const Result<HostTensor> tensor = ReadNpy(path);
    if (!tensor.ok()) return tensor.status();
    ATTEND_RETURN_IF_ERROR(MustBeNumbers(path, *tensor));
    *to = *tensor;
  } else if (const auto found = tensors.find(name); found != tensors.end()) {
    ATTEND_RETURN_IF_ERROR(MustBeNumbers(name, found->second));
    *to = found->second;
  }
  return Status();
}

std::map<std::string, HostTensor> Tensors(const AttentionResult& result) {
  std::map<std::string, HostTensor> tensors;
  for (const v1::TensorName name : kGradients) {
    if (const HostTensor* const tensor = TensorOf(result, name)) tensors[NameOf(name)] = *tensor;
  }
  return tensors;
}

}  // namespace

void AddBackward(CLI::App* command, BackwardFlags* flags) {
  command->option_defaults()->group("Gradients");
  CLI::Option* const backward =
      command->add_flag("--backward", flags->backward,
                        "Ask for gradients of the loss with respect to the tensors in --gradients, "
                        "given those with respect to O and LSE");
  const auto add = [&](const char* name, std::string* path, const char* help) {
    command->add_option(name, *path, help)->needs(backward);
  };
  add("--d-o", &flags->d_o, "Gradient of the loss with respect to O: .npy, in O's shape and type");
  add("--d-lse", &flags->d_lse, "The same with respect to LSE: .npy, float32; default: 0");
  add("--o", &flags->o, "O of the forward pass: .npy; default: computed by the server first");
  add("--lse", &flags->lse, "Its LSE: .npy, float32; with --o");
  command
      ->add_option("--gradients", flags->gradients,
                   "Gradients to compute: d_q, d_k, d_v, d_bias, d_sinks, comma-separated")
      ->delimiter(',')
      ->check(CLI::IsMember({"d_q", "d_k", "d_v", "d_bias", "d_sinks"}))
      ->needs(backward)
      ->capture_default_str();
}

Status FillBackward(const BackwardFlags& flags, const std::string& safetensors,
                    AttentionCall* call) {
  if (call->return_lse) {
    return InvalidArgument(
        "--backward excludes --return-lse and --lse-out: its answer is "
        "gradients");
  }
  std::map<std::string, HostTensor> tensors;
  if (!safetensors.empty()) {
    Result<std::map<std::string, HostTensor>> read =
        ReadSafetensors(safetensors, {"o", "lse", "d_o", "d_lse"});
    if (!read.ok()) return read.status();
    tensors = *std::move(read);
  }
  BackwardCall& backward = call->backward.emplace();
  TensorRef d_lse;
  ATTEND_RETURN_IF_ERROR(Load(flags.o, "o", tensors, &backward.o));
  ATTEND_RETURN_IF_ERROR(Load(flags.lse, "lse", tensors, &backward.lse));
  ATTEND_RETURN_IF_ERROR(Load(flags.d_o, "d_o", tensors, &backward.d_o));
  ATTEND_RETURN_IF_ERROR(Load(flags.d_lse, "d_lse", tensors, &d_lse));
  if (backward.d_o.shape.empty()) return InvalidArgument("--d-o is missing: give it to --backward");
  if (backward.o.shape.empty() != backward.lse.shape.empty()) {
    return InvalidArgument(std::string(backward.o.shape.empty() ? "O" : "LSE") +
                           " is missing: O and LSE go together");
  }
  if (!d_lse.shape.empty()) backward.d_lse = d_lse;
  const auto wanted = [&](const char* name) {
    return std::find(flags.gradients.begin(), flags.gradients.end(), name) != flags.gradients.end();
  };
  backward.d_q = wanted("d_q");
  backward.d_k = wanted("d_k");
  backward.d_v = wanted("d_v");
  backward.d_bias = wanted("d_bias");
  backward.d_sinks = wanted("d_sinks");
  return Status();
}

Status CheckGradientsFile(const BackwardFlags& flags, const std::string& path) {
  if (path.empty() || IsSafetensors(path) || flags.gradients.size() == 1) return Status();
  return InvalidArgument("--out " + path + ": .npy holds one of the " +
                         std::to_string(flags.gradients.size()) +
                         " gradients; give a name that ends in .safetensors");
}

Status WriteGradients(const std::string& path, const AttentionResult& result) {
  const std::map<std::string, HostTensor> tensors = Tensors(result);
  if (path.empty()) return Status();
  if (IsSafetensors(path)) return WriteSafetensors(path, tensors);
  return WriteNpy(path, tensors.begin()->second);
}

std::string DescribeGradients(const std::string& path, const AttentionResult& result) {
  std::string text;
  for (const auto& [name, tensor] : Tensors(result)) {
    text += (text.empty() ? "" : ", ") + name + " " + std::string(DTypeName(tensor.dtype)) + " " +
            ShapeText(tensor.shape);
  }
  return text + (path.empty() ? " not kept (no --out)" : " in " + path);
}

}  // namespace attend::client
