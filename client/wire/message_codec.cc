// SPDX-License-Identifier: Apache-2.0
//
// Encoding: the small fields come from the generated class; each raw entry is a hand-written tag
// and length followed by a slice over the caller's memory. Decoding is the reverse: ReadFields
// walks the top-level fields, copies raw entries directly into their tensors, and collects all
// other fields into one small buffer for the generated parser. So no tensor byte passes through a
// generated class.

#include "client/wire/message_codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>

#include "client/wire/borrowed_slice.h"

namespace attend::client {
namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kWireLengthDelimited = 2;
constexpr uint32_t kRequestIdTag =
    (v1::AttendRequest::kRequestIdFieldNumber << 3) | kWireLengthDelimited;
constexpr uint32_t kRawTag = (v1::AttendRequest::kRawFieldNumber << 3) | kWireLengthDelimited;
static_assert(int{v1::AttendRequest::kRawFieldNumber} == int{v1::AttendResponse::kRawFieldNumber});
// Tensors up to this size are copied into the preceding slice, which is cheaper than a slice of
// their own.
constexpr int64_t kCopiedBytesMax = 8192;
// gRPC and Protobuf count message bytes in signed 32-bit integers.
constexpr int64_t kMessageBytesMax = INT32_MAX;

void AppendVarint(std::string* out, uint64_t value) {
  std::array<uint8_t, 10> bytes;
  const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, bytes.data());
  out->append(reinterpret_cast<const char*>(bytes.data()), end - bytes.data());
}

Status Malformed(const std::string& why) {
  return Internal("the server's answer is not a valid AttendResponse: " + why);
}

// A tag or length. False for more than five bytes, which Protobuf accepts as neither.
bool ReadShort(CodedInputStream* in, uint64_t* value) {
  const int at = in->CurrentPosition();
  return in->ReadVarint64(value) && in->CurrentPosition() - at <= 5;
}

// Copies one field other than raw, tag included, to `header`.
bool CopyField(CodedInputStream* in, uint64_t tag, int64_t total, std::string* header) {
  AppendVarint(header, tag);
  switch (tag & 7) {
    case 0: {
      uint64_t value;
      if (!in->ReadVarint64(&value)) return false;
      AppendVarint(header, value);
      return true;
    }
    case 1:
    case 5: {
      const int size = (tag & 7) == 1 ? 8 : 4;
      char bytes[8];
      if (!in->ReadRaw(bytes, size)) return false;
      header->append(bytes, size);
      return true;
    }
    case 2: {
      uint64_t size;
      if (!ReadShort(in, &size) || size > static_cast<uint64_t>(total - in->CurrentPosition())) {
        return false;
      }
      AppendVarint(header, size);
      const size_t at = header->size();
      header->resize(at + size);
      return in->ReadRaw(header->data() + at, static_cast<int>(size));
    }
    default:
      return false;  // groups do not occur in proto3
  }
}

struct RawEntry {
  std::shared_ptr<std::byte[]> data;
  int64_t bytes = 0;
};

Status ReadFields(grpc::ByteBuffer* buffer, Payload payload, std::string* header,
                  std::vector<RawEntry>* raw) {
  const int64_t total = static_cast<int64_t>(buffer->Length());
  grpc::ProtoBufferReader reader(buffer);
  if (!reader.status().ok()) return Malformed(reader.status().error_message());
  CodedInputStream in(&reader);
  in.SetTotalBytesLimit(INT32_MAX);
  while (in.CurrentPosition() < total) {
    uint64_t tag;
    if (!ReadShort(&in, &tag)) return Malformed("a tag is cut short or too long");
    if (tag != kRawTag) {
      if (!CopyField(&in, tag, total, header)) {
        return Malformed("field " + std::to_string(tag >> 3) + " is cut short");
      }
      continue;
    }
    uint64_t size;
    if (!ReadShort(&in, &size) || raw->size() >= size_t{kAnswerTensorsMax} ||
        size > static_cast<uint64_t>(total - in.CurrentPosition())) {
      return Malformed("entry " + std::to_string(raw->size()) + " of raw is cut short or too many");
    }
    RawEntry entry;
    entry.bytes = static_cast<int64_t>(size);
    bool ok;
    if (payload == Payload::kCopy) {
      entry.data = std::make_shared_for_overwrite<std::byte[]>(size);
      ok = in.ReadRaw(entry.data.get(), static_cast<int>(size));
    } else {
      ok = in.Skip(static_cast<int>(size));
    }
    if (!ok) return Malformed("raw is cut short");
    raw->push_back(std::move(entry));
  }
  return Status();
}

