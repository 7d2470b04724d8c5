// SPDX-License-Identifier: Apache-2.0
//
// Each tenant's bounds are looked up in up to two sections, the defaults and its own; the later one
// that has a key wins, and "none" there removes a default. The defaults are checked alone as well,
// so that an error in them is found even if every tenant has its own section.

#include "server/limits/tenant_bounds.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "server/util/assign.h"
#include "server/util/byte_size.h"
#include "server/util/parse_number.h"

namespace attend {
namespace {

constexpr std::string_view kBytesBurst = "bytes-burst";
constexpr std::string_view kCostBurst = "gflop-burst";

constexpr int64_t kCountMax = int64_t{1} << 24;
constexpr int64_t kBytesMost = int64_t{1} << 50;
constexpr double kGflopMin = 0.001;
constexpr double kGflopMax = 1e9;
constexpr double kFlopsOfGflop = 1e9;

// A value and its position in the file, for messages.
struct Place {
  int line = 0;
  std::string section;  // empty: the defaults
  std::string key;
  std::string value;
};

std::string At(int line) { return "line " + std::to_string(line) + ": "; }

Status Wrong(const Place& place, const std::string& must) {
  const std::string section = place.section.empty() ? "" : "[" + place.section + "] ";
  return InvalidArgument(At(place.line) + section + place.key + " is \"" + place.value +
                         "\", must be " + must);
}

std::string_view Trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

// Strips a trailing comment; # and ; inside quotes start none.
std::string_view WithoutComment(std::string_view line) {
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (quote != 0) {
      if (line[i] == quote) quote = 0;
    } else if (line[i] == '"' || line[i] == '\'') {
      quote = line[i];
    } else if (line[i] == '#' || line[i] == ';') {
      return line.substr(0, i);
    }
  }
  return line;
}

std::string_view Unquoted(std::string_view text) {
  const bool quoted =
      text.size() >= 2 && (text[0] == '"' || text[0] == '\'') && text.back() == text[0];
  return quoted ? text.substr(1, text.size() - 2) : text;
}

Result<int64_t> Count(const Place& place) {
  const std::optional<int64_t> count = ParseNumber<int64_t>(place.value);
  if (count && *count >= 1 && *count <= kCountMax) return *count;
  return Wrong(place, "a whole number in [1, " + std::to_string(kCountMax) + "], or none");
}

Result<int64_t> Bytes(const Place& place) {
  const Result<int64_t> bytes = ParseByteSize(place.value);
  if (bytes.ok() && *bytes >= 1 && *bytes <= kBytesMost) return *bytes;
  return Wrong(place, "a size in [1, " + FormatByteSize(kBytesMost) + "] such as 64MiB, or none");
}

Result<int64_t> Flops(const Place& place) {
  const std::optional<double> gflop = ParseNumber<double>(place.value);
  if (gflop && *gflop >= kGflopMin && *gflop <= kGflopMax) {
    return static_cast<int64_t>(std::llround(*gflop * kFlopsOfGflop));
  }
  return Wrong(place, "a number in [0.001, 1e9], or none");
}

struct Key {
  std::string_view name;
  std::string_view label;  // empty: a burst
  Result<int64_t> (*parse)(const Place& place);
};
// Limits in their order, then bursts.
constexpr std::array<Key, kLimitCount + 2> kKeys = {
    {{"requests-in-flight", "in_flight", Count},
     {"bytes-per-second", "bytes", Bytes},
     {"gflop-per-second", "cost", Flops},
     {"checks", "checks", Count},
     {"session-memory", "session_memory", Bytes},
     {"streams", "streams", Count},
     {"shared-memory", "shared_memory", Bytes},
     {"connections", "connections", Count},
     {"sessions", "sessions", Count},
     {"small-calls-in-flight", "small_calls", Count},
     {kBytesBurst, "", Bytes},
     {kCostBurst, "", Flops}}};

std::string AllKeys() {
  std::string all;
  for (const Key& each : kKeys) all += (all.empty() ? "" : ", ") + std::string(each.name);
  return all;
}

// A section's keys and values; 0: "none" was given.
using Section = std::map<std::string, std::pair<int64_t, Place>, std::less<>>;

Status Read(std::string_view line, int number, const std::string& name, Section& section) {
  const size_t equals = line.find('=');
  if (equals == std::string_view::npos) {
    return InvalidArgument(At(number) + "\"" + std::string(line) +
                           "\" must be KEY = VALUE or [TENANT]");
  }
  Place place{number, name, std::string(Unquoted(Trimmed(line.substr(0, equals)))),
              std::string(Unquoted(Trimmed(line.substr(equals + 1))))};
  const auto* const known = std::find_if(kKeys.begin(), kKeys.end(),
                                         [&](const Key& each) { return each.name == place.key; });
  if (known == kKeys.end()) {
    return InvalidArgument(At(number) + "\"" + place.key + "\" must be one of " + AllKeys());
  }
  int64_t value = 0;
  if (place.value != "none") {
    ATTEND_RETURN_IF_ERROR(Assign(value, known->parse(place)));
  }
  const std::string key = place.key;
  if (!section.emplace(key, std::pair(value, std::move(place))).second) {
    return InvalidArgument(At(number) + key + " is given twice");
  }
  return Status();
}

// The value of `key` in the last section that has it; null if none has.
const Section::mapped_type* Said(std::span<const Section* const> sections, std::string_view key) {
  const Section::mapped_type* said = nullptr;
  for (const Section* const section : sections) {
    if (const auto found = section->find(key); found != section->end()) said = &found->second;
  }
  return said;
}

// The burst defaults to one second's worth. The last section must not give a burst without a rate.
Status SetRate(std::span<const Section* const> sections, std::string_view rate_key,
               std::string_view burst_key, Rate& rate) {
  const auto* const per_second = Said(sections, rate_key);
  const auto* const burst = Said(sections, burst_key);
  const auto* const last = Said(sections.last(1), burst_key);
  rate = {};
  if (per_second != nullptr && per_second->first > 0) {
    rate.per_second = per_second->first;
    rate.burst = burst == nullptr || burst->first == 0 ? rate.per_second : burst->first;
  } else if (last != nullptr && last->first > 0) {
    return Wrong(last->second, "none without " + std::string(rate_key));
  }
  return Status();
}

Result<TenantBounds> BoundsOf(std::span<const Section* const> sections) {
  TenantBounds bounds;
  for (const Limit limit : kLimits) {
    if (limit == Limit::kBytes || limit == Limit::kCost) continue;
    const auto* const said = Said(sections, LimitKey(limit));
    if (said != nullptr) bounds[limit] = said->first > 0 ? said->first : kUnlimited;
  }
  ATTEND_RETURN_IF_ERROR(SetRate(sections, LimitKey(Limit::kBytes), kBytesBurst, bounds.bytes));
  ATTEND_RETURN_IF_ERROR(SetRate(sections, LimitKey(Limit::kCost), kCostBurst, bounds.cost));
  return bounds;
}

// The sections by name; "" holds the keys before the first.
Result<std::map<std::string, Section>> ReadSections(std::string_view text,
                                                    std::span<const std::string> tenants) {
  std::map<std::string, Section> sections;
  sections[""];
  std::string name;
  int number = 0;
  while (!text.empty()) {
    ++number;
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = Trimmed(WithoutComment(text.substr(0, end)));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty()) continue;
    if (line.front() != '[') {
      ATTEND_RETURN_IF_ERROR(Read(line, number, name, sections[name]));
      continue;
    }
    if (line.back() != ']') {
      return InvalidArgument(At(number) + "\"" + std::string(line) + "\" must be [TENANT]");
    }
    name = Unquoted(Trimmed(line.substr(1, line.size() - 2)));
    if (std::find(tenants.begin(), tenants.end(), name) == tenants.end()) {
      return InvalidArgument(At(number) + "[" + name + "] must be a tenant that --tenant names");
    }
    if (!sections.try_emplace(name).second) {
      return InvalidArgument(At(number) + "[" + name + "] is given twice");
    }
  }
  return sections;
}

}  // namespace

std::string_view LimitKey(Limit limit) { return kKeys[static_cast<size_t>(limit)].name; }
std::string_view LimitLabel(Limit limit) { return kKeys[static_cast<size_t>(limit)].label; }

Result<std::vector<TenantBounds>> ParseLimits(std::string_view text,
                                              std::span<const std::string> tenants) {
  if (static_cast<int64_t>(text.size()) > kLimitsBytesMax) {
    return InvalidArgument("it has " + std::to_string(text.size()) + " bytes, must have at most " +
                           std::to_string(kLimitsBytesMax));
  }
  const Result<std::map<std::string, Section>> sections = ReadSections(text, tenants);
  if (!sections.ok()) return sections.status();
  const Section& all = sections->at("");
  const Result<TenantBounds> common = BoundsOf(std::array{&all});
  if (!common.ok()) return common.status();
  std::vector<TenantBounds> list;
  for (const std::string& tenant : tenants) {
    const auto own = sections->find(tenant);
    const Result<TenantBounds> bounds =
        own == sections->end() ? common : BoundsOf(std::array{&all, &own->second});
    if (!bounds.ok()) return bounds.status();
    list.push_back(*bounds);
  }
  return list;
}

}  // namespace attend
