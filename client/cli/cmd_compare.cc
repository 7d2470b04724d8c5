// SPDX-License-Identifier: Apache-2.0
//
// attend-client compare: two files of `load --json` beside each other.

#include <cstdio>

#include "client/cli/commands.h"
#include "client/load/compare.h"
#include "client/load/load_plot.h"
#include "client/tool/file_io.h"

namespace attend::client {
namespace {

struct CompareFlags {
  std::string before, after, plot;
};

int Run(const CompareFlags& flags) {
  if (!flags.plot.empty()) {
    Status writable = CheckPictureName(flags.plot);
    if (writable.ok()) writable = CheckWritable(flags.plot);
    if (!writable.ok()) return Fail(writable, kExitUsage);
  }
  const Result<LoadFile> before = ReadLoadFile(flags.before);
  if (!before.ok()) return Fail(before.status(), kExitUsage);
  const Result<LoadFile> after = ReadLoadFile(flags.after);
  if (!after.ok()) return Fail(after.status(), kExitUsage);
  std::printf("%s", ComparisonTable(*before, *after, Compare(*before, *after)).c_str());
  if (flags.plot.empty()) return kExitOk;
  const Status written = WritePicture(Draw(ComparisonFigure({*before, *after})), flags.plot);
  return written.ok() ? kExitOk : Fail(written, kExitUsage);
}

}  // namespace

Command AddCompare(CLI::App& app) {
  const auto flags = std::make_shared<CompareFlags>();
  CLI::App* command = app.add_subcommand(
      "compare", "Compare two loads: ratios, and whether they are beyond the noise of the windows");
  command->add_option("A", flags->before, "JSON of a load")->required();
  command->add_option("B", flags->after, "JSON of another load")->required();
  command->add_option("--plot", flags->plot, "Draw both into this file, .svg or .png");
  return [flags] { return Run(*flags); };
}

}  // namespace attend::client
