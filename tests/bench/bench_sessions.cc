// SPDX-License-Identifier: Apache-2.0
//
// The gain of sessions: decoding by a server that keeps K and V, compared with the same tokens as
// whole requests, with a bare gRPC echo of the same bytes, and with this machine's memory bandwidth
// (on the CPU). Also steps that only read, from a raw client, and the time of a fork.
//
// Servers are separate processes. Answers with sessions are compared with those of whole requests
// bit for bit, before and after the measurement; if they differ there is no figure.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/session.h"
#include "proto/process/process_settings.h"
#include "proto/process/receive_blocks.h"
#include "tests/bench/read_rate.h"
#include "tests/bench/service/call_driver.h"
#include "tests/bench/service/machine.h"
#include "tests/bench/service/report.h"
#include "tests/bench/service/serve.h"
#include "tests/bench/service/server_process.h"
#include "tests/bench/session_reads.h"
#include "tests/bench/session_sequence.h"

namespace attend::bench {
namespace {

using client::AttentionCall;
using client::AttentionResult;
using client::Session;
using Clock = std::chrono::steady_clock;

struct Settings : SequenceShape {
  std::string device = "cpu";
  int sessions = 16;
  double seconds = 2;
  int rounds = 5;
  int threads = static_cast<int>(std::thread::hardware_concurrency());  // of the CPU kernel
  int64_t fork_tokens = 32768;
  bool streams = false;
  std::string session_memory = "4GiB";
  std::string json;
};

long long Int(int64_t value) { return static_cast<long long>(value); }
double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Times of calls, over one or more calls of Drive.
struct Driven {
  std::vector<double> times_us;
  double seconds = 0;
};
struct Rate {
  double per_second = 0, p50_us = 0, p99_us = 0;
};
Rate RateOf(Driven driven) {
  std::vector<double>& times = driven.times_us;
  std::sort(times.begin(), times.end());
  return {static_cast<double>(times.size()) / driven.seconds, times[times.size() / 2],
          times[times.size() * 99 / 100]};
}

// Makes calls in `chains` concurrent chains, at most `calls_max` in each, until `driven` has
// `seconds`.
constexpr int64_t kUnbounded = INT64_MAX;
using Send = std::function<void(int chain, std::function<void(Status)> done)>;
void Drive(int chains, int64_t calls_max, double seconds, const Send& send, Driven& driven) {
  std::vector<std::vector<double>> times(static_cast<size_t>(chains));
  std::mutex mutex;
  std::condition_variable ended;
  int running = chains;
  std::string error;
  const Clock::time_point begin = Clock::now();
  const double left = seconds - driven.seconds;
  std::function<void(int)> next = [&](int chain) {
    const Clock::time_point sent = Clock::now();
    send(chain, [&, chain, sent](const Status& status) {
      std::vector<double>& own = times[static_cast<size_t>(chain)];
      own.push_back(SecondsSince(sent) * 1e6);
      {
        const std::lock_guard lock(mutex);
        if (!status.ok() && error.empty()) error = status.ToString();
        if (!error.empty() || SecondsSince(begin) >= left ||
            static_cast<int64_t>(own.size()) >= calls_max) {
          if (--running == 0) ended.notify_one();
          return;
        }
      }
      next(chain);
    });
  };
  for (int chain = 0; chain < chains; ++chain) next(chain);
  {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return running == 0; });
  }
  driven.seconds += SecondsSince(begin);
  if (!error.empty()) Fail("a call: " + error);
  for (const auto& each : times) {
    driven.times_us.insert(driven.times_us.end(), each.begin(), each.end());
  }
}

class Bench {
 public:
  explicit Bench(const Settings& settings)
      : settings_(settings),
        server_(Take(ServerProcess::Start(ServeCommand("attend", Flags(settings))), "server")),
        client_(Connect(settings.sessions)) {
    std::random_device device;
    for (int n = 0; n < settings.sessions; ++n) {
      sequences_.push_back(std::make_unique<Sequence>(*client_, settings_, device()));
      if (settings.streams) streams_.push_back(client_->OpenStream());
    }
  }

