// SPDX-License-Identifier: Apache-2.0
//
// Sessions and streams of the C interface.

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "client/c/call_state.h"
#include "client/c/params.h"
#include "client/c/status.h"
#include "client/session.h"
#include "client/wire/json.h"

struct attend_client_stream {
  std::shared_ptr<attend::client::c::ClientState> state;
  std::shared_ptr<attend::client::Stream> stream;
};

struct attend_client_session {
  std::shared_ptr<attend::client::c::ClientState> state;
  std::optional<attend::client::Session> session;  // none: ended
  std::string id;                                  // hexadecimal; with @server if there are several
  mutable std::shared_mutex in_use;                // shared by its functions, exclusive to end it
};

namespace attend::client::c {
namespace {

Status ReadSessionOptions(const attend_client& client, const attend_client_session_options* from,
                          SessionOptions* to) {
  ATTEND_RETURN_IF_ERROR(NotNull("options", from));
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("options", from->struct_bytes, sizeof(*from)));
  if (from->shapes_count != 0) ATTEND_RETURN_IF_ERROR(NotNull("shapes", from->shapes));
  if (from->shapes_count < 0 || from->shapes_count > INT32_MAX) {
    return InvalidArgument("shapes_count is " + std::to_string(from->shapes_count) +
                           ", must be in [0, 2147483647]");
  }
  for (int64_t n = 0; n < from->shapes_count; ++n) {
    const attend_client_layer_shape& shape = from->shapes[n];
    const DType dtype = shape.dtype == 0 ? LayerShape().dtype : static_cast<DType>(shape.dtype);
    to->shapes.push_back({dtype, shape.heads_kv, shape.dim, shape.dim_v});
  }
  to->layers = from->layers;
  to->pinned = from->pinned != 0;
  to->device = TextOf(from->device);
  to->server = TextOf(from->server);
  to->tenant = from->tenant == nullptr ? client.state->tenant() : from->tenant;
  to->traceparent = TextOf(from->traceparent);
  to->lease = std::chrono::duration<double>(from->lease_seconds);
  if (from->timeout_ns > 0) to->timeout = std::chrono::nanoseconds(from->timeout_ns);
  return Status();
}

attend_client_session* Handle(const std::shared_ptr<ClientState>& state, Session session) {
  std::string id = Hex(session.id());
  if (!session.server().empty()) id += "@" + session.server();
  return new attend_client_session{state, std::move(session), std::move(id), {}};
}

Status Check(const attend_client_session* session) {
  ATTEND_RETURN_IF_ERROR(NotNull("session", session));
  if (session->session) return Status();
  return Status(Code::kFailedPrecondition, "session " + session->id + " has ended");
}

using Use = std::shared_lock<std::shared_mutex>;

// Keeps the session from being ended while the lock is held.
Result<Use> UseOf(const attend_client_session* session) {
  ATTEND_RETURN_IF_ERROR(NotNull("session", session));
  Use use(session->in_use);
  ATTEND_RETURN_IF_ERROR(Check(session));
  return use;
}

Status Create(attend_client* client, const attend_client_session_options* options,
              attend_client_session** session) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("session", session));
  SessionOptions read;
  ATTEND_RETURN_IF_ERROR(ReadSessionOptions(*client, options, &read));
  Result<Session> made = Session::Create(client->state->client(), read);
  if (!made.ok()) return made.status();
  *session = Handle(client->state, std::move(*made));
  return Status();
}

Status Open(attend_client* client, const char* id, const attend_client_session_options* options,
            attend_client_session** session) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("session", session));
  SessionOptions read;
  ATTEND_RETURN_IF_ERROR(ReadSessionOptions(*client, options, &read));
  const std::string text = TextOf(id);
  const size_t at = std::min(text.find('@'), text.size());
  const std::string bytes = FromHex(text.substr(0, at));
  if (bytes.empty()) {
    return InvalidArgument(
        "id is \"" + text +
        "\", must be 32 hexadecimal digits, followed by @HOST:PORT if there are several servers");
  }
  if (at < text.size()) read.server = text.substr(at + 1);
  Result<Session> made = Session::Open(client->state->client(), bytes, read);
  if (!made.ok()) return made.status();
  *session = Handle(client->state, std::move(*made));
  return Status();
}

Status List(attend_client* client, const char* tenant, int64_t timeout_ns, char** json) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("json", json));
  const auto list =
      Session::List(client->state->client(), tenant == nullptr ? client->state->tenant() : tenant,
                    std::chrono::nanoseconds(timeout_ns));
  if (!list.ok()) return list.status();
  *json = strdup(JsonOf(*list).c_str());
  return Status();
}

