// SPDX-License-Identifier: Apache-2.0
//
// One sequence over several servers (context parallel). Its keys are cut into shards of so many
// tokens, each a Session of its own, made on the client's servers, as many on each, when the
// sequence gets there. A call goes to all shards that its rows of q see, at once, each computes its
// part of the attention, and the parts are merged here (call/merge_partial.h). So a sequence may be
// longer than one server's memory, and its keys are read by all servers at the same time.
//
// Where a server is lost, its shards' keys are, and only they: Missing says which, Restore takes
// them again. Thread-safe, but one call at a time on a layer, and none while the session is
// truncated or restored, asks what is missing, or repeats a call that failed. Destroy it before its
// client.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/session.h"

namespace attend::client {

struct ShardedOptions {
  // Of each shard. `shapes` must be known; `server` is empty: the client's servers have turns.
  SessionOptions session;
  // A multiple of 8, at least 8. Small ones spread a sequence evenly, also while it is short, and
  // have each token's rows of q sent, and answered, once for each shard.
  int64_t shard_tokens = 16384;
};

class ShardedSession {
 public:
  // Tokens [begin, end) of the sequence, in one layer.
  struct Tokens {
    int64_t begin = 0;
    int64_t end = 0;
    std::string server;  // where they are, or were; as Session::server()

    friend bool operator==(const Tokens&, const Tokens&) = default;
  };

  // Makes the first shard. Fails as Session::Create.
  static Result<ShardedSession> Create(Client& client, const ShardedOptions& options);
  ShardedSession(ShardedSession&& other) noexcept;
  ShardedSession& operator=(ShardedSession&& other) noexcept;
  // Frees the shards, as Session's destructor does.
  ~ShardedSession();

  // As Session::Attend, for one sequence: `call` brings the rows to be appended, or none, and B is
  // 1. Its O has q's dtype, or float32; where one shard is all that q sees, the bits are a
  // Session's. Not with shared memory. `timings` and `check` are those of the slowest part and of
  // the one nearest its bound.
  //
  // If a call that brings rows fails, some shards may have them. length() does not count them, and
  // the next call on the layer must bring the same rows again: what a shard has is not sent twice.
  // Truncate(length()) forgets them. UNAVAILABLE, NOT_FOUND and FAILED_PRECONDITION name the tokens
  // that could not be reached or are gone.
  Result<AttentionResult> Attend(int32_t layer, const AttentionCall& call,
                                 const CallOptions& options = {});

  // Asks every server, and returns the layer's tokens that none has any longer: those of servers
  // that cannot be reached, of sessions that have ended, and those that sessions have lost to
  // others. Empty: all are there. A shard that cannot be reached is given up, in all layers.
  Result<std::vector<Tokens>> Missing(int32_t layer);
  // Appends missing tokens from `begin` on, k [1, Hkv, n, D] and v [1, Hkv, n, Dv] in the layout.
  // Shards that were given up are made anew, on servers that serve. FAILED_PRECONDITION:
  // tokens before `begin` are missing, or some of those are there.
  Status Restore(int32_t layer, int64_t begin, const TensorRef& k, const TensorRef& v,
                 v1::Layout layout = v1::LAYOUT_BHLD, const CallOptions& options = {});

  // Layers that have more than `length` tokens keep that many.
  Status Truncate(int64_t length);
  // Renews every shard's lease. A call renews those of the shards that it goes to.
  Status KeepAlive();

  int32_t layers() const;
  int64_t length(int32_t layer = 0) const;
  // Where a layer's tokens are, a shard each.
  std::vector<Tokens> Placement(int32_t layer = 0) const;

 private:
  struct State;
  explicit ShardedSession(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace attend::client
