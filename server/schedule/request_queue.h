// SPDX-License-Identifier: Apache-2.0
//
// Accepted requests that wait for a lane, by priority, tenant and due time. QueueOrder defines the
// order in which they should start, and its guarantees.
//
// Not thread-safe: guarded by the device worker. Invariants: size() is at most `capacity`, and a
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
  TenantWeights tenant_weights;              // one for every tenant that a request may name
  Duration aging = std::chrono::seconds(1);  // see QueueOrder
};

// A request chosen for a batch, and FairShare's floor at that time.
struct QueuePick {
  uint64_t id = 0;
  int64_t floor = 0;
};

class RequestQueue {
 public:
  // A position in a tenant's line. A request is due at its deadline, but at most `aging` after its
  // arrival, so that only requests that arrive within that time can overtake it.
  struct Place {
    TimePoint due;
    uint64_t sequence = 0;

    auto operator<=>(const Place&) const = default;
  };
  using Line = std::pmr::map<Place, const Request*>;
  // A tenant's requests of one priority, either the small or the large ones.
  struct Lines {
    explicit Lines(std::pmr::memory_resource* nodes)
        : aging(nodes), at_deadline(nodes), newest(nodes) {}
    Line aging;        // due after waiting for `aging`
    Line at_deadline;  // due at their deadlines
    Line newest;       // the same requests, newest first
    Duration time{0};  // the sum of their expected device times
    bool empty() const { return aging.empty() && at_deadline.empty(); }
  };
  // All of a tenant's requests of one priority. Large ones have their own lines, so that small ones
  // can pass them while no lane may take a large one.
  struct TenantLines {
    explicit TenantLines(std::pmr::memory_resource* nodes) : small(nodes), large(nodes) {}
    Lines small;
    Lines large;
    // Set when a request of this line was late: the number of requests due at their deadlines that
    // waited then (those that arrived before `late_before`) and still wait. The line is late while
    // it is not 0.
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
    int64_t served_batch = 0;  // number of the last batch with a request from here
  };
  using Levels = std::map<int32_t, Level, std::greater<>>;  // highest priority first

  explicit RequestQueue(const QueueOptions& options);

  // Takes `request`, whose tenant, cost, large and enqueued are set, if and only if OK; otherwise
  // the caller keeps it. RESOURCE_EXHAUSTED when full. Requests must be pushed in order of arrival.
  // May throw std::bad_alloc; the caller then keeps the request too.
  Status Push(std::unique_ptr<Request>& request);

  // Starts a batch: removes its requests, in order, and charges their tenants. `aged`: chosen by
  // rule 5 of QueueOrder.
  std::vector<std::unique_ptr<Request>> TakeBatch(const std::vector<QueuePick>& picks, bool aged);
  // Takes the request with this id; null if it is not queued. Charges no tenant.
  std::unique_ptr<Request> TakeById(uint64_t id);
  // Takes all requests that would be late even if they started now on an idle device, earliest
  // first, and marks their lines late (NoteLate). Charges no tenant.
  std::vector<std::unique_ptr<Request>> TakeHopeless(TimePoint now);
  // A request was late: its line becomes late, unless it already is. A probe was expected to be
  // late, so it says nothing about its line.
  void NoteLate(const Request& request);
  std::vector<std::unique_ptr<Request>> TakeAll();
  // Call when no request waits or runs: no tenant owes or is owed anything then.
  void ForgetShares();

  const Levels& levels() const { return levels_; }  // including empty ones
  Duration aging() const { return options_.aging; }
  int64_t batches_since_aged() const { return batches_since_aged_; }
  TimePoint earliest_hopeless() const;  // kNever if none
  // The device time of what would start before `request` if it arrived now: higher priorities, its
  // tenant's requests that are due before it, and other tenants' requests up to their fair share in
  // that time. Large requests, which a small one passes, count only as far as `beside` of them can
  // run at the same time. Its tenant's requests are counted up to `enough` at most.
  Duration TimeBefore(const Request& request, TimePoint now, int64_t beside, Duration enough) const;
  int64_t size() const { return static_cast<int64_t>(by_id_.size()); }
  bool empty() const { return by_id_.empty(); }
  Duration expected() const { return expected_; }  // expected device time of all queued requests
  int64_t tried() const { return tried_; }         // number of probes queued
  int tenants() const { return static_cast<int>(tenant_sizes_.size()); }
  int64_t tenant_size(int tenant) const { return tenant_sizes_[tenant]; }
  bool full() const { return size() >= options_.capacity; }

 private:
  static TimePoint LatestStart(const Request& request);
  Place PlaceOf(const Request& request) const;
  bool DueAtDeadline(const Request& request) const {
    return PlaceOf(request).due == request.deadline;
  }
  // Position in Lines::newest.
  static Place NewestPlace(const Request& request) {
    return {TimePoint(), UINT64_MAX - request.sequence};
  }
  // Removes it from its line, if it is there.
  void Unline(const Request& request);
  Level& LevelOf(const Request& request) { return levels_.at(request.priority); }
  std::unique_ptr<Request> Remove(const Request& request);

  const QueueOptions options_;
  // Map nodes are recycled: the pool grows to what `capacity` requests need.
  std::pmr::unsynchronized_pool_resource nodes_;
  uint64_t next_sequence_ = 0;
  int64_t batches_ = 0;
  int64_t batches_since_aged_ = 0;
  int64_t tried_ = 0;
  Levels levels_;  // every priority seen so far
  Duration expected_{0};
  std::vector<int64_t> tenant_sizes_;
  std::pmr::unordered_map<uint64_t, std::unique_ptr<Request>> by_id_{&nodes_};
  // (latest start, id) of the requests with deadlines.
  std::pmr::set<std::pair<TimePoint, uint64_t>> by_start_{&nodes_};
};

}  // namespace attend
