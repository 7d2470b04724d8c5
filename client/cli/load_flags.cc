// SPDX-License-Identifier: Apache-2.0

#include "client/cli/load_flags.h"

#include <algorithm>

#include "client/cli/load_sessions.h"
#include "client/load/value_list.h"
#include "client/plot/drawing.h"
#include "client/tool/file_io.h"
#include "kernels/util/host_mapping.h"

namespace attend::client {
namespace {

Result<Code> ParseCode(const std::string& name) {
  for (int code = 1; code <= 16; ++code) {
    if (CodeName(static_cast<Code>(code)) == name) return static_cast<Code>(code);
  }
  return InvalidArgument("--allow " + name + ": not a status code, such as RESOURCE_EXHAUSTED");
}

Status ReadSteps(LoadFlags* flags) {
  const auto each = [](const char* flag, const std::string& text, const ValueBounds& bounds,
                       const auto& add) -> Status {
    if (text.empty()) return Status();
    const Result<std::vector<double>> values = ParseValues(flag, text, bounds);
    if (!values.ok()) return values.status();
    for (const double value : *values) add(value);
    return Status();
  };
  ATTEND_RETURN_IF_ERROR(
      each("--concurrency", flags->concurrency, {1, 100000, true}, [&](double value) {
        flags->steps.push_back({static_cast<int64_t>(value), 0});
      }));
  ATTEND_RETURN_IF_ERROR(each("--rate", flags->rates, {1e-3, 1e7}, [&](double value) {
    flags->steps.push_back({0, value});
  }));
  ATTEND_RETURN_IF_ERROR(each("--sessions", flags->sessions, {1, 4096, true}, [&](double value) {
    flags->session_counts.push_back(static_cast<int64_t>(value));
  }));
  if (flags->steps.empty()) flags->steps.push_back({1, 0});
  return Status();
}

// Checks for flags that exclude each other.
Status CheckTogether(const LoadFlags& flags) {
  const LoadOptions& load = flags.load;
  if (load.stream && (load.deadline_ms > 0 || load.cancel_share > 0 || load.discard_output)) {
    return InvalidArgument(
        "--stream excludes --deadline-ms, --cancel-share and --discard-output: "
        "they belong to single calls");
  }
  if (load.stream && load.transport == CallTransport::kChunked) {
    return InvalidArgument("--stream excludes --transport chunked: its requests are messages");
  }
  if (flags.transport.shared_memory && (load.deadline_ms > 0 || load.cancel_share > 0)) {
    return InvalidArgument(
        "--transport shm and cuda-ipc exclude --deadline-ms and --cancel-share: a request that was "
        "given up may still write where the next one's answer goes");
  }
  if (flags.transport.cuda_ipc && load.check_share > 0) {
    return InvalidArgument(
        "--transport cuda-ipc excludes --check: the server cannot check tensors in a GPU's memory; "
        "--verify checks them here");
  }
  const bool backward = std::any_of(load.mix.begin(), load.mix.end(),
                                    [](const CallSpec& spec) { return spec.backward; });
  if (!flags.sessions.empty() && backward) {
    return InvalidArgument("--sessions excludes backward: keys in sessions have no gradients");
  }
  if (!flags.sessions.empty() && flags.transport.shared_memory) {
    return InvalidArgument("--sessions excludes --transport shm and cuda-ipc");
  }
  if (flags.search_p99_ms > 0 && (!flags.concurrency.empty() || load.count > 0)) {
    return InvalidArgument("--search-p99 excludes --concurrency and --count");
  }
  if (flags.search_p99_ms > 0 && flags.steps.size() > 1) {
    return InvalidArgument("--search-p99 takes one --rate, where it starts");
  }
  return Status();
}

void AddInputs(CLI::App* command, LoadFlags* f) {
  command->add_option("--pool", f->load.pool, "Number of different inputs for each shape")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--seed", f->load.seed, "Seed for inputs, arrivals and choices")
      ->capture_default_str();
  command->add_flag(
      "--stream", f->load.stream,
      "Use AttendStream, with one stream per connection; with --sessions, for their steps");
}

void AddRate(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("How much");
  command
      ->add_option("--concurrency", f->concurrency,
                   "Closed loop: number of callers, each with one request in flight. A value, a "
                   "range (1:64:x2, 1:16:+4, 1:16:4) or a comma-separated list of them. Default 1 "
                   "without --rate. With --rate, both are measured, one after the other: closed "
                   "loops first")
      ->type_name("VALUES");
  command
      ->add_option("--rate", f->rates,
                   "Open loop: requests per second, independent of the answers; values as for "
                   "--concurrency")
      ->type_name("VALUES");
  command
      ->add_option("--arrivals", f->arrivals,
                   "Open loop: distribution of arrivals, poisson or constant")
      ->check(CLI::IsMember({"poisson", "constant"}))
      ->capture_default_str();
  command->add_option("--warmup", f->load.warmup_s, "Seconds of warm-up before each measurement")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command
      ->add_option("--duration", f->load.duration_s,
                   "Seconds of each measurement; with --stable, of each window")
      ->check(CLI::Range(1e-3, 1e7))
      ->capture_default_str();
  command->add_option("--count", f->load.count, "Requests to measure, instead of --duration")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 50));
  command
      ->add_option("--max-outstanding", f->load.outstanding_max,
                   "Open loop: most requests in flight; later ones wait, and their wait counts. If "
                   "some still wait at the end, they were due but never sent: exit code 1")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  CLI::Option* const search =
      command
          ->add_option("--search-p99", f->search_p99_ms,
                       "Find the highest open-loop rate whose p99, from the intended send time, is "
                       "at most this many milliseconds. Starts at --rate and never tries rates of "
                       "fewer than ten requests per measurement")
          ->check(CLI::Range(1e-3, 1e6));
  command
      ->add_option("--search-precision", f->search_precision,
                   "Relative width of the interval at which the search stops")
      ->needs(search)
      ->check(CLI::Range(0.001, 0.5))
      ->capture_default_str();
  command->add_option("--grace", f->load.grace_s, "Seconds to wait for late answers at the end")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
}

