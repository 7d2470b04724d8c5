// SPDX-License-Identifier: Apache-2.0
//
// Sharing memory must never make a call fail that would succeed without it, except with SHARED. A
// pool becomes trusted_ by a successful call over it. NOT_FOUND before that means that the socket
// belongs to another server (another_servers_): the pool is dropped for good. Later, NOT_FOUND or
// UNAVAILABLE means that the server was replaced: the pool is dropped, and the next Prepare
// connects again. A plain call that failed like this is sent again without the memory
// (CallState::SentAgain). A call on sessions is not, because its NOT_FOUND may concern the session;
// so Known() probes the pool with a tiny call first, unless it is trusted and not doubted.

#include "client/c/client_state.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "client/c/params.h"
#include "client/c/status.h"
#include "client/call/shared_call.h"
#include "client/call/token.h"
#include "client/memory/cuda_memory.h"

namespace attend::client::c {
namespace {

constexpr int kAttemptsDefault = 5;
constexpr std::chrono::seconds kPrepareMax{5};
// A call waits for seconds before it finds a socket silent.
constexpr std::chrono::minutes kSilentSocket{1};

Status None(const std::string& why) {
  return Status(Code::kFailedPrecondition, "no shared memory with the server: " + why);
}

std::string TextOrVariable(const char* text, const char* variable) {
  return TextOf(text != nullptr ? text : std::getenv(variable));
}

// Whether the answer's size is known, for a call on sessions, whose K and V are on the server.
bool SessionSizesFit(const AttentionCall& call) {
  if (call.q.shape.size() != 4 || call.q.dtype == DType::kBit) return false;
  if (call.v.shape.empty()) return true;
  if (call.v.shape.size() != 4) return false;
  const std::vector<AnswerTensor> answer = AnswerTensors(call);
  return std::all_of(answer.begin(), answer.end(), [](const AnswerTensor& each) {
    return TensorBytes(NameOf(each.name), each.dtype, each.shape).ok();
  });
}

}  // namespace

Result<std::shared_ptr<ClientState>> ClientState::Open(const attend_client_options& options) {
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("options", options.struct_bytes, sizeof(options)));
  ClientOptions made;
  if (options.server != nullptr) made.server = options.server;
  made.token = TextOf(options.token);
  if (const std::string path = TextOf(options.token_file); !path.empty()) {
    if (!made.token.empty()) return InvalidArgument("token and token_file are both given");
    Result<std::string> token = ReadTokenFile(path);
    if (!token.ok()) return token.status();
    made.token = *std::move(token);
  }
  made.traceparent = TextOf(options.traceparent);
  made.tls.ca = TextOrVariable(options.tls_ca, "ATTEND_TLS_CA");
  made.tls.cert = TextOrVariable(options.tls_cert, "ATTEND_TLS_CERT");
  made.tls.key = TextOrVariable(options.tls_key, "ATTEND_TLS_KEY");
  made.tls.server_name = TextOrVariable(options.tls_server_name, "ATTEND_TLS_SERVER_NAME");
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
    if (Now() < asked_until_) return Status();
  }
  const bool bounded = timeout.count() > 0 && timeout < kPrepareMax;
  std::string server;
  const Result<v1::GetServerInfoResponse> info =
      client_->GetServerInfo(bounded ? timeout : kPrepareMax, &server);
  // A server without GetServerInfo shares no memory either.
  if (!info.ok() && info.status().code() != Code::kUnimplemented) return info.status();
  std::shared_ptr<RegionPool> pool;
  if (info.ok()) {
    const Result<SharedSocket> socket = client_->FindSharedMemory(*info, socket_, server);
    if (socket.ok()) {
      Result<std::shared_ptr<SharedMemory>> memory =
          SharedMemory::Connect(*socket, {client_->token(), tenant_});
      if (memory.ok()) pool = std::make_shared<RegionPool>(std::move(*memory));
    }
  }
  std::set<std::string> uuids;
  if (pool != nullptr && info->shared_memory().cuda_ipc()) {
    for (const v1::DeviceInfo& device : info->devices()) uuids.insert(device.uuid());
  }
  const MutexLock lock(mutex_);
  if (Now() < asked_until_) return Status();
  asked_until_ = kNever;
  trusted_ = doubted_ = false;
  if (another_servers_) return Status();
  pool_ = std::move(pool);
  server_ = std::move(server);
  uuids_ = std::move(uuids);
  return Status();
}

