// SPDX-License-Identifier: Apache-2.0
//
// Triton's rules: an input's bytes are in shared memory, in its typed `contents`, or in
// raw_input_contents, whose entries belong to the inputs not in shared memory, in order. A message
// uses either contents or raw entries, never both, and every raw entry must be used. Where Triton
// has an error text, it is used here too.

#include "server/oip/infer_parts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/oip/parameters.h"
#include "server/oip/typed_contents.h"

namespace attend::oip {
namespace {

Status FindModelOf(InferState& state) {
  const std::string& name = state.fields->model_name();
  const std::string& version = state.fields->model_version();
  state.model = FindModel(name);
  if (state.model != nullptr && (version.empty() || version == kVersion)) return Status();
  state.model = nullptr;
  return Status(Code::kNotFound, "Request for unknown model: '" + name + "'" +
                                     (version.empty() ? "" : " version '" + version + "'") +
                                     " is not found");
}

std::string NamesOf(const Model& model) {
  std::string names;
  for (int i = 0; i < kInputCount; ++i) {
    if (TakesInput(model, static_cast<Input>(i)) == Takes::kNo) continue;
    names += (names.empty() ? "" : ", ") + std::string(kInputs[static_cast<size_t>(i)]);
  }
  return names;
}

Status FindPlace(const ParameterMap& parameters, const std::string& what,
                 const RegionNames& regions, int tenant, RegionPart& place) {
  if (parameters.empty()) return Status();
  Result<std::optional<RegionParameters>> named = TakeRegion(parameters, what);
  if (!named.ok() || !*named) return named.status();
  const RegionParameters& wanted = **named;
  Result<NamedRegionRef> region = regions.Find(tenant, wanted.region);
  if (!region.ok()) return region.status();
  const int64_t size = (*region)->bytes;
  if (wanted.bytes > size || wanted.offset > size - wanted.bytes) {
    return InvalidArgument("Invalid offset + byte size for shared memory region: '" +
                           wanted.region + "': " + what + "'s shared_memory_offset is " +
                           std::to_string(wanted.offset) + " and shared_memory_byte_size " +
                           std::to_string(wanted.bytes) + ", the region has " +
                           std::to_string(size) + " bytes");
  }
  place = {std::move(*region), wanted.offset, wanted.bytes};
  return Status();
}

class Finder {
 public:
  Finder(const RegionNames& regions, int tenant, std::span<const ByteSpan> slices,
         InferState& state, int64_t& array_bytes)
      : regions_(regions),
        tenant_(tenant),
        slices_(slices),
        state_(state),
        array_bytes_(array_bytes) {}

  Status Run() {
    ATTEND_RETURN_IF_ERROR(FindModelOf(state_));
    ATTEND_RETURN_IF_ERROR(Inputs());
    return Outputs();
  }

 private:
  Status Inputs() {
    const InferScan& scan = state_.scan;
    for (int i = 0; i < state_.fields->inputs_size(); ++i) ATTEND_RETURN_IF_ERROR(OneInput(i));
    if (raw_used_ != scan.raw_count) {
      return InvalidArgument("raw_input_contents has " + std::to_string(scan.raw_count) +
                             " entries, must have " + std::to_string(raw_used_) +
                             ", one for each input that is not in shared memory");
    }
    for (int i = 0; i < kInputCount; ++i) {
      const auto input = static_cast<Input>(i);
      const InferState::InputPart& part = state_.inputs[static_cast<size_t>(i)];
      if (part.tensor != nullptr || TakesInput(*state_.model, input) != Takes::kRequired) continue;
      return InvalidArgument("input '" + std::string(kInputs[static_cast<size_t>(i)]) +
                             "' is missing, model '" + state_.model->name + "' takes " +
                             NamesOf(*state_.model));
    }
    return Status();
  }

