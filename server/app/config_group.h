// SPDX-License-Identifier: Apache-2.0
//
// Helpers for groups of settings: options with environment variables, and validators of their
// values.

#pragma once

#include <CLI/CLI.hpp>

#include <cctype>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "server/app/config.h"
#include "server/util/byte_size.h"
#include "server/util/parse_number.h"

namespace attend {

inline constexpr int64_t kBytesMax = int64_t{1} << 50;

inline std::string EnvName(const std::string& flag) {
  std::string name = "ATTEND_";
  for (const char c : flag.substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

// For use after parsing: a setting that is given needs another.
inline void CheckNeeds(const std::string& flag, bool given, bool met, const std::string& needed) {
  if (given && !met) throw CLI::ValidationError(flag, "needs " + needed);
}
// A certificate and its key.
inline void CheckPair(const std::string& cert_flag, const std::string& cert,
                      const std::string& key_flag, const std::string& key) {
  CheckNeeds(cert_flag, !cert.empty(), !key.empty(), key_flag);
  CheckNeeds(key_flag, !key.empty(), !cert.empty(), cert_flag);
}

// Replaces "64MiB" by its number of bytes.
inline CLI::Validator ByteSize(int64_t low, int64_t high) {
  return CLI::Validator(
      [low, high](std::string& text) -> std::string {
        const Result<int64_t> bytes = ParseByteSize(text);
        if (!bytes.ok()) return bytes.status().message();
        if (*bytes < low || *bytes > high) {
          return text + " must be in [" + FormatByteSize(low) + ", " + FormatByteSize(high) + "]";
        }
        text = std::to_string(*bytes);
        return {};
      },
      "");
}

// Like CLI::Range, but not shown in --help and with plain numbers in its error.
template <class T>
CLI::Validator InRange(T low, T high) {
  return CLI::Validator(
      [low, high](std::string& text) -> std::string {
        const std::optional<T> value = ParseNumber<T>(text);
        if (value && *value >= low && *value <= high) return {};
        std::ostringstream message;
        message << '"' << text << "\" must be a number in [" << low << ", " << high << ']';
        return message.str();
      },
      "");
}

using CheckText = std::function<std::string(std::string&)>;

inline CheckText OneOf(std::vector<std::string> allowed) {
  return [allowed = std::move(allowed)](std::string& text) -> std::string {
    std::string list;
    for (const std::string& each : allowed) {
      if (text == each) return {};
      list += (list.empty() ? "" : ", ") + each;
    }
    return '"' + text + "\" must be one of " + list;
  };
}

// Adds options to one group of --help, each with its environment variable.
class Group {
 public:
  Group(CLI::App& app, std::string name) : app_(app), name_(std::move(name)) {}

  template <class T>
  CLI::Option* Add(const std::string& flag, T& value, const std::string& help) {
    return Named(flag, app_.add_option(flag, value, help)->capture_default_str());
  }
  template <class T>
  CLI::Option* Number(const std::string& flag, T& value, std::type_identity_t<T> low,
                      std::type_identity_t<T> high, const std::string& unit,
                      const std::string& help) {
    return Add(flag, value, help)->check(InRange(low, high))->type_name(unit);
  }
  CLI::Option* Int(const std::string& flag, int64_t& value, int64_t low, int64_t high,
                   const std::string& help) {
    return Number(flag, value, low, high, "N", help);
  }
  CLI::Option* Bytes(const std::string& flag, int64_t& value, int64_t low, int64_t high,
                     const std::string& help) {
    return Named(flag, app_.add_option(flag, value, help))
        ->transform(ByteSize(low, high))
        ->default_str(FormatByteSize(value))
        ->type_name("BYTES");
  }
  // A flag that is on by default gets a --no- form.
  CLI::Option* Flag(const std::string& flag, bool& value, const std::string& help) {
    const std::string names = value ? flag + ",!--no-" + flag.substr(2) : flag;
    return Named(flag, app_.add_flag(names, value, help))->default_str(value ? "true" : "false");
  }
  CLI::Option* Text(const std::string& flag, std::string& value, const std::string& type,
                    const CheckText& check, const std::string& help) {
    CLI::Option* const option = Add(flag, value, help)->type_name(type);
    if (check != nullptr) option->transform(CLI::Validator(check, "", ""));
    return option;
  }
  // Refuses a removed setting; `instead` names its replacement.
  void Gone(const std::string& flag, const std::string& instead) {
    const auto refuse = [flag, instead](const std::string&) {
      throw CLI::ValidationError(flag, "was removed: " + instead);
    };
    app_.add_option_function<std::string>(flag, refuse)->envname(EnvName(flag))->group("");
  }

 private:
  CLI::Option* Named(const std::string& flag, CLI::Option* option) {
    return option->group(name_)->envname(EnvName(flag));
  }

  CLI::App& app_;
  const std::string name_;
};

// Defined in config_network.cc.
void AddNetwork(CLI::App& app, Config& c);
// Throws CLI::ValidationError if network settings contradict each other.
void CheckNetwork(const Config& c);
// Defined in config_callers.cc.
void AddCallers(CLI::App& app, Config& c);
void CheckCallers(const Config& c);
// Defined in config_observe.cc.
void AddObserving(CLI::App& app, Config& c);
void CheckObserving(const Config& c);

}  // namespace attend
