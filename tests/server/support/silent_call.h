// SPDX-License-Identifier: Apache-2.0
//
// A call whose client sends nothing by itself.

#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "server/auth/authenticator.h"
#include "server/transport/server_call.h"

namespace attend::test {

class SilentCall final : public ServerCall {
 public:
  explicit SilentCall(std::string path, const std::string& token = "", ConnectionPeer peer = {})
      : path_(std::move(path)), peer_(std::move(peer)) {
    if (!token.empty()) metadata_.Add(kAuthorizationMetadataKey, "Bearer " + token);
  }
  const std::string& path() const override { return path_; }
  const CallMetadata& metadata() const override { return metadata_; }
  const ConnectionPeer& peer() const override { return peer_; }
  TimePoint deadline() const override { return kNever; }
  void Read() override { reads_ = true; }
  void Write(OutMessage) override { ADD_FAILURE() << "an answer"; }
  void AddHeader(std::string_view, std::string_view) override {}
  void Finish(CallEnd end) override {
    end_ = std::move(end);
    ended_.store(true);
    ended_.notify_all();
  }
  void Cancel() override {}
  bool cancelled() const override { return false; }

  // The status that the stream ends with.
  Status End(CallHandler& handler) {
    if (reads_) handler.OnHalfClose();
    if (!ended_.load()) return Internal("it has not ended");
    handler.OnDone();
    return end_->status;
  }
  // The status that a unary call ends with after this message.
  Status Answer(CallHandler& handler, std::string_view message) {
    handler.OnMessage({message, {}});
    return AwaitEnd(handler);
  }
  bool ended() const { return ended_.load(); }
  Status AwaitEnd(CallHandler& handler) {
    ended_.wait(false);
    handler.OnDone();
    return end_->status;
  }

 private:
  const std::string path_;
  CallMetadata metadata_;
  const ConnectionPeer peer_;
  bool reads_ = false;
  std::optional<CallEnd> end_;
  std::atomic<bool> ended_{false};
};

}  // namespace attend::test
