// SPDX-License-Identifier: Apache-2.0
//
// Accepted requests that wait for a lane, by priority, tenant and due time. QueueOrder says in
// which order they should start, and what that guarantees.
//
// Not thread-safe: the device worker guards it. Invariants: size() is at most `capacity`, and a
// refused Push changes nothing.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/schedule/fair_share.h"
#include "server/util/weight_share.h"

namespace attend {

struct QueueOptions {
  int64_t capacity = 1024;
  TenantWeights tenant_weights;              // of every tenant that a request may name
  Duration aging = std::chrono::seconds(1);  // see QueueOrder
};

// A request that a batch takes, and FairShare's floor when it was chosen.
struct QueuePick {
  uint64_t id = 0;
  int64_t floor = 0;
};

class RequestQueue {
 public:
  // A position in a tenant's line. Due is the deadline, but at most `aging` after the arrival, so
  // that only requests that arrive within that time can overtake.
  struct Place {
    TimePoint due;
    uint64_t sequence = 0;

    auto operator<=>(const Place&) const = default;
  };
  using Line = std::pmr::map<Place, const Request*>;
  // Some of a tenant's requests of one priority.
  struct Lines {
    explicit Lines(std::pmr::memory_resource* nodes)
        : aging(nodes), at_deadline(nodes), newest(nodes) {}
    Line aging;        // due once they have waited for `aging`
    Line at_deadline;  // due at their deadlines
    Line newest;       // the same, by their arrival, the last one first
    Duration time{0};  // what all are expected to take of the device
    bool empty() const { return aging.empty() && at_deadline.empty(); }
  };
  // All of them. Large ones have their own lines: small ones pass them while no lane may take a
  // large one.
  struct TenantLines {
    explicit TenantLines(std::pmr::memory_resource* nodes) : small(nodes), large(nodes) {}
    Lines small;
    Lines large;
    // A request could not be answered in time, and so many of those that waited then and are due at
    // their deadlines, which came before `late_before`, still wait.
    int64_t late = 0;
    uint64_t late_before = 0;
    Lines& of(const Request& request) { return request.large ? large : small; }
    bool empty() const { return small.empty() && large.empty(); }
  };
  // All requests of one priority.
  struct Level {
    Level(const TenantWeights& weights, std::pmr::memory_resource* nodes)
        : share(weights), arrivals(nodes) {
      for (size_t i = 0; i < weights.size(); ++i) tenants.emplace_back(nodes);
    }

    FairShare share;
    std::vector<TenantLines> tenants;
    std::pmr::map<uint64_t, TimePoint> arrivals;  // by sequence
    int64_t served_batch = 0;                     // the last one that took a request from here
  };
  using Levels = std::map<int32_t, Level, std::greater<>>;  // highest priority first

  explicit RequestQueue(const QueueOptions& options);

  // Takes `request`, whose tenant, cost, large and enqueued are set, if and only if OK; else it is
  // not enqueued. RESOURCE_EXHAUSTED when full. Requests must be pushed in the order of their
  // arrival. May throw std::bad_alloc, and then has not taken the request.
  Status Push(std::unique_ptr<Request>& request);

  // Starts a batch: takes its requests, in order, and charges their tenants. `aged`: QueueOrder's.
  std::vector<std::unique_ptr<Request>> TakeBatch(const std::vector<QueuePick>& picks, bool aged);
  // Takes the request with this id; null if it is not here (any more). No tenant is charged.
  std::unique_ptr<Request> TakeById(uint64_t id);
  // Takes all requests that would be late even if they began now and nothing else ran, earliest
  // first. Their lines are late (NoteLate). No tenant is charged.
  std::vector<std::unique_ptr<Request>> TakeHopeless(TimePoint now);
  // A request of that priority and tenant was late: its line is from now on, unless it is already.
  // One that is tried was expected to be late, and says nothing of its line.
  void NoteLate(const Request& request);
  std::vector<std::unique_ptr<Request>> TakeAll();
  // Call when no request waits or runs: then no tenant owes anything or is owed anything.
  void ForgetShares();

  const Levels& levels() const { return levels_; }  // including empty ones
  Duration aging() const { return options_.aging; }
  int64_t batches_since_aged() const { return batches_since_aged_; }
  TimePoint earliest_hopeless() const;  // kNever if none
  // The device time of what would start before `request` if it came now: higher priorities, what
  // its tenant has that is due before it, and of what others have as much as is their share
  // meanwhile. Of large requests, which a small one passes, `beside` may run at the same time.
  // Counts its tenant's no further than `enough`.
  Duration TimeBefore(const Request& request, TimePoint now, int64_t beside, Duration enough) const;
  int64_t size() const { return static_cast<int64_t>(by_id_.size()); }
  bool empty() const { return by_id_.empty(); }
  Duration expected() const { return expected_; }  // device time of all that wait
  int64_t tried() const { return tried_; }         // that wait although they seem hopeless
  int tenants() const { return static_cast<int>(tenant_sizes_.size()); }
  int64_t tenant_size(int tenant) const { return tenant_sizes_[tenant]; }
  bool full() const { return size() >= options_.capacity; }

 private:
  static TimePoint LatestStart(const Request& request);
  Place PlaceOf(const Request& request) const;
  bool DueAtDeadline(const Request& request) const {
    return PlaceOf(request).due == request.deadline;
  }
  // Its place in Lines::newest.
  static Place NewestPlace(const Request& request) {
    return {TimePoint(), UINT64_MAX - request.sequence};
  }
  // Takes it out of its line, if it is there.
  void Unline(const Request& request);
  Level& LevelOf(const Request& request) { return levels_.at(request.priority); }
  std::unique_ptr<Request> Remove(const Request& request);

  const QueueOptions options_;
  // Nodes of requests that left serve those that come: as many as `capacity` requests need.
  std::pmr::unsynchronized_pool_resource nodes_;
  uint64_t next_sequence_ = 0;
  int64_t batches_ = 0;
  int64_t batches_since_aged_ = 0;
  int64_t tried_ = 0;
  Levels levels_;  // of every priority that was ever seen
  Duration expected_{0};
  std::vector<int64_t> tenant_sizes_;
  std::pmr::unordered_map<uint64_t, std::unique_ptr<Request>> by_id_{&nodes_};
  // By the latest start, of those with deadlines; and ids.
  std::pmr::set<std::pair<TimePoint, uint64_t>> by_start_{&nodes_};
};

}  // namespace attend
