// SPDX-License-Identifier: Apache-2.0
//
// Chunks are written by hand: a head of three fields, then a slice over the caller's memory. A
// chunk of an answer is recognised by having its data last; every other message goes to the
// generated parser. Reserve claims a chunk's bytes under the lock, so that each byte is accepted
// once, and the copy then runs without the lock, in parallel with those of other streams.

#include "client/wire/chunk_codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cassert>
#include <cstring>

#include "attend/v1/attention.grpc.pb.h"
#include "client/wire/borrowed_slice.h"

namespace attend::client {
namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kTensorTag = v1::AttendChunkedRequest::kTensorFieldNumber << 3;
constexpr uint32_t kOffsetTag = v1::AttendChunkedRequest::kOffsetFieldNumber << 3;
constexpr uint32_t kDataTag = (v1::AttendChunkedRequest::kDataFieldNumber << 3) | 2;
static_assert(int{v1::AttendChunkedRequest::kTensorFieldNumber} ==
              int{v1::AttendChunkedResponse::kTensorFieldNumber});
static_assert(int{v1::AttendChunkedRequest::kOffsetFieldNumber} ==
              int{v1::AttendChunkedResponse::kOffsetFieldNumber});
static_assert(int{v1::AttendChunkedRequest::kDataFieldNumber} ==
              int{v1::AttendChunkedResponse::kDataFieldNumber});

Status MalformedChunk(const std::string& why) {
  return Internal("the server's answer is not a valid AttendChunkedResponse: " + why);
}

grpc::ByteBuffer Serialize(const v1::AttendChunkedRequest& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// Reads the fields before a chunk's data. False unless this is a chunk with its data last, the
// order that every runtime writes.
struct ChunkHead {
  uint64_t tensor = 0;
  uint64_t offset = 0;
  uint32_t bytes = 0;
};
bool ReadHead(CodedInputStream* in, int64_t message_bytes, ChunkHead* head) {
  for (;;) {
    const uint32_t tag = in->ReadTag();
    if (tag == kTensorTag) {
      if (!in->ReadVarint64(&head->tensor)) return false;
    } else if (tag == kOffsetTag) {
      if (!in->ReadVarint64(&head->offset)) return false;
    } else {
      return tag == kDataTag && in->ReadVarint32(&head->bytes) &&
             head->bytes == message_bytes - in->CurrentPosition();
    }
  }
}

// Checks a tensor against the call, because an unexpected one could be of any size.
Status CheckTensor(const char* name, const v1::Tensor& meta, DType dtype,
                   const std::vector<int64_t>& shape) {
  if (!IsDType(meta.dtype())) {
    return MalformedChunk(std::string(name) + " has dtype " + std::to_string(meta.dtype()));
  }
  const auto dtype_here = static_cast<DType>(meta.dtype());
  const std::vector<int64_t> shape_here(meta.shape().begin(), meta.shape().end());
  if (dtype_here == dtype && shape_here == shape) return Status();
  return MalformedChunk(std::string(name) + " is " + std::string(DTypeName(dtype_here)) + " " +
                        ShapeText(shape_here) + ", must be " + std::string(DTypeName(dtype)) + " " +
                        ShapeText(shape));
}

// An uninitialised tensor of an answer; without memory if its bytes are discarded.
Result<HostTensor> MakeTensor(const char* name, DType dtype, const std::vector<int64_t>& shape,
                              Payload payload) {
  const Result<int64_t> bytes = TensorBytes(name, dtype, shape);
  if (!bytes.ok()) return MalformedChunk(bytes.status().message());
  if (payload == Payload::kDiscard) return HostTensor{dtype, shape, nullptr, *bytes};
  Result<HostTensor> made = HostTensor::Make(name, dtype, shape);
  if (!made.ok()) return MalformedChunk(made.status().message());
  return made;
}

v1::Tensor& InputOf(v1::AttendRequest& request, v1::TensorName name) {
  switch (name) {
    case v1::TENSOR_NAME_K:
      return *request.mutable_k();
    case v1::TENSOR_NAME_V:
      return *request.mutable_v();
    case v1::TENSOR_NAME_BIAS:
      return *request.mutable_bias();
    case v1::TENSOR_NAME_O:
      return *request.mutable_backward()->mutable_o();
    case v1::TENSOR_NAME_LSE:
      return *request.mutable_backward()->mutable_lse();
    case v1::TENSOR_NAME_D_O:
      return *request.mutable_backward()->mutable_d_o();
    case v1::TENSOR_NAME_D_LSE:
      return *request.mutable_backward()->mutable_d_lse();
    default:
      return *request.mutable_q();
  }
}

}  // namespace

Result<ChunkedCall> ChunkedCall::Make(const AttentionCall& call,
                                      std::shared_ptr<const void> keep_alive) {
  ATTEND_RETURN_IF_ERROR(CheckText(call));
  ChunkedCall chunked;
  chunked.header_ = RequestHeader(call);
  ForTensors(call, [&](v1::TensorName name, const TensorRef& tensor) {
    InputOf(chunked.header_, name).mutable_chunked();
    chunked.tensors_.emplace_back(name, tensor);
  });
  chunked.keep_alive_ = std::move(keep_alive);
  chunked.owned_ = true;
  for (const auto& [name, tensor] : chunked.tensors_) {
    if (tensor.bytes < 0) {
      return InvalidArgument("a tensor has " + std::to_string(tensor.bytes) +
                             " bytes, must have at least 0");
    }
    chunked.payload_bytes_ += tensor.bytes;
    chunked.owned_ = chunked.owned_ && (tensor.bytes == 0 || tensor.owner.use_count() > 0);
  }
  chunked.answer_bytes_ = AnswerBytes(call);
  chunked.answer_ = AnswerTensors(call);
  chunked.header_bytes_ = static_cast<int64_t>(chunked.header_.ByteSizeLong());
  return chunked;
}

grpc::ByteBuffer ChunkedCall::Header(std::string_view request_id) const {
  v1::AttendChunkedRequest message;
  *message.mutable_header() = header_;
  message.mutable_header()->set_request_id(std::string(request_id));
  return Serialize(message);
}

bool ChunkedCall::Next(int64_t bytes_max, Piece* piece) const {
  piece->offset += piece->bytes;
  for (; piece->tensor < tensors_.size(); ++piece->tensor, piece->offset = 0) {
    const int64_t left = tensors_[piece->tensor].second.bytes - piece->offset;
    piece->bytes = std::min({left, bytes_max, kPieceBytes});
    if (left > 0) return true;
  }
  piece->bytes = 0;
  return false;
}

grpc::ByteBuffer ChunkedCall::Chunk(const Piece& piece) const {
  const auto& [name, tensor] = tensors_[piece.tensor];
  std::array<uint8_t, 40> head;
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(kTensorTag, head.data());
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(name), end);
  end = CodedOutputStream::WriteVarint32ToArray(kOffsetTag, end);
  end = CodedOutputStream::WriteVarint64ToArray(static_cast<uint64_t>(piece.offset), end);
  end = CodedOutputStream::WriteVarint32ToArray(kDataTag, end);
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(piece.bytes), end);
  const TensorRef data(tensor, piece.offset, piece.bytes);
  const std::array<grpc::Slice, 2> slices = {
      grpc::Slice(head.data(), static_cast<size_t>(end - head.data())),
      BorrowedSlice(data, keep_alive_)};
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer TokenMessage(const std::string& token) {
  v1::AttendChunkedRequest message;
  message.set_token(token);
  return Serialize(message);
}

