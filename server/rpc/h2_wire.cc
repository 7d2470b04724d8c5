// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/h2_wire.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/support/slice.h>

#include <memory>
#include <utility>

#include "server/wire/grpc_status.h"

namespace attend {

std::string H2Wire::Security() const {
  return call_.peer().encrypted ? GRPC_SSL_TRANSPORT_SECURITY_TYPE : "";
}

std::vector<Credentials::Name> H2Wire::CertificateNames() const {
  std::vector<Credentials::Name> names;
  const auto add = [&](const std::vector<std::string>& texts, CertificateName kind) {
    for (const std::string& text : texts) names.push_back({kind, text});
  };
  add(call_.peer().uris, CertificateName::kUri);
  add(call_.peer().dns_names, CertificateName::kDns);
  add(call_.peer().common_names, CertificateName::kCommon);
  return names;
}

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
  using Owner = std::shared_ptr<const void>;
  if (message.pieces.empty()) {
    const grpc::Slice slice(message.bytes.data(), message.bytes.size());
    return grpc::ByteBuffer(&slice, 1);
  }
  std::vector<grpc::Slice> slices;
  slices.reserve(message.pieces.size());
  for (InMessage::Piece& piece : message.pieces) {
    auto owner = std::make_unique<Owner>(std::move(piece.owner));
    slices.emplace_back(
        const_cast<char*>(piece.bytes.data()), piece.bytes.size(),
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
