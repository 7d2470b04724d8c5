// SPDX-License-Identifier: Apache-2.0
//
// Names that clients choose: a request_id in a log line and in the name of a dump's folder, a
// tenant and a traceparent in a call's metadata. A name cannot add a line or a field to the log,
// control a terminal, leave the dumps' folder, or match a tenant that is not configured.

#include <google/protobuf/stubs/logging.h>
#include <spdlog/sinks/null_sink.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/util/utf8.h"
#include "server/app/dump.h"
#include "server/log/log_line.h"
#include "server/schedule/tenants.h"
#include "server/trace/trace_parent.h"
#include "tests/fuzz/fuzz.h"
#include "tests/server/support/messages.h"

namespace attend::fuzz {
namespace {

namespace fs = std::filesystem;

// The code points of `text`, nullopt if it is not valid UTF-8.
std::optional<std::u32string> CodePoints(std::string_view text) {
  std::u32string points;
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const int more = lead < 0x80       ? 0
                     : lead >> 5 == 6  ? 1
                     : lead >> 4 == 14 ? 2
                     : lead >> 3 == 30 ? 3
                                       : -1;
    if (more < 0 || i + static_cast<size_t>(more) >= text.size()) return std::nullopt;
    char32_t point = more == 0 ? lead : lead & (0x3f >> more);
    for (int j = 1; j <= more; ++j) {
      const auto next = static_cast<unsigned char>(text[i + static_cast<size_t>(j)]);
      if (next >> 6 != 2) return std::nullopt;
      point = point << 6 | (next & 0x3f);
    }
    constexpr char32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (point < kLeast[more] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) {
      return std::nullopt;
    }
    points += point;
    i += static_cast<size_t>(more) + 1;
  }
  return points;
}

// True for characters that only display something on a terminal.
bool Printable(char32_t c) {
  return c >= 0x20 && (c < 0x7f || c >= 0xa0) && c != 0x061c && !(c >= 0x200b && c <= 0x200f) &&
         !(c >= 0x2028 && c <= 0x202e) && !(c >= 0x2060 && c <= 0x206f) && c != 0xfeff;
}

void RequireLine(const std::string& line) {
  ATTEND_FUZZ_REQUIRE(line.ends_with('\n') && line.find('\n') == line.size() - 1, line);
  const auto points = CodePoints(std::string_view(line).substr(0, line.size() - 1));
  ATTEND_FUZZ_REQUIRE(points, line);
  for (const char32_t point : *points) ATTEND_FUZZ_REQUIRE(Printable(point), line);
  ATTEND_FUZZ_REQUIRE(line.size() < 8 * kLogTextBytesMax, line);
}

// Requires that `begin` is followed by one quoted string and then `end`, the end of the line.
void RequireOneString(const std::string& line, const std::string& begin, const std::string& end) {
  const size_t at = line.find(begin);
  ATTEND_FUZZ_REQUIRE(at != line.npos, line);
  size_t i = at + begin.size();
  ATTEND_FUZZ_REQUIRE(line[i] == '"', line);
  for (++i; i < line.size() && line[i] != '"'; ++i) i += line[i] == '\\' ? 1 : 0;
  ATTEND_FUZZ_REQUIRE(i < line.size() && line.substr(i + 1) == end, line);
}

void CheckLog(const std::string& name) {
  const LogFields fields = {{"request_id", name}, {"id", int64_t{7}}};
  const auto line_of = [&fields](LogFormat format) {
    return FormatLogLine(format, {}, "request failed", fields);
  };
  const std::string text = line_of(LogFormat::kText);
  RequireLine(text);
  RequireOneString(text, "request failed request_id=", " id=7\n");
  const std::string line = line_of(LogFormat::kJson);
  RequireLine(line);
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  ATTEND_FUZZ_REQUIRE(json.is_object() && json.size() == 6 && json["id"] == 7, line);
  const std::string record = FormatJsonRecord({}, fields);
  RequireLine(record);
  const auto of_access = nlohmann::json::parse(record, nullptr, /*allow_exceptions=*/false);
  ATTEND_FUZZ_REQUIRE(of_access.is_object() && of_access.size() == 3, record);
  ATTEND_FUZZ_REQUIRE(of_access["request_id"] == json["request_id"], record);
  if (name.size() > kLogTextBytesMax || !CodePoints(name)) return;
  ATTEND_FUZZ_REQUIRE(json["request_id"] == name, line);
}

void CheckDump(const std::string& name) {
  static auto* const problem = new test::WireProblem(test::PlainWireProblem(1, 2, 4));
  static auto* const logger = new Logger({}, std::make_shared<spdlog::sinks::null_sink_mt>());
  static const auto* const clock = new SteadyClock();
  static const auto* const folder = [] {
    std::string pattern = fs::temp_directory_path() / "attend-fuzz-XXXXXX";
    auto* const made = new fs::path(mkdtemp(pattern.data()));
    static const fs::path left = *made;
    std::atexit([] { fs::remove_all(left); });
    return made;
  }();
  Dumper::Options options;
  options.directory = *folder / "dumps";
  Dumper dumper(options, *clock, *logger);
  Request failed;
  failed.id = 7;
  failed.request_id = name;
  failed.attention = problem->owned.attention;
  failed.device_name = "cpu";
  failed.report = RowsReport();
  dumper.Write(failed);
  int folders = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(*folder)) {
    ATTEND_FUZZ_REQUIRE(entry.path() == options.directory, entry.path().string());
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(options.directory)) {
    ++folders;
    const std::string plain = entry.path().filename();
    ATTEND_FUZZ_REQUIRE(plain.size() <= 128, plain);
    for (const char c : plain) {
      ATTEND_FUZZ_REQUIRE(
          std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.', plain);
    }
    v1::AttendRequest request;
    std::ifstream file(entry.path() / "request.binpb", std::ios::binary);
    ATTEND_FUZZ_REQUIRE(
        !CodePoints(name) || (request.ParseFromIstream(&file) && request.request_id() == name),
        plain);
    std::ifstream report(entry.path() / "report.json");
    ATTEND_FUZZ_REQUIRE(nlohmann::json::parse(report, nullptr, false).is_object(), plain);
  }
  ATTEND_FUZZ_REQUIRE(folders == 1, std::to_string(folders) + " dumps");
  fs::remove_all(options.directory);
}

void CheckTenant(const std::string& name) {
  static const auto* const tenants = new Tenants(*Tenants::Parse({"team-a=1", "team-b=2"}));
  const int found = tenants->Find(name);
  ATTEND_FUZZ_REQUIRE(found >= 0 && found < 3, name);
  ATTEND_FUZZ_REQUIRE(found == 0 || tenants->list()[static_cast<size_t>(found)].name == name, name);
}

// The name as a traceparent, valid or not, and as text in a span.
void CheckTrace(const std::string& name) {
  const std::optional<TraceParent> parent = ParseTraceParent(name);
  if (parent) {
    ATTEND_FUZZ_REQUIRE(parent->valid() && (parent->trace_high | parent->trace_low) != 0, name);
    const std::string again = FormatTraceParent(*parent);
    ATTEND_FUZZ_REQUIRE(again.substr(2, 51) == name.substr(2, 51), again);
    ATTEND_FUZZ_REQUIRE(ParseTraceParent(again) == parent, again);
  }
  const std::string text = ToUtf8(name, 256);
  ATTEND_FUZZ_REQUIRE(text.size() <= 256 && CodePoints(text), text);
  ATTEND_FUZZ_REQUIRE(name.size() > 256 || !CodePoints(name) || text == name, text);
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto* const silence = new google::protobuf::LogSilencer();
  (void)silence;
  const std::string name(attend::fuzz::View(data, size));
  attend::fuzz::CheckLog(name);
  // Not for every input, as files take a hundred times as long.
  if (attend::fuzz::RandomOf(name)() % 16 == 0) attend::fuzz::CheckDump(name);
  attend::fuzz::CheckTenant(name);
  attend::fuzz::CheckTrace(name);
  return 0;
}
