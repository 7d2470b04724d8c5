// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/echo_server.h"

#include <grpcpp/grpcpp.h>

#include "attend/v1/attention.grpc.pb.h"

namespace attend::bench {
namespace {

class Echo final
    : public v1::AttentionService::WithRawCallbackMethod_Attend<v1::AttentionService::Service> {
 public:
  explicit Echo(int64_t answer_bytes) : answer_(static_cast<size_t>(answer_bytes)) {}

 private:
  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* call, const grpc::ByteBuffer*,
                                   grpc::ByteBuffer* response) override {
    *response = grpc::ByteBuffer(&answer_, 1);  // a reference, no copy
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  const grpc::Slice answer_;
};

class Nothing final : public grpc::CallbackGenericService {
  class Call final : public grpc::ServerGenericBidiReactor {
   public:
    Call() { StartRead(&message_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::OK);
      answer_ = grpc::ByteBuffer(&empty_, 1);
      StartWriteAndFinish(&answer_, {}, grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    const grpc::Slice empty_;
    grpc::ByteBuffer message_;
    grpc::ByteBuffer answer_;
  };
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Call();
  }
};

}  // namespace

struct EchoServer::Impl {
  explicit Impl(int64_t answer_bytes) : service(answer_bytes) {}
  Echo service;
  Nothing nothing;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer(const std::string& listen, int64_t answer_bytes,
                       std::shared_ptr<grpc::ServerCredentials> credentials)
    : impl_(std::make_unique<Impl>(answer_bytes)) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(listen, credentials, &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(&impl_->service);
  builder.RegisterCallbackGenericService(&impl_->nothing);
  impl_->server = builder.BuildAndStart();
  if (impl_->server == nullptr) return;
  const bool unix_socket = listen.starts_with("unix:");
  address_ = unix_socket ? listen : listen.substr(0, listen.rfind(':') + 1) + std::to_string(port);
}

EchoServer::~EchoServer() {
  if (impl_->server != nullptr) impl_->server->Shutdown();
}

}  // namespace attend::bench
