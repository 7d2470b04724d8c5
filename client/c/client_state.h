// SPDX-License-Identifier: Apache-2.0
//
// What a client's handles share: the client, and the memory that it shares with a server on its
// host.

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

// A call as it is sent, and the region that its answer is written to, if it has one.
struct SharedCall {
  AttentionCall call;
  std::shared_ptr<RegionPool> pool = {};  // null: nothing was placed
  std::string server = {};                // whose it is, if the client has several
  // Of `owner`, which is `pool` or a GPU's.
  std::shared_ptr<RegionPool> owner = {};
  std::shared_ptr<SharedRegion> inputs = {}, outputs = {};
  std::optional<DeviceAnswer> on_device = {};
};

// What a call's own kind and its caller allow.
struct ShareOptions {
  int32_t transport = ATTEND_CLIENT_AUTO;
  bool in_session = false;
  bool on_device = true;  // tensors may stay in a GPU's memory
  // Of several servers, the one that the call goes to in any case; none: it may be the memory's.
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
  // The server cannot be reached (UNAVAILABLE) or does not know the pool's regions (NOT_FOUND), and
  // is asked again. If it has never known any, the socket is another server's, and is left alone.
  // A socket that does not answer is not asked again for a minute; calls that are in flight when
  // that is found may wait for the same exchange.
  void Lose(const std::shared_ptr<RegionPool>& pool, Code code);
  // Shared memory, as attend_client_allocate has it, that stays until Free, also if its pool is
  // lost. False: there is none there.
  Result<std::byte*> Allocate(int32_t memory, int64_t bytes);
  bool Free(const void* data);
  // A call over the pool's memory succeeded.
  void Trust(const std::shared_ptr<RegionPool>& pool);
  // A call on sessions failed, which may be the memory's fault or the session's: before the next
  // one the server is asked whether it knows the pool.
  void Doubt(const std::shared_ptr<RegionPool>& pool);

  // The call with its tensors in shared memory, or on the host where that is not wanted, worth it
  // or possible. FAILED_PRECONDITION if the transport insists.
  Result<SharedCall> Share(const AttentionCall& call, const DeviceTensors& devices,
                           const ShareOptions& options);

 private:
  ClientState() = default;
  // Copies what is elsewhere into one region, and makes a place for the answer in another.
  static Status Place(const DeviceTensors& devices, bool in_session, SharedCall* shared);
  // `large`: worth it. False: it does not go so, and is not whole any more.
  bool StageOnDevice(const DeviceTensors& devices, bool large, SharedCall* shared);
  // The pool of a call that goes to the pool's server, and which that is.
  std::shared_ptr<RegionPool> PoolFor(const ShareOptions& options, std::string* server);
  // A GPU's pool; null if the server does not take that GPU's memory.
  std::shared_ptr<RegionPool> PoolOf(int ordinal, const std::shared_ptr<RegionPool>& pool);
  // Asks the server by a small call whether it knows the pool, unless it has shown that.
  bool Known(const std::shared_ptr<RegionPool>& pool);

  std::unique_ptr<Client> client_;
  std::string tenant_;
  std::string socket_;  // empty: as the server says
  bool shared_memory_off_ = false;
  Mutex mutex_;
  TimePoint asked_until_ ATTEND_GUARDED_BY(mutex_) = TimePoint::min();  // before it is asked again
  bool trusted_ ATTEND_GUARDED_BY(mutex_) = false;
  bool doubted_ ATTEND_GUARDED_BY(mutex_) = false;
  bool another_servers_ ATTEND_GUARDED_BY(mutex_) = false;
  std::shared_ptr<RegionPool> pool_ ATTEND_GUARDED_BY(mutex_);
  std::string server_ ATTEND_GUARDED_BY(mutex_);  // whose it is, if the client has several
  // The pools of what Allocate gave out.
  std::map<const void*, std::shared_ptr<RegionPool>> allocated_ ATTEND_GUARDED_BY(mutex_);
  std::set<std::string> uuids_ ATTEND_GUARDED_BY(mutex_);  // of GPUs whose memory it takes
  std::map<int, std::shared_ptr<RegionPool>> device_pools_ ATTEND_GUARDED_BY(mutex_);
};

// From here on calls may exceed what the server's limits say of one message.
inline constexpr int64_t kPreparedBytesMin = int64_t{64} << 10;

}  // namespace attend::client::c

struct attend_client {
  std::shared_ptr<attend::client::c::ClientState> state;
};
