// SPDX-License-Identifier: Apache-2.0
//
// The service's figures, each compared with a rival in the same run: throughput with bare gRPC and
// raw TCP, small requests with an echo and a Python server, latency with the echo and the kernel
// alone; the gain of batches, and the cost of observability.
//
// Servers and client are separate processes. Answers are checked before and during the measurement;
// a wrong one gets no figure. Rounds are interleaved; a figure is the median of the rounds, a ratio
// the median of the rounds' ratios.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "kernels/contract/backend.h"
#include "proto/process/process_settings.h"
#include "proto/process/receive_blocks.h"
#include "server/app/config.h"
#include "server/app/config_values.h"
#include "tests/bench/service/machine.h"
#include "tests/bench/service/rows.h"
#include "tests/bench/service/serve.h"

namespace attend::bench {
namespace {

struct Run {
  Options options;
  std::vector<std::string> rows;
  std::string json;
  bool list = false;
};

// Looks beside the sources of this build, in the current folder if it is a checkout, and beside
// this program.
std::string FindPythonServer() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  for (const std::filesystem::path& folder :
       {std::filesystem::path(ATTEND_BENCH_FOLDER), std::filesystem::path("tests/bench"),
        self.parent_path()}) {
    const std::filesystem::path file = folder / "python_server.py";
    if (std::filesystem::exists(file, error)) return file.string();
  }
  return "";
}

nlohmann::ordered_json MachineOf(const Options& options) {
  nlohmann::ordered_json machine = Machine(Bench(options).first_device());
  machine["device"] = options.device;
  machine["rounds"] = options.rounds;
  machine["seconds"] = options.seconds;
  machine["quick"] = options.quick;
  machine["clients"] = options.clients;
  machine["seed"] = options.seed;
  return machine;
}

void AddFlags(CLI::App& app, Run& run) {
  Options& options = run.options;
  app.add_flag("--list", run.list, "Print the rows and stop");
  app.add_option("--rows", run.rows,
                 "Run only these rows, separated by commas (default: see --list)")
      ->delimiter(',');
  app.add_option("--rounds", options.rounds, "Measured rounds, interleaved")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds,
                 "Seconds per contestant and round, after a warm-up of half as long")
      ->check(CLI::Range(0.001, 3600.0))
      ->capture_default_str();
  app.add_flag("--quick", options.quick,
               "Short rounds and fewer cells: for a first look, not for claims");
  app.add_option(
      "--device", options.device,
      "The server's device: cpu (with small shapes, and no kernel where bytes are measured), "
      "cuda:N, a list of these or cuda:all (default: the first GPU, else cpu)");
  app.add_option("--cells", options.cells,
                 "Run only the cells whose \"work, rival\" contains this text");
  app.add_option("--server-flag", options.server_flags,
                 "FLAG=VALUE for every attend-server, such as --max-queue=64; may be repeated");
  app.add_flag("--pass-through", options.pass_through,
               "Use no kernel and no GPU where bytes are measured, as on a CPU");
  app.add_option("--clients", options.clients,
                 "Clients in the rows of small requests, each with a connection")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of the inputs (default: a fresh one)");
  app.add_option("--python", options.python, "Interpreter of the Python rival")
      ->capture_default_str();
  app.add_option("--python-server", options.python_server,
                 "Path of python_server.py (default: next to the sources or this program)");
  app.add_option("--json", run.json, "Also write the figures, with every round, to this file");
}

// Expands the list to single devices, so that rows can use some of them. Returns an error or "".
std::string ExpandDevices(std::string& list) {
  std::string wrong = CheckDevice(list);
  std::string why;
  const int gpus = list == "cuda:all" ? CudaDeviceCount(&why) : 0;
  if (list == "cuda:all" && gpus == 0) wrong = "cuda:all: " + why;
  for (int i = 0; i < gpus; ++i) list = (i == 0 ? "" : list + ",") + "cuda:" + std::to_string(i);
  return wrong;
}

// Picks the named rows, or the default ones. False if a name is unknown.
bool PickRows(const std::vector<std::string>& names, std::vector<const Row*>& picked) {
  for (const Row& row : Rows()) {
    const bool named = std::find(names.begin(), names.end(), row.name) != names.end();
    if (named || (names.empty() && row.by_default)) picked.push_back(&row);
  }
  return names.empty() || picked.size() == names.size();
}

int Measure(const Run& run, const std::vector<const Row*>& rows) {
  const nlohmann::ordered_json machine = MachineOf(run.options);
  Bench bench(run.options);
  for (const Row* row : rows) row->run(bench);
  if (bench.figures().empty()) {
    std::fprintf(stderr, "bench_service: no cell of these rows matches --cells\n");
    return 2;
  }
  std::printf("%s\n\n%s", MachineText(machine).c_str(), MarkdownTable(bench.figures()).c_str());
  if (!run.json.empty()) {
    const Status written =
        WriteJson(run.json, {{"machine", machine}, {"figures", ToJson(bench.figures())}});
    if (!written.ok()) {
      std::fprintf(stderr, "bench_service: %s\n", written.message().c_str());
      return 1;
    }
  }
  return std::any_of(bench.figures().begin(), bench.figures().end(),
                     [](const Figure& figure) { return figure.verdict == Verdict::kFailed; });
}

int Main(int argc, char** argv) {
  Run run;
  run.options.python = "python3";
  run.options.seed = test::FreshSeed();
  CLI::App app{
      "Measures the service against its rivals in the same run. Exit code 1 if a figure "
      "could not be measured, otherwise 0, even if targets are missed."};
  AddFlags(app, run);
  CLI11_PARSE(app, argc, argv);
  if (run.list) {
    for (const Row& row : Rows()) {
      std::printf("%-14s %s%s\n", row.name, row.what, row.by_default ? "" : " (only if named)");
    }
    return 0;
  }
  if (run.options.quick) {
    if (app.count("--rounds") == 0) run.options.rounds = 3;
    if (app.count("--seconds") == 0) run.options.seconds = 0.1;
  }
  if (run.options.device.empty()) run.options.device = CudaDeviceCount() > 0 ? "cuda:0" : "cpu";
  if (const std::string wrong = ExpandDevices(run.options.device); !wrong.empty()) {
    std::fprintf(stderr, "bench_service: --device: %s\n", wrong.c_str());
    return 2;
  }
  if (run.options.python_server.empty()) run.options.python_server = FindPythonServer();
  std::vector<const Row*> rows;
  if (!PickRows(run.rows, rows)) {
    std::fprintf(stderr, "bench_service: --rows names a row that --list does not print\n");
    return 2;
  }
  TuneAllocatorAndBlocks();
  SkipDeadlockSearch();
  return Measure(run, rows);
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) {
  if (const auto code = attend::bench::ServeIfAsked(argc, argv)) return *code;
  return attend::bench::Main(argc, argv);
}
