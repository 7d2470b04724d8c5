// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of a call for gradients, for callers that have not kept its answer.

#pragma once

#include "client/client.h"

namespace attend::client {

// If `call` asks for gradients and its O has no shape: asks the server for O and LSE, and adds
// them. Waits for the answer.
Status AddForwardPass(Client& client, const CallOptions& options, AttentionCall* call);

}  // namespace attend::client
