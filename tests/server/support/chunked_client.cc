// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/chunked_client.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>
#include <utility>

#include "server/schedule/tenants.h"
#include "tests/server/support/await.h"

namespace attend::test {

ChunkedStreamClient::ChunkedStreamClient(const TestServer& server,
                                         std::chrono::milliseconds timeout,
                                         const std::string& tenant)
    : stub_(server.Stub()) {
  if (timeout.count() > 0) context_.set_deadline(std::chrono::system_clock::now() + timeout);
  if (!tenant.empty()) context_.AddMetadata(kTenantMetadataKey, tenant);
  stream_ = stub_->AttendChunked(&context_);
}

bool ChunkedStreamClient::SendHeader(const v1::AttendRequest& header) {
  v1::AttendChunkedRequest message;
  *message.mutable_header() = header;
  return Send(message);
}

bool ChunkedStreamClient::SendToken(const std::string& token) {
  v1::AttendChunkedRequest message;
  message.set_token(token);
  return Send(message);
}

bool ChunkedStreamClient::SendChunk(int tensor, uint64_t offset, const std::string& data) {
  v1::AttendChunkedRequest message;
  message.set_tensor(static_cast<v1::TensorName>(tensor));
  message.set_offset(offset);
  message.set_data(data);
  return Send(message);
}

v1::AttendChunkedResponse ChunkedStreamClient::Receive() {
  v1::AttendChunkedResponse message;
  EXPECT_TRUE(Receive(&message)) << "the stream has ended";
  return message;
}

grpc::Status ChunkedStreamClient::Finish() {
  v1::AttendChunkedResponse message;
  while (Receive(&message)) {
  }
  return stream_->Finish();
}

int ChunkedStreamClient::PushbackMs() const {
  const auto& metadata = context_.GetServerTrailingMetadata();
  const auto found = metadata.find("grpc-retry-pushback-ms");
  if (found == metadata.end()) return -1;
  return std::atoi(std::string(found->second.data(), found->second.size()).c_str());
}

v1::AttendRequest ChunkedHeader(const v1::AttendRequest& request) {
  v1::AttendRequest header = request;
  header.clear_raw();
  header.mutable_q()->mutable_chunked();
  header.mutable_k()->mutable_chunked();
  header.mutable_v()->mutable_chunked();
  if (header.has_bias()) header.mutable_bias()->mutable_chunked();
  if (!header.has_backward()) return header;
  v1::BackwardPass& backward = *header.mutable_backward();
  backward.mutable_o()->mutable_chunked();
  backward.mutable_lse()->mutable_chunked();
  backward.mutable_d_o()->mutable_chunked();
  if (backward.has_d_lse()) backward.mutable_d_lse()->mutable_chunked();
  return header;
}

namespace {

// The tensor that is the i-th entry of raw.
int NameOf(const v1::AttendRequest& request, int i) {
  const bool behind_bias = i >= 3 && !request.has_bias();
  return v1::TENSOR_NAME_Q + i + (behind_bias ? 1 : 0);
}

// The answer's tensor of this name; null if there is none.
const v1::Tensor* TensorOf(const v1::AttendResponse& response, v1::TensorName name) {
  const v1::Gradients& g = response.gradients();
  const std::map<v1::TensorName, std::pair<bool, const v1::Tensor*>> tensors = {
      {v1::TENSOR_NAME_O, {response.has_o(), &response.o()}},
      {v1::TENSOR_NAME_LSE, {response.has_lse(), &response.lse()}},
      {v1::TENSOR_NAME_D_Q, {g.has_d_q(), &g.d_q()}},
      {v1::TENSOR_NAME_D_K, {g.has_d_k(), &g.d_k()}},
      {v1::TENSOR_NAME_D_V, {g.has_d_v(), &g.d_v()}},
      {v1::TENSOR_NAME_D_BIAS, {g.has_d_bias(), &g.d_bias()}},
      {v1::TENSOR_NAME_D_SINKS, {g.has_d_sinks(), &g.d_sinks()}}};
  const auto found = tensors.find(name);
  return found == tensors.end() || !found->second.first ? nullptr : found->second.second;
}

}  // namespace

std::vector<Chunk> CutToChunks(const v1::AttendRequest& request, int64_t bytes_max,
                               std::mt19937_64& random) {
  std::vector<Chunk> chunks;
  std::uniform_int_distribution<size_t> size(1, static_cast<size_t>(bytes_max));
  for (int i = 0; i < request.raw_size(); ++i) {
    const std::string& raw = request.raw(i);
    for (size_t at = 0; at < raw.size();) {
      const size_t bytes = std::min(size(random), raw.size() - at);
      chunks.push_back({NameOf(request, i), at, raw.substr(at, bytes)});
      at += bytes;
    }
  }
  std::shuffle(chunks.begin(), chunks.end(), random);
  return chunks;
}

void AnswerBuilder::Add(const v1::AttendChunkedResponse& message) {
  const std::lock_guard lock(mutex_);
  if (message.has_response()) {
    ++headers_;
    response_ = message.response();
  } else if (!message.has_grant()) {
    chunks_.push_back({message.tensor(), message.offset(), message.data()});
  }
}

v1::AttendResponse AnswerBuilder::Build(std::string* fault) {
  const std::lock_guard lock(mutex_);
  if (headers_ != 1) *fault = std::to_string(headers_) + " headers";
  if (response_.raw_size() > 0) *fault = "the header has raw";
  for (int number = v1::TENSOR_NAME_O; number <= v1::TENSOR_NAME_D_SINKS; ++number) {
    const auto name = static_cast<v1::TensorName>(number);
    const v1::Tensor* const meta = TensorOf(response_, name);
    if (meta == nullptr) continue;
    const v1::Tensor& tensor = *meta;
    if (!tensor.has_chunked()) *fault = "the source of an answer's tensor is not chunked";
    std::string bytes(tensor.byte_length(), '\0');
    std::vector<bool> came(bytes.size());
    for (const Chunk& chunk : chunks_) {
      if (chunk.tensor != name) continue;
      if (chunk.data.empty()) *fault = "an empty chunk";
      if (chunk.offset + chunk.data.size() > bytes.size()) {
        *fault = "a chunk past the end";
        continue;
      }
      for (size_t i = 0; i < chunk.data.size(); ++i) {
        if (came[chunk.offset + i]) *fault = "bytes twice";
        came[chunk.offset + i] = true;
        bytes[chunk.offset + i] = chunk.data[i];
      }
    }
    if (std::find(came.begin(), came.end(), false) != came.end()) *fault = "bytes missing";
    response_.add_raw(std::move(bytes));
  }
  return response_;
}

bool ChunkedOutcome::ok() const {
  return fault.empty() && std::all_of(statuses.begin(), statuses.end(),
                                      [](const grpc::Status& status) { return status.ok(); });
}

ChunkedOutcome AttendOverStreams(const TestServer& server, const v1::AttendRequest& request,
                                 int streams, int64_t chunk_bytes_max, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<Chunk> chunks = CutToChunks(request, chunk_bytes_max, random);
  if (chunks.empty()) streams = 1;  // over before another stream could join
  std::vector<std::unique_ptr<ChunkedStreamClient>> clients;
  ChunkedOutcome outcome;
  outcome.statuses.resize(static_cast<size_t>(streams));
  AnswerBuilder answer;
  clients.push_back(std::make_unique<ChunkedStreamClient>(server, kWaitMost));
  clients[0]->SendHeader(ChunkedHeader(request));
  v1::AttendChunkedResponse grant;
  if (!clients[0]->Receive(&grant)) {
    outcome.statuses.assign(1, clients[0]->Finish());
    return outcome;
  }
  outcome.token = grant.grant().token();
  for (int i = 1; i < streams; ++i) {
    clients.push_back(std::make_unique<ChunkedStreamClient>(server, kWaitMost));
    clients.back()->SendToken(grant.grant().token());
    v1::AttendChunkedResponse welcome;
    if (!clients.back()->Receive(&welcome) || !welcome.has_grant()) outcome.fault = "no grant";
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < streams; ++i) {
    threads.emplace_back([&, i] {
      ChunkedStreamClient& client = *clients[static_cast<size_t>(i)];
      for (size_t c = static_cast<size_t>(i); c < chunks.size();
           c += static_cast<size_t>(streams)) {
        client.SendChunk(chunks[c].tensor, chunks[c].offset, chunks[c].data);
      }
      client.HalfClose();
      v1::AttendChunkedResponse message;
      while (client.Receive(&message)) answer.Add(message);
      outcome.statuses[static_cast<size_t>(i)] = client.Finish();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (outcome.ok()) outcome.response = answer.Build(&outcome.fault);
  return outcome;
}

}  // namespace attend::test