std::shared_ptr<RegionPool> ClientState::pool() {
  const MutexLock lock(mutex_);
  return pool_;
}

std::shared_ptr<RegionPool> ClientState::PoolFor(const ShareOptions& options, std::string* server) {
  const MutexLock lock(mutex_);
  if (client_->several() && options.server && *options.server != server_) return nullptr;
  *server = server_;
  return pool_;
}

Result<std::byte*> ClientState::Allocate(int32_t memory, int64_t bytes) {
  std::shared_ptr<RegionPool> pool = this->pool();
  if (pool == nullptr) {
    return Status(Code::kFailedPrecondition,
                  "the server shares no memory with this process: it is on another host, or was "
                  "started without --shared-memory");
  }
  if (memory != 0) {
    const std::string field = "memory is " + std::to_string(memory) + ": ";
    if (const Result<std::string> known = CudaUuid(memory - 1); !known.ok()) {
      return Status(known.status().code(), field + known.status().message());
    }
    pool = PoolOf(memory - 1, pool);
    if (pool == nullptr) {
      return Status(Code::kFailedPrecondition,
                    field +
                        "the server does not compute on that GPU, or was started without "
                        "--cuda-ipc");
    }
  }
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
  std::shared_ptr<RegionPool> lost;  // destroyed without the lock
  std::map<int, std::shared_ptr<RegionPool>> lost_devices;
  const TimePoint until = pool->memory()->silent() ? Now() + kSilentSocket : TimePoint::min();
  const MutexLock lock(mutex_);
  if (pool_ != pool) return;
  another_servers_ = code == Code::kNotFound && !trusted_;
  asked_until_ = another_servers_ ? kNever : until;
  lost = std::move(pool_);
  pool_ = nullptr;
  lost_devices.swap(device_pools_);
}

void ClientState::Trust(const std::shared_ptr<RegionPool>& pool) {
  const MutexLock lock(mutex_);
  if (pool_ != pool) return;
  trusted_ = true;
  doubted_ = false;
}

void ClientState::Doubt(const std::shared_ptr<RegionPool>& pool) {
  const MutexLock lock(mutex_);
  if (pool_ == pool) doubted_ = true;
}

std::shared_ptr<RegionPool> ClientState::PoolOf(int ordinal,
                                                const std::shared_ptr<RegionPool>& pool) {
  const Result<std::string> uuid = CudaUuid(ordinal);
  const MutexLock lock(mutex_);
  if (pool_ != pool || !uuid.ok() || !uuids_.contains(*uuid)) return nullptr;
  std::shared_ptr<RegionPool>& made = device_pools_[ordinal];
  if (made == nullptr) {
    made = std::make_shared<RegionPool>(
        pool->memory(),
        [ordinal, memory = pool->memory()](int64_t bytes) -> Result<std::shared_ptr<SharedRegion>> {
          Result<std::shared_ptr<CudaMemory>> allocated = CudaMemory::AllocateOn(ordinal, bytes);
          if (!allocated.ok()) return allocated.status();
          return memory->Lend(std::move(*allocated));
        });
  }
  return made;
}

bool ClientState::Known(const std::shared_ptr<RegionPool>& pool) {
  {
    const MutexLock lock(mutex_);
    if (pool_ != pool) return false;
    if (trusted_ && !doubted_) return true;
  }
  const float one = 1;
  AttentionCall probe;
  probe.q = probe.k = probe.v = TensorRef(DType::kFloat32, {1, 1, 1, 1}, &one, sizeof(one));
  const Result<AttentionCall> shared = ShareCall(*pool->memory(), probe);
  if (!shared.ok()) return false;
  CallOptions options{.timeout = kPrepareMax, .tenant = tenant_};
  {
    const MutexLock lock(mutex_);
    options.server = server_;
  }
  const Result<AttentionResult> result = client_->Call(*shared, options);
  if (result.ok()) {
    Trust(pool);
  } else if (result.status().code() == Code::kNotFound) {
    Lose(pool, Code::kNotFound);
  }
  return result.ok();
}

