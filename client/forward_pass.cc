// SPDX-License-Identifier: Apache-2.0

#include "client/forward_pass.h"

namespace attend::client {

Status AddForwardPass(Client& client, const CallOptions& options, AttentionCall* call) {
  if (!call->backward || !call->backward->o.shape.empty()) return Status();
  AttentionCall forward = *call;
  forward.backward.reset();
  forward.outputs = {};
  forward.return_lse = true;
  forward.check = false;
  forward.request_id.clear();
  const Result<AttentionResult> result = client.Call(forward, options);
  if (!result.ok()) return result.status();
  call->backward->o = result->o;
  call->backward->lse = *result->lse;
  return Status();
}

}  // namespace attend::client
