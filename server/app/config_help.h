// SPDX-License-Identifier: Apache-2.0
//
// How attend-server talks about its settings: the layout of --help, and one line for what is wrong.

#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace attend {

// Each option's default and environment variable stand behind its description, which is wrapped.
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
};

// One line for stderr, whatever `app` threw.
std::string ErrorLine(const CLI::App& app, const CLI::Error& error);

}  // namespace attend
