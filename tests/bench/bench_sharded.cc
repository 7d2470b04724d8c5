// SPDX-License-Identifier: Apache-2.0
//
// One sequence over 1, 2, 4 servers (client/sharded_session.h): the times of a token and of a whole
// prompt, compared with the same sequence in one session of one server and with a model of the
// time.
//
// Servers are separate processes; with --device cuda the n-th uses the n-th GPU. Answers are
// checked in double precision before and after the measurement; a wrong one gets no figure.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/call/key_parts.h"
#include "client/call/merge_partial.h"
#include "client/client.h"
#include "client/sharded_session.h"
#include "client/tool/verify.h"
#include "proto/process/process_settings.h"
#include "proto/process/receive_blocks.h"
#include "tests/bench/service/machine.h"
#include "tests/bench/service/report.h"
#include "tests/bench/service/serve.h"
#include "tests/bench/service/server_process.h"
#include "tests/bench/session_sequence.h"

namespace attend::bench {
namespace {

using client::AttentionCall;
using client::AttentionResult;
using client::HostTensor;
using client::RowRange;
using client::Session;
using client::ShardedSession;
using client::TensorRef;
using Clock = std::chrono::steady_clock;

// Tokens that steps may append to the context without a new shard.
int64_t StepTokens(int64_t context) { return std::clamp<int64_t>(context / 16, 64, 8192); }
constexpr int64_t kFillTokens = 4096;  // per call while the context is appended
constexpr int64_t kTinyContext = 8;    // its steps measure the overhead of a call

struct Settings {
  std::string device = "cpu";
  std::vector<int> servers = {1, 2, 4};
  std::vector<int64_t> contexts = {32768, 131072};
  std::vector<int64_t> prompts = {8192};
  int64_t heads_q = 32, heads_kv = 8, dim = 128;
  double seconds = 1;
  int rounds = 5;
  int threads = 1;  // of each server on the CPU
  std::string session_memory = "2GiB";
  std::string json;
};

// Medians of the measurements of one sequence over `servers` servers.
struct Row {
  std::string work;
  int64_t tokens = 0;
  int servers = 1;
  double us = 0;
  double kernel_us = 0;  // of the slowest server
  double merge_us = 0;
  double bytes = 0;  // sent and received, per call
  double model_us = 0;
};

double MicrosecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// A sequence in a session of one server, or over several servers.
class Placed {
 public:
  Placed(client::Client& client, const client::SessionOptions& options, int servers,
         int64_t tokens) {
    if (servers == 1) {
      one_.emplace(Take(Session::Create(client, options), "session"));
    } else {
      const int64_t each = (tokens + servers - 1) / servers;
      several_.emplace(
          Take(ShardedSession::Create(client, {options, (each + 7) / 8 * 8}), "shards"));
    }
  }
  AttentionResult Attend(const AttentionCall& call) {
    return Take(one_ ? one_->Attend(0, call) : several_->Attend(0, call), "a call");
  }
  void Truncate(int64_t length) {
    if ((one_ ? one_->length() : several_->length()) <= length) return;
    const Status status = one_ ? one_->Truncate(length) : several_->Truncate(length);
    if (!status.ok()) Fail("truncate: " + status.ToString());
  }
  // The token range of each shard.
  std::vector<ShardedSession::Tokens> Shards() const {
    return one_ ? std::vector<ShardedSession::Tokens>{{0, one_->length(), ""}}
                : several_->Placement();
  }

 private:
  std::optional<Session> one_;
  std::optional<ShardedSession> several_;
};

// K and V of all tokens, and calls with some of them.
class Tokens {
 public:
  Tokens(const Settings& settings, int64_t tokens)
      : settings_(settings),
        k_(Random(settings.heads_kv, tokens)),
        v_(Random(settings.heads_kv, tokens)) {}

