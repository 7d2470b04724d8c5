// SPDX-License-Identifier: Apache-2.0

#include "server/app/config_help.h"

#include <algorithm>
#include <string_view>

namespace attend {
namespace {

// CLI11's message for an unknown key or a line of the file that is not a setting.
constexpr std::string_view kNotParsed = "INI was not able to parse ";
// CLI11's name for the start of a section.
constexpr std::string_view kSectionMark = ".++";

// Rewrites CLI11's error about the file's contents; empty if `text` is another error.
std::string ConfigFileFault(const CLI::App& app, std::string_view text) {
  if (!text.starts_with(kNotParsed)) return {};
  text.remove_prefix(kNotParsed.size());
  const CLI::Option* const file = app.get_config_ptr();
  // The path is the flag's value, or the environment's, which is the option's default.
  const std::string path = file == nullptr           ? ""
                           : file->results().empty() ? file->get_default_str()
                                                     : file->results().front();
  std::string fault = "--config " + path;
  if (text.ends_with(kSectionMark)) {
    text.remove_suffix(kSectionMark.size());
    return fault + ": settings must not be in a section such as [" + std::string(text) + "]";
  }
  return fault + ": \"" + std::string(text) + "\" is not a setting";
}

}  // namespace

std::string HelpFormatter::make_option_name(const CLI::Option* option, bool positional) const {
  // CLI11 appends the value that the negation sets; the --no- name says so already.
  constexpr std::string_view kNegated = "{false}";
  std::string name = CLI::Formatter::make_option_name(option, positional);
  const size_t at = name.find(kNegated);
  if (at != std::string::npos) name.erase(at, kNegated.size());
  return name;
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  return option->get_type_name().empty() ? "" : " " + option->get_type_name();
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  constexpr size_t kWidth = 62;
  std::string text = option->get_description();
  if (!option->get_default_str().empty()) text += " [" + option->get_default_str() + "]";
  if (!option->get_envname().empty()) text += " [$" + option->get_envname() + "]";
  size_t line = 0;
  for (size_t space = 0, i = 0; i < text.size(); ++i) {
    if (text[i] == ' ') space = i;
    if (i - line < kWidth || space <= line) continue;
    text[space] = '\n';
    line = space;
  }
  return text;
}

std::string ErrorLine(const CLI::App& app, const CLI::Error& error) {
  std::string text = ConfigFileFault(app, error.what());
  if (text.empty()) text = error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return "attend-server: " + text + " (see attend-server --help)\n";
}

}  // namespace attend
