// SPDX-License-Identifier: Apache-2.0
//
// The socket from which clients get shared regions: shared_memory.proto on one thread. A connection
// is a client of the registry; once it is closed, its regions are released with it. A release of
// lent memory is answered once that is closed, which may take as long as a device does; a region
// for which memory is being closed, once there is room or the wait is over. Only that connection
// waits, including its later packets.
//
// A connection that the server ends gets no more packets, and its regions no more requests. But its
// client may still want to read what is in them. So they stay, and count, and the server's end of
// the connection is only half closed, until the client has released them or closes its end. It is
// not even that before what the client lent is closed.

#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "attend/v1/shared_memory.pb.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/limits/tenant_limits.h"
#include "server/log/logging.h"
#include "server/memory/ledger.h"
#include "server/regions/region_registry.h"
#include "server/regions/unix_listener.h"
#include "server/util/unique_fd.h"
#include "server/util/weight_share.h"

namespace attend {

class RegionSocket {
 public:
  struct Options {
    std::string path;
    bool any_user = false;  // otherwise only processes of this process's user
    // If any user may connect, one of them has a quarter. If connections must say who they are,
    // that is for those that have not, and there are as many places again for those that have.
    int connections_max = 256;
    // By which those are divided; what the tenants may have besides, or null.
    TenantWeights tenant_weights;
    TenantLimits* limits = nullptr;
    // The tenant of the token's caller, speaking for `tenant` if that is not empty. Set: each
    // connection must say who it is before anything else. Empty: all regions are for any tenant.
    std::function<Result<int>(const std::string& token, const std::string& tenant)> identify = {};
    // With it: called when a connection asked for something else, or for nothing, before it said
    // who it is.
    std::function<void()> on_nobody = {};
    // With it: another number once what it says may be something else.
    std::function<uint64_t()> generation = {};
    // How long a connection may take for that. Until then a newer one may take its place.
    Duration identify_time = std::chrono::seconds(10);
  };

  // The socket is listening when this returns. `registry`, `logger` and `clock` must outlive it.
  static Result<std::unique_ptr<RegionSocket>> Start(const Options& options,
                                                     RegionRegistry& registry, Logger& logger,
                                                     const Clock& clock);
  ~RegionSocket();  // stops
  RegionSocket(const RegionSocket&) = delete;
  RegionSocket& operator=(const RegionSocket&) = delete;

  // Ends every connection and removes the socket. Returns whether that is done: it waits until
  // `until` for a region that is being made, and then leaves the rest to the thread, or to another
  // Stop.
  bool Stop(TimePoint until = kNever);
  // `generation` is another: those go that are no longer who they said. Does not wait.
  void RecheckAll();

 private:
  // A request that waits for room.
  struct Wait {
    v1::RegionRequest request;
    TimePoint until;
  };
  struct Connection {
    UniqueFd socket;
    uint64_t client = 0;  // 0: it has not said who it is
    uid_t user = 0;
    TimePoint since = {};
    // One of these must be answered before anything else is read.
    bool releasing = false;
    std::optional<Wait> wait = {};
    bool busy() const { return releasing || wait; }
    // With `identify`: what it said, for whom, and when that was looked at last.
    v1::Identify said = {};
    int tenant = 0;
    uint64_t generation = 0;
    CountHold place = {};  // among its tenant's connections
    bool ended = false;    // by the server; its client has not closed it
  };
  using Connections = std::map<int, Connection>;  // by descriptor
  // Completed releases: added by any thread, even when the socket is gone. Woken also when memory
  // was closed.
  struct Done {
    struct Release {
      int fd = -1;
      uint64_t client = 0;  // the descriptor may belong to another by then
    };
    Mutex mutex;
    std::vector<Release> releases ATTEND_GUARDED_BY(mutex);
    UniqueFd wake;
  };

  RegionSocket(const Options& options, RegionRegistry& registry, Logger& logger,
               const Clock& clock);
  void Run();
  void Accept();
  // The user of the peer's process, if it may connect.
  Result<uid_t> CheckPeer(int socket);
  // Ends the oldest connection that has not said who it is, of that user or of any. False: there
  // is none.
  bool EndUnknown(std::optional<uid_t> user);
  // Ends those that are no longer who they said.
  void EndRevoked();
  // Ends those whose time to say who they are is over; returns when the next one's is.
  TimePoint EndLate();
  // Answers those that wait for room, if it may have come or their time is over; returns when the
  // next one's is.
  TimePoint Retry(bool room);
  int PollTime(TimePoint until) const;
  // These may end the connection.
  void Serve(Connections::iterator connection);
  void ServePacket(Connections::iterator connection, const v1::RegionRequest& request);
  void Reply(Connections::iterator connection, const v1::RegionReply& reply,
             const UniqueFd& file = {});
  // The client has ended it.
  void End(Connections::iterator connection);
  // The server ends it, and says why.
  void EndWith(Connections::iterator connection, const Status& status);
  // The end of one that the server has ended: its client sees it once all that it lent is closed,
  // and may free that then. It is closed once its client has no other regions either.
  void Finish(Connections::iterator connection);
  void FinishEnded();  // all of them
  // Takes a place among the tenant's connections.
  Status TakePlace(int tenant, CountHold& place);
  // Whether one more of those that are known may have one, by the ledger.
  Status CheckPlace(int tenant) const;
  // Nothing: AnswerReleases or Retry will answer.
  std::optional<v1::RegionReply> Answer(Connection& connection, const v1::RegionRequest& request,
                                        UniqueFd& file);
  v1::RegionReply Identify(Connection& connection, const v1::Identify& request);
  // Whether it still is who it said.
  Status Recheck(Connection& connection) const;
  std::optional<v1::RegionReply> Release(Connection& connection, const std::string& token);
  void AnswerReleases();
  v1::RegionReply Refuse(uint64_t client, const Status& status);
  v1::RegionReply Create(uint64_t client, const v1::CreateRegion& request, UniqueFd& file,
                         TimePoint& until);
  v1::RegionReply Import(uint64_t client, const v1::ImportCudaMemory& request, TimePoint& until);

  const Options options_;
  RegionRegistry& registry_;
  Logger& logger_;
  const Clock& clock_;
  UnixListener listener_;
  UniqueFd wake_;  // readable when the thread must end
  const std::shared_ptr<Done> done_ = std::make_shared<Done>();
  Connections connections_;   // the thread's
  Ledger places_;             // the thread's: of connections that have said who they are
  std::vector<int> waiting_;  // the thread's: those with a wait, in the order in which they came
  uint64_t generation_ = 0;   // the thread's: when it last asked of all
  bool accepting_ = true;     // the thread's; false while there are no descriptors
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ATTEND_GUARDED_BY(mutex_) = false;  // the thread's last act
  std::thread thread_;
};

}  // namespace attend
