// SPDX-License-Identifier: Apache-2.0
//
// A tenant's calls on sessions, on generated classes and a connection of its own.

#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "attend/v1/attention.grpc.pb.h"
#include "attend/v1/session.grpc.pb.h"
#include "tests/server/support/test_server.h"

namespace attend::test {

class SessionCalls {
 public:
  explicit SessionCalls(const TestServer& server, std::string tenant = "");

  grpc::Status Create(const v1::CreateSessionRequest& request, v1::Session& session);
  grpc::Status Fork(const std::string& id, std::optional<int64_t> length = {});
  grpc::Status Truncate(const std::string& id, int64_t length);
  grpc::Status Free(const std::string& id);
  grpc::Status Get(const std::string& id, v1::Session& session);
  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse& response);
  // Sends the header and some of the bytes; then the client disconnects.
  grpc::Status AbandonChunks(const v1::AttendRequest& request, std::mt19937_64& random);

  // From the metadata of the last fork, truncation or request.
  const v1::RequestStatus& refusal() const { return refusal_; }

 private:
  void Name(grpc::ClientContext& context) const;
  void ReadRefusal(const grpc::ClientContext& context);

  const TestServer& server_;
  const std::string tenant_;
  v1::RequestStatus refusal_;
  std::unique_ptr<v1::SessionService::Stub> sessions_;
  std::unique_ptr<v1::AttentionService::Stub> attention_;
};

}  // namespace attend::test
