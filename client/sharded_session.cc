// SPDX-License-Identifier: Apache-2.0
//
// Invariants. Shard n holds tokens [n, n + 1) * shard_tokens, so a token's shard follows from its
// position. The lengths known here (State::Layer) count only calls that succeeded on every shard. A
// failed call may have been appended by some shards: Layer::unsure keeps its number of rows, and
// the next call must bring the same rows. Settle then fetches what each shard has, and Plan sends
// rows only to shards that lack them. `mutex` is never held while a server is waited for or a
// session is freed.

#include "client/sharded_session.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "client/call/tree_mask.h"
#include "client/sharded_call.h"
#include "kernels/util/mutex.h"

namespace attend::client {
namespace {

// The server is down or does not answer, or the session has ended.
bool IsGone(Code code) {
  return code == Code::kUnavailable || code == Code::kNotFound || code == Code::kDeadlineExceeded;
}

}  // namespace

struct ShardedSession::State {
  // Tokens [begin, begin + shard_tokens) of the sequence.
  struct Shard {
    int64_t begin = 0;
    std::shared_ptr<Session> session;  // null: given up
    std::string server = {};           // the session's, or the lost one's

    int64_t have(int32_t layer) const {
      return begin + (session == nullptr ? 0 : session->length(layer));
    }
  };
  struct Layer {
    int64_t length = 0;
    int64_t unsure = 0;  // rows of the last call, if it failed
  };
  State(Client& client, const ShardedOptions& options) : client(client), options(options) {}

  Status CheckLayer(int32_t layer) const {
    const MutexLock lock(mutex);
    if (layer >= 0 && layer < std::ssize(layers)) return Status();
    return InvalidArgument("layer is " + std::to_string(layer) + ", must be in [0, " +
                           std::to_string(std::ssize(layers) - 1) + "]");
  }
  Layer LayerOf(int32_t layer) const {
    const MutexLock lock(mutex);
    return layers[static_cast<size_t>(layer)];
  }
  void SetLayer(int32_t layer, const Layer& to) {
    const MutexLock lock(mutex);
    layers[static_cast<size_t>(layer)] = to;
  }
  void SetLayers(int32_t count) {
    const MutexLock lock(mutex);
    layers.resize(static_cast<size_t>(count));
  }
  std::vector<Shard> All() const {
    const MutexLock lock(mutex);
    return shards;
  }
  // End of the shard's tokens in a sequence of that length.
  int64_t End(const Shard& shard, int64_t length) const {
    return std::min(shard.begin + options.shard_tokens, length);
  }
  Status Named(const Shard& shard, int64_t length, const Status& status) const {
    return OfTokens(shard.begin, End(shard, length), shard.server, status);
  }

  // For a shard whose server is lost or whose session has ended.
  void GiveUp(const Shard& lost) {
    std::shared_ptr<Session> session;  // destroyed after the lock is released
    const MutexLock lock(mutex);
    for (Shard& shard : shards) {
      if (shard.session == lost.session) session = std::move(shard.session);
    }
  }
  // Prefers the server with the fewest shards among those that have any. If they all have the same
  // number, or that server is unreachable or full, a server without shards, else any.
  Result<Session> MakeSession(const std::vector<Shard>& all) const;
  // All shards that `tokens` need; shards that were given up are made again, empty.
  Result<std::vector<Shard>> ShardsFor(int64_t tokens);
  // After a failed call: fetches from the shards how many of its rows they have.
  Status Settle(int32_t layer, int64_t rows) const;
  // The shards that the call must reach, with the keys to send to each and the q rows that see it.
  Result<std::vector<ShardPart>> Plan(int32_t layer, const AttentionCall& call, int64_t rows);