void AddStability(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("How much");
  CLI::Option* const stable = command->add_flag(
      "--stable", f->until_stable,
      "Measure windows of --duration until three in a row agree, and report those three. Exit code "
      "3 if they never do");
  stable->excludes(command->get_option("--count"));
  stable->excludes(command->get_option("--search-p99"));
  command
      ->add_option("--stability-percentage", f->stability.percent,
                   "Windows agree if rate and latency are within this of their mean")
      ->needs(stable)
      ->check(CLI::Range(0.01, 1000.0))
      ->capture_default_str();
  command
      ->add_option("--percentile", f->stability.percentile,
                   "Percentile of the latency that must agree")
      ->needs(stable)
      ->check(CLI::Range(1.0, 99.99))
      ->capture_default_str();
  command->add_option("--max-trials", f->stability.windows_max, "Most windows")
      ->needs(stable)
      ->check(CLI::Range(3, 1000))
      ->capture_default_str();
}

void AddFaults(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("Checks and faults (shares in [0, 1])");
  const CLI::Range share(0.0, 1.0);
  command
      ->add_option("--verify", f->load.verify_share,
                   "Share of answers verified here in double precision, on sampled rows, after "
                   "each measurement; LSE only if the shape has it")
      ->check(share);
  command->add_option("--check", f->load.check_share, "Share of requests that the server checks")
      ->check(share);
  CLI::Option* const deadline =
      command
          ->add_option("--deadline-ms", f->load.deadline_ms, "Deadline in milliseconds; 0 = none")
          ->check(CLI::Range(0.0, 1e9));
  command
      ->add_option("--deadline-share", f->load.deadline_share,
                   "Share of requests with that deadline")
      ->needs(deadline)
      ->check(share)
      ->capture_default_str();
  CLI::Option* const cancel = command
                                  ->add_option("--cancel-share", f->load.cancel_share,
                                               "Share of requests that are cancelled")
                                  ->check(share);
  command
      ->add_option("--cancel-after-ms", f->load.cancel_after_ms,
                   "Cancel at a random time up to this many milliseconds")
      ->needs(cancel)
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command
      ->add_option(
          "--allow", f->allow,
          "Status codes that do not count as failures, such as RESOURCE_EXHAUSTED; comma-separated")
      ->delimiter(',');
}

