// SPDX-License-Identifier: Apache-2.0
//
// What the service costs beyond gRPC: calls/s of small requests and bytes/s of large ones, each as
// a ratio to echo servers that carry the same bytes, in one run.
//
// Every server is a process of its own, and so is the client. Rounds are interleaved, the figure is
// the median of the rounds and each ratio the median of the rounds' ratios. Small requests run
// through the real CPU kernels and are checked against double precision; large ones run on a device
// that computes nothing (the kernel is not what is measured) but marks its answer with the tensors'
// first bytes, which the client looks for.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spdlog/sinks/stdout_sinks.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "kernels/backend.h"
#include "kernels/check_rows.h"
#include "server/config.h"
#include "server/process_memory.h"
#include "server/server.h"
#include "tests/bench/call_driver.h"
#include "tests/bench/chunked_driver.h"
#include "tests/bench/echo_server.h"
#include "tests/bench/pass_through_backend.h"
#include "tests/kernels/problems.h"

namespace attend::bench {
namespace {

constexpr char kMethod[] = "/attend.v1.AttentionService/Attend";
constexpr int kChunkedConnections = 8;

// A server in a child process, ended with it.
class ServerProcess {
 public:
  // `serve` starts a server, calls its argument with the port and never returns.
  explicit ServerProcess(const std::function<void(const std::function<void(int)>&)>& serve) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      serve([&](int port) {
        if (write(ends[1], &port, sizeof(port)) != sizeof(port)) std::abort();
        for (;;) pause();
      });
      std::abort();
    }
    close(ends[1]);
    if (read(ends[0], &port_, sizeof(port_)) != sizeof(port_)) {
      std::fprintf(stderr, "a server process did not start\n");
      std::exit(1);
    }
    close(ends[0]);
  }
  ~ServerProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  pid_t pid_ = 0;
  int port_ = 0;
};

struct Workload {
  std::string name;
  std::shared_ptr<const test::OwnedAttention> owned;
  std::string serialized;  // AttendRequest
  int64_t request_bytes = 0;
  int64_t answer_bytes = 0;  // of O
  int outstanding = 1;
  Verify verify_attend;
};

std::string SerializeRequest(const test::OwnedAttention& owned) {
  const Problem& p = owned.attention.problem;
  v1::AttendRequest request;
  request.set_request_id("bench");
  const auto add = [&](v1::Tensor* tensor, int64_t heads, int64_t rows, int64_t dim,
                       const void* data) {
    tensor->set_dtype(static_cast<v1::DType>(p.dtype));
    for (const int64_t size : {p.batch, heads, rows, dim}) tensor->add_shape(size);
    request.add_raw(data, static_cast<size_t>(p.batch * heads * rows * dim * DTypeBytes(p.dtype)));
  };
  add(request.mutable_q(), p.heads_q, p.len_q, p.dim, owned.attention.q.data);
  add(request.mutable_k(), p.heads_kv, p.len_k, p.dim, owned.attention.k.data);
  add(request.mutable_v(), p.heads_kv, p.len_k, p.dim_v, owned.attention.v.data);
  return request.SerializeAsString();
}

bool ParseAnswer(grpc::ByteBuffer& answer, v1::AttendResponse* response) {
  grpc::Slice slice;
  return answer.DumpToSingleSlice(&slice).ok() &&
         response->ParseFromArray(slice.begin(), static_cast<int>(slice.size()));
}

std::string CheckAnswer(const test::OwnedAttention& owned, grpc::ByteBuffer& answer) {
  v1::AttendResponse response;
  const Problem& p = owned.attention.problem;
  const size_t bytes = static_cast<size_t>(ElementsO(p) * DTypeBytes(p.dtype));
  if (!ParseAnswer(answer, &response)) return "the answer cannot be parsed";
  if (response.raw_size() != 1 || response.raw(0).size() != bytes) return "O has a wrong size";
  Attention attention = owned.attention;
  std::string o = response.raw(0);
  attention.o.data = o.data();
  attention.problem.return_lse = false;  // not asked for
  const RowsReport report = CheckAllRows(attention);
  return report.ok ? "" : "wrong answer: " + report.detail;
}

bool HasMarks(const Attention& a, const char* o) {
  return std::memcmp(o, a.q.data, kMarkBytes) == 0 &&
         std::memcmp(o + kMarkBytes, a.k.data, kMarkBytes) == 0 &&
         std::memcmp(o + 2 * kMarkBytes, a.v.data, kMarkBytes) == 0;
}

std::string CheckMarks(const test::OwnedAttention& owned, grpc::ByteBuffer& answer) {
  v1::AttendResponse response;
  if (!ParseAnswer(answer, &response) || response.raw_size() != 1) return "not an answer";
  const bool same = HasMarks(owned.attention, response.raw(0).data());
  return same ? "" : "the tensors did not reach the device";
}