Status ClientState::Place(const DeviceTensors& devices, bool in_session, SharedCall* shared) {
  // Without this check the sizes are meaningless; the server will say what is wrong.
  AttentionCall& call = shared->call;
  const bool sized = in_session ? SessionSizesFit(call) : Describe(call, nullptr, nullptr).ok();
  if (!sized) return InvalidArgument("the shapes do not fit together");
  int64_t bytes = 0;
  ForTensors(call, [&](v1::TensorName, const TensorRef& tensor) {
    if (tensor.shared.region == nullptr) bytes += SharedSpace(tensor.bytes);
  });
  // v determines O's size.
  if (!call.v.shape.empty()) {
    Result<std::shared_ptr<SharedRegion>> outputs =
        shared->pool->Take(std::max<int64_t>(SharedOutputBytes(call), 1));
    if (!outputs.ok()) return outputs.status();
    shared->outputs = *outputs;
    call.outputs = ShareOutputs({std::move(*outputs), 0}, call);
  }
  if (bytes == 0) return Status();
  Result<std::shared_ptr<SharedRegion>> inputs = shared->pool->Take(bytes);
  if (!inputs.ok()) return inputs.status();
  shared->inputs = std::move(*inputs);
  SharedPlace next{shared->inputs, 0};
  Status status;
  ForTensors(call, [&](v1::TensorName name, TensorRef& tensor) {
    if (tensor.shared.region != nullptr || tensor.shape.empty() || !status.ok()) return;
    if (devices.ordinals.contains(name)) {
      status = CopyToHost(devices, name, tensor, next.data());
    } else if (tensor.bytes > 0) {
      std::copy_n(static_cast<const std::byte*>(tensor.data), tensor.bytes, next.data());
    }
    tensor = TensorRef(tensor.dtype, std::move(tensor.shape), next, tensor.bytes);
    next.offset += SharedSpace(tensor.bytes);
  });
  const Status finished = FinishCopies(devices);
  return status.ok() ? finished : status;
}

Result<SharedCall> ClientState::Share(const AttentionCall& call, const DeviceTensors& devices,
                                      const ShareOptions& options) {
  const bool insists = options.transport == ATTEND_CLIENT_SHARED;
  const bool wanted = insists || (options.transport == ATTEND_CLIENT_AUTO && !shared_memory_off_);
  SharedCall shared{.call = call};
  shared.pool = wanted ? PoolFor(options, &shared.server) : nullptr;
  if (insists && shared.pool == nullptr) {
    return None("it offers none to this process, or the call goes to another server");
  }
  const bool large = insists || PayloadBytes(call) >= kPreparedBytesMin;
  if (shared.pool != nullptr && options.on_device && devices.ordinal()) {
    if (StageOnDevice(devices, large, &shared)) return shared;
    shared = {.call = call, .pool = shared.pool, .server = shared.server};
  }
  bool found = false;
  if (shared.pool != nullptr) {
    ForTensors(shared.call, [&](v1::TensorName name, TensorRef& tensor) {
      if (tensor.bytes == 0 || devices.ordinals.contains(name)) return;
      const std::optional<SharedPlace> place = shared.pool->Find(tensor.data, tensor.bytes);
      if (!place) return;
      found = true;
      tensor = TensorRef(tensor.dtype, std::move(tensor.shape), *place, tensor.bytes);
    });
  }
  const bool known =
      shared.pool != nullptr && (found || large) && (!options.in_session || Known(shared.pool));
  if (insists && !known) return None("its socket belongs to another server");
  if (known) {
    shared.owner = shared.pool;
    const Status placed = Place(devices, options.in_session, &shared);
    if (placed.ok()) return shared;
    if (placed.code() == Code::kUnavailable) Lose(shared.pool, placed.code());
    if (insists && placed.code() != Code::kInvalidArgument) return placed;
  }
  shared = {.call = call};
  ATTEND_RETURN_IF_ERROR(BringToHost(devices, &shared.call));
  return shared;
}

bool ClientState::StageOnDevice(const DeviceTensors& devices, bool large, SharedCall* shared) {
  const int ordinal = *devices.ordinal();
  shared->owner = PoolOf(ordinal, shared->pool);
  if (shared->owner == nullptr) return false;
  const LentRegions lent = FindLent(*shared->owner, devices, &shared->call);
  if (!large && lent.empty()) return false;
  Result<std::shared_ptr<SharedRegion>> region =
      StageOn(ordinal, *shared->owner, devices, lent, &shared->call);
  if (!region.ok()) {
    if (region.status().code() == Code::kUnavailable) Lose(shared->pool, Code::kUnavailable);
    return false;
  }
  shared->outputs = std::move(*region);
  shared->on_device = {ordinal, shared->call.outputs};
  return true;
}

}  // namespace attend::client::c
