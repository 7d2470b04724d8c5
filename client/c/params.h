// SPDX-License-Identifier: Apache-2.0
//
// From the C structs to the library's own, and an answer back. Pure.

#pragma once

#include <memory>
#include <string>

#include "client/c/attend_client.h"
#include "client/call/attention_call.h"
#include "client/call/call_options.h"

namespace attend::client::c {

// NULL is "".
std::string TextOf(const char* text);

// The call, whose tensors refer to the caller's memory and hold `owner`. INVALID_ARGUMENT: what no
// message can say. Everything else is for the server to judge.
Status ReadParams(const attend_client_params& params, const std::shared_ptr<const void>& owner,
                  AttentionCall* call);
// `tenant`: of calls that name none.
Status ReadOptions(const attend_client_params& params, const std::string& tenant,
                   CallOptions* options);

// Refers to the outcome's memory.
void FillAnswer(const CallOutcome& outcome, attend_client_answer* answer);

}  // namespace attend::client::c
