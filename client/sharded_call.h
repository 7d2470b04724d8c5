// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one call over the shards of a sequence (sharded_session.h).

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/call/key_parts.h"
#include "client/session.h"

namespace attend::client {

// One shard's part of a call.
struct ShardPart {
  std::shared_ptr<Session> session;
  std::string server;
  KeyPart keys;
  RowRange rows;  // of q
};

// "tokens [0, 16384)".
std::string TokensText(int64_t begin, int64_t end);
// Prefixes the status message with the tokens and the server it concerns.
Status OfTokens(int64_t begin, int64_t end, const std::string& server, const Status& status);

// Whether the call has rows to append.
inline bool BringsRows(const AttentionCall& call) {
  return !call.k.shape.empty() || !call.v.shape.empty();
}
// INVALID_ARGUMENT: more than one sequence, shapes or fields that a sharded call cannot have, or
// tensors in shared memory.
Status CheckShardedCall(const AttentionCall& call);

// Sends the parts of a checked call on a sequence of `keys` tokens, the appended rows included,
// waits for all answers and merges them. There is at least one part.
Result<AttentionResult> CallShards(const std::vector<ShardPart>& parts, int32_t layer, int64_t keys,
                                   const AttentionCall& call, const CallOptions& options);

}  // namespace attend::client
