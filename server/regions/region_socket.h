// SPDX-License-Identifier: Apache-2.0
//
// The socket from which clients get shared regions: shared_memory.proto, served by one thread. A
// connection is a client of the registry; when it is closed, its regions are released. The release
// of lent memory is answered once the memory is closed, which may take as long as a device does. A
// request for a region while memory is being closed is answered once there is room or the wait is
// over. Only that connection waits, with its later packets.
//
// When the server ends a connection, the connection gets no more regions and requests no longer
// find its regions. But the client may still want to read them. So they stay, and count, and the
// connection is only half-closed until the client has released them or closes its end. It is
// half-closed only after the memory that the client lent has been closed.

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
    bool any_user = false;  // otherwise only processes of the server's own user
    // If any user may connect, one user may have a quarter. If connections must identify
    // themselves, the bound applies to those that have not; identified ones have as many places
    // again.
    int connections_max = 256;
    // Weights that divide those places; further limits of the tenants, or null.
    TenantWeights tenant_weights;
    TenantLimits* limits = nullptr;
    // Returns the tenant of the token's caller, acting for `tenant` if that is not empty. If set, a
    // connection must identify itself before anything else. If empty, regions are for any tenant.
    std::function<Result<int>(const std::string& token, const std::string& tenant)> identify = {};
    // With `identify`: called when a connection requests something else, or nothing in time, before
    // it is identified.
    std::function<void()> on_nobody = {};
    // With `identify`: a number that changes whenever its results may have changed.
    std::function<uint64_t()> generation = {};
    // How long a connection may take to identify itself. Until then a newer one may displace it.
    Duration identify_time = std::chrono::seconds(10);
  };

  // The socket is listening when this returns. `registry`, `logger` and `clock` must outlive it.
  static Result<std::unique_ptr<RegionSocket>> Start(const Options& options,
                                                     RegionRegistry& registry, Logger& logger,
                                                     const Clock& clock);
  ~RegionSocket();  // stops
  RegionSocket(const RegionSocket&) = delete;
  RegionSocket& operator=(const RegionSocket&) = delete;

  // Ends every connection and removes the socket. Returns whether that is complete: waits until
  // `until` for a region that is being made, then leaves the rest to the thread or to another Stop.
  bool Stop(TimePoint until = kNever);
  // `generation` has changed: ends connections whose identity is no longer valid. Does not wait.
  void RecheckAll();

 private:
  // A request that waits for memory.
  struct Wait {
    v1::RegionRequest request;
    TimePoint until;
  };
  struct Connection {
    UniqueFd socket;
    uint64_t client = 0;  // 0: not identified
    uid_t user = 0;
    TimePoint since = {};
    // While one of these is pending, nothing more is read.
    bool releasing = false;
    std::optional<Wait> wait = {};
    bool busy() const { return releasing || wait; }
    // With `identify`: the credentials, their tenant, and the generation of the last check.
    v1::Identify said = {};
    int tenant = 0;
    uint64_t generation = 0;
    CountHold place = {};  // counts among its tenant's connections
    bool ended = false;    // ended by the server, but not yet closed by the client
  };
  using Connections = std::map<int, Connection>;  // by descriptor
  // Completed releases, added by any thread, even after the socket is gone. `wake` is also
  // signalled when memory has been closed.
  struct Done {
    struct Release {
      int fd = -1;
      uint64_t client = 0;  // the descriptor may have been reused
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
  // Ends the oldest unidentified connection, of `user` or of any user. False: there is none.
  bool EndUnknown(std::optional<uid_t> user);
  // Ends connections whose identity is no longer valid.
  void EndRevoked();
  // Ends connections that did not identify themselves in time; returns the next deadline.
  TimePoint EndLate();
  // Answers requests that wait for memory, if there may be some or their time is over; returns the
  // next deadline.
  TimePoint Retry(bool room);
  int PollTime(TimePoint until) const;
  // These may end the connection.
  void Serve(Connections::iterator connection);
  void ServePacket(Connections::iterator connection, const v1::RegionRequest& request);
  void Reply(Connections::iterator connection, const v1::RegionReply& reply,
             const UniqueFd& file = {});
  // The client has ended the connection.
  void End(Connections::iterator connection);
  // Ends the connection from the server's side, with a reason.
  void EndWith(Connections::iterator connection, const Status& status);
  // Completes the end of a connection that the server has ended: half-closes it once all memory
  // that the client lent is closed, so that the client may free it. Closes it once no region is
  // left.
  void Finish(Connections::iterator connection);
  void FinishEnded();  // for all of them
  // Takes a place in the tenant's limit of connections.
  Status TakePlace(int tenant, CountHold& place);
  // Whether the ledger has room for another identified connection.
  Status CheckPlace(int tenant) const;
  // Empty: AnswerReleases or Retry will answer.
  std::optional<v1::RegionReply> Answer(Connection& connection, const v1::RegionRequest& request,
                                        UniqueFd& file);
  v1::RegionReply Identify(Connection& connection, const v1::Identify& request);
  // Whether the connection's identity is still valid.
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
  Connections connections_;   // used by the thread only
  Ledger places_;             // used by the thread only: identified connections
  std::vector<int> waiting_;  // used by the thread only: connections with a wait, oldest first
  uint64_t generation_ = 0;   // used by the thread only: of the last check of all
  bool accepting_ = true;     // used by the thread only; false while out of descriptors
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ATTEND_GUARDED_BY(mutex_) = false;  // set by the thread at its end
  std::thread thread_;
};

}  // namespace attend
