// SPDX-License-Identifier: Apache-2.0

#include "server/oip/parameters.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "kernels/util/counted.h"
#include "server/util/parse_number.h"

namespace attend::oip {
namespace {

using Parameter = inference::InferParameter;

std::string TextOf(const Parameter& value) {
  switch (value.parameter_choice_case()) {
    case Parameter::kBoolParam:
      return value.bool_param() ? "true" : "false";
    case Parameter::kInt64Param:
      return std::to_string(value.int64_param());
    case Parameter::kUint64Param:
      return std::to_string(value.uint64_param());
    case Parameter::kDoubleParam:
      return NumberText(value.double_param());
    case Parameter::kStringParam:
      return '"' + value.string_param() + '"';
    default:
      return "unset";
  }
}

Status Wrong(const std::string& name, const Parameter& value, const std::string& must) {
  return InvalidArgument("parameter " + name + " is " + TextOf(value) + ", must be " + must);
}

template <class T>
std::optional<T> Integer(const Parameter& value) {
  switch (value.parameter_choice_case()) {
    case Parameter::kInt64Param:
      if (std::in_range<T>(value.int64_param())) return static_cast<T>(value.int64_param());
      return std::nullopt;
    case Parameter::kUint64Param:
      if (std::in_range<T>(value.uint64_param())) return static_cast<T>(value.uint64_param());
      return std::nullopt;
    case Parameter::kStringParam:
      return ParseNumber<T>(value.string_param());
    default:
      return std::nullopt;
  }
}

std::optional<double> Number(const Parameter& value) {
  switch (value.parameter_choice_case()) {
    case Parameter::kInt64Param:
      return static_cast<double>(value.int64_param());
    case Parameter::kUint64Param:
      return static_cast<double>(value.uint64_param());
    case Parameter::kDoubleParam:
      return value.double_param();
    case Parameter::kStringParam:
      return ParseNumber<double>(value.string_param());
    default:
      return std::nullopt;
  }
}

std::optional<bool> Boolean(const Parameter& value) {
  if (value.parameter_choice_case() == Parameter::kBoolParam) return value.bool_param();
  if (value.string_param() == "true") return true;
  if (value.string_param() == "false") return false;
  return std::nullopt;
}

// Values beyond float's range become infinite, and only 0 becomes 0, which may mean off;
// AttendRequest's rules then refuse them.
float Float(double value) {
  constexpr double kMost = std::numeric_limits<float>::max();
  if (value > kMost) return std::numeric_limits<float>::infinity();
  if (value < -kMost) return -std::numeric_limits<float>::infinity();
  const auto narrow = static_cast<float>(value);
  return narrow != 0 || value == 0 ? narrow
                                   : std::copysign(std::numeric_limits<float>::denorm_min(), value);
}

class Taker {
 public:
  Taker(const Model& model, v1::AttendRequest& fields, Request& request)
      : model_(model), fields_(fields), request_(request) {}

  Status Take(const std::string& name, const Parameter& value) {
    if (name == "causal") return TakeCausal(value);
    if (name == "alignment") return TakeAlignment(value);
    if (name == "window_left") return TakeInteger(name, value, window_left_);
    if (name == "window_right") return TakeInteger(name, value, window_right_);
    if (name == "priority") return TakePriority(value);
    if (name == "timeout") return TakeTimeout(value);
    if (name == "kernel") {
      if (!value.has_string_param()) return Wrong(name, value, "a string");
      return fields_.set_kernel(value.string_param()), Status();
    }
    if (name == "o_dtype") return TakeOutputDType(value);
    if (name == "check") {
      const std::optional<bool> check = Boolean(value);
      if (!check) return Wrong(name, value, "a bool");
      return fields_.set_check(*check), Status();
    }
    if (name == "dropout_seed") {
      const std::optional<uint64_t> seed = Integer<uint64_t>(value);
      if (!seed) return Wrong(name, value, "an integer in [0, 2^64)");
      return fields_.set_dropout_seed(*seed), Status();
    }
    // Each single float of AttendRequest is a parameter.
    const auto* const field = v1::AttendRequest::descriptor()->FindFieldByName(name);
    if (field != nullptr && field->cpp_type() == field->CPPTYPE_FLOAT && !field->is_repeated()) {
      const std::optional<double> number = Number(value);
      if (!number) return Wrong(name, value, "a number");
      return fields_.GetReflection()->SetFloat(&fields_, field, Float(*number)), Status();
    }
    return TakeTritons(name, value);
  }

  // Sets the mask once all parameters have been read.
  void SetMask() {
    const bool window = !causal_ && (window_left_ || window_right_ || top_left_);
    if (!causal_ && !window) return;
    v1::Mask* const mask = fields_.mutable_mask();
    if (causal_) {
      mask->set_kind(top_left_ ? v1::Mask::KIND_CAUSAL_TOP_LEFT
                               : v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT);
    } else {
      mask->set_kind(top_left_ ? v1::Mask::KIND_WINDOW_TOP_LEFT
                               : v1::Mask::KIND_WINDOW_BOTTOM_RIGHT);
    }
    if (window_left_) mask->set_window_left(*window_left_);
    if (window_right_) mask->set_window_right(*window_right_);
  }

