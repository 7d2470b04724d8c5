// SPDX-License-Identifier: Apache-2.0
//
// An AttendRequest is described here by its small fields plus a scan, which says where in the
// message its bytes are. So translating is mostly offsets: a raw input keeps its offset, a typed
// FP32 input in one run gets that run's offset, and anything that must be rewritten goes into
// state.tail. Offsets at or beyond message_bytes refer to the tail, which BuildRequest appends as
// one more slice.

#include "server/oip/infer_request.h"

#include <optional>
#include <string>
#include <utility>

#include "server/oip/parameters.h"
#include "server/oip/typed_contents.h"
#include "server/wire/protobuf_wire.h"

namespace attend::oip {
namespace {

using Contents = inference::InferTensorContents;
using InputPart = InferState::InputPart;

// The AttendRequest field for an input of numbers.
ArrayField FieldOf(Input input) {
  switch (input) {
    case Input::kQLengths:
      return ArrayField::kQLengths;
    case Input::kKvLengths:
      return ArrayField::kKvLengths;
    case Input::kCuQ:
      return ArrayField::kCuQ;
    case Input::kCuKv:
      return ArrayField::kCuKv;
    case Input::kAlibiSlopes:
      return ArrayField::kAlibiSlopes;
    default:
      return ArrayField::kSinks;
  }
}

std::optional<v1::DType> DTypeNamed(std::string_view datatype) {
  for (const DType dtype : kDTypes) {
    if (datatype == DatatypeOf(dtype)) return static_cast<v1::DType>(dtype);
  }
  return std::nullopt;
}

class Builder {
 public:
  Builder(InferState& state, RequestMessage& message, v1::AttendRequest& fields, Request& request)
      : state_(state), message_(message), fields_(fields), request_(request) {}

  Status Run() {
    const Model& model = *state_.model;
    fields_.set_request_id(state_.fields->id());
    fields_.set_layout(static_cast<v1::Layout>(model.layout));
    ATTEND_RETURN_IF_ERROR(TakeParameters(state_.fields->parameters(), model, fields_, request_));
    // In the order of AttendRequest's raw entries.
    for (const Input input : {Input::kQ, Input::kK, Input::kV, Input::kBias}) {
      const InputPart& part = state_.inputs[static_cast<size_t>(input)];
      if (part.tensor != nullptr) ATTEND_RETURN_IF_ERROR(AddTensor(input, part));
    }
    for (int i = 0; i < kInputCount; ++i) {
      const auto input = static_cast<Input>(i);
      const InputPart& part = state_.inputs[static_cast<size_t>(i)];
      if (part.tensor == nullptr || IsTensor(input)) continue;
      ATTEND_RETURN_IF_ERROR(AddNumbers(input, part));
    }
    AddOutputs();
    return Status();
  }

 private:
  v1::Tensor& TensorOf(Input input) {
    switch (input) {
      case Input::kQ:
        return *fields_.mutable_q();
      case Input::kK:
        return *fields_.mutable_k();
      case Input::kV:
        return *fields_.mutable_v();
      default:
        return *fields_.mutable_bias();
    }
  }

  static std::string NameOf(const InputPart& part) { return part.tensor->name(); }

  static void SetRegion(const RegionPart& place, v1::SharedMemory* where) {
    where->set_region(place.region->token);
    where->set_offset(static_cast<uint64_t>(place.offset));
  }

