// SPDX-License-Identifier: Apache-2.0
//
// Converts the C structs to the library's types, and an outcome back. Pure.

#pragma once

#include <memory>
#include <string>
#include <utility>

#include "client/c/attend_client.h"
#include "client/call/attention_call.h"
#include "client/call/call_options.h"

namespace attend::client::c {

// "" for NULL.
std::string TextOf(const char* text);

// The call, with tensors that refer to the caller's memory and hold `owner`. INVALID_ARGUMENT:
// fields that no message can express. The server judges the rest.
Status ReadParams(const attend_client_params& params, const std::shared_ptr<const void>& owner,
                  AttentionCall* call);
// `tenant`: of calls that set none.
Status ReadOptions(const attend_client_params& params, const std::string& tenant,
                   CallOptions* options);

// The tensors that answers may have.
inline constexpr std::pair<v1::TensorName, attend_client_tensor attend_client_answer::*>
    kAnswerFields[] = {{v1::TENSOR_NAME_O, &attend_client_answer::o},
                       {v1::TENSOR_NAME_LSE, &attend_client_answer::lse},
                       {v1::TENSOR_NAME_D_Q, &attend_client_answer::d_q},
                       {v1::TENSOR_NAME_D_K, &attend_client_answer::d_k},
                       {v1::TENSOR_NAME_D_V, &attend_client_answer::d_v},
                       {v1::TENSOR_NAME_D_BIAS, &attend_client_answer::d_bias},
                       {v1::TENSOR_NAME_D_SINKS, &attend_client_answer::d_sinks}};
// The answer refers to the outcome's memory.
void FillAnswer(const CallOutcome& outcome, attend_client_answer* answer);

}  // namespace attend::client::c
