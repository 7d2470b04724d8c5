// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/echo_server.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "attend/v1/attention.grpc.pb.h"

namespace attend::bench {
namespace {

using RawService =
    v1::AttentionService::WithRawCallbackMethod_Attend<v1::AttentionService::Service>;
using GeneratedService =
    v1::AttentionService::WithCallbackMethod_Attend<v1::AttentionService::Service>;

class SameBytes final : public RawService {
  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* call,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override {
    *response = *request;  // references to the same slices
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

class SameSizes final : public RawService {
 public:
  explicit SameSizes(int64_t answer_bytes) : answer_(static_cast<size_t>(answer_bytes)) {}

 private:
  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* call, const grpc::ByteBuffer*,
                                   grpc::ByteBuffer* response) override {
    *response = grpc::ByteBuffer(&answer_, 1);
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  const grpc::Slice answer_;
};

class Generated final : public GeneratedService {
 public:
  explicit Generated(int64_t answer_bytes) : answer_(static_cast<size_t>(answer_bytes), 'o') {}

 private:
  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* call,
                                   const v1::AttendRequest* request,
                                   v1::AttendResponse* response) override {
    response->set_request_id(request->request_id());
    response->add_raw(answer_);
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  const std::string answer_;
};

std::unique_ptr<grpc::Service> MakeService(EchoKind kind, int64_t answer_bytes) {
  switch (kind) {
    case EchoKind::kSameBytes:
      return std::make_unique<SameBytes>();
    case EchoKind::kSameSizes:
      return std::make_unique<SameSizes>(answer_bytes);
    case EchoKind::kGenerated:
      return std::make_unique<Generated>(answer_bytes);
  }
  return nullptr;
}

}  // namespace

const char* EchoName(EchoKind kind) {
  switch (kind) {
    case EchoKind::kSameBytes:
      return "echo, same bytes back";
    case EchoKind::kSameSizes:
      return "echo, same sizes as attend";
    case EchoKind::kGenerated:
      return "echo, generated code";
  }
  return "";
}

struct EchoServer::Impl {
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer(EchoKind kind, int64_t answer_bytes) : impl_(std::make_unique<Impl>()) {
  impl_->service = MakeService(kind, answer_bytes);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(impl_->service.get());
  impl_->server = builder.BuildAndStart();
}

EchoServer::~EchoServer() { impl_->server->Shutdown(); }

}  // namespace attend::bench
