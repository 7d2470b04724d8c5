// SPDX-License-Identifier: Apache-2.0
//
// Settings: each line of the input as a value of every kind, and the whole input as a --limits file
// and as a command line if it begins with a dash, otherwise as a --config file. Accepted settings
// are within the bounds of --help; others are refused with an error of one line.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <sstream>

#include "server/app/config.h"
#include "server/app/config_values.h"
#include "server/limits/tenant_bounds.h"
#include "server/schedule/tenants.h"
#include "server/util/byte_size.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

constexpr size_t kArgumentsMax = 16;

void CheckByteSize(const std::string& text) {
  const Result<int64_t> bytes = ParseByteSize(text);
  if (!bytes.ok()) return RequireRefusal(bytes.status(), {Code::kInvalidArgument});
  ATTEND_FUZZ_REQUIRE(*bytes >= 0 && *bytes <= int64_t{1} << 53, text);
  const Result<int64_t> again = ParseByteSize(FormatByteSize(*bytes));
  ATTEND_FUZZ_REQUIRE(again.ok() && *again == *bytes, text + " " + FormatByteSize(*bytes));
}

void RequireTenants(const Tenants& tenants) {
  ATTEND_FUZZ_REQUIRE(!tenants.list().empty() && tenants.list().size() <= size_t{kTenantsMax},
                      std::to_string(tenants.list().size()));
  for (const Tenant& tenant : tenants.list()) {
    ATTEND_FUZZ_REQUIRE(tenant.weight >= 1 && tenant.weight <= kTenantWeightMax, tenant.name);
    ATTEND_FUZZ_REQUIRE(
        !tenant.name.empty() && tenant.name.size() <= size_t{kTenantNameBytesMax} &&
            std::all_of(tenant.name.begin(), tenant.name.end(),
                        [](char c) { return std::isgraph(static_cast<unsigned char>(c)); }),
        tenant.name);
    ATTEND_FUZZ_REQUIRE(
        tenants.list()[static_cast<size_t>(tenants.Find(tenant.name))].name == tenant.name,
        tenant.name);
  }
}

// The normal form of an accepted value is accepted, and stays as it is.
void CheckValue(std::string (*check)(std::string&), std::string text) {
  if (!check(text).empty()) return;
  const std::string taken = text;
  ATTEND_FUZZ_REQUIRE(check(text).empty() && text == taken, taken);
}

void CheckValues(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    CheckByteSize(line);
    CheckValue(CheckAddress, line);
    CheckValue(CheckMetricsAddress, line);
    CheckValue(CheckDevice, line);
    CheckValue(CheckTenant, line);
    std::string mode = line;
    if (CheckReferenceCheck(mode).empty()) {
      ATTEND_FUZZ_REQUIRE(SampleOf(mode) >= 0 && SampleOf(mode) <= 1, mode);
    }
  }
  const Result<Tenants> tenants = Tenants::Parse(lines);
  if (tenants.ok()) RequireTenants(*tenants);
}

void CheckConfig(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"attend-server"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  Config config;
  std::string text;
  const ConfigOutcome outcome =
      ParseConfig(static_cast<int>(argv.size()), argv.data(), config, text);
  if (outcome == ConfigOutcome::kError) {
    ATTEND_FUZZ_REQUIRE(!text.empty(), "an error without a message");
    const auto lines = std::count(text.begin(), text.end(), '\n');
    ATTEND_FUZZ_REQUIRE(lines == 0 || (lines == 1 && text.back() == '\n'), text);
    return;
  }
  if (outcome == ConfigOutcome::kPrinted) return;
  RequireTenants(config.tenants);
  ATTEND_FUZZ_REQUIRE(!config.listen.empty() && config.listen.size() <= 64, "listen");
  for (std::string address : config.listen) {
    ATTEND_FUZZ_REQUIRE(CheckAddress(address).empty(), address);
  }
  ATTEND_FUZZ_REQUIRE(config.max_request_bytes > 0 && config.memory_budget_bytes > 0 &&
                          config.max_queue > 0 && config.max_streams > 0 &&
                          config.max_batch_requests > 0 && config.check_threads > 0,
                      "a limit of 0");
  for (const double number :
       {config.check_sample, config.drain_timeout_seconds, config.chunked_idle_timeout_seconds}) {
    ATTEND_FUZZ_REQUIRE(std::isfinite(number) && number >= 0, std::to_string(number));
  }
}

void CheckRate(const Rate& rate) {
  ATTEND_FUZZ_REQUIRE(rate.per_second >= 0 && (rate.bounded() ? rate.burst >= 1 : rate.burst == 0),
                      std::to_string(rate.per_second) + " " + std::to_string(rate.burst));
}

void CheckLimits(const std::string& text) {
  static const std::vector<std::string> tenants = {"default", "a", "prod.eu-1"};
  const Result<std::vector<TenantBounds>> bounds = ParseLimits(text, tenants);
  if (!bounds.ok()) {
    RequireRefusal(bounds.status(), {Code::kInvalidArgument});
    ATTEND_FUZZ_REQUIRE(bounds.status().message().find('\n') == std::string::npos,
                        bounds.status().message());
    return;
  }
  ATTEND_FUZZ_REQUIRE(bounds->size() == tenants.size(), std::to_string(bounds->size()));
  for (const TenantBounds& each : *bounds) {
    for (const Limit limit : kLimits) {
      ATTEND_FUZZ_REQUIRE(each[limit] >= 1, std::string(LimitKey(limit)));
    }
    CheckRate(each.bytes);
    CheckRate(each.cost);
  }
}

// True if the argument makes the parser read a file of this machine.
bool NamesFile(const std::string& argument) {
  return argument.find("-config") != argument.npos || argument.find("-limits") != argument.npos;
}

void RunOne(const std::string& input) {
  if (input.find('\0') != input.npos) return;
  std::vector<std::string> lines;
  std::istringstream stream(input);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  CheckValues(lines);
  CheckLimits(input);
  if (NamesFile(input)) return;
  if (input.starts_with('-')) {
    if (lines.size() > kArgumentsMax) lines.resize(kArgumentsMax);
    return CheckConfig(lines);
  }
  const int fd = memfd_create("config", MFD_CLOEXEC);
  ATTEND_FUZZ_REQUIRE(write(fd, input.data(), input.size()) == static_cast<ssize_t>(input.size()),
                      "memfd");
  CheckConfig({"--config", "/proc/self/fd/" + std::to_string(fd)});
  close(fd);
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attend::fuzz::RunOne(std::string(attend::fuzz::View(data, size)));
  return 0;
}
