// SPDX-License-Identifier: Apache-2.0
//
// A function of a process that links attend_read_guard, in gRPC's place: gRPC describes a TLS
// connection with it to CallerGate, and leaves out who is connected. Debian's gRPC calls its own
// functions through the dynamic linker, so the executable's come first.

#include <dlfcn.h>
#include <grpc/grpc_security.h>
#include <grpc/grpc_security_constants.h>

#include <memory>
#include <string>
#include <string_view>

#include "server/rpc/caller_gate.h"
#include "server/tls/tls_connection.h"

extern "C" __attribute__((visibility("default"))) void grpc_auth_context_add_cstring_property(
    grpc_auth_context* context, const char* name, const char* value) {
  static auto* const add = reinterpret_cast<decltype(grpc_auth_context_add_cstring_property)*>(
      dlsym(RTLD_NEXT, "grpc_auth_context_add_cstring_property"));
  add(context, name, value);
  if (name != std::string_view(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME)) return;
  const bool of_tls = value == std::string_view(GRPC_SSL_TRANSPORT_SECURITY_TYPE);
  const std::shared_ptr<const std::string> peer = attend::TlsConnection::TakePeer(of_tls);
  if (peer != nullptr) add(context, attend::kPeerProperty, peer->c_str());
}
