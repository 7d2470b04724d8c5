// SPDX-License-Identifier: Apache-2.0
//
// Inspects what gRPC decrypts from its TLS connections, as ReadGuard does with what it reads from
// others, and puts the server's own TlsContext in place of gRPC's. A process that links
// attend_read_guard has its own SSL_new, SSL_do_handshake, SSL_read and SSL_write, which ask here.
// gRPC 1.51 exchanges no certificates safely (a key that does not belong to its certificate ends
// all further handshakes), knows no revocation list of a single file, and sends no alert to a
// client that it refuses.

#pragma once

#include <openssl/ssl.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/util/clock.h"
#include "server/net/http2_frames.h"
#include "server/net/read_guard.h"
#include "server/tls/tls_certificates.h"
#include "server/tls/tls_clients.h"
#include "server/tls/tls_context.h"
#include "server/tls/tls_standing.h"

namespace attend {

class TlsConnection {
 public:
  // Told why a client's handshake failed. Called on any thread.
  using OnRefused = std::function<void(int socket, const std::string& why)>;
  struct Options {
    int socket = -1;
    ino_t inode = 0;
    std::shared_ptr<const std::string> peer;        // as calls over the connection have it
    const TlsCertificates* certificates = nullptr;  // must outlive the connection
    std::shared_ptr<TlsClients> clients;            // are told of the certificate that is shown
    std::shared_ptr<const TlsContext> context;      // theirs, of `generation` or later
    uint64_t generation = 0;
    Http2Frames::Limits limits;
    const Clock* clock = nullptr;  // these three must outlive the connection
    const ReadGuard::OnWrong* on_wrong = nullptr;
    const OnRefused* on_refused = nullptr;
  };

  // While it lives, the SSL that gRPC makes on this thread belongs to this connection: gRPC makes
  // it while it takes the socket.
  class HandOver {
   public:
    explicit HandOver(const Options& options);
    ~HandOver();
    HandOver(const HandOver&) = delete;
    HandOver& operator=(const HandOver&) = delete;
    // False: gRPC has made none. What it would read must not be served.
    bool taken() const { return taken_; }

   private:
    friend class TlsConnection;
    const Options& options_;
    bool taken_ = false;
    TlsConnection* made_ = nullptr;
  };

  // The rest is for the functions in OpenSSL's place.
  static SSL* New(SSL_CTX* context);         // SSL_new
  static void SetNetwork(BIO* network);      // of the SSL just made: the other end of its BIO
  static TlsConnection* Of(const SSL* ssl);  // null: not a connection of this server's
  // The handshake has failed: says why, and sends the client the alert that OpenSSL has written.
  void Refuse(SSL* ssl);
  // gRPC looks at what the handshake of this connection, if it is one, has come to. On the same
  // thread it then describes the connection to those who ask who calls (see TakePeer), or ends it.
  static void Examine(const TlsConnection* connection);
  // gRPC describes a connection. The peer of the one that this thread has examined last, which is
  // the one described if that is of TLS. Null: nobody's, or the thread has taken it before.
  static std::shared_ptr<const std::string> TakePeer(bool of_tls);
  // The handshake is done.
  void Begin(const SSL* ssl);
  // What has just been decrypted. False if gRPC must not get it, nor anything after it.
  bool Passes(const void* data, int bytes);
  void Sending(const void* data, int bytes);

 private:
  explicit TlsConnection(const Options& options) : options_(options), frames_(options.limits) {}
  ~TlsConnection() = default;
  static int Index();
  static void Free(void* parent, void* own, CRYPTO_EX_DATA* data, int index, long argl, void* argp);
  static void OnMessage(int is_write, int version, int type, const void* bytes, size_t size,
                        SSL* ssl, void* own);
  // Whether the client would be let in again. Asked once the files have changed.
  bool MayStay();
  void End(const std::function<void()>& tell);

  const Options options_;
  Http2Frames frames_;
  std::unique_ptr<TlsStanding> standing_;  // null: its client has shown no certificate
  BIO* network_ = nullptr;                 // gRPC's; only during the handshake
  // Messages of handshakes: those of the first, and requests for new keys and the like after it.
  FrameRate handshake_messages_{32, 1};
  const char* wrong_ = nullptr;  // handshake messages came too often
  bool ended_ = false;
  bool refused_ = false;
};

}  // namespace attend
