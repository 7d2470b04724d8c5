// SPDX-License-Identifier: Apache-2.0
//
// Clients and calls of the C interface.

#include "client/c/attend_client.h"

#include <cstring>
#include <utility>

#include "client/c/call_state.h"
#include "client/c/params.h"
#include "client/c/status.h"
#include "client/wire/json.h"

namespace attend::client::c {
namespace {

constexpr std::chrono::seconds kAskMax{10};

std::chrono::nanoseconds AskTimeout(int64_t timeout_ns) {
  return timeout_ns > 0 ? std::chrono::nanoseconds(timeout_ns) : kAskMax;
}

Status Open(const attend_client_options* options, attend_client** client) {
  ATTEND_RETURN_IF_ERROR(NotNull("options", options));
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  Result<std::shared_ptr<ClientState>> state = ClientState::Open(*options);
  if (!state.ok()) return state.status();
  *client = new attend_client{std::move(*state)};
  return Status();
}

Status Prepare(attend_client* client, int64_t timeout_ns) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  return client->state->Prepare(std::chrono::nanoseconds(timeout_ns));
}

Status Info(attend_client* client, int64_t timeout_ns, char** json) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("json", json));
  const auto info = client->state->client().GetServerInfo(AskTimeout(timeout_ns));
  if (!info.ok()) return info.status();
  *json = strdup(JsonOf(*info).c_str());
  return Status();
}

Status CheckHealth(attend_client* client, const char* service, int64_t timeout_ns,
                   int32_t* health) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("health", health));
  const Result<Health> found =
      client->state->client().CheckHealth(TextOf(service), AskTimeout(timeout_ns));
  if (!found.ok()) return found.status();
  *health = static_cast<int32_t>(*found);
  return Status();
}

Status Allocate(attend_client* client, int32_t memory, int64_t bytes, void** data) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("data", data));
  if (bytes < 0) {
    return InvalidArgument("bytes is " + std::to_string(bytes) + ", must be at least 0");
  }
  ATTEND_RETURN_IF_ERROR(client->state->Prepare({}));
  const Result<std::byte*> made = client->state->Allocate(memory, bytes);
  if (!made.ok()) return made.status();
  *data = *made;
  return Status();
}

Status Release(attend_client* client, void* data) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  if (client->state->Free(data)) return Status();
  return Status(Code::kNotFound, "data was not allocated by this client");
}

Status Start(attend_client* client, const attend_client_params* params, attend_client_call** call) {
  ATTEND_RETURN_IF_ERROR(NotNull("client", client));
  ATTEND_RETURN_IF_ERROR(NotNull("params", params));
  ATTEND_RETURN_IF_ERROR(NotNull("call", call));
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("params", params->struct_bytes, sizeof(*params)));
  auto state = std::make_shared<CallState>(client->state, *params);
  state->Start(*params);
  *call = new attend_client_call{state};
  state->Started();
  return Status();
}

Status Wait(attend_client_call* call, int64_t timeout_ns, int32_t* ended) {
  ATTEND_RETURN_IF_ERROR(NotNull("call", call));
  ATTEND_RETURN_IF_ERROR(NotNull("ended", ended));
  std::optional<std::chrono::nanoseconds> timeout;
  if (timeout_ns >= 0) timeout = std::chrono::nanoseconds(timeout_ns);
  *ended = call->state->Wait(timeout) ? 1 : 0;
  return Status();
}

Status CheckEnded(const attend_client_call& call) {
  if (call.state->outcome() != nullptr) return Status();
  return Status(Code::kFailedPrecondition, "the call has not ended");
}

Status Get(const attend_client_call* call, attend_client_answer* answer) {
  ATTEND_RETURN_IF_ERROR(NotNull("call", call));
  ATTEND_RETURN_IF_ERROR(NotNull("answer", answer));
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("answer", answer->struct_bytes, sizeof(*answer)));
  ATTEND_RETURN_IF_ERROR(CheckEnded(*call));
  call->state->Fill(answer);
  return Status();
}

Status Copy(attend_client_call* call, const attend_client_tensor* tensor, void* to,
            int32_t to_memory, void* stream) {
  ATTEND_RETURN_IF_ERROR(NotNull("call", call));
  ATTEND_RETURN_IF_ERROR(NotNull("tensor", tensor));
  ATTEND_RETURN_IF_ERROR(CheckEnded(*call));
  if (tensor->dims < 1 || tensor->dims > 4 || tensor->dtype < ATTEND_CLIENT_FLOAT16 ||
      tensor->dtype > ATTEND_CLIENT_FLOAT32 || to_memory < 0) {
    return InvalidArgument("tensor has " + std::to_string(tensor->dims) + " dims and dtype " +
                           std::to_string(tensor->dtype) + ", to_memory is " +
                           std::to_string(to_memory) +
                           ": must be one of the answer's, and at least 0");
  }
  return call->state->Copy(*tensor, to, to_memory, stream);
}

void ShutDown(std::shared_ptr<ClientState> state) {
  CallState::OutOfDone([state = std::move(state)] { state->client().Close(); });
}

}  // namespace
}  // namespace attend::client::c

namespace c = attend::client::c;

int32_t attend_client_open(const attend_client_options* options, attend_client** client) {
  return c::Run([&] { return c::Open(options, client); });
}

void attend_client_shut_down(attend_client* client) {
  if (client != nullptr) c::ShutDown(client->state);
}

void attend_client_close(attend_client* client) {
  if (client == nullptr) return;
  c::ShutDown(std::move(client->state));
  delete client;
}

int32_t attend_client_prepare(attend_client* client, int64_t timeout_ns) {
  return c::Run([&] { return c::Prepare(client, timeout_ns); });
}

int32_t attend_client_info(attend_client* client, int64_t timeout_ns, char** json) {
  return c::Run([&] { return c::Info(client, timeout_ns, json); });
}

int32_t attend_client_health(attend_client* client, const char* service, int64_t timeout_ns,
                             int32_t* health) {
  return c::Run([&] { return c::CheckHealth(client, service, timeout_ns, health); });
}

void attend_client_string_free(char* text) { free(text); }

int32_t attend_client_allocate(attend_client* client, int32_t memory, int64_t bytes, void** data) {
  return c::Run([&] { return c::Allocate(client, memory, bytes, data); });
}

int32_t attend_client_release(attend_client* client, void* data) {
  return c::Run([&] { return c::Release(client, data); });
}

int32_t attend_client_start(attend_client* client, const attend_client_params* params,
                            attend_client_call** call) {
  return c::Run([&] { return c::Start(client, params, call); });
}

int32_t attend_client_wait(attend_client_call* call, int64_t timeout_ns, int32_t* ended) {
  return c::Run([&] { return c::Wait(call, timeout_ns, ended); });
}

void attend_client_cancel(attend_client_call* call) {
  if (call != nullptr) call->state->Cancel();
}

int32_t attend_client_get(const attend_client_call* call, attend_client_answer* answer) {
  return c::Run([&] { return c::Get(call, answer); });
}

int32_t attend_client_copy(attend_client_call* call, const attend_client_tensor* tensor, void* to,
                           int32_t to_memory, void* stream) {
  return c::Run([&] { return c::Copy(call, tensor, to, to_memory, stream); });
}

void attend_client_used(attend_client_call* call, void* stream) {
  if (call != nullptr) call->state->Used(stream);
}

void attend_client_call_free(attend_client_call* call) { delete call; }
