// SPDX-License-Identifier: Apache-2.0
//
// Why a client's certificate that was valid once would be refused now.

#include "server/tls/tls_context.h"

#include <gtest/gtest.h>

#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "tests/server/support/self_signed.h"
#include "tests/server/support/test_authority.h"

namespace attend {
namespace {

using test::Certificate;
using test::CertificateOf;
using test::TestAuthority;

class VerifyErrorTest : public ::testing::Test {
 protected:
  // The verdict of a server that trusts `authorities`, with the revocation lists `lists`, if any.
  // `chain`: certificates that the client shows besides its own.
  std::string VerifyError(const std::string& shown, const std::string& authorities,
                          const std::string& lists = "",
                          const std::vector<std::string>& chain = {}) const {
    const TlsTexts texts = {
        .cert = {"tls-cert", "cert", server_.certificate},
        .key = {"tls-key", "key", server_.key},
        .client_ca = {"tls-client-ca", "ca", authorities},
        .crl = {"tls-crl", lists.empty() ? "" : "crl", lists},
    };
    const auto context = TlsContext::Make(texts, {}, std::time(nullptr));
    if (!context.ok()) return "no context: " + context.status().message();
    const auto free = [](STACK_OF(X509) * all) { sk_X509_pop_free(all, X509_free); };
    std::unique_ptr<STACK_OF(X509), decltype(free)> came(nullptr, free);
    if (!chain.empty()) came.reset(sk_X509_new_null());
    for (const std::string& each : chain) sk_X509_push(came.get(), CertificateOf(each).release());
    return (*context)->VerifyError(CertificateOf(shown).get(), came.get());
  }

  const KeyAndCertificate server_ = *MakeSelfSigned("localhost");
  const TestAuthority root_{"root"};
  const TestAuthority between_{"between", &root_};
  const std::string client_ = root_.Issue("client").certificate;
  const std::string of_between_ = between_.Issue("client").certificate;
};

TEST_F(VerifyErrorTest, AValidCertificatePassesWithAndWithoutLists) {
  EXPECT_EQ(VerifyError(client_, root_.certificate()), "");
  EXPECT_EQ(VerifyError(client_, root_.certificate(), root_.Revoke({})), "");
  EXPECT_EQ(VerifyError(client_, TestAuthority("another").certificate() + root_.certificate()), "");
}

TEST_F(VerifyErrorTest, AnIntermediateAuthorityMustBeSentOrTrusted) {
  const std::string lists = root_.Revoke({}) + between_.Revoke({});
  EXPECT_EQ(
      VerifyError(of_between_, root_.certificate(), lists, {of_between_, between_.certificate()}),
      "");
  EXPECT_EQ(VerifyError(of_between_, root_.certificate(), lists),
            "unable to get local issuer certificate");
  EXPECT_EQ(VerifyError(of_between_, between_.certificate()), "");
  // With lists OpenSSL requires one for the trusted authority too, and does not find its issuer.
  EXPECT_NE(VerifyError(of_between_, between_.certificate(), lists), "");
}

TEST_F(VerifyErrorTest, ACertificateInItsAuthoritysListIsRevoked) {
  const std::string other = root_.Issue("client").certificate;
  const std::string list = root_.Revoke({client_});
  EXPECT_EQ(VerifyError(client_, root_.certificate(), list), "certificate revoked");
  EXPECT_EQ(VerifyError(other, root_.certificate(), list), "");
  // So are all certificates of an authority that is in its own authority's list.
  EXPECT_EQ(VerifyError(of_between_, root_.certificate(),
                        root_.Revoke({between_.certificate()}) + between_.Revoke({}),
                        {between_.certificate()}),
            "certificate revoked");
}

TEST_F(VerifyErrorTest, AMissingOrExpiredListRefusesEveryClient) {
  EXPECT_EQ(VerifyError(client_, root_.certificate(), root_.Revoke({}, 60)), "CRL has expired");
  EXPECT_EQ(VerifyError(client_, root_.certificate(), TestAuthority("another").Revoke({})),
            "unable to get certificate CRL");
  EXPECT_EQ(
      VerifyError(of_between_, root_.certificate(), between_.Revoke({}), {between_.certificate()}),
      "unable to get certificate CRL");
}

TEST_F(VerifyErrorTest, ACertificateOfAnUntrustedAuthorityIsRefused) {
  EXPECT_EQ(VerifyError(client_, TestAuthority("another").certificate()),
            "unable to get local issuer certificate");
  // An authority of the same name that has not signed it.
  EXPECT_EQ(VerifyError(client_, TestAuthority("root").certificate()),
            "certificate signature failure");
  EXPECT_EQ(VerifyError(MakeSelfSigned("client")->certificate, root_.certificate()),
            "self-signed certificate");
}

TEST_F(VerifyErrorTest, AnExpiredCertificateOrAnotherUsageIsRefused) {
  EXPECT_EQ(VerifyError(root_.Issue("client", "clientAuth", 60).certificate, root_.certificate()),
            "certificate has expired");
  EXPECT_EQ(VerifyError(root_.Issue("client", "serverAuth").certificate, root_.certificate()),
            "unsuitable certificate purpose");
}

}  // namespace
}  // namespace attend
