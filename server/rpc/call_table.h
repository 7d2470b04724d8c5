// SPDX-License-Identifier: Apache-2.0
//
// The served methods, by path, as the transport calls them. Each service adds its own. For a call
// with tensors, the caller is checked before any message is read.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "server/rpc/call_context.h"
#include "server/transport/server_call.h"

namespace attend {

class CallTable final : public CallMethods {
 public:
  // Begins a call, of which only the headers have arrived, and returns its handler. May throw
  // std::bad_alloc.
  using Starter = std::function<CallHandler*(ServerCall&)>;

  // Twice the size of the largest message without tensors.
  static constexpr MessageBound kSmall{int64_t{128} << 10};
  // For methods that need no credentials, and unknown ones.
  static constexpr MessageBound kOpen{4096};
  // Twice the method's limit, so that it can refuse a message slightly too long with a precise
  // error.
  static MessageBound Twice(int64_t bytes, const char* origin) {
    return 2 * bytes > kSmall.bytes ? MessageBound{2 * bytes, origin} : kSmall;
  }

  // `context` must outlive the calls, as must whatever the methods use.
  explicit CallTable(ServiceContext& context) : context_(context) {}

  // A longer message than `bound` is refused by its length prefix, before any of it is buffered.
  void Add(const std::string& path, MessageBound bound, Starter starter) {
    methods_[path] = {bound, std::move(starter)};
  }
  // For a call with a request.
  void AddLarge(const std::string& path, Starter starter) {
    Add(path, Twice(context_.reader.message_bytes_max(), "twice --max-request-bytes"),
        std::move(starter));
  }
  ServiceContext& context() const { return context_; }

  MessageBound MessageBoundOf(std::string_view path) const override;
  CallHandler* Begin(ServerCall& call) override;
  // Plans, so that requests that arrived together run together.
  void OnTaken() override { context_.engine.PlanNow(); }

 private:
  struct Method {
    MessageBound bound;
    Starter starter;
  };

  ServiceContext& context_;
  std::map<std::string, Method, std::less<>> methods_;
};

}  // namespace attend