  Client& client;
  const ShardedOptions options;
  mutable Mutex mutex;
  std::vector<Shard> shards ATTEND_GUARDED_BY(mutex);  // in token order
  std::vector<Layer> layers ATTEND_GUARDED_BY(mutex);  // size is constant
};

Result<Session> ShardedSession::State::MakeSession(const std::vector<Shard>& all) const {
  std::map<std::string, int64_t> shards_of;
  for (const Shard& shard : all) {
    if (shard.session != nullptr) ++shards_of[shard.server];
  }
  const auto [fewest, most] =
      std::minmax_element(shards_of.begin(), shards_of.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; });
  if (fewest != most && fewest->second != most->second) {
    SessionOptions there = options.session;
    there.server = fewest->first;
    Result<Session> made = Session::Create(client, there);
    const Code code = made.status().code();
    if (made.ok() || (code != Code::kUnavailable && code != Code::kResourceExhausted)) return made;
  }
  // gRPC's round robin reaches every connected server within this many further turns, so a server
  // without shards is found if there is one.
  Result<Session> made = Session::Create(client, options.session);
  for (size_t turns = shards_of.size();
       made.ok() && shards_of.contains(made->server()) && turns > 0; --turns) {
    Result<Session> other = Session::Create(client, options.session);
    if (!other.ok()) break;
    if (!shards_of.contains(other->server())) return other;
  }
  return made;
}

Result<std::vector<ShardedSession::State::Shard>> ShardedSession::State::ShardsFor(int64_t tokens) {
  for (;;) {
    std::vector<Shard> all;
    {
      const MutexLock lock(mutex);
      while (std::ssize(shards) * options.shard_tokens < tokens || shards.empty()) {
        shards.push_back({std::ssize(shards) * options.shard_tokens, nullptr});
      }
      all = shards;
    }
    const auto lacks = [](const Shard& shard) { return shard.session == nullptr; };
    const auto lost = std::find_if(all.begin(), all.end(), lacks);
    if (lost == all.end()) return all;
    // MakeSession waits for servers, so the lock is released. If another thread made the session
    // first, this one is destroyed without the lock too.
    Result<Session> made = MakeSession(all);
    if (!made.ok()) return made.status();
    auto session = std::make_shared<Session>(*std::move(made));
    const MutexLock lock(mutex);
    const auto n = static_cast<size_t>(lost - all.begin());
    if (n >= shards.size() || shards[n].session != nullptr) continue;
    Shard& shard = shards[n];
    shard.server = session->server();
    shard.session = std::move(session);
  }
}

Status ShardedSession::State::Settle(int32_t layer, int64_t rows) const {
  const auto [length, unsure] = LayerOf(layer);
  if (unsure == 0) return Status();
  if (rows != unsure) {
    return Status(Code::kFailedPrecondition,
                  "the last call on layer " + std::to_string(layer) +
                      " failed, and shards may have its " + std::to_string(unsure) +
                      " rows; this call has " + std::to_string(rows) +
                      ", must send those rows again (Truncate discards them)");
  }
  for (const Shard& shard : All()) {
    if (End(shard, length + rows) <= length || shard.session == nullptr) continue;
    const Result<v1::Session> got = shard.session->Get();
    if (!got.ok()) return Named(shard, length + rows, got.status());
  }
  return Status();
}

Result<std::vector<ShardPart>> ShardedSession::State::Plan(int32_t layer, const AttentionCall& call,
                                                           int64_t rows) {
  const auto [length, unsure] = LayerOf(layer);
  const int64_t keys = length + rows;
  const Result<std::vector<Shard>> all = ShardsFor(keys);
  if (!all.ok()) return all.status();
  const attend::Mask mask = MaskOf(call.mask);
  const int64_t len_q = call.q.shape[RowDimension(call.layout)];
  std::vector<ShardPart> parts;
  for (const Shard& shard : *all) {
    const int64_t end = End(shard, keys);
    if (end <= shard.begin) break;
    const int64_t append = std::clamp(length, shard.begin, end);
    ShardPart part{shard.session,
                   shard.server,
                   {shard.begin, end, end},
                   RowsThatSee(mask, len_q, keys, shard.begin, end)};
    if (part.rows.size() == 0 && append == end) continue;
    // Send the call's rows for this shard, unless it has them from the failed call.
    if (unsure == 0 || shard.have(layer) != end) part.keys.send = append;
    if (shard.have(layer) > part.keys.send) {
      return Status(Code::kFailedPrecondition,
                    "layer " + std::to_string(layer) + ": the shard has " +
                        TokensText(part.keys.send, shard.have(layer)) +
                        ", which this session has not appended: Truncate removes them");
    }
    if (shard.have(layer) != part.keys.send) {
      return Status(Code::kFailedPrecondition, "layer " + std::to_string(layer) + ": " +
                                                   TokensText(shard.have(layer), append) +
                                                   " are gone, and must be restored");
    }
    parts.push_back(std::move(part));
  }
  // No key is visible: any shard can compute that answer.
  if (parts.empty())
    parts.push_back({all->front().session, all->front().server, {0, 0, 0}, {0, len_q}});
  return parts;
}