  // A call with `rows` rows of q that appends the tokens [begin, end).
  AttentionCall Call(int64_t rows, int64_t begin, int64_t end) {
    AttentionCall call;
    call.mask.kind = v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT;
    call.q = Random(settings_.heads_q, rows);
    call.k = Take(client::RangeOf("k", k_, 2, begin, end), "k");
    call.v = Take(client::RangeOf("v", v_, 2, begin, end), "v");
    return call;
  }
  // The same attention as a request without sessions.
  AttentionCall Whole(const AttentionCall& call, int64_t end) const {
    AttentionCall whole = call;
    whole.k = Take(client::RangeOf("k", k_, 2, 0, end), "k");
    whole.v = Take(client::RangeOf("v", v_, 2, 0, end), "v");
    return whole;
  }

 private:
  HostTensor Random(int64_t heads, int64_t rows) {
    return RandomBFloat16(random_, {1, heads, rows, settings_.dim});
  }

  const Settings& settings_;
  std::mt19937_64 random_{std::random_device{}()};
  const HostTensor k_, v_;
};

class Bench {
 public:
  explicit Bench(const Settings& settings) : settings_(settings) {
    const int most = *std::max_element(settings.servers.begin(), settings.servers.end());
    for (int n = 0; n < most; ++n) {
      const std::string device =
          settings.device == "cuda" ? "cuda:" + std::to_string(n) : settings.device;
      servers_.push_back(Take(ServerProcess::Start(ServeCommand(
                                  "attend", {"--listen", "127.0.0.1:0", "--metrics-listen", "off",
                                             "--log-level", "warn", "--device", device,
                                             "--cpu-threads", std::to_string(settings.threads),
                                             "--session-memory", settings.session_memory})),
                              "server"));
    }
  }

  void Run() {
    Tokens tiny(settings_, kTinyContext + StepTokens(kTinyContext));
    call_us_ = Decode(tiny, kTinyContext, 1).us;  // the overhead of a call
    PrintHead();
    for (const int64_t prompt : settings_.prompts) Rows(&Bench::Prefill, prompt, prompt);
    for (const int64_t context : settings_.contexts) {
      Rows(&Bench::Decode, context, context + StepTokens(context));
    }
    if (settings_.json.empty()) return;
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Row& row : rows_) {
      rows.push_back({{"work", row.work},
                      {"tokens", row.tokens},
                      {"servers", row.servers},
                      {"us", row.us},
                      {"kernel_us", row.kernel_us},
                      {"merge_us", row.merge_us},
                      {"bytes", row.bytes},
                      {"model_us", row.model_us}});
    }
    const Status written =
        WriteJson(settings_.json,
                  {{"machine", Machine(settings_.device)}, {"call_us", call_us_}, {"rows", rows}});
    if (!written.ok()) Fail(written.message());
  }

 private:
  std::unique_ptr<client::Client> Connect(int servers) const {
    client::ClientOptions options;
    for (int n = 0; n < servers; ++n) {
      const std::string& address = servers_[static_cast<size_t>(n)]->address();
      options.server = n == 0 ? address : options.server + "," + address;
    }
    options.connections = 8;
    return Take(client::Client::Make(options), "client");
  }
  client::SessionOptions Shape() const {
    client::SessionOptions options;
    options.shapes = {{DType::kBFloat16, settings_.heads_kv, settings_.dim}};
    return options;
  }

  // Measures `work` with `length` tokens, of `end` in all, over each number of servers.
  void Rows(Row (Bench::*work)(Tokens&, int64_t, int), int64_t length, int64_t end) {
    Tokens tokens(settings_, end);
    Row one;
    for (const int servers : settings_.servers) {
      Row row = (this->*work)(tokens, length, servers);
      if (servers == 1) one = row;
      if (one.us > 0) {
        // Each kernel computes a share of the keys, but all bytes pass through this process.
        const double byte_us = std::max(0.0, one.us - one.kernel_us - call_us_) / one.bytes;
        row.model_us = one.kernel_us / servers + call_us_ + byte_us * row.bytes + row.merge_us;
      }
      Print(row, one.us);
      rows_.push_back(row);
    }
  }