bool ByteRanges::Add(int64_t begin, int64_t bytes) {
  assert(begin >= 0 && bytes >= 0 && begin <= INT64_MAX - bytes);
  if (bytes == 0) return true;
  int64_t end = begin + bytes;
  auto next = ends_.upper_bound(begin);
  if (next != ends_.end() && next->first < end) return false;
  auto before = next == ends_.begin() ? ends_.end() : std::prev(next);
  if (before != ends_.end() && before->second > begin) return false;
  if (next != ends_.end() && next->first == end) {
    end = next->second;
    ends_.erase(next);
  }
  if (before != ends_.end() && before->second == begin) {
    before->second = end;
  } else {
    ends_[begin] = end;
  }
  return true;
}

Status ChunkedAnswer::Take(grpc::ByteBuffer* message, std::optional<v1::ChunkedGrant>* grant) {
  ChunkHead head;
  bool chunk;
  {
    grpc::ProtoBufferReader reader(message);
    if (!reader.status().ok()) return MalformedChunk(reader.status().error_message());
    CodedInputStream in(&reader);
    chunk = ReadHead(&in, static_cast<int64_t>(message->Length()), &head);
  }
  const Status status =
      chunk ? TakeChunk(message, static_cast<int>(head.tensor), head.offset, head.bytes)
            : TakeFields(message, grant);
  message->Clear();
  return status;
}

Status ChunkedAnswer::TakeFields(grpc::ByteBuffer* message,
                                 std::optional<v1::ChunkedGrant>* grant) {
  v1::AttendChunkedResponse fields;
  if (!grpc::SerializationTraits<v1::AttendChunkedResponse>::Deserialize(message, &fields).ok()) {
    return MalformedChunk("it cannot be parsed");
  }
  if (fields.has_grant()) {
    *grant = std::move(*fields.mutable_grant());
    return Status();
  }
  if (!fields.has_response()) return MalformedChunk("it has neither grant nor response nor data");
  return TakeHeader(fields.mutable_response());
}

