// SPDX-License-Identifier: Apache-2.0

#include "server/chunk_codec.h"

#include <array>
#include <string>
#include <utility>

#include "server/codec.h"
#include "server/wire.h"

namespace attend {
namespace {

using Message = v1::AttendChunkedRequest;

constexpr uint64_t kTensorTag = (Message::kTensorFieldNumber << 3) | wire::kVarint;
constexpr uint64_t kOffsetTag = (Message::kOffsetFieldNumber << 3) | wire::kVarint;
static_assert(wire::kRawField == Message::kDataFieldNumber);
static_assert(wire::kRawField == v1::AttendChunkedResponse::kDataFieldNumber);
static_assert(int{Message::kTensorFieldNumber} ==
              int{v1::AttendChunkedResponse::kTensorFieldNumber});
static_assert(int{Message::kOffsetFieldNumber} ==
              int{v1::AttendChunkedResponse::kOffsetFieldNumber});

// Protobuf takes no longer tags and lengths; what it makes of them is its business.
constexpr int64_t kVarint32BytesMax = 5;

Status Malformed() { return InvalidArgument("the message is not an AttendChunkedRequest"); }

grpc::ByteBuffer Serialize(const v1::AttendChunkedResponse& response) {
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

Status ChunkMessage::Take(grpc::ByteBuffer& message, const char* what, int64_t bytes_max) {
  message_bytes_ = static_cast<int64_t>(message.Length());
  if (message_bytes_ > bytes_max) {
    return InvalidArgument(std::string("the ") + what + " has " + std::to_string(message_bytes_) +
                           " bytes, must have at most " + std::to_string(bytes_max));
  }
  if (!message.Dump(&slices_).ok()) return InvalidArgument("the message cannot be read");
  message.Clear();
  spans_.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) spans_.emplace_back(slice.begin(), slice.size());
  return Status();
}

Status ChunkMessage::ParseFirst(v1::AttendChunkedRequest& first) const {
  if (!ParseSlices(spans_, message_bytes_, first)) return Malformed();
  if (first.first_case() == Message::FIRST_NOT_SET) {
    return InvalidArgument("the stream's first message has neither header nor token");
  }
  if (first.tensor() != 0 || first.offset() != 0 || !first.data().empty()) {
    return InvalidArgument("the stream's first message must have no chunk beside its header");
  }
  return Status();
}

bool ChunkMessage::ReadInOrder() {
  SliceReader reader(spans_);
  uint64_t tensor = 0;
  while (reader.remaining() > 0) {
    const int64_t at = reader.position();
    uint64_t tag = 0;
    if (!reader.ReadVarint(&tag) || reader.position() - at > kVarint32BytesMax) return false;
    if (tag == kTensorTag) {
      if (!reader.ReadVarint(&tensor)) return false;
    } else if (tag == kOffsetTag) {
      if (!reader.ReadVarint(&offset_)) return false;
    } else {
      uint64_t bytes = 0;
      const int64_t length_at = reader.position();
      if (tag != wire::kRawTag || !reader.ReadVarint(&bytes)) return false;
      if (reader.position() - length_at > kVarint32BytesMax) return false;
      if (bytes != static_cast<uint64_t>(reader.remaining())) return false;
      data_at_ = reader.position();
      bytes_ = static_cast<int64_t>(bytes);
      break;
    }
  }
  tensor_ = static_cast<int>(tensor);
  return true;
}

Status ChunkMessage::ParseChunk(int64_t bytes_max) {
  if (!ReadInOrder()) {
    parsed_ = std::make_unique<Message>();
    if (!ParseSlices(spans_, message_bytes_, *parsed_)) return Malformed();
    if (parsed_->first_case() != Message::FIRST_NOT_SET) {
      return InvalidArgument("header and token belong into the stream's first message only");
    }
    tensor_ = parsed_->tensor();
    offset_ = parsed_->offset();
    bytes_ = static_cast<int64_t>(parsed_->data().size());
  }
  if (bytes_ >= 1 && bytes_ <= bytes_max) return Status();
  return InvalidArgument("data has " + std::to_string(bytes_) + " bytes, must have 1 to " +
                         std::to_string(bytes_max));
}

std::vector<CopyPiece> ChunkMessage::Pieces(void* to) const {
  std::vector<CopyPiece> pieces;
  if (parsed_ != nullptr) {
    pieces.push_back({parsed_->data().data(), to, bytes_});
    return pieces;
  }
  pieces.reserve(spans_.size());
  SliceReader reader(spans_);
  reader.Skip(data_at_);
  reader.ReadPieces(to, bytes_, pieces);
  return pieces;
}

grpc::ByteBuffer EncodeGrant(const std::string& token, int64_t streams_max, int64_t chunk_bytes_max,
                             int64_t idle_timeout_ms) {
  v1::AttendChunkedResponse response;
  v1::ChunkedGrant* grant = response.mutable_grant();
  grant->set_token(token);
  grant->set_streams_max(static_cast<int32_t>(streams_max));
  grant->set_chunk_bytes_max(chunk_bytes_max);
  grant->set_idle_timeout_ms(idle_timeout_ms);
  return Serialize(response);
}

grpc::ByteBuffer EncodeChunkedHeader(v1::AttendResponse* response) {
  v1::AttendChunkedResponse message;
  message.mutable_response()->Swap(response);
  return Serialize(message);
}

grpc::ByteBuffer EncodeChunk(v1::TensorName tensor, int64_t offset, const void* data, int64_t bytes,
                             std::shared_ptr<const HostBlock> block) {
  std::array<uint8_t, 2 + 11 + wire::kRawPrefixBytesMax> head;
  uint8_t* end = wire::WriteVarint(kTensorTag, head.data());
  end = wire::WriteVarint(static_cast<uint64_t>(tensor), end);
  end = wire::WriteVarint(kOffsetTag, end);
  end = wire::WriteVarint(static_cast<uint64_t>(offset), end);
  end = wire::WriteRawPrefix(bytes, end);
  using Hold = std::shared_ptr<const HostBlock>;
  const std::array<grpc::Slice, 2> slices = {
      grpc::Slice(head.data(), static_cast<size_t>(end - head.data())),
      grpc::Slice(
          const_cast<void*>(data), static_cast<size_t>(bytes),
          [](void* hold) { delete static_cast<Hold*>(hold); }, new Hold(std::move(block)))};
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace attend