  void Run() {
    const AttentionCall whole = sequences_[0]->Whole();
    const AttentionCall& step = sequences_[0]->Step();
    const int64_t answer = client::PayloadBytes(step) - step.k.bytes - step.v.bytes;
    const double step_bytes = static_cast<double>(client::PayloadBytes(step) + answer);
    const double whole_bytes = static_cast<double>(client::PayloadBytes(whole) + answer);
    Verify();
    const auto echo =
        Take(ServerProcess::Start(ServeCommand("echo", {"127.0.0.1:0", std::to_string(answer)})),
             "echo");
    Measured m;
    for (int n = 0; n < settings_.rounds; ++n) {
      m.steps.push_back(Steps(settings_.sessions));
      m.echoes.push_back(Echo(*echo, settings_.sessions, client::PayloadBytes(step)));
      m.wholes.push_back(Wholes(whole));
      m.alone.push_back(Steps(1));
      m.echo_alone.push_back(Echo(*echo, 1, client::PayloadBytes(step)));
      m.reads.push_back(ReadRate());
    }
    Verify();
    for (const auto& sequence : sequences_) sequence->Truncate();
    const ReadSamples reads =
        MeasureReads(*server_, sequences_, settings_.rounds, settings_.seconds);
    Print(m, step_bytes, whole_bytes);
    bench::Print(reads);
    const nlohmann::ordered_json fork = Forks();
    if (settings_.json.empty()) return;
    const Status written =
        WriteJson(settings_.json, {{"machine", Machine(settings_.device)},
                                   {"settings", SettingsJson()},
                                   {"bytes", {{"step", step_bytes}, {"whole", whole_bytes}}},
                                   {"rows", RowsJson(m)},
                                   {"reads", ReadsJson(reads)},
                                   {"memory_bytes_per_second", m.reads},
                                   {"fork", fork}});
    if (!written.ok()) Fail(written.message());
  }

 private:
  struct Measured {
    std::vector<Rate> steps, wholes, echoes, alone, echo_alone;
    std::vector<double> reads;  // memory bandwidth; 0 if not measured

    std::vector<std::pair<const char*, const std::vector<Rate>*>> Rows() const {
      return {{"steps", &steps},
              {"steps as whole requests", &wholes},
              {"echo of a step's bytes", &echoes},
              {"steps of one client alone", &alone},
              {"its echo", &echo_alone}};
    }
  };
  static std::vector<std::string> Flags(const Settings& settings) {
    return {"--listen",         "127.0.0.1:0",
            "--metrics-listen", "off",
            "--log-level",      "warn",
            "--device",         settings.device,
            "--cpu-threads",    std::to_string(settings.threads),
            "--session-memory", settings.session_memory};
  }
  std::unique_ptr<client::Client> Connect(int connections) const {
    client::ClientOptions options;
    options.server = server_->address();
    options.connections = std::min(connections, 16);
    return Take(client::Client::Make(options), "client");
  }

  // A step's answer must equal the whole request's bit for bit.
  void Verify() {
    for (const auto& sequence : sequences_) {
      sequence->Truncate();
      const AttentionResult step = Take(sequence->session().Attend(0, sequence->Step()), "a step");
      const AttentionResult whole = Take(client_->Call(sequence->Whole()), "a whole request");
      if (step.o.bytes != whole.o.bytes || std::memcmp(step.o.data.get(), whole.o.data.get(),
                                                       static_cast<size_t>(step.o.bytes)) != 0) {
        Fail("the answer of a step differs from that of the whole request");
      }
    }
  }