// Takes the tensors of an answer in order, each from the next entry of `raw` or from the place that
// the call named for it.
class TensorTaker {
 public:
  TensorTaker(std::vector<RawEntry>* raw, Payload payload) : raw_(raw), payload_(payload) {}

  Result<HostTensor> Take(const char* name, const v1::Tensor& meta,
                          const std::optional<SharedPlace>& place) {
    if (!IsDType(meta.dtype())) {
      return Malformed(std::string(name) + " has dtype " + std::to_string(meta.dtype()));
    }
    HostTensor tensor;
    tensor.dtype = static_cast<DType>(meta.dtype());
    tensor.shape.assign(meta.shape().begin(), meta.shape().end());
    const Result<int64_t> bytes = TensorBytes(name, tensor.dtype, tensor.shape);
    if (!bytes.ok()) return Malformed(bytes.status().message());
    tensor.bytes = *bytes;
    const Status taken =
        meta.has_shared_memory() ? TakeShared(name, meta, place, &tensor) : TakeRaw(name, &tensor);
    if (!taken.ok()) return taken;
    return tensor;
  }
  size_t taken() const { return next_; }

 private:
  Status TakeRaw(const char* name, HostTensor* tensor) {
    if (next_ == raw_->size()) return Malformed(std::string("raw has no entry for ") + name);
    RawEntry& entry = (*raw_)[next_++];
    if (tensor->bytes != entry.bytes) {
      return Malformed(std::string(name) + " of shape " + ShapeText(tensor->shape) + " needs " +
                       std::to_string(tensor->bytes) + " bytes, " + std::to_string(entry.bytes) +
                       " came");
    }
    tensor->data = std::move(entry.data);
    return Status();
  }
  // Copies device memory to the host.
  Status TakeShared(const char* name, const v1::Tensor& meta,
                    const std::optional<SharedPlace>& place, HostTensor* tensor) const {
    const v1::SharedMemory& where = meta.shared_memory();
    if (!place || where.region() != place->region->token() ||
        where.offset() != static_cast<uint64_t>(place->offset) ||
        tensor->bytes > place->region->bytes() - place->offset) {
      return Malformed(std::string(name) + " is in shared memory, but was not requested there");
    }
    DeviceMemory* const device = place->region->device();
    if (device == nullptr) {
      tensor->data = std::shared_ptr<std::byte[]>(place->region, place->data());
      return Status();
    }
    if (payload_ == Payload::kDiscard) return Status();
    tensor->data = std::make_shared_for_overwrite<std::byte[]>(static_cast<size_t>(tensor->bytes));
    return device->Read(place->offset, tensor->data.get(), tensor->bytes);
  }

  std::vector<RawEntry>* const raw_;
  const Payload payload_;
  size_t next_ = 0;
};

}  // namespace

