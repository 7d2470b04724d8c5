// SPDX-License-Identifier: Apache-2.0
//
// Who may call, from --tokens: the authenticator, and the thread that sees when its file changes.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "attend/v1/attention.pb.h"
#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/auth/authenticator.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/regions/region_socket.h"
#include "server/util/poll_thread.h"

namespace attend {

class Callers {
 public:
  // Null without --tokens: callers are not authenticated. The arguments must outlive the object.
  static Result<std::unique_ptr<Callers>> Load(const Config& config, Metrics& metrics,
                                               Logger& logger);

  const Authenticator& authenticator() const { return *authenticator_; }
  // Looks at the file from now on, every second, until StopWatching. Calls `changed` whenever what
  // callers may do has changed, and a second later once more: calls that were being let in when it
  // changed are known by then.
  void Watch(const Clock& clock, std::function<void()> changed);
  void StopWatching() { watch_.reset(); }
  // Has the socket ask who connects. This object must outlive it.
  void Guard(RegionSocket::Options& socket) const;
  // The tenant of a process on this host that brings a token, and perhaps the name of the tenant
  // that it speaks for. A refusal is counted. Thread-safe.
  Result<int> TenantOf(const std::string& token, const std::string& tenant) const;

 private:
  explicit Callers(Metrics& metrics) : metrics_(metrics) {}

  Metrics& metrics_;
  std::unique_ptr<Authenticator> authenticator_;
  std::unique_ptr<PollThread> watch_;
};

// Leaves out of GetServerInfo's answer what the caller need not know: other tenants, and without
// the scope info all but limits, ways in and the devices' names.
void LeaveOut(const Caller& caller, const Config& config, v1::GetServerInfoResponse* response);

}  // namespace attend
