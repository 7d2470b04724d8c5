// SPDX-License-Identifier: Apache-2.0
//
// The callers of --tokens: the authenticator, and the thread that watches its file.

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
  // Checks the file every second until StopWatching. Calls `changed` when any caller's permissions
  // have changed, and again a second later, for calls that were being accepted at that moment.
  void Watch(const Clock& clock, std::function<void()> changed);
  void StopWatching() { watch_.reset(); }
  // Makes the region socket authenticate its clients. This object must outlive the socket.
  void Guard(RegionSocket::Options& socket) const;
  // The tenant of a local process, from its token and, if not empty, the tenant that it names.
  // Counts refusals. Thread-safe.
  Result<int> TenantOf(const std::string& token, const std::string& tenant) const;

 private:
  explicit Callers(Metrics& metrics) : metrics_(metrics) {}

  Metrics& metrics_;
  std::unique_ptr<Authenticator> authenticator_;
  std::unique_ptr<PollThread> watch_;
};

// Removes from GetServerInfo's answer what the caller need not know: other tenants, and without the
// scope info everything except limits, ways in and the devices' names.
void LeaveOut(const Caller& caller, const Config& config, v1::GetServerInfoResponse* response);

}  // namespace attend
