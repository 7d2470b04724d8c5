// SPDX-License-Identifier: Apache-2.0

#include "client/cli/parse_errors.h"

#include <algorithm>

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

}  // namespace

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