  Status OneInput(int index) {
    const auto& tensor = state_.fields->inputs(index);
    const auto found = std::find(kInputs.begin(), kInputs.end(), tensor.name());
    const auto input = static_cast<Input>(found - kInputs.begin());
    if (found == kInputs.end() || TakesInput(*state_.model, input) == Takes::kNo) {
      return InvalidArgument("unexpected inference input '" + tensor.name() + "', model '" +
                             state_.model->name + "' takes " + NamesOf(*state_.model));
    }
    InferState::InputPart& part = state_.inputs[static_cast<size_t>(input)];
    if (part.tensor != nullptr) {
      return InvalidArgument("input '" + tensor.name() + "' is given twice");
    }
    part.tensor = &tensor;
    const std::string what = "input '" + tensor.name() + "'";
    ATTEND_RETURN_IF_ERROR(FindPlace(tensor.parameters(), what, regions_, tenant_, part.place));
    ATTEND_RETURN_IF_ERROR(FindBytes(index, what, part));
    if (!IsTensor(input)) {
      return CountNumbers(what, std::max({part.raw.bytes, part.contents.bytes, part.place.bytes}));
    }
    if (!part.contents.present() || FindRun(slices_, part.contents)) return Status();
    return CountNumbers(what, part.contents.bytes);
  }

  // `bytes` is a client's claim, unbounded: compare before adding, so that nothing overflows.
  Status CountNumbers(const std::string& what, int64_t bytes) {
    if (bytes <= kFieldBytesMax - array_bytes_) {
      array_bytes_ += bytes;
      return Status();
    }
    return InvalidArgument(what + " has " + std::to_string(bytes) +
                           " bytes and the inputs before it " + std::to_string(array_bytes_) +
                           "; lengths, cumulative lengths, slopes, sinks and FP32 tensors in "
                           "several runs of contents must have at most " +
                           std::to_string(kFieldBytesMax) + " together");
  }

  Status FindBytes(int index, const std::string& what, InferState::InputPart& part) {
    const MessagePart& contents = state_.scan.contents[static_cast<size_t>(index)];
    if (part.place.region != nullptr) {
      if (!contents.present()) return Status();
      return InvalidArgument(what + " is in shared memory, must not have contents");
    }
    if (state_.scan.raw_count == 0) {
      if (!contents.present()) {
        return InvalidArgument("unable to find data for input tensor '" + part.tensor->name() +
                               "': it has no contents and there is no raw_input_contents");
      }
      part.contents = contents;
      return Status();
    }
    if (contents.present()) {
      return InvalidArgument(
          "contents field must not be specified when using raw_input_contents for " + what);
    }
    if (raw_used_ >= std::min<int64_t>(state_.scan.raw_count, kInputCount)) {
      return InvalidArgument("unable to find data for input tensor '" + part.tensor->name() +
                             "': raw_input_contents has " + std::to_string(state_.scan.raw_count) +
                             " entries");
    }
    part.raw = state_.scan.raw[static_cast<size_t>(raw_used_++)];
    return Status();
  }

  Status Outputs() {
    if (state_.fields->outputs_size() == 0) {
      state_.outputs = {Output::kO, Output::kLse};
      return Status();
    }
    for (const auto& wanted : state_.fields->outputs()) {
      if (wanted.name() != "o" && wanted.name() != "lse") {
        return InvalidArgument("unexpected inference output '" + wanted.name() + "', model '" +
                               state_.model->name + "' has o and lse");
      }
      const Output output = wanted.name() == "o" ? Output::kO : Output::kLse;
      if (std::find(state_.outputs.begin(), state_.outputs.end(), output) != state_.outputs.end()) {
        return InvalidArgument("output '" + wanted.name() + "' is requested twice");
      }
      state_.outputs.push_back(output);
      ATTEND_RETURN_IF_ERROR(FindPlace(wanted.parameters(), "output '" + wanted.name() + "'",
                                       regions_, tenant_,
                                       state_.output_places[static_cast<size_t>(output)]));
    }
    return Status();
  }

  const RegionNames& regions_;
  const int tenant_;
  const std::span<const ByteSpan> slices_;
  InferState& state_;
  int64_t& array_bytes_;
  int64_t raw_used_ = 0;
};

}  // namespace

Status FindParts(const RegionNames& regions, int tenant, std::span<const ByteSpan> slices,
                 InferState& state, int64_t& array_bytes) {
  return Finder(regions, tenant, slices, state, array_bytes).Run();
}

}  // namespace attend::oip
