// SPDX-License-Identifier: Apache-2.0
//
// Options of `attend-client load`. Plain values; cmd_load.cc fills them in from the flags.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/load/run_facts.h"
#include "client/load/schedule.h"
#include "client/load/windows.h"
#include "client/tool/call_spec.h"

namespace attend::client {

// Sequences with sessions, instead of independent requests.
struct SessionLoad {
  int64_t sessions = 0;   // at once; 0: no session load
  int64_t context = 512;  // tokens of each prompt
  int64_t decode = 64;    // steps after it, of one token or of a draft
  int32_t layers = 1;
  double fork_share = 0;  // share of sequences forked after the prompt; forks are decoded too
  double think_ms = 0;    // pause before each step
};

struct LoadOptions {
  ClientOptions client;
  std::vector<CallSpec> mix;
  Arrivals arrivals = Arrivals::kPoisson;
  double warmup_s = 1;
  double duration_s = 10;  // of the measurement, or of each window with a rule; if count == 0
  std::optional<StabilityRule> stability;  // measure until windows agree; not with count
  int64_t count = 0;                       // requests to measure
  uint64_t seed = 1;
  int64_t pool = 4;           // different inputs per shape
  double verify_share = 0;    // share of answers verified by the client
  double check_share = 0;     // share of requests with the server's check
  double deadline_ms = 0;     // 0: none
  double deadline_share = 1;  // share of requests with the deadline
  double cancel_share = 0;
  double cancel_after_ms = 1;  // cancels at a random time up to this
  bool stream = false;
  CallTransport transport = CallTransport::kAuto;  // without stream
  // If its path is set: the server's socket; all tensors are then in shared memory.
  SharedSocket shared_memory_socket;
  std::string server;  // its server, if there are several; empty: any
  // If set: makes the device memory for the tensors, which is lent over that socket.
  std::function<Result<std::shared_ptr<DeviceMemory>>(int64_t bytes)> device_memory;
  std::string tenant;  // empty: the server's default tenant
  bool discard_output = false;
  int64_t outstanding_max = 4096;       // open loop: requests in flight, beyond which sends wait
  int64_t input_bytes_max = INT64_MAX;  // of all inputs of the pool and mix
  int64_t verify_bytes_max = int64_t{512} << 20;
  double grace_s = 30;  // wait for late answers at the end
  std::set<Code> allowed;
  bool quiet = false;  // no progress lines
  RunFacts facts;      // for result files
  SessionLoad session;
};

// One measurement: a closed loop of `concurrency` callers, or an open loop at `rate_per_s`.
struct LoadStep {
  int64_t concurrency = 0;
  double rate_per_s = 0;
  bool open() const { return rate_per_s > 0; }
};

// Names as in the reports.
const char* ArrivalsName(const LoadOptions& options);
const char* MethodName(const LoadOptions& options);
const char* TransportName(const LoadOptions& options);
std::string StepName(const LoadStep& step);  // "open 500/s", "closed x8"
// "20000" or "0.0122", without an exponent.
std::string RateText(double per_s);

}  // namespace attend::client
