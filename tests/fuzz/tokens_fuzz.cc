// SPDX-License-Identifier: Apache-2.0
//
// The file of --tokens, and lookups in it. The first record is the file; all are looked up as
// tokens and as certificates' names. An accepted file keeps its bounds, an error is a short line of
// printable characters, and each caller that is found is named in the file.

#include <chrono>
#include <string>
#include <vector>

#include "server/auth/grants.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

constexpr size_t kErrorBytesMax = 200;

void Try(const std::vector<std::string>& records) {
  const std::vector<std::string> tenants = {"default", "blue", "green"};
  const std::string& file = records[0];
  const Result<Grants> grants = Grants::Parse(file, tenants);
  if (!grants.ok()) {
    RequireRefusal(grants.status(), {Code::kInvalidArgument});
    const std::string& why = grants.status().message();
    ATTEND_FUZZ_REQUIRE(why.size() <= kErrorBytesMax, why);
    for (const char c : why) ATTEND_FUZZ_REQUIRE(' ' <= c && c <= '~', why);
    return;
  }
  ATTEND_FUZZ_REQUIRE(1 <= grants->count() && grants->count() <= kGrantsMax, file);
  ATTEND_FUZZ_REQUIRE(std::ssize(file) <= kTokensFileBytesMax && file.back() == '\n', file);
  const auto check = [&](const Grant* grant) {
    if (grant == nullptr) return;
    ATTEND_FUZZ_REQUIRE(grant->name != nullptr && !grant->name->empty() &&
                            grant->name->size() <= kCallerNameBytesMax,
                        file);
    ATTEND_FUZZ_REQUIRE(file.find("name=" + *grant->name) != std::string::npos, file);
    ATTEND_FUZZ_REQUIRE(0 <= grant->tenant && grant->tenant < std::ssize(tenants), file);
    ATTEND_FUZZ_REQUIRE(!grant->scopes.none(), file);
  };
  for (const std::string& record : records) {
    check(grants->FindToken(record));
    for (const auto kind :
         {CertificateName::kUri, CertificateName::kDns, CertificateName::kCommon}) {
      const Grant* const found = grants->FindCertificate(kind, record);
      ATTEND_FUZZ_REQUIRE(found == nullptr || file.find(record) != std::string::npos, file);
      check(found);
    }
  }
}

}  // namespace

}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::string> records = attend::fuzz::Records(attend::fuzz::View(data, size));
  if (records.empty()) records.emplace_back();
  attend::fuzz::Try(records);
  return 0;
}
