// SPDX-License-Identifier: Apache-2.0
//
// Counts and bounds the calls and bytes of one connection of the transport.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "kernels/util/clock.h"
#include "server/limits/connection_holds.h"
#include "server/net/connection_use.h"
#include "server/net/open_calls.h"
#include "server/transport/connection.h"

namespace attend {

class H2Guard final : public ConnectionGuard {
 public:
  struct Parts {
    std::shared_ptr<OpenCalls::Peer> calls;
    ConnectionHolds::Ref open;  // held while the connection is open
    std::shared_ptr<ConnectionUse> use;
    int64_t stream_window_bytes = 0;
    // Called when the connection is about to close; an error if its client caused it.
    std::function<void(const Status& why)> on_end;
  };

  // `clock` must outlive it.
  H2Guard(Parts parts, const Clock& clock);
  // Without an earlier OnEnd, the connection was never served.
  ~H2Guard() override { OnEnd(Status()); }

  Status OpenCall(int32_t id) override;
  void CloseCall(int32_t id) override;
  void OnMessageBytes(int32_t id, std::string_view bytes) override;
  void OnKept(int64_t bytes) override;
  void OnGrant(int32_t id, int64_t bytes) override;
  void OnEnd(const Status& why) override {
    if (!std::exchange(ended_, true)) parts_.on_end(why);
  }

 private:
  const Parts parts_;
  const Clock& clock_;
  int64_t position_ = 0;  // message bytes so far
  bool ended_ = false;
};

}  // namespace attend