Workload MakeWorkload(const std::string& name, const test::ProblemSpec& spec, int outstanding,
                      std::string (*check)(const test::OwnedAttention&, grpc::ByteBuffer&)) {
  auto owned = std::make_shared<test::OwnedAttention>(test::MakeAttention(spec, test::FreshSeed()));
  Workload workload;
  workload.name = name;
  workload.owned = owned;
  workload.serialized = SerializeRequest(*owned);
  workload.request_bytes = static_cast<int64_t>(workload.serialized.size());
  workload.answer_bytes = ElementsO(spec.problem) * DTypeBytes(spec.problem.dtype);
  workload.outstanding = outstanding;
  workload.verify_attend = [owned, check](grpc::ByteBuffer& answer) {
    return check(*owned, answer);
  };
  return workload;
}

// An attend server as its binary would be, but for the device of large transfers.
void ServeAttend(bool pass_through, const std::function<void(int)>& ready) {
  TuneAllocator();
  Config config;
  config.listen = {"127.0.0.1:0"};
  config.metrics_listen = "off";
  config.device = "cpu";
  config.log_level = "warn";
  std::shared_ptr<spdlog::logger> logger = spdlog::stderr_logger_mt("bench");
  logger->set_level(spdlog::level::warn);
  Result<std::vector<std::unique_ptr<Backend>>> backends = MakeBackends(config, *logger);
  if (backends.ok() && pass_through) {
    backends->clear();
    backends->push_back(MakePassThroughBackend());
  }
  const Result<std::unique_ptr<Server>> server =
      backends.ok() ? Server::Start(config, std::move(*backends), logger) : backends.status();
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().ToString().c_str());
    std::exit(1);
  }
  const std::string& address = (*server)->addresses().front();
  ready(std::stoi(address.substr(address.rfind(':') + 1)));
}

