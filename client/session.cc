// SPDX-License-Identifier: Apache-2.0
//
// Exactly-once appends: Begin sends the length it believes and a random append id, and a retry
// repeats both. End stores the length of the answer; without one the layer is no longer `known`,
// and the next Begin asks first.

#include "client/session.h"

#include <cassert>
#include <utility>

#include "client/call/listed_ids.h"
#include "client/rpc/session_calls.h"
#include "kernels/util/counted.h"
#include "kernels/util/mutex.h"

namespace attend::client {
namespace {

using Stub = v1::SessionService::Stub;
constexpr std::chrono::milliseconds kFreeInDestructorMax{500};

// A tensor without rows, which tells how large O will be.
TensorRef NoRows(const LayerShape& shape, v1::Layout layout, int64_t batch, int64_t dim) {
  std::vector<int64_t> dims = {batch, shape.heads_kv, 0, dim};
  if (layout == v1::LAYOUT_BLHD) std::swap(dims[1], dims[2]);
  return TensorRef(shape.dtype, std::move(dims), nullptr, 0);
}

}  // namespace

struct Session::State {
  template <class Request, class Response>
  using Method = SessionCalls::Method<Request, Response>;

  State(Client& client, const SessionOptions& options)
      : client(client),
        options(options),
        calls(client.pool(), {options.tenant, options.traceparent}, options.timeout,
              options.server),
        append_ids(SystemSeed()) {}

  template <class Request, class Response>
  Status Ask(Method<Request, Response> method, const Request& request, Response* response) {
    return calls.Ask(method, client.MakeRetryState(), request, response);
  }
  // For calls that name the session and return it; updates the lengths.
  template <class Request>
  Result<v1::Session> AskForSession(Method<Request, v1::Session> method, Request request) {
    request.set_session(id);
    v1::Session session;
    ATTEND_RETURN_IF_ERROR(Ask(method, request, &session));
    Learn(session);
    return session;
  }
  void Learn(const v1::Session& session) {
    const MutexLock lock(mutex);
    if (!layers.empty() && std::ssize(layers) != session.layer_lengths_size()) return;
    layers.clear();
    for (const int64_t length : session.layer_lengths()) layers.push_back({length, true});
  }
  // Fetches the length of a layer whose last call failed; other layers may have calls in flight.
  // False: the length is not what this side believed.
  Result<bool> MakeKnown(int32_t layer);
  // Null: unknown.
  const LayerShape* ShapeOf(int32_t layer) const {
    if (options.shapes.empty()) return nullptr;
    return &options.shapes[options.shapes.size() == 1 ? 0 : static_cast<size_t>(layer)];
  }
  std::string NextAppendId() ATTEND_REQUIRES(mutex) {
    const uint64_t words[] = {append_ids.Bits(), append_ids.Bits()};
    return std::string(reinterpret_cast<const char*>(words), sizeof words);
  }

  struct Layer {
    int64_t length = 0;
    bool known = false;  // false: the last call failed and may or may not have appended its rows
  };

  Client& client;
  const SessionOptions options;
  SessionCalls calls;
  std::string id;
  bool owned = false;  // the destructor frees it
  Mutex mutex;
  std::vector<Layer> layers ATTEND_GUARDED_BY(mutex);  // size is constant
  Random append_ids ATTEND_GUARDED_BY(mutex);
};

Result<bool> Session::State::MakeKnown(int32_t layer) {
  {
    const MutexLock lock(mutex);
    if (layers[layer].known) return true;
  }
  v1::GetSessionRequest request;
  request.set_session(id);
  v1::Session session;
  ATTEND_RETURN_IF_ERROR(Ask(&Stub::PrepareAsyncGetSession, request, &session));
  const MutexLock lock(mutex);
  if (session.layer_lengths_size() != std::ssize(layers)) {
    return Internal("the server's session has " + Counted(session.layer_lengths_size(), "layer") +
                    ", it had " + std::to_string(layers.size()));
  }
  const int64_t believed = std::exchange(layers[layer].length, session.layer_lengths(layer));
  layers[layer].known = true;
  return believed == layers[layer].length;
}

// The sessions of one call, from sending to answer.
struct Session::Use {
  std::vector<std::shared_ptr<State>> states;
  int32_t layer = 0;