Result<ShardedSession> ShardedSession::Create(Client& client, const ShardedOptions& options) {
  if (options.shard_tokens < 8 || options.shard_tokens % 8 != 0) {
    return InvalidArgument("shard_tokens is " + std::to_string(options.shard_tokens) +
                           ", must be a multiple of 8, at least 8");
  }
  if (options.session.shapes.empty()) {
    return InvalidArgument("session.shapes has 0 entries, must have at least 1");
  }
  if (!options.session.server.empty()) {
    return InvalidArgument("session.server is " + options.session.server +
                           ", must be empty: shards are on all servers in turn");
  }
  auto state = std::make_unique<State>(client, options);
  const Result<std::vector<State::Shard>> first = state->ShardsFor(0);
  if (!first.ok()) return first.status();
  state->SetLayers(first->front().session->layers());
  return ShardedSession(std::move(state));
}

ShardedSession::ShardedSession(std::unique_ptr<State> state) : state_(std::move(state)) {}
ShardedSession::ShardedSession(ShardedSession&& other) noexcept = default;
ShardedSession& ShardedSession::operator=(ShardedSession&& other) noexcept = default;
ShardedSession::~ShardedSession() = default;

Result<AttentionResult> ShardedSession::Attend(int32_t layer, const AttentionCall& given,
                                               const CallOptions& options) {
  ATTEND_RETURN_IF_ERROR(state_->CheckLayer(layer));
  ATTEND_RETURN_IF_ERROR(CheckShardedCall(given));
  const int64_t rows = BringsRows(given) ? given.k.shape[RowDimension(given.layout)] : 0;
  const int64_t keys = state_->LayerOf(layer).length + rows;
  const int64_t len_q = given.q.shape[RowDimension(given.layout)];
  Attention sizes;
  sizes.problem.batch = 1;
  sizes.problem.len_q = len_q;
  sizes.problem.len_k = keys;
  // Each shard gets its columns of a bias.
  const Result<AttentionCall> written = WithTreeAsBias(given, sizes);
  if (!written.ok()) return written.status();
  const AttentionCall& call = *written;
  if (call.bias) {
    const std::vector<int64_t>& shape = call.bias->shape;
    if (shape[3] != keys || (shape[2] != 1 && shape[2] != len_q)) {
      return InvalidArgument("bias has the shape " + ShapeText(shape) + ", must have Lk = " +
                             std::to_string(keys) + " and Lq = " + std::to_string(len_q) + " or 1");
    }
  }
  ATTEND_RETURN_IF_ERROR(state_->Settle(layer, rows));
  const Result<std::vector<ShardPart>> parts = state_->Plan(layer, call, rows);
  if (!parts.ok()) return parts.status();
  const int64_t length = state_->LayerOf(layer).length;
  Result<AttentionResult> answer = CallShards(*parts, layer, length + rows, call, options);
  state_->SetLayer(layer,
                   answer.ok() ? State::Layer{length + rows, 0} : State::Layer{length, rows});
  return answer;
}

Result<std::vector<ShardedSession::Tokens>> ShardedSession::Missing(int32_t layer) {
  ATTEND_RETURN_IF_ERROR(state_->CheckLayer(layer));
  const int64_t length = state_->LayerOf(layer).length;
  std::vector<Tokens> missing;
  for (const State::Shard& shard : state_->All()) {
    int64_t have = shard.begin;
    if (shard.session != nullptr) {
      const Result<v1::Session> got = shard.session->Get();
      if (!got.ok() && !IsGone(got.status().code())) {
        return state_->Named(shard, length, got.status());
      }
      if (got.ok()) have = shard.have(layer);
      if (!got.ok()) state_->GiveUp(shard);
    }
    const int64_t end = state_->End(shard, length);
    if (have < end) missing.push_back({have, end, shard.server});
  }
  return missing;
}

