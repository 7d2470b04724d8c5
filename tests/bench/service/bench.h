// SPDX-License-Identifier: Apache-2.0
//
// A run of bench_service: its options, the figures so far, and helpers of all rows. Used from
// main's thread.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/bench/service/call_driver.h"
#include "tests/bench/service/echo_server.h"
#include "tests/bench/service/report.h"
#include "tests/bench/service/server_process.h"
#include "tests/bench/service/work.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {

struct Options {
  int rounds = 5;
  double seconds = 0.5;  // per contestant and round
  bool quick = false;    // fewer cells
  std::string device;    // as for attend-server: "cpu", "cuda:N" or a list of these
  // Whether rows about moving bytes use a server that computes nothing, as they always do on a CPU,
  // where they would only measure the kernel otherwise.
  bool pass_through = false;
  std::string cells;  // only cells whose work and rival, joined, contain this text
  int clients = 64;   // for small requests
  std::vector<std::string> server_flags;  // for every attend-server
  uint64_t seed = 0;
  std::string python;         // the interpreter
  std::string python_server;  // python_server.py; empty: not found
};

// The kind of a server's device.
enum class Serves { kComputing, kTransfers };

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  const Options& options() const { return options_; }
  bool gpu() const { return options_.device.starts_with("cuda"); }
  // The device of rows that use only one.
  std::string first_device() const { return options_.device.substr(0, options_.device.find(',')); }
  // Whether servers for kTransfers compute nothing.
  bool passes_through() const { return options_.pass_through || !gpu(); }

  // Whether this cell is selected. Other cells are not measured.
  bool Wants(const Question& question) const;
  bool WantsAny(const std::vector<Question>& questions) const;
  // Also prints the figure to stderr, to show the progress.
  void Add(Figure figure);
  // Adds the selected ones as failed, with this reason.
  void AddWithout(const std::vector<Question>& questions, const Status& reason);
  // Adds the figure of `of` of both sides' rounds, if it is selected.
  void AddJudged(Question question, const Samples& attend, const Samples& rival,
                 const std::function<double(const Sample&)>& of);
  std::span<const Figure> figures() const { return figures_; }

  // The small request that several rows share, determined by the seed.
  std::shared_ptr<Work> SmallWork() const;
  // A request by which wrong answers of servers for kTransfers are found.
  std::shared_ptr<Work> TransferWork(std::string name, const test::ProblemSpec& spec) const;

  // Starts attend-server, on a free port unless `flags` say otherwise.
  Result<std::unique_ptr<ServerProcess>> StartAttend(Serves serves,
                                                     std::vector<std::string> flags = {}) const;

 private:
  const Options options_;
  std::vector<Figure> figures_;
};

// Starts a bare gRPC server that answers with this number of bytes.
Result<std::unique_ptr<ServerProcess>> StartEcho(int64_t answer_bytes,
                                                 const std::string& listen = "127.0.0.1:0",
                                                 EchoKind kind = EchoKind::kPlain);

// Sends each work once, and requires correct answers.
Status AdmitAll(Connections& connections, const std::vector<std::shared_ptr<Work>>& works);

// A temporary folder, removed with its content.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string Path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace attend::bench
