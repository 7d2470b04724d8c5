// SPDX-License-Identifier: Apache-2.0
//
// What a client's handles share: the client, and the memory that it shares with a server on its
// host.

#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "client/c/attend_client.h"
#include "client/client.h"
#include "client/memory/region_pool.h"

namespace attend::client::c {

// A call as it is sent, and the region that its answer is written to, if it has one.
struct SharedCall {
  AttentionCall call;
  std::shared_ptr<RegionPool> pool = {};  // null: nothing was placed
  std::shared_ptr<SharedRegion> inputs = {}, outputs = {};
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
  // is asked anew. If it has never known any, the socket is another server's, and is left alone.
  void Lose(const std::shared_ptr<RegionPool>& pool, Code code);
  // Memory of the pool's that stays until Free, also if the pool is lost. False: there is none
  // there.
  Result<std::byte*> Allocate(const std::shared_ptr<RegionPool>& pool, int64_t bytes);
  bool Free(const void* data);
  // A call over the pool's memory succeeded.
  void Trust(const std::shared_ptr<RegionPool>& pool);

  // The call with its tensors in shared memory, or as it was where that is not wanted, worth it or
  // possible. FAILED_PRECONDITION if `transport` insists.
  Result<SharedCall> Share(const AttentionCall& call, int32_t transport, bool in_session);

 private:
  ClientState() = default;
  // Copies what is elsewhere into one region, and makes a place for the answer in another.
  static Status Place(SharedCall* shared);

  std::unique_ptr<Client> client_;
  std::string tenant_;
  std::string socket_;  // empty: as the server says
  bool shared_memory_off_ = false;
  Mutex mutex_;
  bool prepared_ ATTEND_GUARDED_BY(mutex_) = false;
  bool trusted_ ATTEND_GUARDED_BY(mutex_) = false;
  bool another_servers_ ATTEND_GUARDED_BY(mutex_) = false;
  std::shared_ptr<RegionPool> pool_ ATTEND_GUARDED_BY(mutex_);
  // The pools of what Allocate gave out.
  std::map<const void*, std::shared_ptr<RegionPool>> allocated_ ATTEND_GUARDED_BY(mutex_);
};

// From here on calls may exceed what the server's limits say of one message.
inline constexpr int64_t kPreparedBytesMin = int64_t{64} << 10;

}  // namespace attend::client::c

struct attend_client {
  std::shared_ptr<attend::client::c::ClientState> state;
};
