// SPDX-License-Identifier: Apache-2.0

#include "server/auth/grants.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/util/random_token.h"

namespace attend {
namespace {

const std::vector<std::string> kTenants = {"default", "blue", "green"};

std::string Sha256(std::string_view token) {
  const TokenDigest digest = DigestOf(token);
  return "sha256=" + HexText({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

Result<Grants> Parse(const std::string& text) { return Grants::Parse(text, kTenants); }

void ExpectRefused(const std::string& text, const std::string& why) {
  const Result<Grants> grants = Parse(text);
  ASSERT_FALSE(grants.ok()) << text;
  EXPECT_EQ(grants.status().code(), Code::kInvalidArgument);
  EXPECT_NE(grants.status().message().find(why), std::string::npos) << grants.status().message();
}

TEST(GrantsTest, ALineDescribesACaller) {
  const Result<Grants> grants =
      Parse("# who may call\n\nname=ci-1 " + Sha256("secret of the ci") +
            " tenant=blue scopes=compute,info expires=2027-01-31T12:34:56Z any-tenant\n");
  ASSERT_TRUE(grants.ok()) << grants.status().message();
  EXPECT_EQ(grants->count(), 1);
  const Grant* const grant = grants->FindToken("secret of the ci");
  ASSERT_NE(grant, nullptr);
  EXPECT_EQ(*grant->name, "ci-1");
  EXPECT_EQ(grant->tenant, 1);
  EXPECT_TRUE(grant->scopes.Has(Scope::kCompute));
  EXPECT_FALSE(grant->scopes.Has(Scope::kSessions));
  EXPECT_TRUE(grant->scopes.Has(Scope::kInfo));
  EXPECT_FALSE(grant->scopes.Has(Scope::kAdmin));
  EXPECT_TRUE(grant->scopes.Has(Scope::kAny));
  EXPECT_TRUE(grant->any_tenant);
  EXPECT_EQ(grant->expires.time_since_epoch().count(), 1801398896);
  EXPECT_EQ(grants->FindToken("secret of the cI"), nullptr);
}

TEST(GrantsTest, OmittedFieldsHaveDefaults) {
  const Result<Grants> grants = Parse("name=a " + Sha256("t") + " scopes=admin\n");
  ASSERT_TRUE(grants.ok()) << grants.status().message();
  const Grant* const grant = grants->FindToken("t");
  ASSERT_NE(grant, nullptr);
  EXPECT_EQ(grant->tenant, 0);
  EXPECT_FALSE(grant->any_tenant);
  EXPECT_EQ(grant->expires, kNoExpiry);
}

TEST(GrantsTest, CertificatesAreFoundByTheKindOfTheirName) {
  const Result<Grants> grants = Parse(
      "name=a uri=spiffe://prod/web scopes=compute tenant=blue\n"
      "name=b dns=web.example scopes=compute tenant=green\n"
      "name=c cn=web.example scopes=info\n");
  ASSERT_TRUE(grants.ok()) << grants.status().message();
  const auto tenant = [&](CertificateName kind, std::string_view name) {
    const Grant* const grant = grants->FindCertificate(kind, name);
    return grant == nullptr ? -1 : grant->tenant;
  };
  EXPECT_EQ(tenant(CertificateName::kUri, "spiffe://prod/web"), 1);
  EXPECT_EQ(tenant(CertificateName::kDns, "spiffe://prod/web"), -1);
  EXPECT_EQ(tenant(CertificateName::kDns, "web.example"), 2);
  EXPECT_EQ(tenant(CertificateName::kCommon, "web.example"), 0);
  EXPECT_EQ(tenant(CertificateName::kUri, "web.example"), -1);
  EXPECT_EQ(tenant(CertificateName::kCommon, ""), -1);
}

TEST(GrantsTest, ErrorsNameTheLineAndTheFault) {
  const std::string hash = Sha256("t");
  ExpectRefused("", "it contains no callers");
  ExpectRefused("# nothing\n\n", "it contains no callers");
  ExpectRefused("name=a " + hash + " scopes=compute", "its last line has no line break");
  ExpectRefused("\n" + hash + " scopes=compute\n", "line 2 has no name");
  ExpectRefused("name=a scopes=compute\n", "line 1 has none of sha256=");
  ExpectRefused("name=a " + hash + "\n", "line 1 has no scopes");
  ExpectRefused("name=a " + hash + " scopes=\n", "line 1 has no scopes");
  ExpectRefused("name=a " + hash + " scopes=compute,any\n", "an unknown scope");
  ExpectRefused("name=a " + hash + " scopes=compute,,info\n", "an unknown scope");
  ExpectRefused("name=a b " + hash + " scopes=compute\n", "an unknown field");
  ExpectRefused("name=a " + hash + " scopes=compute any-tenant=no\n", "an unknown field");
  ExpectRefused("name=a " + hash + " scopes=compute name=b\n", "has name twice");
  ExpectRefused("name=a/b " + hash + " scopes=compute\n", "has a name that is not");
  ExpectRefused("name=" + std::string(65, 'a') + " " + hash + " scopes=compute\n", "1 to 64");
  ExpectRefused("name=a " + hash + " scopes=compute tenant=red\n",
                "a tenant that --tenant does not name");
  ExpectRefused("name=a " + hash + " scopes=compute dns=x\n", "has more than one of sha256=");
  ExpectRefused("name=a dns= scopes=compute\n", "has an empty dns");
  ExpectRefused("name=a " + hash + " scopes=compute\nname=a dns=x scopes=info\n",
                "line 2 repeats the name of an earlier line");
  ExpectRefused("name=a " + hash + " scopes=compute\nname=b " + hash + " scopes=info\n",
                "line 2 repeats the token or certificate of an earlier line");
  ExpectRefused("name=a " + hash + " scopes=compute\r\n", "an unknown scope");
  for (const char* time : {"2027-1-31", "2027-02-30", "2027-01-31T24:00:00Z", "2027-01-31T1:00:00Z",
                           "2027-01-31T00:00:00", "20270131", "+027-01-31", "tomorrow", ""}) {
    ExpectRefused("name=a " + hash + " scopes=info expires=" + time + "\n", "has an expires");
  }
}

// If the file is mistaken for a plain list of tokens, they do not appear in the log.
TEST(GrantsTest, ErrorsDoNotQuotePossibleTokens) {
  const std::string token = "attend_0123456789abcdef0123456789abcdef";
  for (const std::string& line : {"name=a sha256=" + token + " scopes=compute\n", token + "\n",
                                  "name=a token=" + token + "\n", "name=a scopes=" + token + "\n",
                                  "name=a tenant=" + token + "\n", "name=a/" + token + "\n",
                                  "name=a expires=" + token + "\n"}) {
    const Result<Grants> grants = Parse(line);
    ASSERT_FALSE(grants.ok());
    EXPECT_EQ(grants.status().message().find(token), std::string::npos)
        << grants.status().message();
  }
}

TEST(GrantsTest, SizesAreBounded) {
  ExpectRefused("name=a cn=" + std::string(kGrantBytesMax, 'x') + " scopes=info\n",
                "must have at most 1024");
  ExpectRefused(std::string(kTokensFileBytesMax, '#') + "\n", "has more than 1048576 bytes");
  std::string text;
  for (int64_t i = 0; i < kGrantsMax; ++i) {
    const std::string number = std::to_string(i);
    text += "name=n" + number + " cn=c" + number + " scopes=info\n";
  }
  EXPECT_TRUE(Parse(text).ok());
  ExpectRefused(text + "name=last cn=last scopes=info\n",
                "line 1025 exceeds the limit of 1024 callers");
}

}  // namespace
}  // namespace attend
