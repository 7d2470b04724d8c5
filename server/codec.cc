// SPDX-License-Identifier: Apache-2.0

#include "server/codec.h"

#include <google/protobuf/io/zero_copy_stream.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>

#include "server/shared_tensors.h"
#include "server/wire.h"

namespace attend {
namespace {

// Protobuf takes tags and lengths of at most this many bytes. Longer ones, as all that is unusual,
// are left to it.
constexpr int64_t kVarint32BytesMax = 5;

constexpr std::array<const char*, kTensorsMax> kTensorNames = {"q", "k", "v", "bias"};

// What protobuf reads from: the slices as they lie.
class SliceStream final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  explicit SliceStream(std::span<const ByteSpan> slices) : slices_(slices) {}

  bool Next(const void** data, int* size) override {
    while (slice_ < slices_.size() && offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
    }
    if (slice_ == slices_.size()) return false;
    const size_t step = std::min<size_t>(slices_[slice_].size() - offset_, INT_MAX);
    *data = slices_[slice_].data() + offset_;
    *size = static_cast<int>(step);
    offset_ += step;
    position_ += static_cast<int64_t>(step);
    return true;
  }
  void BackUp(int count) override {  // within what the last Next returned
    offset_ -= static_cast<size_t>(count);
    position_ -= count;
  }
  bool Skip(int count) override {
    const void* data;
    int size;
    while (count > 0 && Next(&data, &size)) {
      if (size > count) BackUp(size - count);
      count -= std::min(size, count);
    }
    return count == 0;
  }
  int64_t ByteCount() const override { return position_; }

 private:
  std::span<const ByteSpan> slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;
  int64_t position_ = 0;
};

Status Malformed(const std::string& what) {
  return InvalidArgument("the message is not an AttendRequest: " + what);
}

Status Truncated(uint64_t field, int64_t at) {
  return Malformed("it ends inside field " + std::to_string(field) + ", which begins at byte " +
                   std::to_string(at));
}

// Where one part of a block lies: the next aligned offset. False on overflow.
bool Append(int64_t bytes, int64_t& total, int64_t& offset) {
  int64_t begin;
  if (__builtin_add_overflow(total, kTensorAlignBytes - 1, &begin)) return false;
  begin -= begin % kTensorAlignBytes;
  offset = begin;
  return !__builtin_add_overflow(begin, bytes, &total);
}

// Fields 2 to 15 of Placement are kept for places that later servers know.
Status CheckPlacement(const std::string& name, const v1::Placement& placement, bool chunked,
                      bool& shared) {
  const auto& unknown = v1::Placement::GetReflection()->GetUnknownFields(placement);
  for (int i = 0; i < unknown.field_count(); ++i) {
    const int number = unknown.field(i).number();
    if (number < 2 || number > 15) continue;
    return Unimplemented(name + " is field " + std::to_string(number) +
                         ", this server knows shared_memory");
  }
  shared = placement.place_case() == v1::Placement::kSharedMemory;
  if (!shared || !chunked) return Status();
  return InvalidArgument(name + " is set, must be unset in AttendChunked");
}

template <class T>
const T* PlaceArray(const google::protobuf::RepeatedField<T>& values, char* block, int64_t offset) {
  if (values.empty()) return nullptr;
  std::memcpy(block + offset, values.data(), static_cast<size_t>(values.size()) * sizeof(T));
  return reinterpret_cast<const T*>(block + offset);
}

}  // namespace

Status ScanMessage(std::span<const ByteSpan> slices, MessageScan& scan) {
  SliceReader reader(slices);
  scan = MessageScan();
  scan.message_bytes = reader.remaining();
  scan.in_order = true;
  while (reader.remaining() > 0) {
    const int64_t at = reader.position();
    uint64_t tag = 0;
    if (!reader.ReadVarint(&tag)) return Malformed("no tag at byte " + std::to_string(at));
    const uint64_t field = tag >> 3;
    if (reader.position() - at > kVarint32BytesMax) {
      scan.in_order = false;
      return Status();
    }
    uint64_t bytes = 0;
    bool there = true;
    switch (tag & 7) {
      case wire::kVarint:
        there = reader.ReadVarint(&bytes);
        break;
      case wire::kFixed64:
        there = reader.Skip(8);
        break;
      case wire::kFixed32:
        there = reader.Skip(4);
        break;
      case wire::kBytes: {
        const int64_t length_at = reader.position();
        if (!reader.ReadVarint(&bytes)) return Truncated(field, at);
        if (bytes > static_cast<uint64_t>(reader.remaining())) {
          return Malformed("field " + std::to_string(field) + " at byte " + std::to_string(at) +
                           " declares " + std::to_string(bytes) + " bytes, " +
                           std::to_string(reader.remaining()) + " are left");
        }
        if (reader.position() - length_at > kVarint32BytesMax) {
          scan.in_order = false;
          return Status();
        }
        if (tag != wire::kRawTag) {
          there = reader.Skip(static_cast<int64_t>(bytes));
          break;
        }
        if (scan.raw_count == 0) scan.header_bytes = at;
        if (scan.raw_count < kTensorsMax) {
          scan.raw[scan.raw_count] = {reader.position(), static_cast<int64_t>(bytes)};
        }
        ++scan.raw_count;
        reader.Skip(static_cast<int64_t>(bytes));
        continue;
      }
      default:  // groups and what is no wire type: the generated parser's business
        scan.in_order = false;
        return Status();
    }
    if (!there) return Truncated(field, at);
    if (scan.raw_count > 0) scan.in_order = false;  // something behind the bytes
  }
  if (scan.raw_count == 0) scan.header_bytes = scan.message_bytes;
  return Status();
}