  Client& client() const {
    assert(!states.empty());
    return states.front()->client;
  }
  const std::string& server() const { return states.front()->calls.server(); }
  CallOptions With(CallOptions options) const {
    const SessionOptions& session = states.front()->options;
    if (options.tenant.empty()) options.tenant = session.tenant;
    if (options.traceparent.empty()) options.traceparent = session.traceparent;
    options.server = server();
    return options;
  }
  void End(const std::vector<int64_t>& lengths) const {
    for (size_t n = 0; n < states.size(); ++n) {
      const MutexLock lock(states[n]->mutex);
      State::Layer& known = states[n]->layers[layer];
      // Lengths that come with a failure mean that the request was refused and appended nothing.
      known.known = lengths.size() == states.size() && lengths[n] >= 0;
      if (known.known) known.length = lengths[n];
    }
  }
};

Session::Session(std::shared_ptr<State> state) : state_(std::move(state)) {}

Session& Session::operator=(Session&& other) noexcept {
  Session old(std::move(other));
  std::swap(state_, old.state_);
  return *this;
}

Session::~Session() {
  if (state_ == nullptr || !state_->owned) return;
  v1::FreeSessionRequest request;
  request.set_session(state_->id);
  v1::FreeSessionResponse response;
  (void)state_->calls.AskOnce(&Stub::PrepareAsyncFreeSession, kFreeInDestructorMax, request,
                              &response);
}

Result<std::shared_ptr<Session::State>> Session::MakeState(Client& client,
                                                           const SessionOptions& options) {
  ATTEND_RETURN_IF_ERROR(CheckNames(options.tenant, options.traceparent));
  ATTEND_RETURN_IF_ERROR(client.pool().CheckServer(options.server));
  return std::make_shared<State>(client, options);
}

Result<Session> Session::Create(Client& client, const SessionOptions& options) {
  Result<std::shared_ptr<State>> state = MakeState(client, options);
  if (!state.ok()) return state.status();
  v1::CreateSessionRequest request;
  for (const LayerShape& from : options.shapes) {
    v1::LayerShape* const shape = request.add_shapes();
    shape->set_dtype(static_cast<v1::DType>(from.dtype));
    shape->set_heads_kv(from.heads_kv);
    shape->set_dim(from.dim);
    shape->set_dim_v(from.dim_v);
  }
  request.set_layers(options.layers);
  request.set_device(options.device);
  request.set_lease_seconds(options.lease.count());
  request.set_pinned(options.pinned);
  v1::Session made;
  ATTEND_RETURN_IF_ERROR((*state)->calls.Create(client.MakeRetryState(), request, &made));
  (*state)->id = made.id();
  (*state)->owned = true;
  (*state)->Learn(made);
  return Session(std::move(*state));
}

Result<Session> Session::Open(Client& client, const std::string& id,
                              const SessionOptions& options) {
  Result<std::shared_ptr<State>> state = MakeState(client, options);
  if (!state.ok()) return state.status();
  (*state)->id = id;
  Session session(std::move(*state));
  ATTEND_RETURN_IF_ERROR(session.Get().status());
  const auto shapes = std::ssize(options.shapes);
  if (shapes > 1 && shapes != session.layers()) {
    return InvalidArgument("shapes has " + std::to_string(shapes) + " entries, the session has " +
                           Counted(session.layers(), "layer"));
  }
  return session;
}

Result<v1::ListSessionsResponse> Session::List(Client& client, const std::string& tenant,
                                               std::chrono::nanoseconds timeout,
                                               const std::string& server) {
  SessionOptions options;
  options.tenant = tenant;
  options.server = server;
  options.timeout = timeout;
  const TimePoint begin = client.clock().Now();
  v1::ListSessionsRequest request;
  v1::ListSessionsResponse all;
  ListedIds listed;
  for (;;) {
    if (timeout.count() > 0) {  // covers all pages
      options.timeout = timeout - (client.clock().Now() - begin);
      if (options.timeout.count() <= 0) {
        return Status(Code::kDeadlineExceeded,
                      "the list of sessions has not ended in time: it has " +
                          std::to_string(all.sessions_size()) + " so far");
      }
    }
    const Result<std::shared_ptr<State>> state = MakeState(client, options);
    if (!state.ok()) return state.status();
    v1::ListSessionsResponse page;
    ATTEND_RETURN_IF_ERROR((*state)->Ask(&Stub::PrepareAsyncListSessions, request, &page));
    if (page.sessions_size() == 0) return all;
    for (v1::Session& session : *page.mutable_sessions()) {
      ATTEND_RETURN_IF_ERROR(listed.Take(session.id(), session.ByteSizeLong()));
      *all.add_sessions() = std::move(session);
    }
    request.set_after(listed.last());
  }
}

Result<Session> Session::Fork(std::optional<int64_t> length) const {
  v1::ForkSessionRequest request;
  request.set_session(state_->id);
  if (length) request.set_length(*length);
  v1::Session made;
  ATTEND_RETURN_IF_ERROR(state_->Ask(&Stub::PrepareAsyncForkSession, request, &made));
  SessionOptions options = state_->options;
  options.server = state_->calls.server();
  auto state = std::make_shared<State>(state_->client, options);
  state->id = made.id();
  state->owned = true;
  state->Learn(made);
  return Session(std::move(state));
}

Status Session::Truncate(int64_t length) {
  v1::TruncateSessionRequest request;
  request.set_length(length);
  return state_->AskForSession(&Stub::PrepareAsyncTruncateSession, request).status();
}

Status Session::KeepDraft(int64_t length, std::span<const int64_t> kept) {
  v1::KeepDraftRequest request;
  request.set_length(length);
  request.mutable_kept()->Add(kept.begin(), kept.end());
  return state_->AskForSession(&Stub::PrepareAsyncKeepDraft, request).status();
}

Status Session::KeepAlive() {
  v1::KeepAliveRequest request;
  request.set_session(state_->id);
  v1::Session session;
  return state_->Ask(&Stub::PrepareAsyncKeepAlive, request, &session);
}

Result<v1::Session> Session::Get() {
  return state_->AskForSession(&Stub::PrepareAsyncGetSession, v1::GetSessionRequest());
}

Status Session::Free() {
  assert(state_ != nullptr && "the session is empty");
  const std::shared_ptr<State> state = std::move(state_);
  v1::FreeSessionRequest request;
  request.set_session(state->id);
  v1::FreeSessionResponse response;
  Status status = state->Ask(&Stub::PrepareAsyncFreeSession, request, &response);
  // An earlier attempt freed it, and its answer was lost.
  return status.code() == Code::kNotFound && state->owned ? Status() : status;
}

std::string Session::Release() {
  assert(state_ != nullptr && "the session is empty");
  const std::shared_ptr<State> state = std::move(state_);
  return state->id;
}

const std::string& Session::id() const {
  assert(state_ != nullptr && "the session is empty");
  return state_->id;
}

const std::string& Session::server() const {
  assert(state_ != nullptr && "the session is empty");
  return state_->calls.server();
}

int32_t Session::layers() const {
  const MutexLock lock(state_->mutex);
  return static_cast<int32_t>(state_->layers.size());
}

int64_t Session::length(int32_t layer) const {
  assert(state_ != nullptr && "the session is empty");
  const MutexLock lock(state_->mutex);
  assert(layer >= 0 && layer < std::ssize(state_->layers));
  return state_->layers[static_cast<size_t>(layer)].length;
}

Result<Session::Use> Session::Begin(const std::vector<Session*>& sessions, int32_t layer,
                                    AttentionCall* call) {
  Use use;
  use.layer = layer;
  if (sessions.empty()) return InvalidArgument("sessions has 0 entries, must have at least 1");
  call->sessions.clear();
  Status changed;
  for (const Session* const session : sessions) {
    const std::string name = "sessions[" + std::to_string(use.states.size()) + "]";
    if (session == nullptr || session->state_ == nullptr) {
      return InvalidArgument(name + " is empty");
    }
    const std::shared_ptr<State>& state = use.states.emplace_back(session->state_);
    if (&state->client != &use.client()) {
      return InvalidArgument(name + " is of another client than sessions[0]");
    }
    if (state->calls.server() != use.server()) {
      return InvalidArgument(name + " is on " + state->calls.server() + ", and sessions[0] on " +
                             use.server());
    }
    if (layer < 0 || layer >= session->layers()) {
      return InvalidArgument("layer is " + std::to_string(layer) + ", must be in [0, " +
                             std::to_string(session->layers() - 1) + "] for " + name);
    }
    const Result<bool> as_believed = state->MakeKnown(layer);
    if (!as_believed.ok()) return as_believed.status();
    const MutexLock lock(state->mutex);
    if (HasKeys(*call) && !*as_believed && changed.ok()) {
      changed = Status(Code::kFailedPrecondition,
                       name + ": its layer " + std::to_string(layer) + " has " +
                           std::to_string(state->layers[layer].length) +
                           " tokens: an earlier failed call did append its rows, or another client "
                           "has; append what is missing");
    }
    call->sessions.push_back({state->id, layer, state->layers[layer].length, {}});
    if (HasKeys(*call)) call->sessions.back().append_id = state->NextAppendId();
  }
  ATTEND_RETURN_IF_ERROR(changed);
  const LayerShape* const shape = use.states.front()->ShapeOf(layer);
  if (!HasKeys(*call) && shape != nullptr) {
    const auto batch = static_cast<int64_t>(sessions.size());
    call->k = NoRows(*shape, call->layout, batch, shape->dim);
    call->v = NoRows(*shape, call->layout, batch, shape->dim_v == 0 ? shape->dim : shape->dim_v);
  }
  return use;
}

Result<AttentionResult> Session::Attend(const std::vector<Session*>& sessions, int32_t layer,
                                        AttentionCall call, const CallOptions& options) {
  const Result<Use> use = Begin(sessions, layer, &call);
  if (!use.ok()) return use.status();
  CallOutcome outcome = use->client().CallAndWait(call, use->With(options));
  use->End(outcome.result.session_lengths);
  if (!outcome.status.ok()) return outcome.status;
  return std::move(outcome.result);
}

CallHandle Session::AttendAsync(const std::vector<Session*>& sessions, int32_t layer,
                                AttentionCall call, const CallOptions& options,
                                CallCallback callback) {
  Result<Use> use = Begin(sessions, layer, &call);
  if (!use.ok()) {
    callback({.status = use.status()});
    return CallHandle();
  }
  return use->client().CallAsync(call, use->With(options),
                                 [use = *use, callback = std::move(callback)](CallOutcome outcome) {
                                   use.End(outcome.result.session_lengths);
                                   callback(std::move(outcome));
                                 });
}

CallHandle Session::Send(Stream& stream, const std::vector<Session*>& sessions, int32_t layer,
                         AttentionCall call, StreamCallback callback) {
  const Result<Use> use = Begin(sessions, layer, &call);
  Status refused = use.status();
  if (refused.ok() && stream.server() != use->server()) {
    refused = InvalidArgument("the sessions are on " + use->server() +
                              ", which the stream must name (StreamOptions::server)");
  }
  if (!refused.ok()) {
    callback({.status = std::move(refused)});
    return CallHandle();
  }
  return stream.Send(call, [use = *use, callback = std::move(callback)](StreamAnswer answer) {
    use.End(answer.result.session_lengths);
    callback(std::move(answer));
  });
}

}  // namespace attend::client
