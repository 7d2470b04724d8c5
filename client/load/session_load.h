// SPDX-License-Identifier: Apache-2.0
//
// The load of `attend-client load --sessions`: many sequences at once, each with a session of its
// own, as language models make them. A sequence's prompt is appended and attended, then one token
// after another, layer by layer, with a pause between tokens. Each sequence has a thread. Steps go
// as calls, or over one stream for each connection; prompts are always calls.

#pragma once

#include <atomic>
#include <map>
#include <string>

#include "client/load/histogram.h"
#include "client/load/load_options.h"
#include "client/plot/chart.h"
#include "client/tool/verify.h"

namespace attend::client {

// Plain sums; threads' are merged.
struct SessionLoadStats {
  int64_t sessions = 0;  // made, forks included
  int64_t forks = 0;
  int64_t prompts = 0;           // answered, on all layers
  int64_t tokens = 0;            // of the steps, answered on all layers
  double step_bytes_in = 0;      // of tensors, to the server
  double step_bytes_out = 0;     // and back
  Histogram prompt_ns, step_ns;  // on all layers, the calls alone
  // Within these, on the steady clock, in ns: the prompts, and the steps.
  int64_t prompts_end = 0;
  int64_t steps_begin = INT64_MAX;
  int64_t steps_end = 0;
  std::map<Code, int64_t> failures;  // each ended its sequence
  std::map<Code, std::string> first_message;
  int64_t unexpected = 0;  // failures that --allow does not name

  void Merge(const SessionLoadStats& other);
};

struct SessionLoadResult {
  int64_t sessions = 0;  // at once
  SessionLoadStats stats;
  VerifyQueue::Counts verified;
  double prompts_s = 0;  // from the start to the last prompt's answer
  double steps_s = 0;    // from the first step's sending to the last one's answer
  bool interrupted = false;

  double prompts_per_s() const;
  double tokens_per_s() const;
  // Tensor bytes of a step, to the server and back.
  double bytes_in_per_token() const;
  double bytes_out_per_token() const;
  bool failed() const { return stats.unexpected > 0 || verified.failed > 0; }
};

// `options.session` says what; of the rest count the client's options, the first shape (heads,
// dims, dtype, mask), seed, stream, verify_share (of the sequences, some answers of one layer
// each), transport, tenant, allowed and input_bytes_max. INVALID_ARGUMENT for what does not fit
// together.
Result<SessionLoadResult> RunSessionLoad(const LoadOptions& options,
                                         const std::atomic<bool>& interrupted);

std::string SessionLoadTable(const LoadOptions& options, const SessionLoadResult& result);
// Of one load after another, with more and more sessions or so.
std::string SessionLoadJson(const LoadOptions& options,
                            const std::vector<SessionLoadResult>& results);
// Tokens and the time of a step over the number of sessions.
Figure SessionLoadFigure(const LoadOptions& options, const std::vector<SessionLoadResult>& results);

}  // namespace attend::client
