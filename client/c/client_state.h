// SPDX-License-Identifier: Apache-2.0
//
// The state shared by a client's handles: the client itself, and the memory that it shares with a
// server on its host.

#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "client/c/attend_client.h"
#include "client/c/device_tensors.h"
#include "client/client.h"
#include "client/memory/region_pool.h"

namespace attend::client::c {

inline TimePoint Now() { return std::chrono::steady_clock::now(); }

// A call ready to be sent, with the regions that its tensors and its answer are placed in, if any.
struct SharedCall {
  AttentionCall call;
  std::shared_ptr<RegionPool> pool = {};  // null: nothing is placed
  std::string server = {};                // the memory's, if the client has several
  // The regions are from `owner`, which is `pool` or a GPU's pool.
  std::shared_ptr<RegionPool> owner = {};
  std::shared_ptr<SharedRegion> inputs = {}, outputs = {};
  std::optional<DeviceAnswer> on_device = {};
};

// Ways of sharing that the kind of call and its caller allow.
struct ShareOptions {
  int32_t transport = ATTEND_CLIENT_AUTO;
  bool in_session = false;
  bool on_device = true;  // tensors may stay in GPU memory
  // With several servers, where the call must go; unset: it may go to the memory's server.
  std::optional<std::string> server = {};
};

class ClientState {
 public:
  static Result<std::shared_ptr<ClientState>> Open(const attend_client_options& options);

  Client& client() { return *client_; }
  const std::string& tenant() const { return tenant_; }

  // Asks for the server's limits and shared memory, unless it has answered before.
  Status Prepare(std::chrono::nanoseconds timeout);
  // Null if the server shares none with this process.
  std::shared_ptr<RegionPool> pool();
  // Drops the pool, because the server is unreachable (UNAVAILABLE) or does not know its regions
  // (NOT_FOUND); the next Prepare asks again. If the server has never known any, the socket belongs
  // to another server and is not used again. A socket that does not answer is tried again after a
  // minute; calls in flight when that is found may wait for the same exchange.
  void Lose(const std::shared_ptr<RegionPool>& pool, Code code);
  // Shared memory for attend_client_allocate. It stays until Free, even if its pool is dropped.
  // Free returns false if `data` was not allocated here.
  Result<std::byte*> Allocate(int32_t memory, int64_t bytes);
  bool Free(const void* data);
  // To be called when a call over the pool's memory has succeeded.
  void Trust(const std::shared_ptr<RegionPool>& pool);
  // To be called when a call on sessions has failed, because of the memory or the session: before
  // the next such call the server is asked whether it knows the pool.
  void Doubt(const std::shared_ptr<RegionPool>& pool);

  // The call with its tensors in shared memory, or on the host if that is not requested, not
  // worthwhile or not possible. FAILED_PRECONDITION: the transport is SHARED and it is not
  // possible.
  Result<SharedCall> Share(const AttentionCall& call, const DeviceTensors& devices,
                           const ShareOptions& options);

 private:
  ClientState() = default;
  // Copies tensors that are not in shared memory into one region, and reserves another for the
  // answer.
  static Status Place(const DeviceTensors& devices, bool in_session, SharedCall* shared);
  // `large`: worth a copy. False: not possible, and `*shared` is unusable.
  bool StageOnDevice(const DeviceTensors& devices, bool large, SharedCall* shared);
  // The pool, if the call may go to its server, and that server.
  std::shared_ptr<RegionPool> PoolFor(const ShareOptions& options, std::string* server);
  // A GPU's pool; null if the server does not use that GPU's memory.
  std::shared_ptr<RegionPool> PoolOf(int ordinal, const std::shared_ptr<RegionPool>& pool);
  // Whether the server knows the pool; asks with a small call unless a call has shown it.
  bool Known(const std::shared_ptr<RegionPool>& pool);

  std::unique_ptr<Client> client_;
  std::string tenant_;
  std::string socket_;  // empty: as the server reports
  bool shared_memory_off_ = false;
  Mutex mutex_;
  TimePoint asked_until_ ATTEND_GUARDED_BY(mutex_) = TimePoint::min();  // no question earlier
  bool trusted_ ATTEND_GUARDED_BY(mutex_) = false;
  bool doubted_ ATTEND_GUARDED_BY(mutex_) = false;
  bool another_servers_ ATTEND_GUARDED_BY(mutex_) = false;
  std::shared_ptr<RegionPool> pool_ ATTEND_GUARDED_BY(mutex_);
  std::string server_ ATTEND_GUARDED_BY(mutex_);  // the pool's, if the client has several
  // The pools of Allocate's memory.
  std::map<const void*, std::shared_ptr<RegionPool>> allocated_ ATTEND_GUARDED_BY(mutex_);
  std::set<std::string> uuids_ ATTEND_GUARDED_BY(mutex_);  // of GPUs that the server uses
  std::map<int, std::shared_ptr<RegionPool>> device_pools_ ATTEND_GUARDED_BY(mutex_);
};

// Larger calls may exceed the server's limit on one message, or be worth sharing.
inline constexpr int64_t kPreparedBytesMin = int64_t{64} << 10;

}  // namespace attend::client::c

struct attend_client {
  std::shared_ptr<attend::client::c::ClientState> state;
};