  Status AddTensor(Input input, const InputPart& part) {
    const std::string& datatype = part.tensor->datatype();
    const std::string_view own = DatatypeOf(state_.model->dtype);
    const std::optional<v1::DType> dtype = DTypeNamed(datatype);
    if (input == Input::kBias ? !dtype : datatype != own) {
      return InvalidArgument(NameOf(part) + ".datatype is '" + datatype + "', must be " +
                             (input == Input::kBias ? "FP16, BF16 or FP32" : std::string(own)) +
                             " for model '" + state_.model->name + "'");
    }
    v1::Tensor& tensor = TensorOf(input);
    tensor.set_dtype(*dtype);
    *tensor.mutable_shape() = part.tensor->shape();
    const RegionPart& place = part.place;
    if (place.region != nullptr && !place.region->file) {
      SetRegion(place, tensor.mutable_shared_memory());
      tensor.set_byte_length(static_cast<uint64_t>(place.bytes));
      return Status();
    }
    MessageScan::Raw raw;
    if (place.region != nullptr) {
      raw = {place.region->offset + place.offset, place.bytes, &*place.region->file};
    } else if (part.raw.present()) {
      raw = {part.raw.offset, part.raw.bytes};
    } else {
      ATTEND_RETURN_IF_ERROR(FindTyped(part, raw));
    }
    tensor.set_byte_length(static_cast<uint64_t>(raw.bytes));
    message_.scan.raw[static_cast<size_t>(message_.scan.raw_count++)] = raw;
    return Status();
  }

  Status FindTyped(const InputPart& part, MessageScan::Raw& raw) {
    if (part.tensor->datatype() != "FP32") {
      return InvalidArgument(NameOf(part) + " is " + part.tensor->datatype() +
                             ", whose bytes must be in raw_input_contents");
    }
    MessagePart found;
    ATTEND_RETURN_IF_ERROR(FindFloats(message_.slices, part.contents, NameOf(part),
                                      message_.scan.message_bytes, state_.tail, found));
    raw = {found.offset, found.bytes};
    return Status();
  }

  Status AddNumbers(Input input, const InputPart& part) {
    const ArrayField field = FieldOf(input);
    const bool floats = IsFloatArray(static_cast<int>(field));
    const std::string& datatype = part.tensor->datatype();
    if (floats ? datatype != "FP32" : datatype != "INT32" && datatype != "INT64") {
      return InvalidArgument(NameOf(part) + ".datatype is '" + datatype + "', must be " +
                             (floats ? "FP32" : "INT32 or INT64"));
    }
    std::vector<uint8_t> numbers;
    int64_t entries = 0;
    ATTEND_RETURN_IF_ERROR(part.contents.present()
                               ? TakeTyped(part, floats, numbers, entries)
                               : TakeRawNumbers(part, floats, numbers, entries));
    ATTEND_RETURN_IF_ERROR(CheckCount(part, entries));
    if (entries == 0) return Status();
    const int64_t begin = message_.scan.message_bytes + std::ssize(state_.tail);
    std::array<uint8_t, 20> prefix{};
    const uint8_t* const end =
        wire::WritePrefix(wire::BytesTag(kArrayNumbers[static_cast<size_t>(field)]),
                          std::ssize(numbers), prefix.data());
    state_.tail.insert(state_.tail.end(), prefix.cbegin(), prefix.cbegin() + (end - prefix.data()));
    state_.tail.insert(state_.tail.end(), numbers.begin(), numbers.end());
    message_.scan.arrays[static_cast<size_t>(field)] = {
        begin, message_.scan.message_bytes + std::ssize(state_.tail), entries};
    return Status();
  }

  Status TakeTyped(const InputPart& part, bool floats, std::vector<uint8_t>& numbers,
                   int64_t& entries) {
    if (floats) {
      MessagePart found;
      std::vector<uint8_t> apart;
      ATTEND_RETURN_IF_ERROR(
          FindFloats(message_.slices, part.contents, NameOf(part), 0, apart, found));
      if (!apart.empty()) {
        numbers = std::move(apart);
      } else {
        numbers.resize(static_cast<size_t>(found.bytes));
        SliceReader reader(message_.slices);
        reader.Skip(found.offset);
        reader.Read(numbers.data(), found.bytes);
      }
      entries = std::ssize(numbers) / 4;
      return std::ssize(numbers) % 4 == 0 ? Status() : NotWhole(part, std::ssize(numbers), 4);
    }
    const bool wide = part.tensor->datatype() == "INT64";
    return TakeVarints(
        message_.slices, part.contents,
        wide ? Contents::kInt64ContentsFieldNumber : Contents::kIntContentsFieldNumber,
        NameOf(part), numbers, entries);
  }