void AddOutput(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("Output");
  command->add_option("--json", f->json, "Write the results to this file as JSON");
  const auto no_csv = [](const std::string&) {
    throw CLI::ValidationError("--csv", "was removed: use --json FILE");
  };
  command->add_option_function<std::string>("--csv", no_csv)->expected(0, 1)->group("");
  command->add_option("--plot", f->plot,
                      "Draw the results into this .svg file: latency against rate, throughput, "
                      "phases, histogram");
  command->add_flag("--quiet", f->load.quiet, "Print no progress lines");
  command->add_flag(
      "--discard-output", f->load.discard_output,
      "Drop answers that are not verified, without copying them out of gRPC's buffers");
}

}  // namespace

void AddShape(CLI::App* command, ShapeFlags* f) {
  command->option_defaults()->group("What is sent");
  command
      ->add_option(
          "--shape", f->shapes,
          std::string(kCallWords) + "; give only what differs; repeatable. Default B1,H8,L128,D64")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--mix", f->mix,
                      "JSON file with an array of shapes, see client/load/README.md");
  command->add_flag("--backward", f->backward,
                    "Ask for gradients, whatever the shapes say; their forward passes are made "
                    "before the measurement");
}

Status ReadShapes(const ShapeFlags& flags, std::vector<CallSpec>* mix) {
  if (!flags.mix.empty()) {
    Result<std::vector<CallSpec>> read = ReadMix(flags.mix);
    if (!read.ok()) return read.status();
    *mix = std::move(*read);
  }
  for (const std::string& text : flags.shapes) {
    Result<CallSpec> spec = ParseCallSpec(text);
    if (!spec.ok()) return InvalidArgument("--shape: " + spec.status().message());
    mix->push_back(std::move(*spec));
  }
  if (mix->empty()) mix->push_back(*ParseCallSpec("B1,H8,L128,D64"));
  for (CallSpec& spec : *mix) spec.backward |= flags.backward;
  return Status();
}

void AddLoadFlags(CLI::App* command, LoadFlags* flags) {
  AddShape(command, &flags->shapes);
  AddInputs(command, flags);
  AddRate(command, flags);
  AddStability(command, flags);
  AddFaults(command, flags);
  command->option_defaults()->group("Options");
  AddTransport(command, &flags->transport);
  AddTenant(command, &flags->load.tenant);
  AddOutput(command, flags);
  AddSessionLoad(command, &flags->sessions, &flags->load.session);
}

Status FinishLoadFlags(LoadFlags* flags, const CommonOptions& common) {
  LoadOptions& load = flags->load;
  ATTEND_RETURN_IF_ERROR(ReadShapes(flags->shapes, &load.mix));
  ATTEND_RETURN_IF_ERROR(ReadSteps(flags));
  if (flags->until_stable) load.stability = flags->stability;
  load.transport = flags->transport.transport;
  load.client = ClientOptionsOf(common);
  load.facts = FactsOf(common);
  // Unless requested, because retries would hide refusals.
  if (common.attempts == 0) load.client.retry.attempts_max = 1;
  load.arrivals = flags->arrivals == "poisson" ? Arrivals::kPoisson : Arrivals::kConstant;
  for (const std::string& name : flags->allow) {
    const Result<Code> code = ParseCode(name);
    if (!code.ok()) return code.status();
    load.allowed.insert(*code);
  }
  ATTEND_RETURN_IF_ERROR(CheckTogether(*flags));
  load.input_bytes_max = PhysicalMemoryBytes();
  // Checked before the load, so that no measurement is lost.
  if (!flags->plot.empty()) ATTEND_RETURN_IF_ERROR(CheckPictureName(flags->plot));
  for (const std::string& path : {flags->json, flags->plot}) {
    if (!path.empty()) ATTEND_RETURN_IF_ERROR(CheckWritable(path));
  }
  return Status();
}

}  // namespace attend::client
