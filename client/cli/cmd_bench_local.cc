// SPDX-License-Identifier: Apache-2.0
//
// attend-client bench-local: computes calls in this process and, optionally, on a server.

#include <chrono>
#include <cstdio>

#include "client/cli/load_flags.h"
#include "client/load/true_time.h"
#include "client/local/local_bench.h"
#include "client/tool/file_io.h"
#include "kernels/util/host_mapping.h"

namespace attend::client {
namespace {

struct BenchFlags {
  LoadOptions load;
  ShapeFlags shapes;
  std::string device = "auto";
  std::string against;
  std::string json, plot;
  int64_t rounds = 5;
};

Status Finish(BenchFlags* flags, const CommonOptions& common) {
  LoadOptions& load = flags->load;
  ATTEND_RETURN_IF_ERROR(ReadShapes(flags->shapes, &load.mix));
  if (!flags->plot.empty()) ATTEND_RETURN_IF_ERROR(CheckPictureName(flags->plot));
  for (const std::string& path : {flags->json, flags->plot}) {
    if (!path.empty()) ATTEND_RETURN_IF_ERROR(CheckWritable(path));
  }
  int64_t bytes_left = PhysicalMemoryBytes();
  for (const CallSpec& spec : load.mix) {
    ATTEND_RETURN_IF_ERROR(TakeInputBytes(spec, load.pool, &bytes_left));
    if (!spec.backward) continue;
    return InvalidArgument("--shape " + spec.text + ": bench-local excludes backward");
  }
  load.client = ClientOptionsOf(common);
  load.client.server = flags->against;
  load.client.retry.attempts_max = 1;
  load.input_bytes_max = PhysicalMemoryBytes();
  load.facts = FactsOf(common);
  load.quiet = true;
  return Status();
}

// The ways that the server offers. Stores the server's facts in `load`.
Result<std::vector<Served>> ServedWays(LoadOptions* load) {
  const Result<std::unique_ptr<Client>> client = Client::Make(load->client);
  if (!client.ok()) return client.status();
  const Result<KnownServer> server = AskServer(**client, std::chrono::seconds(5));
  if (!server.ok()) return server.status();
  load->server = server->address;  // with several servers, all ways use this one
  load->facts.server = ServerFactsOf(server->info);
  load->client.message_bytes_max = server->info.limits().request_bytes_max();
  const Result<SharedSocket> socket =
      (*client)->FindSharedMemory(server->info, "", server->address);
  if (!socket.ok()) return std::vector{Served::kMessages};
  load->shared_memory_socket = *socket;
  return std::vector{Served::kMessages, Served::kShared, Served::kInPlace};
}

Result<ShapeResult> MeasureShape(const BenchFlags& flags, int32_t device, const CallSpec& spec,
                                 const std::vector<Served>& served,
                                 const std::atomic<bool>& interrupted) {
  ShapeResult shape;
  shape.spec = spec;
  std::vector<AttentionCall> calls;
  uint64_t seed = flags.load.seed;
  for (int64_t i = 0; i < flags.load.pool; ++i) {
    Result<AttentionCall> call = MakeRandomCall(spec, SplitMix64(&seed));
    if (!call.ok()) return call.status();
    calls.push_back(std::move(*call));
  }
  const Result<Attention> attention = Describe(calls.front(), nullptr, nullptr);
  if (!attention.ok()) return attention.status();
  shape.flops = Flops(*attention);
  std::vector<std::unique_ptr<Way>> ways;
  Result<std::unique_ptr<Way>> here = MakeHere(device, calls);
  if (!here.ok()) return here.status();
  ways.push_back(std::move(*here));
  for (const Served each : served) {
    Result<std::unique_ptr<Way>> way = MakeServed(flags.load, each, calls);
    if (!way.ok()) return way.status();
    ways.push_back(std::move(*way));
  }
  Result<std::vector<WayResult>> results =
      BenchWays(flags.load, flags.rounds, calls, ways, interrupted, NowNs);
  if (!results.ok()) return results.status();
  shape.ways = std::move(*results);
  return shape;
}

Status Write(const BenchFlags& flags, const BenchFile& file) {
  if (!flags.json.empty()) {
    const std::string text = BenchJson(file);
    ATTEND_RETURN_IF_ERROR(
        WriteFile(flags.json, {{text.data(), static_cast<int64_t>(text.size())}}));
  }
  return flags.plot.empty() ? Status() : WritePicture(Draw(BenchFigure(file)), flags.plot);
}

int Run(BenchFlags& flags, const CommonOptions& common) {
  const Status finished = Finish(&flags, common);
  if (!finished.ok()) return Fail(finished, kExitUsage);
  const Result<int32_t> device = ParseDevice(flags.device);
  if (!device.ok()) return Fail(device.status(), kExitUsage);
  const std::atomic<bool>& interrupted = InstallInterrupt();
  std::vector<Served> served;
  if (!flags.against.empty()) {
    Result<std::vector<Served>> ways = ServedWays(&flags.load);
    if (!ways.ok()) return Fail(ways.status(), kExitFailed);
    served = std::move(*ways);
  }
  BenchFile file;
  file.options = flags.load;
  file.rounds = flags.rounds;
  file.device = *device == ATTEND_CPU ? "cpu" : "cuda:" + std::to_string(*device);
  file.against = flags.against;
  bool failed = false;
  for (const CallSpec& spec : flags.load.mix) {
    if (interrupted) break;
    Result<ShapeResult> shape = MeasureShape(flags, *device, spec, served, interrupted);
    if (!shape.ok()) return Fail(shape.status(), kExitFailed);
    for (const WayResult& way : shape->ways) failed = failed || way.failed;
    file.shapes.push_back(std::move(*shape));
  }
  std::printf("%s", BenchTable(file).c_str());
  const Status written = Write(flags, file);
  if (!written.ok()) return Fail(written, kExitUsage);
  if (interrupted) return kExitInterrupted;
  return failed ? kExitFailed : kExitOk;
}

}  // namespace

Command AddBenchLocal(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand(
      "bench-local",
      "Compute shapes in this process and, if asked, compare with calls to a server");
  AddShape(command, &flags->shapes);
  command->option_defaults()->group("Options");
  LoadOptions& load = flags->load;
  load.duration_s = 2;
  load.warmup_s = 0.1;
  command
      ->add_option("--device", flags->device,
                   "Device of the computation in this process: cpu, cuda:N or auto")
      ->capture_default_str();
  command->add_option("--against", flags->against,
                      "Send the same calls to this server, inline and in shared memory if it has "
                      "that on; an address as --server takes it");
  command->add_option("--duration", load.duration_s, "Seconds to measure each way, in all rounds")
      ->check(CLI::Range(1e-3, 1e7))
      ->capture_default_str();
  command->add_option("--warmup", load.warmup_s, "Seconds of warm-up before each turn of a way")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_option("--count", load.count, "Calls to measure of each way, instead of --duration")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 50));
  command->add_option("--rounds", flags->rounds, "Rounds; each way takes one turn in each")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--pool", load.pool, "Number of different inputs for each shape")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--seed", load.seed, "Seed for the inputs")->capture_default_str();
  command->add_option("--json", flags->json, "Write the results to this file as JSON");
  command->add_option("--plot", flags->plot, "Draw them into this .svg file");
  return [flags, &common] { return Run(*flags, common); };
}

}  // namespace attend::client
