// SPDX-License-Identifier: Apache-2.0
//
// A server's certificate and key, by which TLS streams are begun. One thread.

#pragma once

#include <openssl/ssl.h>

#include <chrono>
#include <memory>
#include <string>

#include "kernels/util/status.h"
#include "server/util/file_stamp.h"

namespace attend {

struct TlsFiles {
  std::string certificate;  // PEM, the chain too; empty: no TLS
  std::string key;          // PEM
};

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

class TlsIdentity {
 public:
  // An error, of one line, names the file.
  static Result<std::unique_ptr<TlsIdentity>> Load(const TlsFiles& files);

  // Looks whether a file has changed, and if so takes both over. After an error, which is told once
  // for each change, the old ones stay. True: others are in use from here on.
  Result<bool> Refresh();
  // For one accepted connection. Null without memory.
  std::unique_ptr<SSL, FreeSsl> Begin() const;
  std::chrono::system_clock::time_point expires() const { return expires_; }

 private:
  explicit TlsIdentity(const TlsFiles& files) : files_(files) {}
  Status Read();

  const TlsFiles files_;
  FileStamp certificate_stamp_;
  FileStamp key_stamp_;
  std::unique_ptr<SSL_CTX, FreeSsl> context_;
  std::chrono::system_clock::time_point expires_;
};

}  // namespace attend