Status ShardedSession::Restore(int32_t layer, int64_t begin, const TensorRef& k, const TensorRef& v,
                               v1::Layout layout, const CallOptions& options) {
  ATTEND_RETURN_IF_ERROR(state_->CheckLayer(layer));
  AttentionCall call;
  call.layout = layout;
  call.k = k;
  call.v = v;
  call.q = k;
  ATTEND_RETURN_IF_ERROR(CheckShardedCall(call));
  const size_t dimension = RowDimension(layout);
  const int64_t length = state_->LayerOf(layer).length, end = begin + k.shape[dimension];
  if (begin < 0 || end > length || v.shape[dimension] != k.shape[dimension]) {
    return InvalidArgument(TokensText(begin, end) + " of k " + ShapeText(k.shape) + " and v " +
                           ShapeText(v.shape) + " must be in [0, " + std::to_string(length) + ")");
  }
  Result<TensorRef> nothing = RangeOf("q", k, dimension, 0, 0);
  if (!nothing.ok()) return nothing.status();
  call.q = *nothing;
  const Result<std::vector<State::Shard>> all = state_->ShardsFor(length);
  if (!all.ok()) return all.status();
  for (const State::Shard& shard : *all) {
    const int64_t from = std::max(begin, shard.begin), to = state_->End(shard, end);
    if (from >= to) continue;
    if (shard.have(layer) != from) {
      return Status(
          Code::kFailedPrecondition,
          "layer " + std::to_string(layer) + ": " + TokensText(shard.begin, shard.have(layer)) +
              " of the shard are there; restored tokens must begin where they end, not at " +
              std::to_string(from));
    }
    Result<AttentionCall> part = PartOf(call, end, {shard.begin, from, to}, {});
    if (!part.ok()) return part.status();
    const Result<AttentionResult> put = shard.session->Attend(layer, *part, options);
    if (!put.ok()) return state_->Named(shard, length, put.status());
  }
  return Status();
}

Status ShardedSession::Truncate(int64_t length) {
  if (length < 0) {
    return InvalidArgument("length is " + std::to_string(length) + ", must be at least 0");
  }
  const std::vector<State::Shard> all = state_->All();
  for (const State::Shard& shard : all) {
    if (shard.session == nullptr || shard.begin >= length) continue;
    // The lengths are fetched: a failed call may have left more rows there than are known here.
    const Result<v1::Session> got = shard.session->Get();
    Status status = got.status();
    if (got.ok() && std::ranges::any_of(got->layer_lengths(), [&](int64_t tokens) {
          return tokens > length - shard.begin;
        })) {
      status = shard.session->Truncate(length - shard.begin);
    }
    if (status.ok()) continue;
    if (!IsGone(status.code())) return state_->Named(shard, length, status);
    state_->GiveUp(shard);
  }
  std::vector<State::Shard> gone;  // destroyed after the lock is released
  const MutexLock lock(state_->mutex);
  const auto cut = std::ranges::find_if(
      state_->shards, [&](const State::Shard& shard) { return shard.begin >= length; });
  std::move(cut, state_->shards.end(), std::back_inserter(gone));
  state_->shards.erase(cut, state_->shards.end());
  for (State::Layer& layer : state_->layers) {
    layer = length > layer.length ? layer : State::Layer{length, 0};
  }
  return Status();
}

Status ShardedSession::KeepAlive() {
  Status first;  // the first failure; the other leases are renewed regardless
  for (const State::Shard& shard : state_->All()) {
    if (shard.session == nullptr) continue;
    const Status status = shard.session->KeepAlive();
    if (!status.ok() && first.ok()) first = state_->Named(shard, INT64_MAX, status);
  }
  return first;
}

int32_t ShardedSession::layers() const {
  const MutexLock lock(state_->mutex);
  return static_cast<int32_t>(state_->layers.size());
}

int64_t ShardedSession::length(int32_t layer) const {
  assert(layer >= 0 && layer < layers());
  return state_->LayerOf(layer).length;
}

std::vector<ShardedSession::Tokens> ShardedSession::Placement(int32_t layer) const {
  const int64_t length = this->length(layer);
  std::vector<Tokens> placement;
  for (const State::Shard& shard : state_->All()) {
    const int64_t end = state_->End(shard, length);
    if (shard.begin < end) placement.push_back({shard.begin, end, shard.server});
  }
  return placement;
}

}  // namespace attend::client
