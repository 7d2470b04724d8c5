// SPDX-License-Identifier: Apache-2.0
//
// The options of `attend-client load`. Plain values; cmd_load.cc fills them from the flags.

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

// Sequences with sessions, instead of requests by themselves.
struct SessionLoad {
  int64_t sessions = 0;   // at once; 0: no such load
  int64_t context = 512;  // tokens of each prompt
  int64_t decode = 64;    // steps of one token after it
  int32_t layers = 1;
  double fork_share = 0;  // of the sequences: forked after the prompt, and the fork decoded as well
  double think_ms = 0;    // before each step
};

struct LoadOptions {
  ClientOptions client;
  std::vector<CallSpec> mix;
  Arrivals arrivals = Arrivals::kPoisson;
  double warmup_s = 1;
  double duration_s = 10;  // of the measurement, or of each window of a rule; if count == 0
  std::optional<StabilityRule> stability;  // measure until windows agree; not with count
  int64_t count = 0;                       // requests to measure
  uint64_t seed = 1;
  int64_t pool = 4;           // number of different inputs per shape
  double verify_share = 0;    // answers verified on the client
  double check_share = 0;     // requests with the server's check
  double deadline_ms = 0;     // 0 = none
  double deadline_share = 1;  // share of the requests, if deadline_ms > 0
  double cancel_share = 0;
  double cancel_after_ms = 1;  // cancel at a random time up to this
  bool stream = false;
  CallTransport transport = CallTransport::kAuto;  // without stream
  // If its path is not empty: the server's; all tensors are then in shared memory.
  SharedSocket shared_memory_socket;
  std::string server;  // whose that is, where there are several; else calls go to any
  // If set: makes the device memory that holds the tensors, which is lent over that socket.
  std::function<Result<std::shared_ptr<DeviceMemory>>(int64_t bytes)> device_memory;
  std::string tenant;  // empty: the server's default tenant
  bool discard_output = false;
  int64_t outstanding_max = 4096;       // open loop: requests in flight before sends are held back
  int64_t input_bytes_max = INT64_MAX;  // of all inputs, pool and mix
  int64_t verify_bytes_max = int64_t{512} << 20;
  double grace_s = 30;  // to wait for late answers at the end
  std::set<Code> allowed;
  bool quiet = false;  // no progress lines
  RunFacts facts;      // for the files
  SessionLoad session;
};

// One measurement: a closed loop of `concurrency` callers, or an open loop at `rate`.
struct LoadStep {
  int64_t concurrency = 0;
  double rate_per_s = 0;
  bool open() const { return rate_per_s > 0; }
};

// As the reports write them.
const char* ArrivalsName(const LoadOptions& options);
const char* MethodName(const LoadOptions& options);
const char* TransportName(const LoadOptions& options);
std::string StepName(const LoadStep& step);  // "open 500/s", "closed x8"
// "20000" or "0.0122": never an exponent.
std::string RateText(double per_s);

}  // namespace attend::client