  // One token after another, each with its row of q.
  Row Decode(Tokens& tokens, int64_t context, int servers) {
    const auto client = Connect(servers);
    const int64_t end = context + StepTokens(context);
    Placed placed(*client, Shape(), servers, end);
    for (int64_t begin = 0; begin < context; begin += kFillTokens) {
      placed.Attend(tokens.Call(0, begin, std::min(context, begin + kFillTokens)));
    }
    Row row{"decode", context, servers, 0, 0, 0, 0, 0};
    std::vector<double> us, kernel_us;
    Judge(tokens, placed, 1, context);
    for (int round = 0; round < settings_.rounds; ++round) {
      placed.Truncate(context);
      std::vector<double> times, kernels;
      const Clock::time_point begin = Clock::now();
      for (int64_t n = context; n < end; ++n) {
        const AttentionCall step = tokens.Call(1, n, n + 1);
        const Clock::time_point sent = Clock::now();
        const AttentionResult answer = placed.Attend(step);
        times.push_back(MicrosecondsSince(sent));
        kernels.push_back(static_cast<double>(answer.timings.kernel_ns) * 1e-3);
        if (MicrosecondsSince(begin) > settings_.seconds * 1e6) break;
      }
      us.push_back(Median(std::move(times)));
      kernel_us.push_back(Median(std::move(kernels)));
    }
    placed.Truncate(context);
    Judge(tokens, placed, 1, context);
    row.us = Median(us);
    row.kernel_us = Median(kernel_us);
    Count(placed, 1, context, 1, &row);
    return row;
  }

  // All tokens at once in an empty sequence, with all rows of q.
  Row Prefill(Tokens& tokens, int64_t prompt, int servers) {
    const auto client = Connect(servers);
    Placed placed(*client, Shape(), servers, prompt);
    Row row{"prefill", prompt, servers, 0, 0, 0, 0, 0};
    std::vector<double> us, kernel_us;
    for (int round = 0; round <= settings_.rounds; ++round) {
      const AttentionCall call = tokens.Call(prompt, 0, prompt);
      const Clock::time_point sent = Clock::now();
      const AttentionResult answer = placed.Attend(call);
      const double took = MicrosecondsSince(sent);
      if (round == 0 || round == settings_.rounds) JudgeAnswer(tokens.Whole(call, prompt), answer);
      if (round > 0) us.push_back(took);
      if (round > 0) kernel_us.push_back(static_cast<double>(answer.timings.kernel_ns) * 1e-3);
      if (round == settings_.rounds) Count(placed, prompt, prompt, prompt, &row);
      placed.Truncate(0);
    }
    row.us = Median(us);
    row.kernel_us = Median(kernel_us);
    return row;
  }

  void Judge(Tokens& tokens, Placed& placed, int64_t rows, int64_t context) {
    const AttentionCall call = tokens.Call(rows, context, context + 1);
    JudgeAnswer(tokens.Whole(call, context + 1), placed.Attend(call));
    placed.Truncate(context);
  }
  static void JudgeAnswer(const AttentionCall& whole, const AttentionResult& answer) {
    const RowsReport report =
        Take(client::VerifyAnswer(whole, answer, std::random_device{}()), "verification");
    if (!report.ok) Fail("an answer is wrong: " + report.detail);
  }

