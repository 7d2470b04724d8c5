// SPDX-License-Identifier: Apache-2.0
//
// Sessions: K and V of a sequence stay on the server, layer by layer
// (proto/attend/v1/session.proto), so that the next token sends only its own rows. A Session is the
// client's side of one: it knows how many tokens each layer has, and names every append, so that
// the client's retries append nothing twice. Thread-safe, but one call at a time on a layer, and
// none while the session is truncated. Destroy sessions before their client.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attend/v1/session.pb.h"
#include "client/client.h"

namespace attend::client {

// The shape of a layer's K, [heads_kv, tokens, dim], and V, [heads_kv, tokens, dim_v].
struct LayerShape {
  DType dtype = DType::kFloat32;
  int64_t heads_kv = 1;
  int64_t dim = 64;
  int64_t dim_v = 0;  // 0: dim
};

struct SessionOptions {
  std::vector<LayerShape> shapes;          // each layer's, or one for all of `layers`
  int32_t layers = 0;                      // 0: as many as there are shapes
  std::string device;                      // "cuda:0" or "cpu"; empty: the server chooses
  std::chrono::duration<double> lease{0};  // from its last use to its end; 0: server's default
  bool pinned = false;                     // loses no tokens to other sessions
  // The tenant that owns the session; also of calls on it that name no tenant.
  std::string tenant;
  // As CallOptions::traceparent, of calls on the session that name none.
  std::string traceparent = {};
  std::chrono::nanoseconds timeout = std::chrono::seconds(10);  // of each call but Attend; 0 = none
  // Where the client has several servers: the session's, HOST:PORT, as server() says it. Empty:
  // Create chooses one that serves.
  std::string server = {};
};

class Session {
 public:
  // RESOURCE_EXHAUSTED: the number of sessions is at its limit. INVALID_ARGUMENT names the option,
  // the value and the bound. UNIMPLEMENTED: the server has sessions off. After a lost connection
  // this is retried like any call; a session that the first attempt may have made ends with its
  // lease.
  static Result<Session> Create(Client& client, const SessionOptions& options);
  // Opens a session that was made elsewhere, by its id; the destructor leaves it alone. Only these
  // options count: tenant, timeout, server and, if they are known, shapes and layers. Without
  // shapes, calls that append nothing are never sent in chunks. NOT_FOUND: there is no such
  // session.
  static Result<Session> Open(Client& client, const std::string& id,
                              const SessionOptions& options = {});
  // Lists the tenant's sessions, of several servers those of the one that is named, or of the
  // first. `timeout`: of the whole list; 0: none.
  static Result<v1::ListSessionsResponse> List(Client& client, const std::string& tenant = "",
                                               std::chrono::nanoseconds timeout = {},
                                               const std::string& server = "");

  Session(Session&& other) noexcept = default;
  Session& operator=(Session&& other) noexcept;
  // Frees the session if it was made here. Waits half a second at most: if the server does not
  // answer, the lease ends it.
  ~Session();

  // Makes another session that begins with the same tokens, `length` of them or all. OUT_OF_RANGE
  // beyond this session's shortest layer. FAILED_PRECONDITION: no length is given, and layers have
  // different ones.
  Result<Session> Fork(std::optional<int64_t> length = {}) const;
  // Layers that have more than `length` tokens keep that many. UNAVAILABLE, which is retried like
  // any call, while an append is under way.
  Status Truncate(int64_t length);
  // Renews the lease, as every use does.
  Status KeepAlive();
  // Asks the server, and learns the lengths.
  Result<v1::Session> Get();
  // Frees the session. The object is then empty: it may only be destroyed or assigned to. OK also
  // if the session was made here and has already ended.
  Status Free();
  // As Free, but the session stays at the server until its lease is over. Returns its id.
  std::string Release();

  const std::string& id() const;
  // Where it is, for SessionOptions, CallOptions and StreamOptions; empty if the client has one
  // server only. All its calls go there.
  const std::string& server() const;
  int32_t layers() const;
  // Tokens of a layer, those of the last answer included. After a call that failed it may differ
  // from the server's number, until Get or the next call has asked.
  int64_t length(int32_t layer = 0) const;

  // Attention over a layer's tokens. `call` is as for Client::Call, with the rows to be appended
  // for k and v, [1, Hkv, n, D] and [1, Hkv, n, Dv] in the layout, before q reads them, or neither.
  // A q of no rows only appends. Not with LAYOUT_LHD, kv_lengths or sessions.
  // All rows are appended or none. After OUT_OF_RANGE (tokens were evicted: append those from
  // length() on again) and FAILED_PRECONDITION (somebody else appended or truncated) the true
  // length is known. After other failures the next call (of any kind, AttendAsync and Send too)
  // first asks for it, and waits. If the failed call has appended its rows after all, a next call
  // that brings rows is FAILED_PRECONDITION, so simply calling again appends nothing twice.
  Result<AttentionResult> Attend(int32_t layer, const AttentionCall& call,
                                 const CallOptions& options = {}) {
    return Attend({this}, layer, call, options);
  }
  // The same for B sequences, each with its session, all of this client, with the same shape and on
  // one device of one server.
  static Result<AttentionResult> Attend(const std::vector<Session*>& sessions, int32_t layer,
                                        AttentionCall call, const CallOptions& options = {});
  // As Client::CallAsync. If the call succeeds, the lengths are known when `callback` runs.
  static CallHandle AttendAsync(const std::vector<Session*>& sessions, int32_t layer,
                                AttentionCall call, const CallOptions& options,
                                CallCallback callback);
  // As Stream::Send; the stream must be of the sessions' tenant, and of their server. A cancelled
  // call may append its rows all the same; the next call on the layer first asks for its length.
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
