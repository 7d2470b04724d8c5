// SPDX-License-Identifier: Apache-2.0
//
// attend-client compare: compares files of `load --json`.

#include <algorithm>
#include <cstdio>
#include <set>

#include "client/cli/commands.h"
#include "client/load/compare.h"
#include "client/load/load_plot.h"
#include "client/tool/file_io.h"

namespace attend::client {
namespace {

struct CompareFlags {
  std::vector<std::string> pair, before, after;
  std::string plot;
};

// Collects the files of both sides, from either form of the flags.
Status Finish(CompareFlags* flags) {
  if (!flags->plot.empty()) {
    ATTEND_RETURN_IF_ERROR(CheckPictureName(flags->plot));
    ATTEND_RETURN_IF_ERROR(CheckWritable(flags->plot));
  }
  if (flags->pair.size() == 2) {
    flags->before = {flags->pair[0]};
    flags->after = {flags->pair[1]};
  }
  if (flags->before.empty() || flags->after.empty()) {
    return InvalidArgument("needs two files, or --before and --after with at least one each");
  }
  for (const std::vector<std::string>* side : {&flags->before, &flags->after}) {
    const std::set<std::string> files(side->begin(), side->end());
    for (const std::string& file : files) {
      if (std::count(side->begin(), side->end(), file) == 1) continue;
      return InvalidArgument(file + ": is one run, and was given twice for one side");
    }
  }
  return Status();
}

Status Read(const std::vector<std::string>& paths, LoadRuns* runs) {
  for (const std::string& path : paths) {
    Result<LoadFile> file = ReadLoadFile(path);
    if (!file.ok()) return file.status();
    runs->push_back(std::move(*file));
  }
  return Status();
}

int Run(CompareFlags& flags) {
  LoadRuns before, after;
  Status status = Finish(&flags);
  if (status.ok()) status = Read(flags.before, &before);
  if (status.ok()) status = Read(flags.after, &after);
  if (!status.ok()) return Fail(status, kExitUsage);
  std::printf("%s", ComparisonTable(before, after, Compare(before, after)).c_str());
  if (flags.plot.empty()) return kExitOk;
  LoadRuns all = std::move(before);
  all.insert(all.end(), after.begin(), after.end());
  const Status written = WritePicture(Draw(ComparisonFigure(all)), flags.plot);
  return written.ok() ? kExitOk : Fail(written, kExitUsage);
}

}  // namespace

Command AddCompare(CLI::App& app) {
  const auto flags = std::make_shared<CompareFlags>();
  CLI::App* command = app.add_subcommand(
      "compare", "Compare loads: ratios, and whether they are beyond the noise of the runs");
  CLI::Option* pair =
      command->add_option("FILES", flags->pair, "A.json B.json: one run before, one after")
          ->expected(2);
  for (const auto& [name, files] :
       {std::pair{"--before", &flags->before}, std::pair{"--after", &flags->after}}) {
    command->add_option(name, *files, "JSON of three or more runs, made in turns with the others")
        ->expected(1, 1000)
        ->excludes(pair);
  }
  command->add_option("--plot", flags->plot, "Draw all of them into this .svg file");
  return [flags] { return Run(*flags); };
}

}  // namespace attend::client
