// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/h2_calls.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "server/rpc/attention_service.h"
#include "server/rpc/h2_wire.h"
#include "server/rpc/unary_call.h"

namespace attend {
namespace {

// A call with one small message each way.
class SmallCallHandler final : public CallHandler {
 public:
  SmallCallHandler(ServerCall& call, const CallTable::Small& answer)
      : wire_(std::make_shared<const H2Wire>(call)), answer_(answer) {
    wire_->Read();
  }

  // Further messages are read and dropped, so that none is kept.
  void OnMessage(InMessage message) override {
    wire_->Read();
    if (std::exchange(begun_, true)) return;
    request_ = message.Text();
    answer_({wire_, &request_, &response_, [this](const Status& status) { End(status); }});
  }
  void OnHalfClose() override {
    if (begun_) return;
    End(InvalidArgument("the call has no message"));
  }
  void OnWritten(bool) override {}
  void OnCancel() override {}
  void OnDone() override { delete this; }

 private:
  void End(const Status& status) {
    if (status.ok()) wire_->Write(OutMessage::Of(std::move(response_)));
    wire_->End(status);
  }

  const std::shared_ptr<const H2Wire> wire_;
  const CallTable::Small& answer_;
  std::string request_;
  std::string response_;
  bool begun_ = false;  // its message has arrived
};

MessageBound Smallest(const H2Methods::Bounds& bounds) {
  return std::min_element(bounds.begin(), bounds.end(),
                          [](const auto& one, const auto& other) {
                            return one.second.bytes < other.second.bytes;
                          })
      ->second;
}

}  // namespace

H2Methods::H2Methods(ServiceContext& context, const CallTable& table, Bounds bounds)
    : context_(context),
      table_(table),
      bounds_(std::move(bounds)),
      smallest_bound_(Smallest(bounds_)) {}

MessageBound H2Methods::MessageBoundOf(std::string_view path) const {
  const auto found = bounds_.find(path);
  return found == bounds_.end() ? smallest_bound_ : found->second;
}

CallHandler* H2Methods::Begin(ServerCall& call) {
  const std::string& path = call.path();
  if (const auto data = table_.data.find(path); data != table_.data.end()) {
    return UnaryCall::Begin(context_, data->first, data->second, call);
  }
  if (const auto small = table_.small.find(path); small != table_.small.end()) {
    return new SmallCallHandler(call, small->second);
  }
  if (const auto stream = table_.streams.find(path); stream != table_.streams.end()) {
    return stream->second(call);
  }
  const H2Wire wire(call);
  return RefuseCall(wire, RefuseMethod(context_, wire, path, "unknown method " + path));
}

void H2Methods::OnTaken() { context_.engine.PlanNow(); }

}  // namespace attend