  static Status NotWhole(const InputPart& part, int64_t bytes, int width) {
    return InvalidArgument(NameOf(part) + " has " + std::to_string(bytes) +
                           " bytes, must have a multiple of " + std::to_string(width));
  }

  Status TakeRawNumbers(const InputPart& part, bool floats, std::vector<uint8_t>& numbers,
                        int64_t& entries) {
    const int width = part.tensor->datatype() == "INT64" ? 8 : 4;
    const RegionPart& place = part.place;
    const int64_t bytes = place.region != nullptr ? place.bytes : part.raw.bytes;
    if (bytes % width != 0) return NotWhole(part, bytes, width);
    entries = bytes / width;
    std::vector<uint8_t> read;
    ByteSpan whole;
    std::span<const ByteSpan> slices = message_.slices;
    int64_t offset = part.raw.offset;
    if (place.region != nullptr) {
      if (!place.region->file) {
        return Unimplemented(
            NameOf(part) + " is in GPU memory, must be in the message or in system shared memory");
      }
      read.resize(static_cast<size_t>(bytes));
      ATTEND_RETURN_IF_ERROR(
          place.region->file->Read(place.region->offset + place.offset, read.data(), bytes));
      whole = read;
      slices = {&whole, 1};
      offset = 0;
    }
    SliceReader reader(slices);
    reader.Skip(offset);
    if (!floats) return EncodeVarints(reader, bytes, width, NameOf(part), numbers);
    numbers.resize(static_cast<size_t>(bytes));
    reader.Read(numbers.data(), bytes);
    return Status();
  }

  static Status CheckCount(const InputPart& part, int64_t entries) {
    constexpr int kRankMax = 2;  // alibi_slopes may be [B, Hq]
    if (part.tensor->shape_size() > kRankMax) {
      return InvalidArgument(NameOf(part) + ".shape has " +
                             std::to_string(part.tensor->shape_size()) +
                             " dimensions, must have at most " + std::to_string(kRankMax));
    }
    int64_t product = 1;
    std::string text;
    bool fits = true;
    for (const int64_t dim : part.tensor->shape()) {
      text += (text.empty() ? "[" : ", ") + std::to_string(dim);
      fits &= dim >= 0 && !__builtin_mul_overflow(product, dim, &product);
    }
    if (fits && product == entries) return Status();
    return InvalidArgument(NameOf(part) + ".shape is " + (text.empty() ? "[" : text) +
                           "], must have the " + std::to_string(entries) +
                           " elements that were sent");
  }

  void AddOutputs() {
    for (const Output output : state_.outputs) {
      if (output == Output::kLse) fields_.set_return_lse(true);
      const RegionPart& place = state_.place_of(output);
      if (place.region == nullptr || place.region->file) continue;
      v1::Placement* const placement =
          output == Output::kO ? fields_.mutable_o_placement() : fields_.mutable_lse_placement();
      SetRegion(place, placement->mutable_shared_memory());
    }
  }

  InferState& state_;
  RequestMessage& message_;
  v1::AttendRequest& fields_;
  Request& request_;
};

}  // namespace

Status BuildRequest(google::protobuf::Arena& arena, InferState& state, MessageSlices& slices,
                    RequestMessage& message, Request& request) {
  auto* const fields = google::protobuf::Arena::CreateMessage<v1::AttendRequest>(&arena);
  ATTEND_RETURN_IF_ERROR(Builder(state, message, *fields, request).Run());
  if (!state.tail.empty()) {
    slices.Append(state.tail);
    message.slices = slices.spans();
  }
  message.fields = fields;
  return Status();
}

}  // namespace attend::oip
