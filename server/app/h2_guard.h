// SPDX-License-Identifier: Apache-2.0
//
// Counts and bounds the calls and bytes of one connection of the transport.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "server/limits/connection_holds.h"
#include "server/net/connection_use.h"
#include "server/net/message_memory.h"
#include "server/net/open_calls.h"
#include "server/transport/connection.h"

namespace attend {

class H2Guard final : public ConnectionGuard {
 public:
  struct Parts {
    std::shared_ptr<OpenCalls::Peer> calls;
    ConnectionHolds::Ref open;  // until its end
    std::shared_ptr<ConnectionUse> use;
    std::shared_ptr<MessageMemory> memory;
    // Called when the connection is about to close; an error if its client caused it.
    std::function<void(const Status& why)> on_end;
  };

  explicit H2Guard(Parts parts) : parts_(std::move(parts)) {}
  // Without an earlier OnEnd, the connection was never served.
  ~H2Guard() override { OnEnd(Status()); }

  Status OpenCall() override;
  void CloseCall() override { parts_.calls->End(1); }
  void OnFirstFrame() override { parts_.use->spoke.store(true, std::memory_order_relaxed); }
  void OnMessageBytes(int64_t bytes) override;
  void OnKept(int64_t bytes) override;
  void OnEnd(const Status& why) override;

 private:
  const Parts parts_;
  bool ended_ = false;
};

}  // namespace attend
