// SPDX-License-Identifier: Apache-2.0
//
// The flags that describe one attention call on files, for the commands `run`, `session append` and
// `session attend`.

#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "client/call/attention_call.h"
#include "client/call/call_options.h"

namespace attend::client {

struct CallFlags {
  std::string q, k, v, bias, tree, safetensors, out, lse_out;
  std::string layout = "bhld";
  bool causal = false;
  bool top_left = false;
  AttentionCall call;  // the options that flags set directly
  double deadline_ms = 0;
  std::string tenant;
};

// The tensors that the files must contain. K and V go together.
struct NeededTensors {
  bool q = true;
  bool keys = true;
};

// --q, --k, --v, --safetensors, and --bias, --out and --lse-out if there is a q.
void AddFiles(CLI::App* command, CallFlags* flags, const NeededTensors& needed);
void AddLayout(CLI::App* command, CallFlags* flags, bool packed);
// --layout, --causal and the other flags that define the computation. `packed`: includes LHD and
// key lengths.
void AddMeaning(CLI::App* command, CallFlags* flags, bool packed);
// --kernel, --check, --priority, --request-id.
void AddCallOptions(CLI::App* command, CallFlags* flags);
void AddDeadline(CLI::App* command, CallFlags* flags);

// The call, with its tensors read. Errors name the flag or the file.
Result<AttentionCall> MakeCall(const CallFlags& flags, const NeededTensors& needed);
CallOptions CallOptionsOf(const CallFlags& flags);

// Whether the answer can be written; checked before the call, so that nothing is computed for
// nothing.
Status CheckOutputs(const CallFlags& flags, const AttentionCall& call);
Status WriteOutputs(const CallFlags& flags, const AttentionResult& result);
// Describes where the answer's tensors were written.
std::string DescribeOutputs(const CallFlags& flags, const AttentionResult& result);

}  // namespace attend::client
