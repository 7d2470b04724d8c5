// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/echo_server.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

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
    *response = grpc::ByteBuffer(&answer_, 1);  // by reference, without a copy
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  const grpc::Slice answer_;
};

class InlineEcho final
    : public v1::AttentionService::WithRawCallbackMethod_Attend<
          v1::AttentionService::WithRawCallbackMethod_AttendStream<v1::AttentionService::Service>> {
 public:
  explicit InlineEcho(int64_t answer_bytes)
      : bytes_(static_cast<size_t>(answer_bytes)), rest_(bytes_ - std::min(bytes_, kIdBytes)) {}

 private:
  // A message begins with its id, a field with its tag and length.
  static constexpr size_t kIdBytes = 6;

  class Unary final : public grpc::ServerUnaryReactor {
    void OnDone() override { delete this; }
    bool InternalInlineable() override { return true; }
  };
  class Stream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    explicit Stream(const grpc::Slice& rest) : rest_(rest) { StartRead(&message_); }

   private:
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::OK);
      std::vector<grpc::Slice> slices;
      if (!message_.Dump(&slices).ok()) return Finish(grpc::Status::CANCELLED);
      std::string id;
      for (size_t i = 0; i < slices.size() && id.size() < kIdBytes; ++i) {
        const size_t bytes = std::min(slices[i].size(), kIdBytes - id.size());
        id.append(reinterpret_cast<const char*>(slices[i].begin()), bytes);
      }
      const std::array<grpc::Slice, 2> both = {grpc::Slice(id), rest_};
      answer_ = grpc::ByteBuffer(both.data(), both.size());
      StartWrite(&answer_);
    }
    void OnWriteDone(bool ok) override {
      if (ok) StartRead(&message_);
    }
    void OnDone() override { delete this; }
    bool InternalInlineable() override { return true; }

    const grpc::Slice rest_;
    grpc::ByteBuffer message_;
    grpc::ByteBuffer answer_;
  };

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext*, const grpc::ByteBuffer*,
                                   grpc::ByteBuffer* response) override {
    *response = grpc::ByteBuffer(&answer_, 1);
    auto* const reactor = new Unary();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttendStream(
      grpc::CallbackServerContext*) override {
    return new Stream(rest_);
  }

  const size_t bytes_;
  const grpc::Slice answer_{bytes_};
  const grpc::Slice rest_;
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
  Impl(int64_t answer_bytes, EchoKind kind) {
    if (kind == EchoKind::kInline) {
      service = std::make_unique<InlineEcho>(answer_bytes);
    } else {
      service = std::make_unique<Echo>(answer_bytes);
    }
  }
  std::unique_ptr<grpc::Service> service;
  Nothing nothing;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer(const std::string& listen, int64_t answer_bytes, EchoKind kind,
                       std::shared_ptr<grpc::ServerCredentials> credentials)
    : impl_(std::make_unique<Impl>(answer_bytes, kind)) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(listen, credentials, &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(impl_->service.get());
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
