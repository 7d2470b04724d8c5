// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/h2_calls.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/attention_service.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/data_wire.h"
#include "server/rpc/h2_wire.h"
#include "server/rpc/unary_call.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

// A call that has been refused.
class H2Ended final : public CallHandler {
 public:
  void OnMessage(InMessage) override {}
  void OnHalfClose() override {}
  void OnWritten(bool) override {}
  void OnCancel() override {}
  void OnDone() override { delete this; }
};

class H2Unary final : public CallHandler, public UnaryWire {
 public:
  H2Unary(ServiceContext& context, std::string_view method, const CallTable::Data& data,
          ServerCall& call)
      : context_(context), method_(method), data_(data), call_(call), wire_(call) {}

  void Begin() {
    const Status status = OrOutOfMemory([&]() -> Status {
      Result<Caller> caller = CallerOf(context_, wire_, method_, Scope::kCompute, /*came=*/0);
      if (caller.ok()) caller_ = std::move(*caller);
      return caller.status();
    });
    status.ok() ? call_.Read() : wire_.End(ToGrpc(status));
  }

  // CallHandler
  // Whatever follows is dropped as it comes, so that none of it is kept.
  void OnMessage(InMessage message) override {
    call_.Read();
    if (unary_ != nullptr) return;
    if (message.pieces.empty()) return Start({nullptr, message.bytes});
    grpc::ByteBuffer bytes = ToByteBuffer(std::move(message));
    Start({&bytes, {}});
  }
  void OnHalfClose() override {
    if (unary_ == nullptr) Start({});
  }
  void OnWritten(bool) override {}
  void OnCancel() override {
    if (unary_ != nullptr) unary_->OnCancel();
  }
  void OnDone() override {
    if (unary_ != nullptr) unary_->OnDone();
    delete this;
  }

  // UnaryWire
  const WireCall& call() const override { return wire_; }
  void Answer(grpc::ByteBuffer&& answer) override {
    call_.Write(ToOutMessage(answer));
    wire_.End(grpc::Status::OK);
  }
  void Fail(const grpc::Status& status) override { wire_.End(status); }

 private:
  // With its message, or none.
  void Start(const ArrivedMessage& message) {
    const Status status = OrOutOfMemory([&] {
      unary_ = new UnaryCall(context_, FactsOf(context_, method_, caller_, wire_), *data_.format,
                             data_.pass, *this);
      return Status();
    });
    status.ok() ? unary_->Begin(message) : wire_.End(ToGrpc(status));
  }

  ServiceContext& context_;
  const std::string_view method_;  // the table's
  const CallTable::Data& data_;
  ServerCall& call_;
  const H2Wire wire_;
  Caller caller_;
  UnaryCall* unary_ = nullptr;  // until its message has come
};

class H2Stream final : public CallHandler, public StreamWire {
 public:
  explicit H2Stream(ServerCall& call) : call_(call), wire_(call) {}

  void Begin(const CallTable::Stream& begin) {
    const Status status = begin(*this);
    if (!status.ok()) wire_.End(ToGrpc(status));
  }

  // CallHandler
  void OnMessage(InMessage message) override {
    if (message.pieces.empty() && handler_->OnLent(message.bytes)) return;
    grpc::ByteBuffer bytes = ToByteBuffer(std::move(message));
    to_->Swap(&bytes);
    handler_->OnReadDone(true);
  }
  void OnHalfClose() override { handler_->OnReadDone(false); }
  void OnWritten(bool ok) override { handler_->OnWriteDone(ok); }
  void OnCancel() override {
    if (handler_ != nullptr) handler_->OnCancel();
  }
  void OnDone() override {
    if (handler_ != nullptr) handler_->OnDone();
    delete this;
  }

  // StreamWire
  const WireCall& call() const override { return wire_; }
  void Give(StreamHandler& handler) override { handler_ = &handler; }
  void Read(grpc::ByteBuffer* to) override {
    to_ = to;
    call_.Read();
  }
  void Write(const grpc::ByteBuffer* message, bool) override {
    call_.Write(ToOutMessage(*message));
  }
  void End(const grpc::Status& status) override { wire_.End(status); }

 private:
  ServerCall& call_;
  const H2Wire wire_;
  StreamHandler* handler_ = nullptr;  // null: it was refused
  grpc::ByteBuffer* to_ = nullptr;    // of the read that is under way
};

// One small message each way.
class H2Small final : public CallHandler {
 public:
  H2Small(ServerCall& call, const CallTable::Small& answer)
      : call_(call), wire_(std::make_shared<const H2Wire>(call)), answer_(answer) {}

  void OnMessage(InMessage message) override {
    call_.Read();
    if (std::exchange(begun_, true)) return;
    request_ = ToByteBuffer(std::move(message));
    answer_({wire_, &request_, &response_, [this](const grpc::Status& status) { End(status); }});
  }
  void OnHalfClose() override {
    if (begun_) return;
    End(call_.cancelled()
            ? grpc::Status::CANCELLED
            : grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "the call has no message"));
  }
  void OnWritten(bool) override {}
  void OnCancel() override {}
  void OnDone() override { delete this; }

 private:
  void End(const grpc::Status& status) {
    if (status.ok()) call_.Write(ToOutMessage(response_));
    wire_->End(status);
  }

  ServerCall& call_;
  const std::shared_ptr<const H2Wire> wire_;
  const CallTable::Small& answer_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
  bool begun_ = false;  // its message has come
};

int64_t Smallest(const H2Methods::Bounds& bounds) {
  int64_t smallest = std::numeric_limits<int64_t>::max();
  for (const auto& [path, bytes] : bounds) smallest = std::min(smallest, bytes);
  return smallest;
}

}  // namespace

H2Methods::H2Methods(ServiceContext& context, const CallTable& table, Bounds bounds)
    : context_(context),
      table_(table),
      bounds_(std::move(bounds)),
      smallest_bound_(Smallest(bounds_)) {}

int64_t H2Methods::MessageBytesMax(std::string_view path) const {
  const auto found = bounds_.find(path);
  return found == bounds_.end() ? smallest_bound_ : found->second;
}

CallHandler* H2Methods::Begin(ServerCall& call) {
  const std::string& path = call.path();
  if (const auto data = table_.data.find(path); data != table_.data.end()) {
    auto* const handler = new H2Unary(context_, data->first, data->second, call);
    handler->Begin();
    return handler;
  }
  if (const auto stream = table_.streams.find(path); stream != table_.streams.end()) {
    auto* const handler = new H2Stream(call);
    handler->Begin(stream->second);
    return handler;
  }
  if (const auto small = table_.small.find(path); small != table_.small.end()) {
    auto* const handler = new H2Small(call, small->second);
    call.Read();
    return handler;
  }
  auto* const ended = new H2Ended();
  const H2Wire wire(call);
  wire.End(ToGrpc(RefuseMethod(context_, wire, path, "there is no method " + path)));
  return ended;
}

void H2Methods::OnTaken() { context_.engine.PlanNow(); }

}  // namespace attend
