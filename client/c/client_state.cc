// SPDX-License-Identifier: Apache-2.0

#include "client/c/client_state.h"

#include <algorithm>
#include <utility>

#include "client/c/params.h"
#include "client/c/status.h"
#include "client/call/shared_call.h"

namespace attend::client::c {
namespace {

constexpr int kAttemptsDefault = 5;
constexpr std::chrono::seconds kPrepareMax{5};

Status None(const std::string& why) {
  return Status(Code::kFailedPrecondition, "no memory is shared with the server: " + why);
}

}  // namespace

Result<std::shared_ptr<ClientState>> ClientState::Open(const attend_client_options& options) {
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("options", options.struct_bytes, sizeof(options)));
  ClientOptions made;
  if (options.server != nullptr) made.server = options.server;
  if (options.connections != 0) made.connections = options.connections;
  if (options.chunked_bytes_min != 0) made.chunked_bytes_min = options.chunked_bytes_min;
  made.retry.attempts_max = options.attempts_max == 0 ? kAttemptsDefault : options.attempts_max;
  Result<std::unique_ptr<Client>> client = Client::Make(made);
  if (!client.ok()) return client.status();
  std::shared_ptr<ClientState> state(new ClientState());
  state->client_ = std::move(*client);
  state->tenant_ = TextOf(options.tenant);
  state->socket_ = TextOf(options.shared_memory_socket);
  state->shared_memory_off_ = options.shared_memory_off != 0;
  return state;
}

Status ClientState::Prepare(std::chrono::nanoseconds timeout) {
  {
    const MutexLock lock(mutex_);
    if (prepared_) return Status();
  }
  const bool bounded = timeout.count() > 0 && timeout < kPrepareMax;
  const Result<v1::GetServerInfoResponse> info =
      client_->GetServerInfo(bounded ? timeout : kPrepareMax);
  // A server without GetServerInfo shares no memory either.
  if (!info.ok() && info.status().code() != Code::kUnimplemented) return info.status();
  std::shared_ptr<RegionPool> pool;
  if (info.ok() && info->has_shared_memory()) {
    const std::string& path = socket_.empty() ? info->shared_memory().socket() : socket_;
    Result<std::shared_ptr<SharedMemory>> memory = SharedMemory::Connect(path);
    if (memory.ok()) pool = std::make_shared<RegionPool>(std::move(*memory));
  }
  const MutexLock lock(mutex_);
  if (prepared_) return Status();
  prepared_ = true;
  trusted_ = false;
  if (!another_servers_) pool_ = std::move(pool);
  return Status();
}

std::shared_ptr<RegionPool> ClientState::pool() {
  const MutexLock lock(mutex_);
  return pool_;
}

Result<std::byte*> ClientState::Allocate(const std::shared_ptr<RegionPool>& pool, int64_t bytes) {
  const Result<std::byte*> made = pool->Allocate(bytes);
  if (!made.ok()) return made;
  const MutexLock lock(mutex_);
  allocated_[*made] = pool;
  return made;
}

bool ClientState::Free(const void* data) {
  std::shared_ptr<RegionPool> pool;
  {
    const MutexLock lock(mutex_);
    const auto found = allocated_.find(data);
    if (found == allocated_.end()) return false;
    pool = std::move(found->second);
    allocated_.erase(found);
  }
  return pool->Free(data);
}

void ClientState::Lose(const std::shared_ptr<RegionPool>& pool, Code code) {
  std::shared_ptr<RegionPool> lost;  // let go without the lock
  const MutexLock lock(mutex_);
  if (pool_ != pool) return;
  another_servers_ = code == Code::kNotFound && !trusted_;
  prepared_ = another_servers_;
  lost = std::move(pool_);
  pool_ = nullptr;
}

void ClientState::Trust(const std::shared_ptr<RegionPool>& pool) {
  const MutexLock lock(mutex_);
  if (pool_ == pool) trusted_ = true;
}

Status ClientState::Place(SharedCall* shared) {
  // Else its sizes mean nothing; the server says what is wrong.
  if (const Result<Attention> described = Describe(shared->call, nullptr, nullptr);
      !described.ok()) {
    return described.status();
  }
  int64_t bytes = 0;
  ForTensors(shared->call, [&](v1::TensorName, const TensorRef& tensor) {
    if (tensor.shared.region == nullptr) bytes += SharedSpace(tensor.bytes);
  });
  Result<std::shared_ptr<SharedRegion>> outputs =
      shared->pool->Take(std::max<int64_t>(SharedOutputBytes(shared->call), 1));
  if (!outputs.ok()) return outputs.status();
  shared->outputs = *outputs;
  shared->call.outputs = ShareOutputs({std::move(*outputs), 0}, shared->call);
  if (bytes == 0) return Status();
  Result<std::shared_ptr<SharedRegion>> inputs = shared->pool->Take(bytes);
  if (!inputs.ok()) return inputs.status();
  shared->inputs = std::move(*inputs);
  SharedPlace next{shared->inputs, 0};
  ForTensors(shared->call, [&](v1::TensorName, TensorRef& tensor) {
    if (tensor.shared.region != nullptr) return;
    if (tensor.bytes > 0)
      std::copy_n(static_cast<const std::byte*>(tensor.data), tensor.bytes, next.data());
    tensor = TensorRef(tensor.dtype, std::move(tensor.shape), next, tensor.bytes);
    next.offset += SharedSpace(tensor.bytes);
  });
  return Status();
}

Result<SharedCall> ClientState::Share(const AttentionCall& call, int32_t transport,
                                      bool in_session) {
  const bool wanted =
      transport == ATTEND_CLIENT_SHARED || (transport == ATTEND_CLIENT_AUTO && !shared_memory_off_);
  SharedCall shared{.call = call};
  shared.pool = wanted ? pool() : nullptr;
  if (shared.pool == nullptr) {
    if (transport != ATTEND_CLIENT_SHARED) return shared;
    return None("it offers none to this process");
  }
  bool found = false;
  ForTensors(shared.call, [&](v1::TensorName, TensorRef& tensor) {
    const std::optional<SharedPlace> place =
        tensor.bytes > 0 ? shared.pool->Find(tensor.data, tensor.bytes) : std::nullopt;
    if (!place) return;
    found = true;
    tensor = TensorRef(tensor.dtype, std::move(tensor.shape), *place, tensor.bytes);
  });
  if (in_session) {
    // Its answer's size is not known here, and its rows must not be sent twice in two ways.
    shared.pool = nullptr;
    return shared;
  }
  if (found || transport == ATTEND_CLIENT_SHARED || PayloadBytes(call) >= kPreparedBytesMin) {
    const Status placed = Place(&shared);
    if (placed.ok()) return shared;
    if (placed.code() == Code::kUnavailable) Lose(shared.pool, placed.code());
    if (transport == ATTEND_CLIENT_SHARED && placed.code() != Code::kInvalidArgument) {
      return placed;
    }
  }
  return SharedCall{.call = call};
}

}  // namespace attend::client::c