  // Sequences are truncated to their prompts, outside the measured time, before they have grown by
  // a quarter, so that a faster server is not measured with longer sequences.
  Rate Steps(int chains) {
    const auto send = [&](int chain, const std::function<void(Status)>& done) {
      Sequence& sequence = *sequences_[static_cast<size_t>(chain)];
      if (settings_.streams) {
        Session::Send(*streams_[static_cast<size_t>(chain)], {&sequence.session()}, 0,
                      sequence.Step(),
                      [done](const client::StreamAnswer& answer) { done(answer.status); });
      } else {
        Session::AttendAsync({&sequence.session()}, 0, sequence.Step(), {},
                             [done](const client::CallOutcome& outcome) { done(outcome.status); });
      }
    };
    Driven driven;
    while (driven.seconds < settings_.seconds) {
      for (const auto& sequence : sequences_) sequence->Truncate();
      Drive(chains, std::max<int64_t>(1, settings_.context / 4), settings_.seconds, send, driven);
    }
    return RateOf(std::move(driven));
  }
  Rate Wholes(const AttentionCall& whole) {
    Driven driven;
    Drive(
        settings_.sessions, kUnbounded, settings_.seconds,
        [&](int, const std::function<void(Status)>& done) {
          client_->CallAsync(whole, {},
                             [done](const client::CallOutcome& outcome) { done(outcome.status); });
        },
        driven);
    return RateOf(std::move(driven));
  }
  Rate Echo(const ServerProcess& echo, int chains, int64_t request_bytes) const {
    auto call = std::make_shared<PreparedCall>();
    const grpc::Slice slice(std::string(static_cast<size_t>(request_bytes), 'x'));
    call->request = grpc::ByteBuffer(&slice, 1);
    call->verify = [](const grpc::ByteBuffer&, bool) { return std::string(); };
    Connections connections(echo.address(), std::min(chains, 16));
    const auto sample =
        Take(Drive(connections, {Script{call}}, chains, settings_.seconds), "the echo");
    return {sample.calls_per_second(), sample.p50_us, sample.p99_us};
  }
  double ReadRate() {
    if (settings_.device != "cpu") return 0;
    if (memory_.empty()) memory_.resize(size_t{768} << 20, std::byte{1});
    return MeasureReadRate(memory_, settings_.threads);
  }

  nlohmann::ordered_json Forks() {
    Settings settings = settings_;
    settings.context = settings_.fork_tokens;
    Sequence sequence(*client_, settings, 1);
    std::vector<double> times;
    int64_t own_bytes = 0;
    for (int n = 0; n < 30; ++n) {
      const Clock::time_point begin = Clock::now();
      Session fork = Take(sequence.session().Fork(settings.context - n), "fork");
      times.push_back(SecondsSince(begin) * 1e6);
      const v1::Session info = Take(fork.Get(), "fork");
      own_bytes = std::max(own_bytes, info.bytes() - info.shared_bytes());
    }
    std::printf(
        "fork of %lld tokens: p50 %.0f us, max %.0f us of 30; at most %lld bytes not shared\n",
        Int(settings.context), Median(times), *std::max_element(times.begin(), times.end()),
        Int(own_bytes));
    return {{"tokens", settings.context}, {"us", times}, {"own_bytes_max", own_bytes}};
  }

