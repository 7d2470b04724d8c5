// SPDX-License-Identifier: Apache-2.0
//
// Functions of a process that links attend_read_guard, in OpenSSL's place: gRPC makes its TLS
// connections with them, and reads and writes what is inside. Debian's gRPC links OpenSSL
// dynamically, so the executable's come first.

#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include "server/tls/tls_connection.h"

namespace {

using attend::TlsConnection;

// OpenSSL's own.
template <class Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define ATTEND_IN_PLACE extern "C" __attribute__((visibility("default")))

ATTEND_IN_PLACE SSL* SSL_new(SSL_CTX* context) { return TlsConnection::New(context); }

ATTEND_IN_PLACE int BIO_new_bio_pair(BIO** one, size_t one_size, BIO** other, size_t other_size) {
  static auto* const make = Next<int(BIO**, size_t, BIO**, size_t)>("BIO_new_bio_pair");
  const int made = make(one, one_size, other, other_size);
  if (made == 1) TlsConnection::SetNetwork(*one);
  return made;
}

ATTEND_IN_PLACE int SSL_do_handshake(SSL* ssl) {
  static auto* const shake = Next<int(SSL*)>("SSL_do_handshake");
  const int result = shake(ssl);
  TlsConnection* const connection = TlsConnection::Of(ssl);
  if (connection == nullptr) return result;
  if (result > 0) {
    connection->Begin(ssl);
  } else if (SSL_get_error(ssl, result) == SSL_ERROR_SSL) {
    connection->Refuse(ssl);
  }
  return result;
}

ATTEND_IN_PLACE int SSL_session_reused(const SSL* ssl) {
  static auto* const reused = Next<int(const SSL*)>("SSL_session_reused");
  TlsConnection::Examine(TlsConnection::Of(ssl));
  return reused(ssl);
}

ATTEND_IN_PLACE int SSL_read(SSL* ssl, void* data, int size) {
  static auto* const read = Next<int(SSL*, void*, int)>("SSL_read");
  const int bytes = read(ssl, data, size);
  TlsConnection* const connection = TlsConnection::Of(ssl);
  if (connection == nullptr || connection->Passes(data, bytes)) return bytes;
  ERR_raise(ERR_LIB_SSL, SSL_R_UNEXPECTED_MESSAGE);
  return -1;
}

ATTEND_IN_PLACE int SSL_write(SSL* ssl, const void* data, int size) {
  static auto* const write = Next<int(SSL*, const void*, int)>("SSL_write");
  if (TlsConnection* const connection = TlsConnection::Of(ssl)) connection->Sending(data, size);
  return write(ssl, data, size);
}
