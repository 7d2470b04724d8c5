// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/session_calls.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>
#include <vector>

#include "server/schedule/tenants.h"
#include "tests/server/support/chunked_client.h"

namespace attend::test {

SessionCalls::SessionCalls(const TestServer& server, std::string tenant)
    : server_(server), tenant_(std::move(tenant)) {
  const std::shared_ptr<grpc::Channel> channel = server.Connect();
  sessions_ = v1::SessionService::NewStub(channel);
  attention_ = v1::AttentionService::NewStub(channel);
}

void SessionCalls::Name(grpc::ClientContext& context) const {
  if (!tenant_.empty()) context.AddMetadata(kTenantMetadataKey, tenant_);
}

void SessionCalls::ReadRefusal(const grpc::ClientContext& context) {
  refusal_.Clear();
  const auto& trailers = context.GetServerTrailingMetadata();
  if (const auto found = trailers.find("attend-status-bin"); found != trailers.end()) {
    EXPECT_TRUE(refusal_.ParseFromString({found->second.data(), found->second.size()}));
  }
}

grpc::Status SessionCalls::Create(const v1::CreateSessionRequest& request, v1::Session& session) {
  grpc::ClientContext context;
  Name(context);
  return sessions_->CreateSession(&context, request, &session);
}

grpc::Status SessionCalls::Fork(const std::string& id, std::optional<int64_t> length) {
  v1::ForkSessionRequest request;
  request.set_session(id);
  if (length.has_value()) request.set_length(*length);
  v1::Session fork;
  grpc::ClientContext context;
  Name(context);
  const grpc::Status status = sessions_->ForkSession(&context, request, &fork);
  ReadRefusal(context);
  return status;
}

grpc::Status SessionCalls::Truncate(const std::string& id, int64_t length) {
  v1::TruncateSessionRequest request;
  request.set_session(id);
  request.set_length(length);
  v1::Session session;
  grpc::ClientContext context;
  Name(context);
  const grpc::Status status = sessions_->TruncateSession(&context, request, &session);
  ReadRefusal(context);
  return status;
}

grpc::Status SessionCalls::Free(const std::string& id) {
  v1::FreeSessionRequest request;
  request.set_session(id);
  v1::FreeSessionResponse response;
  grpc::ClientContext context;
  Name(context);
  return sessions_->FreeSession(&context, request, &response);
}

grpc::Status SessionCalls::Get(const std::string& id, v1::Session& session) {
  v1::GetSessionRequest request;
  request.set_session(id);
  grpc::ClientContext context;
  Name(context);
  return sessions_->GetSession(&context, request, &session);
}

grpc::Status SessionCalls::Attend(const v1::AttendRequest& request, v1::AttendResponse& response) {
  grpc::ClientContext context;
  Name(context);
  const grpc::Status status = attention_->Attend(&context, request, &response);
  ReadRefusal(context);
  return status;
}

grpc::Status SessionCalls::AbandonChunks(const v1::AttendRequest& request,
                                         std::mt19937_64& random) {
  constexpr int64_t kChunkBytesMax = 100'000;
  ChunkedStreamClient client(server_, std::chrono::milliseconds(0), tenant_);
  client.SendHeader(ChunkedHeader(request));
  v1::AttendChunkedResponse grant;
  if (!client.Receive(&grant)) return client.Finish();
  std::vector<Chunk> chunks = CutToChunks(request, kChunkBytesMax, random);
  if (!chunks.empty()) chunks.resize(random() % chunks.size());
  for (const Chunk& chunk : chunks) client.SendChunk(chunk.tensor, chunk.offset, chunk.data);
  client.Cancel();
  return client.Finish();
}

}  // namespace attend::test