Status ParseMessage(std::span<const ByteSpan> slices, const MessageScan& scan,
                    google::protobuf::Arena& arena, ParsedMessage& out) {
  auto* request = google::protobuf::Arena::CreateMessage<v1::AttendRequest>(&arena);
  out.scan = scan;
  out.request = request;
  const int64_t bytes = scan.in_order ? scan.header_bytes : scan.message_bytes;
  return ParseSlices(slices, bytes, *request) ? Status() : Malformed("its fields cannot be parsed");
}

bool ParseSlices(std::span<const ByteSpan> slices, int64_t bytes,
                 google::protobuf::MessageLite& out) {
  if (bytes > INT_MAX) return false;
  const ByteSpan first = SliceReader(slices).Contiguous();
  if (bytes <= static_cast<int64_t>(first.size())) {
    return out.ParseFromArray(first.data(), static_cast<int>(bytes));
  }
  SliceStream stream(slices);
  return out.ParseFromBoundedZeroCopyStream(&stream, static_cast<int>(bytes));
}

Status CheckSources(const v1::AttendRequest& request, Transport transport, Validated& validated) {
  const bool chunked = transport == Transport::kChunked;
  const auto check = [&](int index, const v1::Tensor& tensor) {
    const bool is_chunked = tensor.source_case() == v1::Tensor::kChunked;
    validated.shared[index] = tensor.source_case() == v1::Tensor::kSharedMemory;
    if (is_chunked == chunked) return Status();
    return InvalidArgument(std::string(kTensorNames[index]) + ".source is " +
                           (is_chunked ? "chunked, which AttendChunked alone takes"
                                       : "not chunked, which AttendChunked demands"));
  };
  ATTEND_RETURN_IF_ERROR(check(0, request.q()));
  ATTEND_RETURN_IF_ERROR(check(1, request.k()));
  ATTEND_RETURN_IF_ERROR(check(2, request.v()));
  if (request.has_bias()) ATTEND_RETURN_IF_ERROR(check(3, request.bias()));
  if (chunked && request.raw_size() > 0) {
    return InvalidArgument("raw has " + std::to_string(request.raw_size()) +
                           " entries, must have none in AttendChunked");
  }
  ATTEND_RETURN_IF_ERROR(
      CheckPlacement("o_placement", request.o_placement(), chunked, validated.o_shared));
  ATTEND_RETURN_IF_ERROR(
      CheckPlacement("lse_placement", request.lse_placement(), chunked, validated.lse_shared));
  if (validated.lse_shared && !request.return_lse()) {
    return InvalidArgument("lse_placement is set, return_lse is not");
  }
  return Status();
}

Status CheckRaw(const ParsedMessage& message, const Validated& validated) {
  std::string names;
  int64_t expected = 0;
  for (int i = 0; i < validated.tensors; ++i) {
    if (validated.shared[i]) continue;
    ++expected;
    names += std::string(names.empty() ? ", one for each of " : ", ") + kTensorNames[i];
  }
  if (message.raw_count() != expected) {
    return InvalidArgument("raw has " + std::to_string(message.raw_count()) +
                           " entries, must have " + std::to_string(expected) + names);
  }
  for (int i = 0, raw = 0; i < validated.tensors; ++i) {
    if (validated.shared[i]) continue;
    const int64_t bytes = message.raw_bytes(raw);
    if (bytes != validated.tensor_bytes[i]) {
      return InvalidArgument("raw[" + std::to_string(raw) + "] has " + std::to_string(bytes) +
                             " bytes, must have " + std::to_string(validated.tensor_bytes[i]) +
                             ", the bytes of " + kTensorNames[i]);
    }
    ++raw;
  }
  return Status();
}