 private:
  static Status TakeInteger(const std::string& name, const Parameter& value,
                            std::optional<int64_t>& out) {
    out = Integer<int64_t>(value);
    return out ? Status() : Wrong(name, value, "an integer");
  }

  Status TakeCausal(const Parameter& value) {
    const std::optional<bool> causal = Boolean(value);
    if (!causal) return Wrong("causal", value, "a bool");
    if (model_.inputs != Inputs::kAll && *causal != causal_) {
      return Wrong("causal", value,
                   std::string(causal_ ? "true" : "false") + " for model '" + model_.name + "'");
    }
    causal_ = *causal;
    return Status();
  }

  Status TakeAlignment(const Parameter& value) {
    top_left_ = value.string_param() == "top_left";
    if (!top_left_ && value.string_param() != "bottom_right") {
      return Wrong("alignment", value, "\"bottom_right\" or \"top_left\"");
    }
    return Status();
  }

  Status TakeOutputDType(const Parameter& value) {
    if (value.string_param() != "FP32") {
      const std::string own(DatatypeOf(model_.dtype));
      if (value.string_param() == own) return Status();
      return Wrong("o_dtype", value, (own == "FP32" ? "" : '"' + own + "\" or ") + "\"FP32\"");
    }
    fields_.set_o_dtype(v1::DTYPE_FLOAT32);
    return Status();
  }

  // Triton's levels start at 1, the most urgent; 0 is the default.
  Status TakePriority(const Parameter& value) {
    const std::optional<int64_t> level = Integer<int64_t>(value);
    if (!level || *level < 0 || *level > kPriorityLevels) {
      return Wrong("priority", value, "an integer in [0, " + std::to_string(kPriorityLevels) + "]");
    }
    if (*level > 0) fields_.set_priority(static_cast<int32_t>(kDefaultPriorityLevel - *level));
    return Status();
  }

  Status TakeTimeout(const Parameter& value) {
    const std::optional<int64_t> us = Integer<int64_t>(value);
    if (!us || *us < 0) return Wrong("timeout", value, "microseconds, at least 0");
    constexpr int64_t kYearUs = int64_t{365} * 24 * 3600 * 1000 * 1000;
    if (*us == 0 || *us > kYearUs) return Status();
    const TimePoint until = request_.received + std::chrono::microseconds(*us);
    if (request_.deadline == kNever || until < request_.deadline) request_.deadline = until;
    return Status();
  }

  // Parameters that Triton's clients send to every server.
  static Status TakeTritons(const std::string& name, const Parameter& value) {
    if (name == "triton_enable_empty_final_response") return Status();  // every answer is final
    const bool sequence = name.starts_with("sequence_");
    if (sequence) {
      const bool unset = value.int64_param() == 0 && value.uint64_param() == 0 &&
                         value.string_param().empty() && !value.bool_param();
      if (unset) return Status();
      return Unimplemented("parameter " + name +
                           ": these models have no state; sessions are in attend.v1");
    }
    return InvalidArgument(
        "parameter " + name +
        " is unknown; known are alignment, causal, check, dropout_p, dropout_seed, kernel, "
        "o_dtype, priority, scale, softcap, timeout, window_left and window_right");
  }

  const Model& model_;
  v1::AttendRequest& fields_;
  Request& request_;
  bool causal_ = model_.inputs == Inputs::kCausal;
  bool top_left_ = false;
  std::optional<int64_t> window_left_;
  std::optional<int64_t> window_right_;
};

}  // namespace

Status TakeParameters(const ParameterMap& parameters, const Model& model, v1::AttendRequest& fields,
                      Request& request) {
  Taker taker(model, fields, request);
  for (const auto& [name, value] : parameters) {
    ATTEND_RETURN_IF_ERROR(taker.Take(name, value));
  }
  taker.SetMask();
  return Status();
}

Result<std::optional<RegionParameters>> TakeRegion(const ParameterMap& parameters,
                                                   const std::string& what) {
  RegionParameters out;
  bool any = false;
  bool sized = false;
  for (const auto& [name, value] : parameters) {
    const std::string full = what + "'s parameter " + name;
    if (name == "shared_memory_region") {
      out.region = value.string_param();
      if (out.region.empty())
        return InvalidArgument(full + " is " + TextOf(value) + ", must be a name");
      any = true;
    } else if (name == "shared_memory_byte_size" || name == "shared_memory_offset") {
      const std::optional<int64_t> number = Integer<int64_t>(value);
      if (!number || *number < 0)
        return InvalidArgument(full + " is " + TextOf(value) +
                               ", must be an integer of at least 0");
      const bool size = name == "shared_memory_byte_size";
      (size ? out.bytes : out.offset) = *number;
      sized |= size;
    } else if (name == "classification") {
      const std::optional<int64_t> classes = Integer<int64_t>(value);
      if (!classes || *classes != 0) return Unimplemented(full + ": attention has no classes");
    } else {
      return InvalidArgument(full + " is unknown");
    }
  }
  if (!any) return std::optional<RegionParameters>();
  if (!sized) return InvalidArgument(what + " has no parameter shared_memory_byte_size");
  return std::optional<RegionParameters>(std::move(out));
}

}  // namespace attend::oip