Status ChunkedAnswer::TakeHeader(v1::AttendResponse* response) {
  auto wanted = call_->answer().begin();
  for (const v1::TensorName name : kAnswerNames) {
    const v1::Tensor* const meta = TensorOf(*response, name);
    const bool asked = wanted != call_->answer().end() && wanted->name == name;
    if ((meta != nullptr) != asked) {
      return MalformedChunk(
          asked ? "it has no " + std::string(NameOf(name)) + ", but one was requested"
                : "it has an " + std::string(NameOf(name)) + ", but none was requested");
    }
    if (!asked) continue;
    ATTEND_RETURN_IF_ERROR(CheckTensor(NameOf(name), *meta, wanted->dtype, wanted->shape));
    ++wanted;
  }
  const MutexLock lock(mutex_);
  if (header_) return MalformedChunk("a second header");
  ATTEND_RETURN_IF_ERROR(MakeTensors());
  header_ = true;
  TakeSmallFields(response, &response_.result);
  return Status();
}

Status ChunkedAnswer::MakeTensors() {
  if (made_) return Status();
  if (call_->backward()) response_.result.gradients.emplace();
  int64_t bytes = 0;
  for (const AnswerTensor& each : call_->answer()) {
    Result<HostTensor> made = MakeTensor(NameOf(each.name), each.dtype, each.shape, payload_);
    if (!made.ok()) return made.status();
    if (__builtin_add_overflow(bytes, made->bytes, &bytes)) {
      return MalformedChunk("the bytes of its tensors overflow 64 bits");
    }
    MakeTensorOf(response_.result, each.name) = std::move(*made);
  }
  missing_bytes_ = response_.payload_bytes = bytes;
  made_ = true;
  return Status();
}

Result<std::byte*> ChunkedAnswer::Reserve(int tensor, uint64_t offset, int64_t bytes) {
  ATTEND_RETURN_IF_ERROR(MakeTensors());
  const std::vector<AnswerTensor>& answer = call_->answer();
  const auto found = std::find_if(answer.begin(), answer.end(),
                                  [&](const AnswerTensor& each) { return each.name == tensor; });
  const HostTensor* const to =
      found == answer.end() ? nullptr : TensorOf(response_.result, found->name);
  const int64_t size = to == nullptr ? 0 : to->bytes;
  if (to == nullptr || bytes > size || offset > static_cast<uint64_t>(size - bytes)) {
    return MalformedChunk("a chunk of tensor " + std::to_string(tensor) + " at offset " +
                          std::to_string(offset) + " with " + std::to_string(bytes) +
                          " bytes is not within the tensor's " + std::to_string(size));
  }
  if (!came_[static_cast<size_t>(found - answer.begin())].Add(static_cast<int64_t>(offset),
                                                              bytes)) {
    return MalformedChunk("bytes of tensor " + std::to_string(tensor) + " in [" +
                          std::to_string(offset) + ", " +
                          std::to_string(static_cast<int64_t>(offset) + bytes) + ") came twice");
  }
  return to->data == nullptr ? nullptr : to->data.get() + offset;
}

Status ChunkedAnswer::TakeChunk(grpc::ByteBuffer* message, int tensor, uint64_t offset,
                                int64_t bytes) {
  std::byte* place;
  {
    const MutexLock lock(mutex_);
    const Result<std::byte*> reserved = Reserve(tensor, offset, bytes);
    if (!reserved.ok()) return reserved.status();
    place = *reserved;
  }
  if (place != nullptr) {
    std::vector<grpc::Slice> slices;
    if (!message->Dump(&slices).ok()) return MalformedChunk("it cannot be read");
    int64_t skip = static_cast<int64_t>(message->Length()) - bytes;  // the data is last
    for (const grpc::Slice& slice : slices) {
      const int64_t size = static_cast<int64_t>(slice.size());
      const int64_t from = std::min(skip, size);
      skip -= from;
      std::memcpy(place, slice.begin() + from, static_cast<size_t>(size - from));
      place += size - from;
    }
  }
  const MutexLock lock(mutex_);
  missing_bytes_ -= bytes;
  assert(missing_bytes_ >= 0 && "a byte came twice");
  return Status();
}

bool ChunkedAnswer::complete() const {
  const MutexLock lock(mutex_);
  return header_ && missing_bytes_ == 0;
}

DecodedResponse ChunkedAnswer::TakeResponse() {
  const MutexLock lock(mutex_);
  assert(header_ && missing_bytes_ == 0 && "the answer is not complete");
  return std::move(response_);
}

}  // namespace attend::client