void TakeSmallFields(v1::AttendResponse* message, AttentionResult* result) {
  result->request_id = std::move(*message->mutable_request_id());
  const v1::Timings& t = message->timings();
  result->timings = {t.receive_ns(),  t.queue_ns(), t.copy_in_ns(), t.kernel_ns(),
                     t.copy_out_ns(), t.check_ns(), t.total_ns()};
  result->batch_requests = message->batch_requests();
  result->kernel = std::move(*message->mutable_kernel());
  result->kernel_reason = std::move(*message->mutable_kernel_reason());
  result->device = std::move(*message->mutable_device());
  result->transport = std::move(*message->mutable_transport());
  result->session_lengths.assign(message->session_lengths().begin(),
                                 message->session_lengths().end());
  result->sessions_ending = message->sessions_ending();
  if (message->has_check()) {
    const v1::CheckReport& c = message->check();
    result->check = RowsReport{.ok = c.ok(),
                               .undecided = c.undecided(),
                               .rows_checked = c.rows_checked(),
                               .rows_total = c.rows_total(),
                               .rows_wide = c.rows_wide(),
                               .rows_unjudged = c.rows_unjudged(),
                               .max_abs_error = c.max_abs_error(),
                               .mean_abs_error = c.mean_abs_error(),
                               .bound = c.bound(),
                               .detail = c.detail()};
  }
}

Result<EncodedCall> EncodedCall::Make(const AttentionCall& call,
                                      std::shared_ptr<const void> keep_alive) {
  ATTEND_RETURN_IF_ERROR(CheckText(call));
  EncodedCall encoded;
  std::string pending = RequestHeader(call).SerializeAsString();
  std::vector<const TensorRef*> tensors;
  ForTensors(call, [&](v1::TensorName, const TensorRef& tensor) { tensors.push_back(&tensor); });
  encoded.backward_ = call.backward.has_value();
  encoded.owned_ = true;
  encoded.outputs_ = call.outputs;
  int64_t total = static_cast<int64_t>(pending.size());
  for (const TensorRef* tensor : tensors) {
    if (tensor->shared.region != nullptr) {
      encoded.payload_bytes_ += tensor->bytes;
      encoded.regions_.push_back(tensor->shared.region);
      continue;
    }
    if (tensor->bytes < 0 || tensor->bytes > kMessageBytesMax - total - 64) {
      return InvalidArgument("the message would be larger than " +
                             std::to_string(kMessageBytesMax) +
                             " bytes, the most that one gRPC message holds");
    }
    total += tensor->bytes + 8;
    AppendVarint(&pending, kRawTag);
    AppendVarint(&pending, static_cast<uint64_t>(tensor->bytes));
    encoded.payload_bytes_ += tensor->bytes;
    if (tensor->bytes <= kCopiedBytesMax) {
      if (tensor->bytes > 0) {
        pending.append(static_cast<const char*>(tensor->data), static_cast<size_t>(tensor->bytes));
      }
      continue;
    }
    encoded.slices_.emplace_back(pending);
    pending.clear();
    encoded.slices_.push_back(BorrowedSlice(*tensor, keep_alive));
    encoded.owned_ = encoded.owned_ && tensor->owner.use_count() > 0;
  }
  if (!pending.empty()) encoded.slices_.emplace_back(pending);
  for (const grpc::Slice& slice : encoded.slices_) {
    encoded.message_bytes_ += static_cast<int64_t>(slice.size());
  }
  encoded.sizes_ = SizesOf(call);
  if (!UsesSharedMemory(call)) {
    for (const AnswerSize& each : encoded.sizes_) encoded.answer_bytes_ += each.bytes.value_or(0);
  }
  return encoded;
}

Status EncodedCall::CheckMessageBytes(int64_t bytes_max) const {
  for (const auto& [what, bytes] : {std::pair{"the call's message would have ", message_bytes_},
                                    std::pair{"the call's answer would have ", answer_bytes_}}) {
    if (bytes_max == 0 || bytes <= bytes_max) continue;
    return InvalidArgument(what + std::to_string(bytes) + " bytes, the server takes at most " +
                           std::to_string(bytes_max) +
                           " in one message (its --max-request-bytes); chunks have no such bound");
  }
  return Status();
}

