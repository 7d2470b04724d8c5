// SPDX-License-Identifier: Apache-2.0
//
// How a client and a server authenticate each other over TCP. Unix sockets have no TLS.

#pragma once

#include <string>

namespace attend::client {

struct TlsOptions {
  // A PEM file of the authorities that may have issued the server's certificate, or "system" for
  // the system's. Empty: no TLS.
  std::string ca;
  // PEM files of this client's certificate chain and key, for servers that require one. Both or
  // neither.
  std::string cert;
  std::string key;
  // The name that the server's certificate must have. Empty: the host of the address.
  std::string server_name;
};

}  // namespace attend::client
