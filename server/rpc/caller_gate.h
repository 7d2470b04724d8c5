// SPDX-License-Identifier: Apache-2.0
//
// Refuses strangers' calls over TLS by their headers alone. gRPC reads the message of a unary call
// before it hands the call over, so without this whoever can connect could fill --grpc-memory-max.
// (Who comes without TLS is on this host, where --tokens are given.) What a caller may do, and for
// which tenant, is asked when the call is handed over (call_caller.h).

#pragma once

#include <grpcpp/security/auth_metadata_processor.h>

#include "kernels/util/status.h"
#include "server/auth/authenticator.h"
#include "server/log/access_log.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"

namespace attend {

// What the gate is told of a connection besides gRPC's own properties: what calls over it have as
// their peer. There is none where nobody adds it (app/guarded_auth_context.cc).
inline constexpr char kPeerProperty[] = "attend_peer";

// Thread-safe; gRPC's threads ask it.
class CallerGate final : public grpc::AuthMetadataProcessor {
 public:
  // The arguments must outlive the server whose credentials keep the gate.
  // `access_log`: null if off.
  CallerGate(const Authenticator& authenticator, Metrics& metrics, Logger& logger,
             AccessLog* access_log)
      : authenticator_(authenticator),
        metrics_(metrics),
        logger_(logger),
        access_log_(access_log) {}

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* connection,
                       OutputMetadata* consumed, OutputMetadata* response) override;

 private:
  // May throw std::bad_alloc.
  Status Check(const InputMetadata& metadata, const grpc::AuthContext& connection) const;

  const Authenticator& authenticator_;
  Metrics& metrics_;
  Logger& logger_;
  AccessLog* const access_log_;
};

}  // namespace attend
