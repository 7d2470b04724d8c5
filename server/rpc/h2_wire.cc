// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/h2_wire.h"

#include <grpcpp/support/slice.h>

#include <memory>
#include <utility>

#include "server/wire/grpc_status.h"

namespace attend {

int H2Wire::Find(std::string_view key, std::string_view& first) const {
  int count = 0;
  for (const auto& [name, value] : call_.metadata()) {
    if (name == key && count++ == 0) first = value;
  }
  return count;
}

void H2Wire::End(const grpc::Status& status) const {
  call_.Finish({FromGrpc(status), std::move(trailers_)});
}

grpc::ByteBuffer ToByteBuffer(InMessage&& message) {
  using Owner = std::shared_ptr<const std::string>;
  if (message.blocks.empty()) {
    const grpc::Slice slice(message.bytes.data(), message.bytes.size());
    return grpc::ByteBuffer(&slice, 1);
  }
  std::vector<grpc::Slice> slices;
  slices.reserve(message.blocks.size());
  for (Owner& block : message.blocks) {
    auto owner = std::make_unique<Owner>(std::move(block));
    slices.emplace_back(
        const_cast<char*>((*owner)->data()), (*owner)->size(),
        [](void* held) { delete static_cast<Owner*>(held); }, owner.get());
    (void)owner.release();
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

OutMessage ToOutMessage(const grpc::ByteBuffer& message) {
  const auto piece = [](grpc::Slice&& slice) -> OutMessage::Piece {
    const auto owner = std::make_shared<const grpc::Slice>(std::move(slice));
    return {{reinterpret_cast<const char*>(owner->begin()), owner->size()}, owner};
  };
  OutMessage out;
  grpc::Slice one;
  std::vector<grpc::Slice> slices;
  if (message.TrySingleSlice(&one).ok()) {
    out.first = piece(std::move(one));
  } else if (message.Dump(&slices).ok()) {
    out.rest.reserve(slices.size());
    for (grpc::Slice& slice : slices) out.rest.push_back(piece(std::move(slice)));
  }
  return out;
}

}  // namespace attend
