// SPDX-License-Identifier: Apache-2.0
//
// Attention as models of the Open Inference Protocol, which has no other notion: one model for each
// dtype, layout and set of inputs. Constant; any thread.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "inference/grpc_service.pb.h"
#include "kernels/contract/dtype.h"
#include "server/request/request.h"

namespace attend::oip {

// The only version of every model.
inline constexpr char kVersion[] = "1";

// Inputs of a model besides q, k and v (and, if packed, cu_q and cu_kv).
enum class Inputs {
  kAll,     // all inputs of attention, optional; the mask by parameters
  kFull,    // none; no mask
  kCausal,  // none; causal, bottom right
};

struct Model {
  std::string name;  // "attention_bf16_bhld_causal"
  DType dtype = DType::kFloat32;
  Layout layout = Layout::kBhld;
  Inputs inputs = Inputs::kAll;

  bool packed() const { return layout == Layout::kLhd; }
  // Whether the first dimension of every tensor is B.
  bool batched() const { return inputs != Inputs::kAll && !packed(); }
};

inline constexpr int kModelCount = 27;
// Sorted by name.
std::span<const Model, kModelCount> Models();
// Null if no model has this name.
const Model* FindModel(std::string_view name);
// The index in Models().
int IndexOf(const Model& model);

// Inputs, in the order in which models list them. They have the names of AttendRequest's fields, so
// that its errors name them correctly.
enum class Input { kQ, kK, kV, kCuQ, kCuKv, kQLengths, kKvLengths, kBias, kAlibiSlopes, kSinks };
inline constexpr int kInputCount = 10;
inline constexpr std::array<std::string_view, kInputCount> kInputs = {
    "q", "k", "v", "cu_q", "cu_kv", "q_lengths", "kv_lengths", "bias", "alibi_slopes", "sinks"};
// Whether it is one of the four tensors whose bytes go to the kernel; the others are read as
// numbers.
constexpr bool IsTensor(Input input) { return input <= Input::kV || input == Input::kBias; }

enum class Takes { kNo, kOptional, kRequired };
Takes TakesInput(const Model& model, Input input);

// "FP16", "BF16", "FP32".
std::string_view DatatypeOf(DType dtype);

void FillMetadata(const Model& model, inference::ModelMetadataResponse& out);
// `delay_us`: how long a batch waits for more requests.
void FillConfig(const Model& model, int64_t delay_us, inference::ModelConfig& out);

// Levels of the request parameter "priority" (parameters.cc).
inline constexpr int64_t kPriorityLevels = 201;
inline constexpr int64_t kDefaultPriorityLevel = 101;

}  // namespace attend::oip
