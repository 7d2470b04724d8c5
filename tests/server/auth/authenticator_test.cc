// SPDX-License-Identifier: Apache-2.0

#include "server/auth/authenticator.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/util/random_token.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

using std::chrono::seconds;

const std::string kToken = "attend_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
const std::string kOther = "attend_BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB";

std::string Line(const std::string& name, const std::string& token, const std::string& rest) {
  const TokenDigest digest = DigestOf(token);
  return "name=" + name +
         " sha256=" + HexText({reinterpret_cast<const char*>(digest.data()), digest.size()}) + " " +
         rest + "\n";
}

class AuthenticatorTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) {
    std::ofstream(path_.string() + ".new", std::ios::binary) << text;
    std::filesystem::rename(path_.string() + ".new", path_);
  }
  void Load(const std::string& text) {
    Write(text);
    Result<std::unique_ptr<Authenticator>> made = TryLoad();
    ASSERT_TRUE(made.ok()) << made.status().message();
    authenticator_ = std::move(*made);
  }
  Result<std::unique_ptr<Authenticator>> TryLoad() {
    Authenticator::Options options;
    options.file = path_;
    options.tenants = {"default", "blue", "green"};
    options.now = [this] { return now_; };
    options.on_reload = [this](const Status& status, int64_t callers) {
      reloads_.push_back(status);
      callers_ = callers;
    };
    return Authenticator::Load(options);
  }
  Decision Ask(const std::string& authorization, Scope scope = Scope::kCompute,
               std::optional<std::string_view> tenant = {}) const {
    Credentials credentials;
    if (!authorization.empty()) credentials.authorization = authorization;
    credentials.tenant = tenant;
    credentials.local = true;
    return authenticator_->Decide(credentials, scope);
  }
  static void ExpectRefused(const Decision& decision, CallerRefusal refusal,
                            const std::string& message) {
    ASSERT_FALSE(decision.status.ok());
    EXPECT_EQ(decision.refusal, refusal);
    EXPECT_EQ(decision.status.message(), message);
    const bool denied = refusal == CallerRefusal::kScope || refusal == CallerRefusal::kTenant;
    EXPECT_EQ(decision.status.code(), denied ? Code::kPermissionDenied : kUnauthenticated);
  }

  test::TemporaryDirectory folder_;
  const std::filesystem::path path_ = folder_.path() / "tokens";
  WallTime now_ = WallTime(seconds(1'000'000'000));
  std::vector<Status> reloads_;
  int64_t callers_ = -1;
  std::unique_ptr<Authenticator> authenticator_;
};

TEST_F(AuthenticatorTest, AKnownTokenIdentifiesItsCaller) {
  Load(Line("ci", kToken, "tenant=blue scopes=compute"));
  for (const char* scheme : {"Bearer ", "bearer ", "BEARER "}) {
    const Decision decision = Ask(scheme + kToken);
    ASSERT_TRUE(decision.status.ok()) << decision.status.message();
    EXPECT_EQ(decision.caller.tenant, 1);
    EXPECT_TRUE(decision.caller.authenticated());
    EXPECT_EQ(*decision.caller.name, "ci");
    EXPECT_FALSE(decision.caller.scopes.Has(Scope::kSessions));
  }
}

TEST_F(AuthenticatorTest, ARefusalNamesWhatIsMissing) {
  Load(Line("ci", kToken, "scopes=compute expires=2001-09-09T01:46:41Z"));
  ExpectRefused(Ask(""), CallerRefusal::kNoCredentials,
                "no token: the call must have the metadata authorization, \"Bearer TOKEN\"");
  ExpectRefused(Ask("Bearer " + kOther), CallerRefusal::kUnknown, "the token is unknown");
  ExpectRefused(Ask("Bearer " + kToken, Scope::kSessions), CallerRefusal::kScope,
                "the caller \"ci\" lacks the scope sessions");
  EXPECT_TRUE(Ask("Bearer " + kToken, Scope::kAny).status.ok());
  now_ += seconds(1);
  ExpectRefused(Ask("Bearer " + kToken), CallerRefusal::kExpired, "the token has expired");
  // The message about the form is the same for known and unknown tokens.
  for (const std::string& wrong :
       {std::string("Bearer"), std::string("Bearer "), "Bearer  " + kToken, "Basic " + kToken,
        kToken, "Bearer " + kToken + " ", "Bearer " + kToken + "\n",
        "Bearer " + std::string(15, 'a'), "Bearer " + std::string(513, 'a')}) {
    ExpectRefused(Ask(wrong), CallerRefusal::kUnknown,
                  "the metadata authorization must be \"Bearer TOKEN\", with a token of 16 to 512 "
                  "visible characters");
  }
  EXPECT_EQ(Ask("Bearer " + std::string(512, 'a')).status.message(), "the token is unknown");
}

TEST_F(AuthenticatorTest, ATokenOverPlaintextIsRefusedKnownOrNot) {
  Load(Line("ci", kToken, "scopes=compute"));
  for (const std::string& token : {kToken, kOther}) {
    const std::string authorization = "Bearer " + token;
    Credentials credentials;
    credentials.authorization = authorization;
    ExpectRefused(authenticator_->Decide(credentials, Scope::kCompute), CallerRefusal::kCleartext,
                  "the token was sent in the clear: tokens are accepted only over TLS, loopback "
                  "and Unix sockets; replace it, as others may have read it");
  }
  const std::string authorization = "Bearer " + kToken;
  Credentials encrypted;
  encrypted.authorization = authorization;
  encrypted.encrypted = true;
  EXPECT_TRUE(authenticator_->Decide(encrypted, Scope::kCompute).status.ok());
}

TEST_F(AuthenticatorTest, OnlyACallerWithTheRightMayNameAnotherTenant) {
  Load(Line("ci", kToken, "tenant=blue scopes=compute") +
       Line("gate", kOther, "tenant=green scopes=compute any-tenant"));
  EXPECT_EQ(Ask("Bearer " + kToken, Scope::kCompute, "blue").caller.tenant, 1);
  // The message is the same whether such a tenant exists or not.
  for (const char* other : {"green", "default", "unknown", "", "Blue"}) {
    ExpectRefused(
        Ask("Bearer " + kToken, Scope::kCompute, other), CallerRefusal::kTenant,
        "the caller belongs to tenant \"blue\" and may not call for another (x-attend-tenant)");
  }
  EXPECT_EQ(Ask("Bearer " + kOther).caller.tenant, 2);
  EXPECT_EQ(Ask("Bearer " + kOther, Scope::kCompute, "blue").caller.tenant, 1);
  // A refusal is charged to the caller's own tenant.
  EXPECT_EQ(Ask("Bearer " + kOther, Scope::kSessions, "blue").caller.tenant, 2);
  EXPECT_TRUE(Ask("Bearer " + kOther).caller.for_others);
  ExpectRefused(Ask("Bearer " + kOther, Scope::kCompute, "unknown"), CallerRefusal::kTenant,
                "x-attend-tenant names none of the server's tenants");
}

TEST_F(AuthenticatorTest, ACertificateIdentifiesItsCallerButDoesNotExcuseAWrongToken) {
  Load("name=web uri=spiffe://prod/web tenant=green scopes=compute\n" +
       Line("ci", kToken, "tenant=blue scopes=compute"));
  const std::vector<Credentials::Name> names = {{CertificateName::kDns, "web.example"},
                                                {CertificateName::kUri, "spiffe://prod/web"}};
  Credentials credentials;
  credentials.encrypted = true;
  credentials.certificate = names;
  EXPECT_EQ(authenticator_->Decide(credentials, Scope::kCompute).caller.tenant, 2);
  credentials.certificate = std::span(names).first(1);
  ExpectRefused(authenticator_->Decide(credentials, Scope::kCompute), CallerRefusal::kUnknown,
                "no token, and no name in the client's certificate is known");
  credentials.certificate = names;
  const std::string right = "Bearer " + kToken;
  credentials.authorization = right;
  EXPECT_EQ(authenticator_->Decide(credentials, Scope::kCompute).caller.tenant, 1);
  const std::string wrong = "Bearer " + kOther;
  credentials.authorization = wrong;
  ExpectRefused(authenticator_->Decide(credentials, Scope::kCompute), CallerRefusal::kUnknown,
                "the token is unknown");
}

TEST_F(AuthenticatorTest, AChangedFileIsLoadedAndABrokenOneIsIgnored) {
  Load(Line("ci", kToken, "scopes=compute"));
  authenticator_->Reload();
  EXPECT_TRUE(reloads_.empty());
  Write(Line("new", kOther, "scopes=compute") + Line("ci", kToken, "scopes=info"));
  authenticator_->Reload();
  ASSERT_EQ(reloads_.size(), 1u);
  EXPECT_TRUE(reloads_[0].ok());
  EXPECT_EQ(callers_, 2);
  EXPECT_TRUE(Ask("Bearer " + kOther).status.ok());
  EXPECT_FALSE(Ask("Bearer " + kToken).status.ok());
  Write("name=ci\n");
  authenticator_->Reload();
  authenticator_->Reload();
  ASSERT_EQ(reloads_.size(), 2u) << "it is reported once";
  EXPECT_EQ(reloads_[1].message(),
            "tokens " + path_.string() + ": line 1 has none of sha256=, uri=, dns= or cn=");
  EXPECT_EQ(callers_, 2);
  EXPECT_TRUE(Ask("Bearer " + kOther).status.ok());
  std::filesystem::remove(path_);
  authenticator_->Reload();
  authenticator_->Reload();
  ASSERT_EQ(reloads_.size(), 3u);
  EXPECT_NE(reloads_[2].message().find("cannot be read"), std::string::npos);
  Write(Line("back", kToken, "scopes=compute"));
  authenticator_->Reload();
  EXPECT_TRUE(Ask("Bearer " + kToken).status.ok());
  EXPECT_FALSE(Ask("Bearer " + kOther).status.ok());
}

// Too few descriptors, no memory and disk errors may pass; the file itself is fine.
TEST_F(AuthenticatorTest, AFileThatCouldNotBeReadIsRetried) {
  Load(Line("ci", kToken, "scopes=compute"));
  Write(Line("new", kOther, "scopes=compute"));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  authenticator_->Reload();
  authenticator_->Reload();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_EQ(reloads_.size(), 1u) << "it is reported once";
  EXPECT_NE(reloads_[0].message().find("Too many open files"), std::string::npos);
  EXPECT_TRUE(Ask("Bearer " + kToken).status.ok());
  authenticator_->Reload();
  ASSERT_EQ(reloads_.size(), 2u);
  EXPECT_TRUE(reloads_[1].ok());
  EXPECT_FALSE(Ask("Bearer " + kToken).status.ok());
}

TEST_F(AuthenticatorTest, AReloadOrExpiryChangesTheGeneration) {
  now_ = std::chrono::sys_days(std::chrono::year(2027) / 1 / 30);
  Load(Line("ci", kToken, "scopes=compute expires=2027-01-31") +
       Line("other", kOther, "scopes=compute expires=2027-02-01"));
  uint64_t generation = authenticator_->generation();
  EXPECT_NE(generation, 0u);
  const auto changed = [&] {
    authenticator_->Reload();
    const uint64_t now = authenticator_->generation();
    return std::exchange(generation, now) != now;
  };
  EXPECT_FALSE(changed());
  now_ += std::chrono::hours(23);
  EXPECT_FALSE(changed());
  now_ += std::chrono::hours(1);
  EXPECT_TRUE(changed()) << "ci has expired";
  EXPECT_FALSE(changed());
  now_ += std::chrono::hours(48);
  EXPECT_TRUE(changed());
  EXPECT_FALSE(changed());
  Write("name=ci\n");
  EXPECT_FALSE(changed()) << "nothing is taken of it";
  Write(Line("ci", kToken, "scopes=compute"));
  EXPECT_TRUE(changed());
}

TEST_F(AuthenticatorTest, ACredentialDoesNotDependOnTheRestOfItsLine) {
  Load(Line("ci", kToken, "scopes=compute expires=2027-01-31") +
       "name=web cn=web scopes=info\nname=other uri=web scopes=info\n");
  const TokenDigest ci = Ask("Bearer " + kToken).credential;
  EXPECT_EQ(ci, DigestOf(kToken));
  const Credentials::Name name{CertificateName::kCommon, "web"};
  Credentials shown;
  shown.certificate = {&name, 1};
  const TokenDigest web = authenticator_->Decide(shown, Scope::kInfo).credential;
  EXPECT_EQ(authenticator_->credentials().size(), 3U);
  EXPECT_TRUE(authenticator_->credentials().contains(ci));
  Write(Line("ci", kOther, "scopes=compute") + "name=page tenant=blue cn=web scopes=compute\n");
  authenticator_->Reload();
  EXPECT_FALSE(authenticator_->credentials().contains(ci)) << "another token of that name";
  EXPECT_TRUE(authenticator_->credentials().contains(web));
  Write(Line("ci", kToken, "scopes=compute expires=2027-01-31"));
  authenticator_->Reload();
  EXPECT_TRUE(authenticator_->credentials().contains(ci));
  now_ = std::chrono::sys_days(std::chrono::year(2027) / 1 / 31);
  EXPECT_FALSE(authenticator_->credentials().contains(ci)) << "it has expired";
}

TEST_F(AuthenticatorTest, CallsAreDecidedDuringAReload) {
  const std::string one = Line("one", kToken, "scopes=compute");
  const std::string two = one + Line("two", kOther, "scopes=compute");
  Load(one);
  std::atomic<bool> stop = false;
  std::vector<std::thread> callers;
  for (int n = 0; n < 3; ++n) {
    callers.emplace_back([&] {
      while (!stop) {
        const Decision decision = Ask("Bearer " + kToken);
        EXPECT_TRUE(decision.status.ok() && *decision.caller.name == "one");
        (void)Ask("Bearer " + kOther);
      }
    });
  }
  for (int n = 0; n < 50; ++n) {
    Write(n % 2 == 0 ? two : one);
    authenticator_->Reload();
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(reloads_.size(), 50u);
}

// A name that a call was given stays valid, whatever happens to the file.
TEST_F(AuthenticatorTest, ACallersNameOutlivesItsLine) {
  Load(Line("ci", kToken, "scopes=compute"));
  const Caller caller = Ask("Bearer " + kToken).caller;
  Write(Line("other", kOther, "scopes=compute"));
  authenticator_->Reload();
  EXPECT_EQ(*caller.name, "ci");
}

TEST_F(AuthenticatorTest, AnUnusableFileIsRefused) {
  const auto expect = [this](const std::string& why) {
    const auto made = TryLoad();
    ASSERT_FALSE(made.ok());
    EXPECT_NE(made.status().message().find(path_.string() + ": " + why), std::string::npos)
        << made.status().message();
  };
  expect("it cannot be read: No such file");
  std::filesystem::create_directory(path_);
  expect("it is not a regular file");
  std::filesystem::remove(path_);
  Write(Line("ci", kToken, "scopes=compute"));
  std::filesystem::permissions(path_, std::filesystem::perms::others_write,
                               std::filesystem::perm_options::add);
  expect("any user may write to it");
  Write(std::string(kTokensFileBytesMax + 1, '\n'));
  expect("it has more than 1048576 bytes");
}

}  // namespace
}  // namespace attend
