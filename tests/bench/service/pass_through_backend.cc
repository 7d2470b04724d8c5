// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/pass_through_backend.h"

#include <cstring>
#include <utility>

#include "kernels/cpu/cpu_backend.h"

namespace attend::bench {
namespace {

class PassThroughLane final : public Lane {
 public:
  Status Submit(std::span<const WorkItem> items, Done done) override {
    for (const WorkItem& item : items) {
      char* o = static_cast<char*>(item.attention.o.data);
      std::memcpy(o, item.attention.q.data, kMarkBytes);
      std::memcpy(o + kMarkBytes, item.attention.k.data, kMarkBytes);
      std::memcpy(o + 2 * kMarkBytes, item.attention.v.data, kMarkBytes);
    }
    BatchOutcome outcome;
    outcome.statuses.resize(items.size());
    done(std::move(outcome));
    return Status();
  }
};

// Memory and description of the CPU, without its kernels.
class PassThroughBackend final : public Backend {
 public:
  PassThroughBackend() : cpu_(MakeCpuBackend(BackendOptions{})) {}

  const DeviceInfo& info() const override { return cpu_->info(); }
  HostAllocator& host_allocator() override { return cpu_->host_allocator(); }
  Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions&) override {
    return std::unique_ptr<Lane>(std::make_unique<PassThroughLane>());
  }

 private:
  std::unique_ptr<Backend> cpu_;
};

}  // namespace

std::unique_ptr<Backend> MakePassThroughBackend() { return std::make_unique<PassThroughBackend>(); }

}  // namespace attend::bench
