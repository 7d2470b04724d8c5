// SPDX-License-Identifier: Apache-2.0
//
// Revocation that races with handshakes: a client that the current files would refuse keeps no
// connection, whichever comes first, and is reported once.

#include "server/tls/client_trust.h"

#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <spdlog/sinks/ostream_sink.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/tls/tls_certificates.h"
#include "tests/server/support/self_signed.h"
#include "tests/server/support/temporary_directory.h"
#include "tests/server/support/test_authority.h"
#include "tests/server/support/tls_ends.h"

namespace attend {
namespace {

using test::TestAuthority;
using test::TlsEnds;
using Refusals = std::vector<std::string>;

class ClientTrustTest : public ::testing::Test {
 protected:
  ClientTrustTest() {
    Put("cert", server_.certificate);
    Put("key", server_.key);
    Put("ca", authority_.certificate());
    Put("crl", authority_.Revoke({}));
    TlsCertificates::Options options;
    options.cert = folder_.path() / "cert";
    options.key = folder_.path() / "key";
    options.client_ca = folder_.path() / "ca";
    options.crl = folder_.path() / "crl";
    certificates_ = std::move(*TlsCertificates::Load(std::move(options), metrics_, logger_));
  }
  // Under a new inode, so that a change within the resolution of file times is seen.
  void Put(const std::string& name, const std::string& text) {
    std::ofstream(folder_.path() / "new") << text;
    std::filesystem::rename(folder_.path() / "new", folder_.path() / name);
  }
  void Use(const std::vector<std::string>& revoked) {
    const uint64_t before = certificates_->generation();
    Put("crl", authority_.Revoke(revoked));
    certificates_->Look();
    EXPECT_NE(certificates_->generation(), before) << log_.str();
  }
  std::unique_ptr<TlsEnds> Open(const KeyAndCertificate& client) {
    auto ends = std::make_unique<TlsEnds>(*certificates_, client);
    ends->Greet();
    return ends;
  }
  const test::TemporaryDirectory folder_;
  const KeyAndCertificate server_ = *MakeSelfSigned("localhost");
  const TestAuthority authority_{"authority"};
  const KeyAndCertificate gone_ = authority_.Issue("gone");
  const KeyAndCertificate stays_ = authority_.Issue("stays");
  const Refusals revoked_ = {"certificate revoked"};
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  TlsMetrics metrics_{*registry_};
  std::ostringstream log_;
  Logger logger_{{}, std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)};
  std::unique_ptr<TlsCertificates> certificates_;
};

TEST_F(ClientTrustTest, ExactlyTheRevokedClientsAreRefused) {
  const auto gone = Open(gone_);
  const auto stays = Open(stays_);
  EXPECT_TRUE(gone->Finish() && stays->Finish());
  EXPECT_TRUE(gone->Serves() && stays->Serves());
  Use({gone_.certificate});
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(gone->Serves());
    EXPECT_TRUE(stays->Serves());
  }
  EXPECT_EQ(gone->refused(), revoked_) << "once";
  EXPECT_TRUE(stays->refused().empty());
}

// Its handshake began under the old files.
TEST_F(ClientTrustTest, AClientRevokedDuringItsHandshakeIsRefused) {
  const auto gone = Open(gone_);
  const auto stays = Open(stays_);
  Use({gone_.certificate});
  EXPECT_FALSE(gone->Finish()) << "whether or not it sends anything";
  EXPECT_TRUE(stays->Finish());
  EXPECT_EQ(gone->refused(), revoked_);
  EXPECT_FALSE(gone->Serves());
  EXPECT_TRUE(stays->Serves());
}

// Handshakes on one thread, new lists on another: in the end each revoked client has been reported
// once per connection, and no other client.
TEST_F(ClientTrustTest, RevokedClientsAreReportedOnceWhenHandshakesRace) {
  constexpr int kConnections = 24;
  std::vector<std::unique_ptr<TlsEnds>> gone;
  std::vector<std::unique_ptr<TlsEnds>> stays;
  std::atomic<int> opened{0};
  std::thread clients([&] {
    for (int i = 0; i < kConnections; ++i) {
      for (auto [all, who] : {std::pair(&gone, &gone_), std::pair(&stays, &stays_)}) {
        all->push_back(Open(*who));
        opened.fetch_add(1);
        all->back()->Finish();
      }
    }
  });
  while (opened < kConnections) std::this_thread::yield();
  Use({gone_.certificate});
  clients.join();
  for (const auto& each : gone) {
    EXPECT_FALSE(each->Serves());
    EXPECT_EQ(each->refused(), revoked_);
  }
  for (const auto& each : stays) {
    EXPECT_TRUE(each->Serves());
    EXPECT_TRUE(each->refused().empty());
  }
}

}  // namespace
}  // namespace attend
