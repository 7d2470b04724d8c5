// SPDX-License-Identifier: Apache-2.0
//
// Runs the forward pass of a gradient call for callers that did not keep its answer.

#pragma once

#include "client/client.h"

namespace attend::client {

// If `call` asks for gradients and its O has no shape, asks the server for O and LSE and adds them
// to `call`. Blocks until the answer has arrived.
Status AddForwardPass(Client& client, const CallOptions& options, AttentionCall* call);

}  // namespace attend::client
