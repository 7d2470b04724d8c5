// SPDX-License-Identifier: Apache-2.0
//
// The shared regions that there are, by their tokens. A region belongs to the client (the
// connection) that made it: its token is known from Create to Release or RemoveClient, its memory
// lives until the last RegionRef has gone too, and only then are its bytes free for others. Memory
// is given back on a thread of the registry's own, as that may wait for a device.
//
// Thread-safe. Create, Release and RemoveClient are called by the socket's thread, Find by gRPC's,
// and a RegionRef may be dropped on any; neither of the latter waits. Create may: for the memory,
// and for what was let go of just now if it needs that. The registry must outlive
// every RegionRef.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>

#include "kernels/status.h"
#include "server/random_token.h"
#include "server/region_memory.h"

namespace attend {

// Never changes but for its bytes, which the client writes whenever it likes.
struct SharedRegion {
  std::string token;
  char* data = nullptr;
  int64_t bytes = 0;
  uint64_t client = 0;
  SharedRegion* next = nullptr;  // the registry's, once nobody uses it
};
// Keeps the memory.
using RegionRef = std::shared_ptr<const SharedRegion>;

struct RegionLimits {
  int64_t bytes_max = int64_t{4} << 30;
  int64_t client_bytes_max = int64_t{4} << 30;
  int64_t client_regions_max = 64;
};

class RegionRegistry {
 public:
  struct Created {
    std::string token;
    int64_t bytes = 0;
    UniqueFd file;  // to be mapped by the client
  };
  struct Stats {
    int64_t clients = 0;
    int64_t regions = 0;         // whose tokens are known
    int64_t bytes = 0;           // of them
    int64_t changing_bytes = 0;  // being made, or no longer known and not given back
    int64_t created = 0;         // since the start
    int64_t refused = 0;         // since the start
  };

  // `memory` must outlive the registry.
  RegionRegistry(const RegionLimits& limits, RegionMemory& memory, TokenSource tokens);
  ~RegionRegistry();  // forgets every region and waits until their memory is given back
  RegionRegistry(const RegionRegistry&) = delete;
  RegionRegistry& operator=(const RegionRegistry&) = delete;

  uint64_t AddClient();
  // Forgets all of its regions.
  void RemoveClient(uint64_t client);
  // INVALID_ARGUMENT for sizes that no region may have, RESOURCE_EXHAUSTED for those that do not
  // fit now; both name bytes, use and bound.
  Result<Created> Create(uint64_t client, uint64_t bytes);
  // NOT_FOUND unless it is this client's.
  Status Release(uint64_t client, const std::string& token);

  // Null if no region has this token.
  RegionRef Find(const std::string& token) const;

  Stats stats() const;
  const RegionLimits& limits() const { return limits_; }

 private:
  struct Client {
    std::set<std::string> tokens;
    int64_t bytes = 0;    // until they are given back
    int64_t regions = 0;  // the same
  };

  Status Reserve(uint64_t client, int64_t bytes);
  Status CheckLocked(const Client& client, int64_t bytes) const;
  Result<Created> Add(uint64_t client, RegionMapping mapping);
  // Any thread: the last reference has gone.
  void Bury(SharedRegion* region);
  void ReturnLocked(uint64_t client, int64_t bytes);
  void Run();

  const RegionLimits limits_;
  RegionMemory& memory_;
  const TokenSource tokens_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, RegionRef> regions_;
  std::unordered_map<uint64_t, Client> clients_;
  uint64_t last_client_ = 0;
  int64_t open_bytes_ = 0;
  int64_t taken_bytes_ = 0;  // the open ones, those being made and those not given back
  int64_t created_ = 0;
  int64_t refused_ = 0;
  SharedRegion* dead_ = nullptr;
  bool burying_ = false;  // from the first dead one until the last one's bytes are free
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace attend
