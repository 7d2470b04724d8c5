// SPDX-License-Identifier: Apache-2.0
//
// Sessions keep K and V of a sequence on the server, layer by layer
// (proto/attend/v1/session.proto), so that the next token sends only its own rows. A Session is the
// client's handle: it tracks the length of each layer and gives every append an id, so that a retry
// never appends twice. Thread-safe, with two exceptions: one call at a time per layer, and no call
// during Truncate and KeepDraft. Sessions must be destroyed before their client.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attend/v1/session.pb.h"
#include "client/client.h"

namespace attend::client {

// Shape of a layer's K, [heads_kv, tokens, dim], and V, [heads_kv, tokens, dim_v].
struct LayerShape {
  DType dtype = DType::kFloat32;
  int64_t heads_kv = 1;
  int64_t dim = 64;
  int64_t dim_v = 0;  // 0: dim
};

struct SessionOptions {
  std::vector<LayerShape> shapes;          // one per layer, or one for all of `layers`
  int32_t layers = 0;                      // 0: the number of shapes
  std::string device;                      // "cuda:0" or "cpu"; empty: the server chooses
  std::chrono::duration<double> lease{0};  // counted from the last use; 0: server's default
  bool pinned = false;                     // its tokens are not evicted for other sessions
  // The tenant that owns the session, and that of its calls that set none.
  std::string tenant;
  // traceparent of calls on the session that set none, as CallOptions::traceparent.
  std::string traceparent = {};
  std::chrono::nanoseconds timeout = std::chrono::seconds(10);  // of each call but Attend; 0: none
  // With several servers: the session's, HOST:PORT, as server() returns it. Empty: Create chooses
  // one that serves.
  std::string server = {};
};

class Session {
 public:
  // RESOURCE_EXHAUSTED: the session limit is reached. INVALID_ARGUMENT names the option, the value
  // and the bound. UNIMPLEMENTED: the server has sessions off. Retried after a lost connection like
  // any call; a session that the lost attempt made ends with its lease.
  static Result<Session> Create(Client& client, const SessionOptions& options);
  // Opens an existing session by id; the destructor does not free it. Uses these options only:
  // tenant, timeout, server and, if known, shapes and layers. Without shapes, calls that append
  // nothing are never sent in chunks. NOT_FOUND: no such session.
  static Result<Session> Open(Client& client, const std::string& id,
                              const SessionOptions& options = {});
  // Lists the tenant's sessions; with several servers, those of `server`, or of the first one.
  // `timeout` covers the whole list; 0: none.
  static Result<v1::ListSessionsResponse> List(Client& client, const std::string& tenant = "",
                                               std::chrono::nanoseconds timeout = {},
                                               const std::string& server = "");

  Session(Session&& other) noexcept = default;
  Session& operator=(Session&& other) noexcept;
  // Frees the session if Create or Fork made it. Waits at most half a second; if the server does
  // not answer, the lease ends the session.
  ~Session();

  // Makes another session with the same first `length` tokens, or all. OUT_OF_RANGE: beyond this
  // session's shortest layer. FAILED_PRECONDITION: no length given and the layers differ in length.
  Result<Session> Fork(std::optional<int64_t> length = {}) const;
  // Cuts layers longer than `length` to that length. UNAVAILABLE while an append is in flight,
  // which is retried like any call.
  Status Truncate(int64_t length);
  // Keeps, in all layers, the tokens of a draft that `kept` names, ascending and counted from
  // `length` on, the tokens before it: they move up to follow these, and all others after `length`
  // are removed. A draft has at most 1024 tokens. Otherwise as Truncate.
  Status KeepDraft(int64_t length, std::span<const int64_t> kept);
  // Renews the lease, as every use does.
  Status KeepAlive();
  // Fetches the session's state and updates the lengths.
  Result<v1::Session> Get();
  // Frees the session. The object is then empty: it may only be destroyed or assigned to. Also OK
  // if the session was made by this object and has already ended.
  Status Free();
  // Empties the object like Free, but leaves the session on the server until its lease ends.
  // Returns its id.
  std::string Release();

  const std::string& id() const;
  // Where the session is, for SessionOptions, CallOptions and StreamOptions; empty if the client
  // has only one server. All its calls go there.
  const std::string& server() const;
  int32_t layers() const;
  // Tokens of a layer as of the last answer. After a failed call this may differ from the server's
  // number until Get or the next call has fetched it.
  int64_t length(int32_t layer = 0) const;

  // Attention over a layer's tokens. `call` is as for Client::Call; its k and v are the rows to
  // append before q reads them, [1, Hkv, n, D] and [1, Hkv, n, Dv] in the layout, or both empty. A
  // q without rows only appends. Not with LAYOUT_LHD, kv_lengths or sessions.
  // All rows are appended or none. After OUT_OF_RANGE (tokens were evicted: append again from
  // length() on) and FAILED_PRECONDITION (another client appended or truncated) the true length is
  // known. After other failures the next call of any kind, AttendAsync and Send included, first
  // fetches it and waits for that. If the failed call did append its rows, a next call with rows
  // ends with FAILED_PRECONDITION, so repeating a call never appends twice.
  Result<AttentionResult> Attend(int32_t layer, const AttentionCall& call,
                                 const CallOptions& options = {}) {
    return Attend({this}, layer, call, options);
  }
  // The same for B sequences, one session each: all of this client, of the same shape, on one
  // device of one server.
  static Result<AttentionResult> Attend(const std::vector<Session*>& sessions, int32_t layer,
                                        AttentionCall call, const CallOptions& options = {});
  // As Client::CallAsync. After success, length() is up to date when `callback` runs.
  static CallHandle AttendAsync(const std::vector<Session*>& sessions, int32_t layer,
                                AttentionCall call, const CallOptions& options,
                                CallCallback callback);
  // As Stream::Send; the stream must have the sessions' tenant and server. A cancelled call may
  // still append its rows; the next call on the layer first fetches its length.
  static CallHandle Send(Stream& stream, const std::vector<Session*>& sessions, int32_t layer,
                         AttentionCall call, StreamCallback callback);

 private:
  struct State;  // shared with calls in flight
  struct Use;
  explicit Session(std::shared_ptr<State> state);
  static Result<std::shared_ptr<State>> MakeState(Client& client, const SessionOptions& options);
  static Result<Use> Begin(const std::vector<Session*>& sessions, int32_t layer,
                           AttentionCall* call);

  std::shared_ptr<State> state_;  // null: empty
};

}  // namespace attend::client
