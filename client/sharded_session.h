// SPDX-License-Identifier: Apache-2.0
//
// One sequence over several servers (context parallel). The keys are cut into shards of a fixed
// number of tokens. Each shard is a Session of its own, made when the sequence reaches it, and
// shards are spread evenly over the client's servers. A call goes to all shards that its q rows
// see, at once; each computes partial attention, and the parts are merged here
// (call/merge_partial.h). So a sequence may exceed one server's memory, and all servers read its
// keys in parallel.
//
// A lost server loses only its own shards: Missing lists their tokens and Restore appends them
// again. Thread-safe, with two exceptions: one call at a time per layer, and no other call during
// Truncate, Restore, Missing or the repetition of a failed call. Must be destroyed before its
// client.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/session.h"

namespace attend::client {

struct ShardedOptions {
  // Options of each shard. `shapes` must not be empty; `server` must be: shards go to the servers
  // in turn.
  SessionOptions session;
  // A multiple of 8, at least 8. Small shards spread even a short sequence evenly, but the q rows
  // of each token are sent, and answered, once per shard.
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

  // Makes the first shard. Fails as Session::Create does.
  static Result<ShardedSession> Create(Client& client, const ShardedOptions& options);
  ShardedSession(ShardedSession&& other) noexcept;
  ShardedSession& operator=(ShardedSession&& other) noexcept;
  // Frees the shards, as Session's destructor does.
  ~ShardedSession();

  // As Session::Attend for one sequence (B = 1), with or without rows to append. O has q's dtype,
  // or float32. If q sees a single shard, the result has the bits of a plain Session's. Not with
  // shared memory. `timings` are the slowest part's; `check` is that of the part closest to its
  // bound.
  //
  // If a call with rows fails, some shards may have appended them. length() does not count them,
  // and the next call on the layer must bring the same rows: shards that have them are not sent
  // them again. Truncate(length()) discards them instead. UNAVAILABLE, NOT_FOUND and
  // FAILED_PRECONDITION name the tokens that are unreachable or gone.
  Result<AttentionResult> Attend(int32_t layer, const AttentionCall& call,
                                 const CallOptions& options = {});

  // Asks every server and returns the layer's tokens that none has any more: those on unreachable
  // servers, in ended sessions, or evicted. Empty: all are there. An unreachable shard is given up,
  // in all layers.
  Result<std::vector<Tokens>> Missing(int32_t layer);
  // Appends missing tokens from `begin` on, k [1, Hkv, n, D] and v [1, Hkv, n, Dv] in the layout.
  // Shards that were given up are made again, on servers that serve. FAILED_PRECONDITION: tokens
  // before `begin` are missing, or some of the restored ones are not.
  Status Restore(int32_t layer, int64_t begin, const TensorRef& k, const TensorRef& v,
                 v1::Layout layout = v1::LAYOUT_BHLD, const CallOptions& options = {});

  // Cuts layers longer than `length` to that length.
  Status Truncate(int64_t length);
  // Renews the leases of all shards. A call renews only those of the shards it reaches.
  Status KeepAlive();

  int32_t layers() const;
  int64_t length(int32_t layer = 0) const;
  // Where a layer's tokens are, one entry per shard.
  std::vector<Tokens> Placement(int32_t layer = 0) const;

 private:
  struct State;
  explicit ShardedSession(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace attend::client