struct Peer {
  std::string name;
  std::unique_ptr<ServerProcess> process;
  std::unique_ptr<Connections> connections;
  Verify verify;
  int64_t answer_bytes = 0;
  std::vector<DriveResult> rounds;
  ChunkedDriver chunked = nullptr;  // in place of calls with ready-made bytes
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double GigabytesPerSecond(const Peer& peer, const Workload& workload, const DriveResult& round) {
  const double bytes = static_cast<double>(workload.request_bytes + peer.answer_bytes);
  return round.calls_per_second() * bytes * 1e-9;
}

nlohmann::json Report(const Workload& workload, const std::vector<Peer>& peers) {
  std::printf("\n%s: %.3f MiB up, %.3f MiB down, %d calls in flight\n", workload.name.c_str(),
              workload.request_bytes / 1048576.0, workload.answer_bytes / 1048576.0,
              workload.outstanding);
  std::printf(
      "| server | calls/s | GB/s in + out | p50 us | p99 us | attend's calls/s over it | "
      "attend's GB/s over it |\n|---|---|---|---|---|---|---|\n");
  nlohmann::json rows = nlohmann::json::array();
  const Peer& attend = peers.front();
  for (const Peer& peer : peers) {
    std::vector<double> calls, bytes, p50, p99, call_ratio, byte_ratio;
    for (size_t i = 0; i < peer.rounds.size(); ++i) {
      calls.push_back(peer.rounds[i].calls_per_second());
      bytes.push_back(GigabytesPerSecond(peer, workload, peer.rounds[i]));
      p50.push_back(peer.rounds[i].p50_us);
      p99.push_back(peer.rounds[i].p99_us);
      call_ratio.push_back(attend.rounds[i].calls_per_second() / calls.back());
      byte_ratio.push_back(GigabytesPerSecond(attend, workload, attend.rounds[i]) / bytes.back());
    }
    std::printf("| %s | %.0f | %.2f | %.0f | %.0f | %.2f | %.2f |\n", peer.name.c_str(),
                Median(calls), Median(bytes), Median(p50), Median(p99), Median(call_ratio),
                Median(byte_ratio));
    rows.push_back({{"workload", workload.name},
                    {"server", peer.name},
                    {"calls_per_second", Median(calls)},
                    {"gigabytes_per_second", Median(bytes)},
                    {"p50_us", Median(p50)},
                    {"p99_us", Median(p99)},
                    {"attend_calls_ratio", Median(call_ratio)},
                    {"attend_bytes_ratio", Median(byte_ratio)}});
  }
  return rows;
}

// Runs every peer once a round, in turns; false if one failed or answered wrongly.
bool Run(const Workload& workload, std::vector<Peer>& peers, int rounds, double seconds) {
  grpc::Slice slice(workload.serialized);
  const grpc::ByteBuffer request(&slice, 1);
  for (int round = -1; round < rounds; ++round) {  // the first is warm-up
    for (Peer& peer : peers) {
      DriveOptions options{peer.process->target(), kMethod, workload.outstanding,
                           peer.connections->count(), seconds};
      DriveResult result = peer.chunked
                               ? peer.chunked(seconds)
                               : Drive(*peer.connections, options, request, peer.verify, 256);
      if (result.failed > 0 || result.calls == 0) {
        std::fprintf(stderr, "%s, %s: %ld failed: %s\n", workload.name.c_str(), peer.name.c_str(),
                     static_cast<long>(result.failed), result.first_error.c_str());
        return false;
      }
      if (round >= 0) peer.rounds.push_back(result);
    }
  }
  return true;
}

struct Options {
  int rounds = 7;
  double seconds = 1.0;
  int connections = 1;
  std::string json;
};

// The servers' processes are made before this one starts gRPC: fork() and gRPC don't mix.
struct Bench {
  Workload workload;
  std::vector<Peer> peers;
};

Bench Prepare(Workload workload, bool pass_through) {
  Bench bench{std::move(workload), {}};
  const auto right = [](grpc::ByteBuffer&) { return std::string(); };
  const int64_t answer_bytes = bench.workload.answer_bytes;
  bench.peers.push_back(Peer{
      "attend",
      std::make_unique<ServerProcess>([=](const auto& ready) { ServeAttend(pass_through, ready); }),
      nullptr,
      bench.workload.verify_attend,
      answer_bytes,
      {}});
  for (const EchoKind kind : {EchoKind::kSameBytes, EchoKind::kSameSizes, EchoKind::kGenerated}) {
    bench.peers.push_back(
        Peer{EchoName(kind),
             std::make_unique<ServerProcess>([=](const auto& ready) {
               TuneAllocator();
               EchoServer server(kind, answer_bytes);
               ready(server.port());
             }),
             nullptr,
             right,
             kind == EchoKind::kSameBytes ? bench.workload.request_bytes : answer_bytes,
             {}});
  }
  return bench;
}

// One large request in chunks over kChunkedConnections, against the same in one message, which all
// the other peers take.
Bench PrepareChunked(Workload workload) {
  auto request = std::make_shared<v1::AttendRequest>();
  request->ParseFromString(workload.serialized);
  Bench bench = Prepare(std::move(workload), true);
  bench.peers.front().name = "attend, one message";
  Peer chunked{"attend, chunked, " + std::to_string(kChunkedConnections) + " connections",
               std::make_unique<ServerProcess>(
                   [](const auto& ready) { ServeAttend(/*pass_through=*/true, ready); }),
               nullptr,
               nullptr,
               bench.workload.answer_bytes,
               {}};
  chunked.chunked = MakeChunkedDriver(
      chunked.process->target(), kChunkedConnections, std::move(request),
      [owned = bench.workload.owned](const char* o) { return HasMarks(owned->attention, o); });
  bench.peers.insert(bench.peers.begin(), std::move(chunked));
  return bench;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app{"What the service costs beyond gRPC, against echo servers in the same run"};
  app.add_option("--rounds", options.rounds, "measured rounds, interleaved")->capture_default_str();
  app.add_option("--seconds", options.seconds, "of each server in each round")
      ->capture_default_str();
  app.add_option("--connections", options.connections, "per server")->capture_default_str();
  app.add_option("--json", options.json, "also write the tables to this file");
  CLI11_PARSE(app, argc, argv);

  std::vector<Bench> benches;
  const test::ProblemSpec small = test::MakeSpec(1, 1, 1, 16, 16, 64, 64);
  benches.push_back(Prepare(MakeWorkload("B1 H1 L16 D64 fp32", small, 1, CheckAnswer), false));
  benches.push_back(Prepare(MakeWorkload("B1 H1 L16 D64 fp32", small, 64, CheckAnswer), false));
  // 4 MiB of Q, 6 MiB each of K and V.
  const test::ProblemSpec large = test::MakeSpec(1, 8, 8, 1024, 1536, 128, 128);
  benches.push_back(Prepare(MakeWorkload("16 MiB, no kernel", large, 1, CheckMarks), true));
  benches.push_back(Prepare(MakeWorkload("16 MiB, no kernel", large, 4, CheckMarks), true));
  // 16 MiB of Q, 24 MiB each of K and V.
  const test::ProblemSpec larger = test::MakeSpec(1, 8, 8, 4096, 6144, 128, 128);
  benches.push_back(PrepareChunked(MakeWorkload("64 MiB, no kernel", larger, 1, CheckMarks)));

  TuneAllocator();
  nlohmann::json all = nlohmann::json::array();
  for (Bench& bench : benches) {
    for (Peer& peer : bench.peers) {
      peer.connections = std::make_unique<Connections>(peer.process->target(), options.connections);
    }
    if (!Run(bench.workload, bench.peers, options.rounds, options.seconds)) return 1;
    for (nlohmann::json& row : Report(bench.workload, bench.peers)) all.push_back(row);
  }
  if (!options.json.empty()) std::ofstream(options.json) << all.dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) { return attend::bench::Main(argc, argv); }
