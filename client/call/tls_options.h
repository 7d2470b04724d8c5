// SPDX-License-Identifier: Apache-2.0
//
// How a client and a server know each other over TCP. Unix sockets have no TLS.

#pragma once

#include <string>

namespace attend::client {

struct TlsOptions {
  // A PEM file of the authorities that the server's certificate may be of, or "system" for those
  // that the system trusts. Empty: no TLS.
  std::string ca;
  // PEM files of this client's certificate, with its chain, and key, for servers that ask for one.
  // Both or neither.
  std::string cert;
  std::string key;
  // For whom the server's certificate must be. Empty: for the host of the address.
  std::string server_name;
};

}  // namespace attend::client