  static double Of(const std::vector<Rate>& rates, double Rate::*value) {
    std::vector<double> values;
    for (const Rate& rate : rates) values.push_back(rate.*value);
    return Median(values);
  }
  nlohmann::ordered_json SettingsJson() const {
    return {{"sessions", settings_.sessions},
            {"context", settings_.context},
            {"heads_q", settings_.heads_q},
            {"heads_kv", settings_.heads_kv},
            {"dim", settings_.dim},
            {"dtype", "bfloat16"},
            {"streams", settings_.streams},
            {"threads", settings_.threads},
            {"seconds", settings_.seconds},
            {"rounds", settings_.rounds},
            {"session_memory", settings_.session_memory}};
  }
  // The medians, and the values of the rounds.
  static nlohmann::ordered_json RowsJson(const Measured& m) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const auto& [name, rates] : m.Rows()) {
      nlohmann::ordered_json row = {{"row", name}};
      for (const auto& [unit, value] : {std::pair{"per_second", &Rate::per_second},
                                        {"p50_us", &Rate::p50_us},
                                        {"p99_us", &Rate::p99_us}}) {
        row[unit] = Of(*rates, value);
        for (const Rate& rate : *rates) row[std::string(unit) + "_rounds"].push_back(rate.*value);
      }
      rows.push_back(std::move(row));
    }
    return rows;
  }
  static void Line(const char* name, const std::vector<Rate>& rates) {
    std::printf("%-28s %10.0f %10.0f %10.0f\n", name, Of(rates, &Rate::per_second),
                Of(rates, &Rate::p50_us), Of(rates, &Rate::p99_us));
  }
  void Print(const Measured& m, double step_bytes, double whole_bytes) const {
    std::printf(
        "%d sessions of %lld tokens, Hq %lld Hkv %lld D %lld bfloat16, %s, %s, medians of %d\n",
        settings_.sessions, Int(settings_.context), Int(settings_.heads_q), Int(settings_.heads_kv),
        Int(settings_.dim), settings_.device.c_str(), settings_.streams ? "streams" : "calls",
        settings_.rounds);
    std::printf("%-28s %10s %10s %10s\n", "", "per second", "p50 us", "p99 us");
    for (const auto& [name, rates] : m.Rows()) Line(name, *rates);
    const double rate = Of(m.steps, &Rate::per_second);
    std::printf("whole requests: %.1fx the bytes, steps %.1fx as many\n", whole_bytes / step_bytes,
                rate / Of(m.wholes, &Rate::per_second));
    std::printf("steps / echo: %.2f; one client's p50 less its echo's: %.0f us\n",
                rate / Of(m.echoes, &Rate::per_second),
                Of(m.alone, &Rate::p50_us) - Of(m.echo_alone, &Rate::p50_us));
    if (Median(m.reads) == 0) return;
    const double read =
        static_cast<double>(settings_.context * settings_.heads_kv * settings_.dim) * 4 * rate;
    std::printf("K and V read at %.1f GB/s: %.2f of the %.1f that %d threads read\n", read * 1e-9,
                read / Median(m.reads), Median(m.reads) * 1e-9, settings_.threads);
  }

  const Settings settings_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<client::Client> client_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<std::unique_ptr<client::Stream>> streams_;  // destroyed before the client
  std::vector<std::byte> memory_;
};

int Main(int argc, char** argv) {
  Settings s;
  CLI::App app("Measures decoding over sessions against whole requests, an echo and memory");
  app.add_option("--device", s.device, "cpu or cuda")->capture_default_str();
  app.add_option("--sessions", s.sessions, "Clients, each with one session")->capture_default_str();
  app.add_option("--context", s.context, "Tokens of each prompt")->capture_default_str();
  app.add_option("--heads-q", s.heads_q, "Query heads")->capture_default_str();
  app.add_option("--heads-kv", s.heads_kv, "KV heads")->capture_default_str();
  app.add_option("--dim", s.dim, "Head dim")->capture_default_str();
  app.add_option("--seconds", s.seconds, "Seconds of each measurement")->capture_default_str();
  app.add_option("--rounds", s.rounds, "Measurements of each kind")->capture_default_str();
  app.add_option("--threads", s.threads, "Threads of the CPU device")->capture_default_str();
  app.add_option("--fork-tokens", s.fork_tokens, "Tokens of a fork")->capture_default_str();
  app.add_option("--session-memory", s.session_memory, "The server's flag")->capture_default_str();
  app.add_flag("--streams", s.streams, "Send each client's steps on a separate stream");
  app.add_option("--json", s.json, "Also write the figures, with every round, to this file");
  CLI11_PARSE(app, argc, argv);
  Bench(s).Run();
  return 0;
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) {
  if (const auto code = attend::bench::ServeIfAsked(argc, argv)) return *code;
  attend::TuneAllocatorAndBlocks();
  attend::SkipDeadlockSearch();
  return attend::bench::Main(argc, argv);
}
