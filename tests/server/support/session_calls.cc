// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/session_calls.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kernels/contract/dtype.h"
#include "server/schedule/tenants.h"
#include "tests/server/support/chunked_client.h"

namespace attend::test {
namespace {

constexpr int64_t kChunkBytesMax = 100'000;
constexpr size_t kPageTokens = 64;

// Half the time, chunks end where a head's rows of a page do, or a byte before or after.
std::vector<Chunk> Cut(const v1::AttendRequest& request, std::mt19937_64& random) {
  if (random() % 2 == 0) return CutToChunks(request, kChunkBytesMax, random);
  std::vector<Chunk> chunks;
  for (int i = 0; i < request.raw_size(); ++i) {
    const std::string& raw = request.raw(i);
    const v1::Tensor& tensor = i == 0 ? request.q() : i == 1 ? request.k() : request.v();
    const auto row_bytes =
        static_cast<size_t>(tensor.shape(3) * DTypeBytes(static_cast<DType>(tensor.dtype())));
    const size_t bytes = kPageTokens * row_bytes - 1 + random() % 3;
    for (size_t at = 0; at < raw.size(); at += bytes) {
      chunks.push_back({i + 1, at, raw.substr(at, bytes)});
    }
  }
  std::shuffle(chunks.begin(), chunks.end(), random);
  return chunks;
}

}  // namespace

SessionCalls::SessionCalls(const TestServer& server, std::string tenant)
    : server_(server), tenant_(std::move(tenant)) {
  const std::shared_ptr<grpc::Channel> channel = server.Connect();
  sessions_ = v1::SessionService::NewStub(channel);
  attention_ = v1::AttentionService::NewStub(channel);
}

void SessionCalls::Name(grpc::ClientContext& context) const {
  if (!tenant_.empty()) context.AddMetadata(kTenantMetadataKey, tenant_);
}

grpc::Status SessionCalls::Create(const v1::CreateSessionRequest& request, v1::Session& session) {
  grpc::ClientContext context;
  Name(context);
  return sessions_->CreateSession(&context, request, &session);
}

grpc::Status SessionCalls::Fork(const std::string& id, std::optional<int64_t> length,
                                v1::Session& fork) {
  v1::ForkSessionRequest request;
  request.set_session(id);
  if (length.has_value()) request.set_length(*length);
  grpc::ClientContext context;
  Name(context);
  return sessions_->ForkSession(&context, request, &fork);
}

grpc::Status SessionCalls::Truncate(const std::string& id, int64_t length) {
  v1::TruncateSessionRequest request;
  request.set_session(id);
  request.set_length(length);
  v1::Session session;
  grpc::ClientContext context;
  Name(context);
  return sessions_->TruncateSession(&context, request, &session);
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

grpc::Status SessionCalls::KeepAlive(const std::string& id) {
  v1::KeepAliveRequest request;
  request.set_session(id);
  v1::Session session;
  grpc::ClientContext context;
  Name(context);
  return sessions_->KeepAlive(&context, request, &session);
}

std::vector<v1::Session> SessionCalls::List(int page_size) {
  std::vector<v1::Session> all;
  for (;;) {
    v1::ListSessionsRequest request;
    request.set_page_size(page_size);
    if (!all.empty()) request.set_after(all.back().id());
    v1::ListSessionsResponse response;
    grpc::ClientContext context;
    Name(context);
    const grpc::Status status = sessions_->ListSessions(&context, request, &response);
    if (!status.ok()) throw std::runtime_error(status.error_message());
    all.insert(all.end(), response.sessions().begin(), response.sessions().end());
    if (!response.more()) return all;
  }
}

grpc::Status SessionCalls::Attend(Way way, const v1::AttendRequest& request,
                                  v1::AttendResponse& response, std::mt19937_64& random) {
  if (way == Way::kStream) return AttendOnStream(request, response);
  if (way == Way::kChunks) return AttendInChunks(request, response, random);
  grpc::ClientContext context;
  return Attend(context, request, response);
}

grpc::Status SessionCalls::Attend(grpc::ClientContext& context, const v1::AttendRequest& request,
                                  v1::AttendResponse& response) {
  Name(context);
  return attention_->Attend(&context, request, &response);
}

grpc::Status SessionCalls::AttendOnStream(const v1::AttendRequest& request,
                                          v1::AttendResponse& response) {
  grpc::ClientContext context;
  Name(context);
  const auto stream = attention_->AttendStream(&context);
  stream->Write(request);
  stream->WritesDone();
  const bool answered = stream->Read(&response);
  const grpc::Status status = stream->Finish();
  if (!status.ok()) return status;
  if (!answered) return grpc::Status(grpc::StatusCode::INTERNAL, "the stream ended without answer");
  return grpc::Status(static_cast<grpc::StatusCode>(response.status().code()),
                      response.status().message());
}

grpc::Status SessionCalls::AttendInChunks(const v1::AttendRequest& request,
                                          v1::AttendResponse& response, std::mt19937_64& random) {
  ChunkedStreamClient client(server_, std::chrono::milliseconds(0), tenant_);
  client.SendHeader(ChunkedHeader(request));
  v1::AttendChunkedResponse message;
  if (!client.Receive(&message)) return client.Finish();
  AnswerBuilder answer;
  if (!message.has_grant()) answer.Add(message);
  for (const Chunk& chunk : Cut(request, random)) {
    client.SendChunk(chunk.tensor, chunk.offset, chunk.data);
  }
  client.HalfClose();
  while (client.Receive(&message)) answer.Add(message);
  const grpc::Status status = client.Finish();
  if (!status.ok()) return status;
  std::string fault;
  response = answer.Build(&fault);
  return fault.empty() ? status : grpc::Status(grpc::StatusCode::INTERNAL, fault);
}

grpc::Status SessionCalls::AbandonChunks(const v1::AttendRequest& request,
                                         std::mt19937_64& random) {
  ChunkedStreamClient client(server_, std::chrono::milliseconds(0), tenant_);
  client.SendHeader(ChunkedHeader(request));
  v1::AttendChunkedResponse grant;
  if (!client.Receive(&grant)) return client.Finish();
  std::vector<Chunk> chunks = Cut(request, random);
  if (!chunks.empty()) chunks.resize(random() % chunks.size());
  for (const Chunk& chunk : chunks) client.SendChunk(chunk.tensor, chunk.offset, chunk.data);
  client.Cancel();
  return client.Finish();
}

}  // namespace attend::test
