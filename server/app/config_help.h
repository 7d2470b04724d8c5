// SPDX-License-Identifier: Apache-2.0
//
// The layout of attend-server's --help, and one-line errors about settings.

#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace attend {

// Wraps each option's description, followed by its default and environment variable.
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
};

// One line for stderr about `error`, thrown by `app`.
std::string ErrorLine(const CLI::App& app, const CLI::Error& error);

}  // namespace attend
