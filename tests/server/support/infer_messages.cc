// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/infer_messages.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

namespace attend::test {
namespace {

using Infer = inference::ModelInferRequest;

const char* DatatypeOf(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FLOAT16:
      return "FP16";
    case v1::DTYPE_BFLOAT16:
      return "BF16";
    default:
      return "FP32";
  }
}

const char* LayoutOf(v1::Layout layout) {
  switch (layout) {
    case v1::LAYOUT_BLHD:
      return "blhd";
    case v1::LAYOUT_LHD:
      return "packed";
    default:
      return "bhld";
  }
}

// One input and its bytes.
struct Part {
  Infer::InferInputTensor tensor;
  std::string raw;
};

template <class T>
void AddNumbers(const char* name, const google::protobuf::RepeatedField<T>& numbers, bool wide,
                Sent sent, std::vector<Part>& parts) {
  if (numbers.empty()) return;
  Part part;
  part.tensor.set_name(name);
  part.tensor.add_shape(numbers.size());
  auto* const contents = sent == Sent::kTyped ? part.tensor.mutable_contents() : nullptr;
  for (const T number : numbers) {
    if constexpr (std::is_same_v<T, float>) {
      part.tensor.set_datatype("FP32");
      if (contents != nullptr) contents->add_fp32_contents(number);
      part.raw.append(reinterpret_cast<const char*>(&number), sizeof(number));
    } else if (wide) {
      part.tensor.set_datatype("INT64");
      if (contents != nullptr) contents->add_int64_contents(number);
      part.raw.append(reinterpret_cast<const char*>(&number), sizeof(number));
    } else {
      const auto narrow = static_cast<int32_t>(number);
      part.tensor.set_datatype("INT32");
      if (contents != nullptr) contents->add_int_contents(narrow);
      part.raw.append(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
    }
  }
  parts.push_back(std::move(part));
}

void AddTensor(const char* name, const v1::Tensor& tensor, const std::string& raw, Sent sent,
               std::vector<Part>& parts) {
  Part part;
  part.tensor.set_name(name);
  part.tensor.set_datatype(DatatypeOf(tensor.dtype()));
  *part.tensor.mutable_shape() = tensor.shape();
  part.raw = raw;
  if (sent == Sent::kTyped) {
    std::vector<float> numbers(raw.size() / sizeof(float));
    if (!raw.empty()) std::memcpy(numbers.data(), raw.data(), raw.size());
    part.tensor.mutable_contents()->mutable_fp32_contents()->Add(numbers.begin(), numbers.end());
  }
  parts.push_back(std::move(part));
}

void SetNumber(Infer& infer, const char* name, float value, std::mt19937_64& random) {
  inference::InferParameter& parameter = (*infer.mutable_parameters())[name];
  if (random() % 2 == 0) return parameter.set_double_param(value);
  std::ostringstream text;
  text.precision(17);
  text << value;
  parameter.set_string_param(text.str());
}

void SetMask(const v1::Mask& mask, Infer& infer) {
  auto& parameters = *infer.mutable_parameters();
  using M = v1::Mask;
  if (mask.kind() == M::KIND_CAUSAL_BOTTOM_RIGHT || mask.kind() == M::KIND_CAUSAL_TOP_LEFT) {
    parameters["causal"].set_bool_param(true);
  }
  if (mask.kind() == M::KIND_CAUSAL_TOP_LEFT || mask.kind() == M::KIND_WINDOW_TOP_LEFT) {
    parameters["alignment"].set_string_param("top_left");
  }
  if (mask.has_window_left()) parameters["window_left"].set_int64_param(mask.window_left());
  if (mask.has_window_right()) parameters["window_right"].set_int64_param(mask.window_right());
}

}  // namespace

bool IsInferable(const v1::AttendRequest& request) {
  return !request.has_backward() && request.sessions_size() == 0 &&
         request.bias().dtype() != v1::DTYPE_BIT;
}

bool MayBeTyped(const v1::AttendRequest& request) {
  return request.q().dtype() == v1::DTYPE_FLOAT32 &&
         (!request.has_bias() || request.bias().dtype() == v1::DTYPE_FLOAT32);
}

Infer ToInfer(const v1::AttendRequest& request, Sent sent, std::mt19937_64& random) {
  Infer infer;
  std::string dtype = DatatypeOf(request.q().dtype());
  std::transform(dtype.begin(), dtype.end(), dtype.begin(), ::tolower);
  infer.set_model_name("attention_" + dtype + "_" + LayoutOf(request.layout()));
  infer.set_id(request.request_id());
  std::vector<Part> parts;
  AddTensor("q", request.q(), request.raw(0), sent, parts);
  AddTensor("k", request.k(), request.raw(1), sent, parts);
  AddTensor("v", request.v(), request.raw(2), sent, parts);
  if (request.has_bias()) AddTensor("bias", request.bias(), request.raw(3), sent, parts);
  const bool wide = random() % 2 == 0;
  AddNumbers("q_lengths", request.q_lengths(), wide, sent, parts);
  AddNumbers("kv_lengths", request.kv_lengths(), wide, sent, parts);
  AddNumbers("cu_q", request.cu_q(), wide, sent, parts);
  AddNumbers("cu_kv", request.cu_kv(), wide, sent, parts);
  AddNumbers("alibi_slopes", request.alibi_slopes(), wide, sent, parts);
  AddNumbers("sinks", request.sinks(), wide, sent, parts);
  std::shuffle(parts.begin(), parts.end(), random);
  for (Part& part : parts) {
    *infer.add_inputs() = std::move(part.tensor);
    if (sent == Sent::kRaw) infer.add_raw_input_contents(std::move(part.raw));
  }
  SetMask(request.mask(), infer);
  if (request.has_scale()) SetNumber(infer, "scale", request.scale(), random);
  if (request.softcap() != 0) SetNumber(infer, "softcap", request.softcap(), random);
  if (request.dropout_p() != 0) {
    SetNumber(infer, "dropout_p", request.dropout_p(), random);
    (*infer.mutable_parameters())["dropout_seed"].set_uint64_param(request.dropout_seed());
  }
  if (request.o_dtype() == v1::DTYPE_FLOAT32) {
    (*infer.mutable_parameters())["o_dtype"].set_string_param("FP32");
  }
  infer.add_outputs()->set_name("o");
  if (request.return_lse()) infer.add_outputs()->set_name("lse");
  return infer;
}

Infer ToInfer(const v1::AttendRequest& request, std::mt19937_64& random) {
  return ToInfer(request, MayBeTyped(request) ? Sent::kTyped : Sent::kRaw, random);
}

Infer PlainInfer(const std::string& model) {
  Infer infer;
  infer.set_model_name(model);
  for (const char* const name : {"q", "k", "v"}) {
    auto* const input = infer.add_inputs();
    input->set_name(name);
    input->set_datatype("FP32");
    for (const int64_t dim : {1, 1, 4, 8}) input->add_shape(dim);
    infer.add_raw_input_contents(std::string(128, '\0'));
  }
  return infer;
}

void PutInRegion(const std::string& region, int64_t bytes, int64_t offset,
                 google::protobuf::Map<std::string, inference::InferParameter>& parameters) {
  parameters["shared_memory_region"].set_string_param(region);
  parameters["shared_memory_byte_size"].set_int64_param(bytes);
  parameters["shared_memory_offset"].set_int64_param(offset);
}

std::vector<Infer> InfersInRegion(const std::string& region) {
  Infer tensors = PlainInfer();
  tensors.clear_raw_input_contents();
  for (auto& each : *tensors.mutable_inputs()) {
    PutInRegion(region, 128, 512, *each.mutable_parameters());
  }
  auto* const o = tensors.add_outputs();
  o->set_name("o");
  PutInRegion(region, 128, 0, *o->mutable_parameters());
  Infer numbers = PlainInfer("attention_fp32_packed_full");
  for (auto& each : *numbers.mutable_inputs()) {
    each.clear_shape();
    for (const int64_t dim : {0, 1, 8}) each.add_shape(dim);
  }
  for (auto& each : *numbers.mutable_raw_input_contents()) each.clear();
  for (const char* const name : {"cu_q", "cu_kv"}) {
    auto* const input = numbers.add_inputs();
    input->set_name(name);
    input->set_datatype("INT64");
    input->add_shape(2);
    PutInRegion(region, 16, 0, *input->mutable_parameters());
  }
  Infer huge = numbers;
  for (const int i : {3, 4}) {
    PutInRegion(region, INT64_MAX - 7, 0, *huge.mutable_inputs(i)->mutable_parameters());
  }
  return {tensors, numbers, huge};
}

}  // namespace attend::test