Status Fork(const attend_client_session* session, int64_t length, attend_client_session** fork) {
  ATTEND_RETURN_IF_ERROR(NotNull("fork", fork));
  const Result<Use> use = UseOf(session);
  if (!use.ok()) return use.status();
  std::optional<int64_t> tokens;
  if (length >= 0) tokens = length;
  Result<Session> made = session->session->Fork(tokens);
  if (!made.ok()) return made.status();
  *fork = Handle(session->state, std::move(*made));
  return Status();
}

Status GetSession(attend_client_session* session, char** json) {
  ATTEND_RETURN_IF_ERROR(NotNull("json", json));
  const Result<Use> use = UseOf(session);
  if (!use.ok()) return use.status();
  const Result<v1::Session> got = session->session->Get();
  if (!got.ok()) return got.status();
  *json = strdup(JsonOf(*got).c_str());
  return Status();
}

Status Truncate(attend_client_session* session, int64_t length) {
  const Result<Use> use = UseOf(session);
  return use.ok() ? session->session->Truncate(length) : use.status();
}

Status KeepDraft(attend_client_session* session, int64_t length, const int64_t* kept,
                 int64_t count) {
  if (count < 0)
    return InvalidArgument("count is " + std::to_string(count) + ", must be at least 0");
  if (count > 0) ATTEND_RETURN_IF_ERROR(NotNull("kept", kept));
  const Result<Use> use = UseOf(session);
  if (!use.ok()) return use.status();
  return session->session->KeepDraft(length, {kept, static_cast<size_t>(count)});
}

Status KeepAlive(attend_client_session* session) {
  const Result<Use> use = UseOf(session);
  return use.ok() ? session->session->KeepAlive() : use.status();
}

Status End(attend_client_session* session) {
  ATTEND_RETURN_IF_ERROR(NotNull("session", session));
  const std::unique_lock whole(session->in_use);
  ATTEND_RETURN_IF_ERROR(Check(session));
  const Status freed = session->session->Free();
  session->session.reset();
  return freed;
}

// On success the caller must call Started.
Status StartOn(const std::shared_ptr<ClientState>& state, attend_client_stream* stream,
               const std::vector<Session*>& sessions, int32_t layer,
               const attend_client_params* params, attend_client_call** call) {
  ATTEND_RETURN_IF_ERROR(NotNull("params", params));
  ATTEND_RETURN_IF_ERROR(NotNull("call", call));
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("params", params->struct_bytes, sizeof(*params)));
  auto started = std::make_shared<CallState>(state, *params);
  started->StartOn(stream == nullptr ? nullptr : stream->stream.get(), sessions, layer, *params);
  *call = new attend_client_call{std::move(started)};
  return Status();
}

void Started(const attend_client_call& call) {
  const std::shared_ptr<CallState> state = call.state;  // `done` may free the call
  state->Started();
}

Status StartStream(attend_client_stream* stream, const attend_client_params* params,
                   attend_client_call** call) {
  ATTEND_RETURN_IF_ERROR(NotNull("stream", stream));
  ATTEND_RETURN_IF_ERROR(StartOn(stream->state, stream, {}, 0, params, call));
  Started(**call);
  return Status();
}

Status StartSession(attend_client_session* const* sessions, int32_t count, int32_t layer,
                    attend_client_stream* stream, const attend_client_params* params,
                    attend_client_call** call) {
  if (count < 1) {
    return InvalidArgument("count is " + std::to_string(count) + ", must be at least 1");
  }
  ATTEND_RETURN_IF_ERROR(NotNull("sessions", sessions));
  std::vector<Session*> all;
  // Locked in address order, so that two calls cannot deadlock. Held until the call is sent; no
  // `done` runs here before that.
  std::map<attend_client_session*, Use> uses;
  for (int32_t n = 0; n < count; ++n) {
    ATTEND_RETURN_IF_ERROR(NotNull("session", sessions[n]));
    uses.try_emplace(sessions[n]);
  }
  for (auto& [session, use] : uses) use = Use(session->in_use);
  for (int32_t n = 0; n < count; ++n) {
    ATTEND_RETURN_IF_ERROR(Check(sessions[n]));
    all.push_back(&*sessions[n]->session);
  }
  ATTEND_RETURN_IF_ERROR(StartOn(sessions[0]->state, stream, all, layer, params, call));
  uses.clear();  // `done` may end the sessions
  Started(**call);
  return Status();
}

