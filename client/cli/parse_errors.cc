// SPDX-License-Identifier: Apache-2.0

#include "client/cli/parse_errors.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "kernels/util/counted.h"
#include "kernels/util/printable.h"

namespace attend::client {
namespace {

// Damerau-Levenshtein distance (optimal string alignment): insertions, deletions, substitutions and
// swaps of neighbours.
size_t Distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> steps(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        steps[i][j] = i + j;
        continue;
      }
      const size_t changed = a[i - 1] == b[j - 1] ? 0 : 1;
      steps[i][j] =
          std::min({steps[i - 1][j] + 1, steps[i][j - 1] + 1, steps[i - 1][j - 1] + changed});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        steps[i][j] = std::min(steps[i][j], steps[i - 2][j - 2] + 1);
      }
    }
  }
  return steps[a.size()][b.size()];
}

std::string Joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

template <class Integer>
std::string RangeText() {
  using Limits = std::numeric_limits<Integer>;
  return "in [" + std::to_string(Limits::min()) + ", " + std::to_string(Limits::max()) + "]";
}

// Says what the number must be; empty: it is. `type` is the parser's: "FLOAT:FLOAT in [0 - 1]".
std::string BoundOf(const std::string& type, const std::string& text) {
  errno = 0;
  if (type.starts_with("UINT")) {
    std::strtoull(text.c_str(), nullptr, 0);
    return errno == ERANGE || text.find('-') != std::string::npos ? RangeText<uint64_t>() : "";
  }
  if (type.starts_with("INT")) {
    std::strtoll(text.c_str(), nullptr, 0);
    return errno == ERANGE ? RangeText<int64_t>() : "";
  }
  if (!type.starts_with("FLOAT")) return "";
  const long double number = std::strtold(text.c_str(), nullptr);
  const size_t range = type.find("in [");
  if (std::isnan(number)) return range == std::string::npos ? "" : type.substr(range);
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  return number != 0 && std::abs(number) < kLeast ? "0, or at least " + NumberText(kLeast) : "";
}

}  // namespace

Status CheckNumbers(const CLI::App& app) {
  for (const CLI::Option* const option : app.get_options()) {
    for (const std::string& text : option->results()) {
      const std::string bound = BoundOf(option->get_type_name(), text);
      if (bound.empty()) continue;
      return InvalidArgument(option->get_name() + " is " + Printable(text) + ", must be " + bound);
    }
  }
  for (const CLI::App* const command : app.get_subcommands()) {
    ATTEND_RETURN_IF_ERROR(CheckNumbers(*command));
  }
  return Status();
}

std::string Nearest(const std::string& word, const std::vector<std::string>& names) {
  std::string nearest;
  // Two changed letters turn a short word into a different one.
  size_t least = word.size() < 4 ? 2 : 3;
  for (const std::string& name : names) {
    const size_t distance = Distance(word, name);
    if (distance >= least) continue;
    least = distance;
    nearest = name;
  }
  return nearest;
}

std::string DescribeParseError(const CLI::App& app, const CLI::ParseError& error) {
  // By exit code: for some errors the parser's name is the program's.
  const auto code = static_cast<CLI::ExitCodes>(error.get_exit_code());
  const bool extras = code == CLI::ExitCodes::ExtrasError;
  if (!extras && code != CLI::ExitCodes::RequiredError) return Printable(error.what());
  const CLI::App* last = &app;  // the innermost command on the line
  std::string path;
  while (!last->get_subcommands().empty()) {
    last = last->get_subcommands().front();
    path += last->get_name() + " ";
  }
  const std::vector<std::string> left = app.remaining(/*recurse=*/true);
  std::vector<std::string> names;
  for (const CLI::App* command : last->get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  const std::string see = "see " + path + "--help";
  if (names.empty()) {
    return extras && !left.empty() ? "not expected: " + Printable(Joined(left, " ")) + "; " + see
                                   : Printable(error.what());
  }
  const std::string of = path.empty() ? "" : path.substr(0, path.size() - 1) + ": ";
  if (left.empty()) return of + "a command is missing: " + Joined(names, ", ") + "; " + see;
  const std::string meant = Nearest(left.front(), names);
  return of + "unknown command or flag \"" + Printable(left.front()) + "\"" +
         (meant.empty() ? "" : ", did you mean " + meant + "?") + (meant.empty() ? ", " : " ") +
         see;
}

}  // namespace attend::client