Result<MemoryPlan> PlanMemory(const v1::AttendRequest& request, const Validated& validated) {
  const Problem& problem = validated.attention.problem;
  MemoryPlan plan;
  bool fits = true;
  for (int i = 0; i < validated.tensors; ++i) {
    if (validated.shared[i]) continue;
    fits &= Append(validated.tensor_bytes[i], plan.input_bytes, plan.tensors[i]);
  }
  const auto array = [&](int64_t entries, int64_t entry_bytes, int64_t& offset) {
    if (entries > 0) fits &= Append(entries * entry_bytes, plan.input_bytes, offset);
  };
  array(request.q_lengths_size(), sizeof(int64_t), plan.q_lengths);
  array(request.kv_lengths_size(), sizeof(int64_t), plan.kv_lengths);
  array(request.cu_q_size(), sizeof(int64_t), plan.cu_q);
  array(request.cu_kv_size(), sizeof(int64_t), plan.cu_kv);
  array(request.alibi_slopes_size(), sizeof(float), plan.alibi);
  array(request.sinks_size(), sizeof(float), plan.sinks);
  if (!validated.o_shared) fits &= Append(BytesO(problem), plan.output_bytes, plan.o);
  if (problem.return_lse && !validated.lse_shared) {
    fits &= Append(BytesLse(problem), plan.output_bytes, plan.lse);
  }
  if (!fits) return InvalidArgument("the tensors' bytes together overflow 64 bits");
  return plan;
}

void PlaceArrays(const v1::AttendRequest& message, const Validated& validated,
                 const MemoryPlan& plan, Request& request) {
  request.layout = validated.layout;
  request.attention = validated.attention;
  Attention& a = request.attention;
  char* const input = static_cast<char*>(request.input.data());
  char* const output = static_cast<char*>(request.output.data());
  request.input_spans = {{input, request.input.bytes()}};
  request.output_spans = {{output, request.output.bytes()}};
  if (request.shared != nullptr) AddSharedSpans(*request.shared, request);
  const auto place = [](char* block, int64_t offset, const RegionPlace* shared) -> char* {
    if (shared != nullptr && shared->region != nullptr) return shared->data();
    return block == nullptr ? nullptr : block + offset;
  };
  const SharedTensors* const shared = request.shared.get();
  const auto tensor = [&](int i) -> const void* {
    return place(input, plan.tensors[i], shared == nullptr ? nullptr : &shared->inputs[i]);
  };
  a.q.data = tensor(0);
  a.k.data = tensor(1);
  a.v.data = tensor(2);
  if (a.problem.has_bias) a.bias.data = tensor(3);
  if (input != nullptr) {
    a.q_lengths = PlaceArray(message.q_lengths(), input, plan.q_lengths);
    a.kv_lengths = PlaceArray(message.kv_lengths(), input, plan.kv_lengths);
    a.q_offsets = PlaceArray(message.cu_q(), input, plan.cu_q);
    a.kv_offsets = PlaceArray(message.cu_kv(), input, plan.cu_kv);
    a.alibi_slopes = PlaceArray(message.alibi_slopes(), input, plan.alibi);
    a.sinks = PlaceArray(message.sinks(), input, plan.sinks);
  }
  a.o.data = place(output, plan.o, shared == nullptr ? nullptr : &shared->o);
  if (a.problem.return_lse) {
    a.lse = reinterpret_cast<float*>(
        place(output, plan.lse, shared == nullptr ? nullptr : &shared->lse));
  }
}

void CopyTensors(std::span<const ByteSpan> slices, const ParsedMessage& message,
                 const Validated& validated, const MemoryPlan& plan, Request& request) {
  char* const input = static_cast<char*>(request.input.data());
  if (input == nullptr) return;  // every inline tensor is empty
  SliceReader reader(slices);
  for (int i = 0, raw = 0; i < validated.tensors; ++i) {
    if (validated.shared[i]) continue;
    if (message.scan.in_order) {
      reader.Skip(message.scan.raw[raw].offset - reader.position());
      reader.Read(input + plan.tensors[i], validated.tensor_bytes[i]);
    } else {
      const std::string& bytes = message.request->raw(raw);
      std::memcpy(input + plan.tensors[i], bytes.data(), bytes.size());
    }
    ++raw;
  }
}

std::vector<CopyPiece> TensorPieces(std::span<const ByteSpan> slices, const ParsedMessage& message,
                                    const Validated& validated, const MemoryPlan& plan,
                                    Request& request) {
  std::vector<CopyPiece> pieces;
  pieces.reserve(slices.size() + kTensorsMax);
  char* const input = static_cast<char*>(request.input.data());
  SliceReader reader(slices);
  for (int i = 0, raw = 0; i < validated.tensors && input != nullptr; ++i) {
    if (validated.shared[i]) continue;
    if (message.scan.in_order) {
      reader.Skip(message.scan.raw[raw].offset - reader.position());
      reader.ReadPieces(input + plan.tensors[i], validated.tensor_bytes[i], pieces);
    } else {
      const std::string& bytes = message.request->raw(raw);
      pieces.push_back({bytes.data(), input + plan.tensors[i], static_cast<int64_t>(bytes.size())});
    }
    ++raw;
  }
  return pieces;
}

}  // namespace attend