std::shared_ptr<const EncodedCall> EncodedCall::WithOutputs(const SharedOutputs& outputs) const {
  assert(chunked_ == nullptr && !outputs_.any() && "it has places already");
  auto with = std::make_shared<EncodedCall>(*this);
  v1::AttendRequest placements;
  FillOutputs(outputs, &placements);
  // In front, because a message's raw bytes should come last.
  with->slices_.insert(with->slices_.begin(), grpc::Slice(placements.SerializeAsString()));
  with->message_bytes_ += static_cast<int64_t>(with->slices_.front().size());
  with->outputs_ = outputs;
  return with;
}

grpc::ByteBuffer EncodedCall::ToByteBuffer(std::string_view request_id) const {
  assert(chunked_ == nullptr && "it is not one message");
  // At most two slices per tensor, and one each for the fields before and after. On the stack, so
  // the list needs no allocation.
  constexpr size_t kSlicesMax = 20;
  std::array<grpc::Slice, kSlicesMax> all;
  size_t count = 0;
  if (!request_id.empty()) {
    std::array<uint8_t, 160> field;
    uint8_t* at = CodedOutputStream::WriteVarint32ToArray(kRequestIdTag, field.data());
    at = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(request_id.size()), at);
    if (request_id.size() + (at - field.data()) <= field.size()) {
      std::memcpy(at, request_id.data(), request_id.size());
      at += request_id.size();
      all[count++] = grpc::Slice(field.data(), at - field.data());
    } else {  // too long for any server, which will say so
      std::string text(reinterpret_cast<const char*>(field.data()), at - field.data());
      all[count++] = grpc::Slice(text.append(request_id));
    }
  }
  for (const grpc::Slice& slice : slices_) all[count++] = slice;
  return grpc::ByteBuffer(all.data(), count);
}

Result<DecodedResponse> DecodeResponse(grpc::ByteBuffer* buffer, Payload payload,
                                       const FindOutputs& find_outputs) {
  std::string header;
  std::vector<RawEntry> raw;
  const Status read = ReadFields(buffer, payload, &header, &raw);
  buffer->Clear();
  ATTEND_RETURN_IF_ERROR(read);
  v1::AttendResponse message;
  if (!message.ParseFromString(header)) return Malformed("its small fields do not parse");
  DecodedResponse decoded;
  if (message.has_status() && message.status().code() != 0) {
    decoded.has_status = true;
    decoded.status = Status(static_cast<Code>(message.status().code()), message.status().message());
    decoded.retry_after_ms = message.status().retry_after_ms();
    decoded.result.request_id = message.request_id();
    decoded.result.session_lengths.assign(message.status().session_lengths().begin(),
                                          message.status().session_lengths().end());
    return decoded;
  }
  TakeSmallFields(&message, &decoded.result);
  if (message.has_o() == message.has_gradients()) {
    return Malformed(message.has_o() ? "it has o and gradients" : "it has no o");
  }
  SharedOutputs outputs;
  if (find_outputs && std::any_of(kAnswerNames.begin(), kAnswerNames.end(), [&](auto name) {
        const v1::Tensor* const meta = TensorOf(message, name);
        return meta != nullptr && meta->has_shared_memory();
      })) {
    outputs = find_outputs(decoded.result.request_id);
  }
  if (message.has_gradients()) decoded.result.gradients.emplace();
  TensorTaker taker(&raw, payload);
  for (const v1::TensorName name : kAnswerNames) {
    const v1::Tensor* const meta = TensorOf(message, name);
    if (meta == nullptr) continue;
    Result<HostTensor> tensor = taker.Take(NameOf(name), *meta, PlaceOf(outputs, name));
    if (!tensor.ok()) return tensor.status();
    decoded.payload_bytes += tensor->bytes;
    MakeTensorOf(decoded.result, name) = std::move(*tensor);
  }
  if (taker.taken() != raw.size()) {
    return Malformed("it has " + std::to_string(raw.size()) + " entries of raw, must have " +
                     std::to_string(taker.taken()));
  }
  return decoded;
}

}  // namespace attend::client
