// SPDX-License-Identifier: Apache-2.0
//
// One run of bench_service: what was asked for, the figures so far, and what all rows need. Used
// from main's thread.

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
  double seconds = 0.5;  // of each contestant in each round
  bool quick = false;    // fewer cells
  std::string device;    // as attend-server's: "cpu", "cuda:N" or a list of these
  // Whether rows about moving bytes have a server that computes nothing, as they always have on a
  // CPU: there the kernel would be all that is measured.
  bool pass_through = false;
  std::string cells;  // those alone whose work and rival, one behind the other, hold it
  int clients = 64;   // of small requests
  std::vector<std::string> server_flags;  // of every attend-server
  uint64_t seed = 0;
  std::string python;         // the interpreter
  std::string python_server;  // python_server.py; empty: not found
};

// Which device a server has.
enum class Serves { kComputing, kTransfers };

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  const Options& options() const { return options_; }
  bool gpu() const { return options_.device.starts_with("cuda"); }
  // What runs on one device takes this one.
  std::string first_device() const { return options_.device.substr(0, options_.device.find(',')); }
  // Whether servers of kTransfers compute nothing.
  bool passes_through() const { return options_.pass_through || !gpu(); }

  // Whether this cell is asked for: of others nothing is measured.
  bool Wants(const Question& question) const;
  bool WantsAny(const std::vector<Question>& questions) const;
  // Also tells stderr, so that one sees how far it is.
  void Add(Figure figure);
  // All of these that are asked for failed, for one reason.
  void AddWithout(const std::vector<Question>& questions, const Status& reason);
  // `of` of both sides' rounds, if it is asked for.
  void AddJudged(Question question, const Samples& attend, const Samples& rival,
                 const std::function<double(const Sample&)>& of);
  std::span<const Figure> figures() const { return figures_; }

  // The small request of several rows, the same one in each run of the same seed.
  std::shared_ptr<Work> SmallWork() const;
  // A request that tells kTransfers' servers from wrong ones.
  std::shared_ptr<Work> TransferWork(std::string name, const test::ProblemSpec& spec) const;

  // An attend server, on a free port unless `flags` say otherwise.
  Result<std::unique_ptr<ServerProcess>> StartAttend(Serves serves,
                                                     std::vector<std::string> flags = {}) const;

 private:
  const Options options_;
  std::vector<Figure> figures_;
};

// A bare gRPC server that answers with so many bytes.
Result<std::unique_ptr<ServerProcess>> StartEcho(int64_t answer_bytes,
                                                 const std::string& listen = "127.0.0.1:0",
                                                 EchoKind kind = EchoKind::kPlain);

// Sends each once; all must be answered rightly.
Status AdmitAll(Connections& connections, const std::vector<std::shared_ptr<Work>>& works);

// A folder of its own, removed with what is in it.
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
