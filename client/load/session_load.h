// SPDX-License-Identifier: Apache-2.0
//
// The load of `attend-client load --sessions`: many concurrent sequences, each with its own
// session, as in language models. A sequence's prompt is appended and attended, then one token
// after another, layer by layer, with a pause between tokens. If the shape has a tree, a step is
// one of speculative decoding: it appends and attends a draft of that many tokens, and keeps a
// random path of it. Each sequence has a thread. Steps are sent as calls, or over one stream per
// connection; prompts are always calls.

#pragma once

#include <atomic>
#include <map>
#include <string>

#include "client/load/histogram.h"
#include "client/load/load_options.h"
#include "client/plot/chart.h"
#include "client/tool/verify.h"

namespace attend::client {

// Plain sums, merged from all threads.
struct SessionLoadStats {
  int64_t sessions = 0;  // made, forks included
  int64_t forks = 0;
  int64_t prompts = 0;           // answered, on all layers
  int64_t tokens = 0;            // in steps, answered on all layers; of drafts those kept
  double step_bytes_in = 0;      // tensor bytes, requests
  double step_bytes_out = 0;     // tensor bytes, answers
  Histogram prompt_ns, step_ns;  // over all layers, calls only, KeepDraft included
  // Ends of the prompts and of the steps, in ns of the steady clock.
  int64_t prompts_end = 0;
  int64_t steps_begin = INT64_MAX;
  int64_t steps_end = 0;
  std::map<Code, int64_t> failures;  // each ended its sequence
  std::map<Code, std::string> first_message;
  int64_t unexpected = 0;  // failures that --allow does not list

  void Merge(const SessionLoadStats& other);
};

struct SessionLoadResult {
  int64_t sessions = 0;  // at once
  SessionLoadStats stats;
  VerifyQueue::Counts verified;
  double prompts_s = 0;  // from the start to the last prompt's answer
  double steps_s = 0;    // from the first step's send to the last answer
  bool interrupted = false;

  double prompts_per_s() const;
  double tokens_per_s() const;
  // Tensor bytes of the steps per token, requests and answers.
  double bytes_in_per_token() const;
  double bytes_out_per_token() const;
  bool failed() const { return stats.unexpected > 0 || verified.failed > 0; }
};

// `options.session` describes the load. Other options used: the client's, the first shape (heads,
// dims, dtype, mask, tree), seed, stream, verify_share (of the sequences; some answers of one layer
// each), transport, tenant, allowed and input_bytes_max. INVALID_ARGUMENT: options that do not fit
// together.
Result<SessionLoadResult> RunSessionLoad(const LoadOptions& options,
                                         const std::atomic<bool>& interrupted);

std::string SessionLoadTable(const LoadOptions& options, const SessionLoadResult& result);
// For several loads in a row, such as with increasing numbers of sessions.
std::string SessionLoadJson(const LoadOptions& options,
                            const std::vector<SessionLoadResult>& results);
// Token rate and step time over the number of sessions.
Figure SessionLoadFigure(const LoadOptions& options, const std::vector<SessionLoadResult>& results);

}  // namespace attend::client
