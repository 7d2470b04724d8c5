// SPDX-License-Identifier: Apache-2.0

#include "server/oip/models.h"

#include <algorithm>
#include <vector>

#include "kernels/contract/limits.h"

namespace attend::oip {
namespace {

constexpr int64_t kAny = -1;

std::array<Model, kModelCount> MakeModels() {
  std::array<Model, kModelCount> models;
  size_t n = 0;
  for (const auto& [dtype_name, dtype] :
       {std::pair{"bf16", DType::kBFloat16}, std::pair{"fp16", DType::kFloat16},
        std::pair{"fp32", DType::kFloat32}}) {
    for (const auto& [layout_name, layout] :
         {std::pair{"bhld", Layout::kBhld}, std::pair{"blhd", Layout::kBlhd},
          std::pair{"packed", Layout::kLhd}}) {
      for (const auto& [suffix, inputs] :
           {std::pair{"", Inputs::kAll}, std::pair{"_causal", Inputs::kCausal},
            std::pair{"_full", Inputs::kFull}}) {
        models.at(n++) = {"attention_" + std::string(dtype_name) + "_" + layout_name + suffix,
                          dtype, layout, inputs};
      }
    }
  }
  return models;
}

struct TensorFacts {
  std::string name;
  inference::DataType type;
  std::string_view datatype;
  std::vector<int64_t> shape;
  bool optional = false;
};

inference::DataType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return inference::TYPE_FP16;
    case DType::kBFloat16:
      return inference::TYPE_BF16;
    default:
      return inference::TYPE_FP32;
  }
}

size_t Rank(const Model& model) { return model.packed() ? 3 : 4; }

std::vector<TensorFacts> InputsOf(const Model& model) {
  std::vector<TensorFacts> facts;
  for (int i = 0; i < kInputCount; ++i) {
    const auto input = static_cast<Input>(i);
    const Takes takes = TakesInput(model, input);
    if (takes == Takes::kNo) continue;
    TensorFacts each;
    each.name = std::string(kInputs[static_cast<size_t>(i)]);
    each.optional = takes == Takes::kOptional;
    if (IsTensor(input)) {
      each.type = TypeOf(model.dtype);
      each.datatype = DatatypeOf(model.dtype);
      each.shape.assign(input == Input::kBias ? 4 : Rank(model), kAny);
    } else {
      const bool floats = input == Input::kAlibiSlopes || input == Input::kSinks;
      each.type = floats ? inference::TYPE_FP32 : inference::TYPE_INT32;
      each.datatype = floats ? "FP32" : "INT32";
      each.shape = {kAny};
    }
    facts.push_back(std::move(each));
  }
  return facts;
}

std::vector<TensorFacts> OutputsOfModel(const Model& model) {
  return {
      {"o", TypeOf(model.dtype), DatatypeOf(model.dtype), std::vector<int64_t>(Rank(model), kAny)},
      {"lse", inference::TYPE_FP32, "FP32", std::vector<int64_t>(Rank(model) - 1, kAny)}};
}

template <class Tensors>
void AddMetadata(const std::vector<TensorFacts>& facts, Tensors* tensors) {
  for (const TensorFacts& each : facts) {
    auto* const tensor = tensors->Add();
    tensor->set_name(each.name);
    tensor->set_datatype(std::string(each.datatype));
    tensor->mutable_shape()->Add(each.shape.begin(), each.shape.end());
  }
}

// `from`: index of the first dimension to list.
template <class Tensor>
void FillTensor(const TensorFacts& facts, size_t from, Tensor* tensor) {
  tensor->set_name(facts.name);
  tensor->set_data_type(facts.type);
  tensor->mutable_dims()->Add(facts.shape.begin() + static_cast<std::ptrdiff_t>(from),
                              facts.shape.end());
}

}  // namespace

std::span<const Model, kModelCount> Models() {
  static const std::array<Model, kModelCount> models = MakeModels();
  return models;
}

const Model* FindModel(std::string_view name) {
  const auto models = Models();
  const auto found = std::lower_bound(
      models.begin(), models.end(), name,
      [](const Model& model, std::string_view wanted) { return model.name < wanted; });
  return found != models.end() && found->name == name ? &*found : nullptr;
}

int IndexOf(const Model& model) { return static_cast<int>(&model - Models().data()); }

Takes TakesInput(const Model& model, Input input) {
  switch (input) {
    case Input::kQ:
    case Input::kK:
    case Input::kV:
      return Takes::kRequired;
    case Input::kCuQ:
    case Input::kCuKv:
      return model.packed() ? Takes::kRequired : Takes::kNo;
    case Input::kQLengths:
    case Input::kKvLengths:
      if (model.packed()) return Takes::kNo;
      [[fallthrough]];
    default:
      return model.inputs == Inputs::kAll ? Takes::kOptional : Takes::kNo;
  }
}

std::string_view DatatypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "FP16";
    case DType::kBFloat16:
      return "BF16";
    default:
      return "FP32";
  }
}

void FillMetadata(const Model& model, inference::ModelMetadataResponse& out) {
  out.set_name(model.name);
  out.add_versions(kVersion);
  out.set_platform("attend");
  AddMetadata(InputsOf(model), out.mutable_inputs());
  AddMetadata(OutputsOfModel(model), out.mutable_outputs());
}

void FillConfig(const Model& model, int64_t delay_us, inference::ModelConfig& out) {
  out.set_name(model.name);
  out.set_platform("attend");
  out.set_backend("attend");
  out.set_max_batch_size(model.batched() ? static_cast<int32_t>(kBatchMax) : 0);
  const size_t from = model.batched() ? 1 : 0;
  for (const TensorFacts& each : InputsOf(model)) {
    inference::ModelInput* const input = out.add_input();
    FillTensor(each, from, input);
    input->set_optional(each.optional);
  }
  for (const TensorFacts& each : OutputsOfModel(model)) FillTensor(each, from, out.add_output());
  // The engine batches requests of any shapes, so models without a batch dimension have this too.
  inference::ModelDynamicBatching* const batching = out.mutable_dynamic_batching();
  batching->set_max_queue_delay_microseconds(static_cast<uint64_t>(delay_us));
  batching->set_priority_levels(static_cast<uint64_t>(kPriorityLevels));
  batching->set_default_priority_level(static_cast<uint64_t>(kDefaultPriorityLevel));
  out.mutable_model_transaction_policy()->set_decoupled(false);
}

}  // namespace attend::oip