Status OpenStream(attend_client* client, const char* tenant, const char* traceparent,
                  const char* server, int64_t timeout_ns, attend_client_stream** stream) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("stream", stream));
  StreamOptions options;
  options.timeout = std::chrono::nanoseconds(timeout_ns);
  options.tenant = tenant == nullptr ? client->state->tenant() : tenant;
  options.traceparent = TextOf(traceparent);
  options.server = TextOf(server);
  *stream = new attend_client_stream{client->state, client->state->client().OpenStream(options)};
  return Status();
}

void CancelStream(const attend_client_stream& stream) {
  CallState::OutOfDone([state = stream.state, cancelled = stream.stream]() mutable {
    cancelled->Close();
    cancelled = nullptr;  // released before the client
  });
}

}  // namespace
}  // namespace attend::client::c

namespace c = attend::client::c;
using attend::Status;

int32_t attend_client_stream_open(attend_client* client, const char* tenant,
                                  const char* traceparent, const char* server, int64_t timeout_ns,
                                  attend_client_stream** stream) {
  return c::Run(
      [&] { return c::OpenStream(client, tenant, traceparent, server, timeout_ns, stream); });
}

int32_t attend_client_stream_start(attend_client_stream* stream, const attend_client_params* params,
                                   attend_client_call** call) {
  return c::Run([&] { return c::StartStream(stream, params, call); });
}

int32_t attend_client_stream_finish(attend_client_stream* stream) {
  if (const Status status = c::NotNull("stream", stream); !status.ok()) return c::Return(status);
  return c::Run([&] { return stream->stream->Finish(); });
}

void attend_client_stream_cancel(attend_client_stream* stream) {
  if (stream != nullptr) c::CancelStream(*stream);
}

void attend_client_stream_close(attend_client_stream* stream) {
  if (stream == nullptr) return;
  c::CallState::OutOfDone([stream] { delete stream; });
}

int32_t attend_client_session_create(attend_client* client,
                                     const attend_client_session_options* options,
                                     attend_client_session** session) {
  return c::Run([&] { return c::Create(client, options, session); });
}

int32_t attend_client_session_open(attend_client* client, const char* id,
                                   const attend_client_session_options* options,
                                   attend_client_session** session) {
  return c::Run([&] { return c::Open(client, id, options, session); });
}

int32_t attend_client_session_list(attend_client* client, const char* tenant, int64_t timeout_ns,
                                   char** json) {
  return c::Run([&] { return c::List(client, tenant, timeout_ns, json); });
}

int32_t attend_client_session_fork(const attend_client_session* session, int64_t length,
                                   attend_client_session** fork) {
  return c::Run([&] { return c::Fork(session, length, fork); });
}

int32_t attend_client_session_truncate(attend_client_session* session, int64_t length) {
  return c::Run([&] { return c::Truncate(session, length); });
}

int32_t attend_client_session_keep_draft(attend_client_session* session, int64_t length,
                                         const int64_t* kept, int64_t count) {
  return c::Run([&] { return c::KeepDraft(session, length, kept, count); });
}

int32_t attend_client_session_keep_alive(attend_client_session* session) {
  return c::Run([&] { return c::KeepAlive(session); });
}

int32_t attend_client_session_get(attend_client_session* session, char** json) {
  return c::Run([&] { return c::GetSession(session, json); });
}

const char* attend_client_session_id(const attend_client_session* session) {
  return session == nullptr ? "" : session->id.c_str();
}

int32_t attend_client_session_layers(const attend_client_session* session) {
  const attend::Result<c::Use> use = c::UseOf(session);
  return use.ok() ? session->session->layers() : 0;
}

int64_t attend_client_session_length(const attend_client_session* session, int32_t layer) {
  const attend::Result<c::Use> use = c::UseOf(session);
  if (!use.ok() || layer < 0 || layer >= session->session->layers()) return -1;
  return session->session->length(layer);
}

int32_t attend_client_session_start(attend_client_session* const* sessions, int32_t count,
                                    int32_t layer, attend_client_stream* stream,
                                    const attend_client_params* params, attend_client_call** call) {
  return c::Run([&] { return c::StartSession(sessions, count, layer, stream, params, call); });
}

int32_t attend_client_session_end(attend_client_session* session) {
  return c::Run([&] { return c::End(session); });
}

void attend_client_session_free(attend_client_session* session, int32_t keep) {
  if (session == nullptr) return;
  if (keep != 0 && session->session) (void)session->session->Release();
  c::CallState::OutOfDone([session] { delete session; });
}