  // Counts the bytes of a call with `rows` rows of q and `fresh` new tokens, and times the merging
  // of its answers.
  void Count(const Placed& placed, int64_t rows, int64_t keys, int64_t fresh, Row* row) const {
    const attend::Mask mask = client::MaskOf({v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT, {}, {}});
    const auto shards = placed.Shards();
    const double row_bytes = static_cast<double>(settings_.heads_q * settings_.dim);
    row->bytes = 4.0 * static_cast<double>(settings_.heads_kv * settings_.dim * fresh);
    std::vector<AttentionResult> answers;
    std::vector<int64_t> firsts;
    for (const ShardedSession::Tokens& shard : shards) {
      const RowRange seen = client::RowsThatSee(mask, rows, keys, shard.begin, shard.end);
      const double o_bytes = shards.size() == 1 ? 2 : 4 + 4.0 / settings_.dim;  // O and LSE
      row->bytes += row_bytes * static_cast<double>(seen.size()) * (2 + o_bytes);
      answers.push_back(Ones(seen.size()));
      firsts.push_back(seen.begin);
    }
    if (shards.size() == 1) return;
    std::vector<client::PartialRows> parts;
    for (size_t i = 0; i < answers.size(); ++i) parts.push_back({&answers[i], firsts[i]});
    std::vector<double> times;
    for (int n = 0; n < 5; ++n) {
      const Clock::time_point begin = Clock::now();
      Take(client::MergePartial(parts, rows, {}, v1::LAYOUT_BHLD), "merge");
      times.push_back(MicrosecondsSince(begin));
    }
    row->merge_us = Median(times);
  }
  AttentionResult Ones(int64_t rows) const {
    AttentionResult answer;
    answer.o = Take(
        HostTensor::Make("o", DType::kFloat32, {1, settings_.heads_q, rows, settings_.dim}), "o");
    answer.lse =
        Take(HostTensor::Make("lse", DType::kFloat32, {1, settings_.heads_q, rows}), "lse");
    for (HostTensor* const tensor : {&answer.o, &*answer.lse}) {
      std::fill_n(reinterpret_cast<float*>(tensor->data.get()), tensor->bytes / 4, 1.0f);
    }
    return answer;
  }

  void PrintHead() const {
    std::printf("Hq %lld Hkv %lld D %lld bfloat16, %s, medians of %d; a call alone: %.0f us\n\n",
                static_cast<long long>(settings_.heads_q),
                static_cast<long long>(settings_.heads_kv), static_cast<long long>(settings_.dim),
                settings_.device.c_str(), settings_.rounds, call_us_);
    std::printf(
        "| Work | tokens | servers | us | of one | kernel us | merge us | MiB | model us |\n");
    std::printf("|---|---|---|---|---|---|---|---|---|\n");
    std::fflush(stdout);
  }
  static void Print(const Row& row, double one_us) {
    std::printf("| %s | %lld | %d | %.0f | %.2fx | %.0f | %.0f | %.2f | %.0f |\n", row.work.c_str(),
                static_cast<long long>(row.tokens), row.servers, row.us, one_us / row.us,
                row.kernel_us, row.merge_us, row.bytes / (1 << 20), row.model_us);
    std::fflush(stdout);
  }

  const Settings settings_;
  std::vector<std::unique_ptr<ServerProcess>> servers_;
  double call_us_ = 0;
  std::vector<Row> rows_;
};

int Main(int argc, char** argv) {
  Settings s;
  CLI::App app("Compares one sequence sharded over several servers with one server");
  app.add_option("--device", s.device, "cpu or cuda")->capture_default_str();
  app.add_option("--servers", s.servers, "Numbers of servers, 1 first")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--contexts", s.contexts, "Context lengths of single-token steps")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--prompts", s.prompts, "Lengths of prompts, each sent in one call")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--heads-q", s.heads_q, "Query heads")->capture_default_str();
  app.add_option("--heads-kv", s.heads_kv, "KV heads")->capture_default_str();
  app.add_option("--dim", s.dim, "Head dim")->capture_default_str();
  app.add_option("--seconds", s.seconds, "Seconds of each round of steps")->capture_default_str();
  app.add_option("--rounds", s.rounds, "Rounds; medians are reported")->capture_default_str();
  app.add_option("--threads", s.threads, "Threads of each server's CPU device")
      ->capture_default_str();
  app.add_option("--session-memory", s.session_memory, "--session-memory of each server")
      ->capture_default_str();
  app.add_option("--json", s.json, "Also write the figures to this file");
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
  // Otherwise gRPC would make connections without waiting calls every 5 s only.
  setenv("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "50", /*overwrite=*/0);
  return attend::bench::Main(argc, argv);
}
