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

// What one shard has to do with a call.
struct ShardPart {
  std::shared_ptr<Session> session;
  std::string server;
  KeyPart keys;
  RowRange rows;  // of q
};

// "tokens [0, 16384)".
std::string TokensText(int64_t begin, int64_t end);
// The status, with whose it is before it.
Status OfTokens(int64_t begin, int64_t end, const std::string& server, const Status& status);

// Whether the call has rows to append.
inline bool BringsRows(const AttentionCall& call) {
  return !call.k.shape.empty() || !call.v.shape.empty();
}
// INVALID_ARGUMENT for calls that are not of one sequence, or whose tensors are not sent.
Status CheckShardedCall(const AttentionCall& call);

// Sends the parts of a checked call on a sequence of `keys` tokens, its own rows included, waits
// for all of their answers, and makes one of them. There is at least one part.
Result<AttentionResult> CallShards(const std::vector<ShardPart>& parts, int32_t layer, int64_t keys,
                                   const AttentionCall& call, const CallOptions& options);

}  // namespace attend::client
