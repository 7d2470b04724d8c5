// SPDX-License-Identifier: Apache-2.0
//
// The requests of a load, made and encoded before it starts: for every shape of the mix a few with
// different inputs. Immutable afterwards and shared by all threads.

#pragma once

#include <memory>
#include <vector>

#include "client/load/load_options.h"
#include "client/wire/message_codec.h"

namespace attend::client {

struct WorkItem {
  AttentionCall call;
  std::shared_ptr<const EncodedCall> encoded;
  std::shared_ptr<const EncodedCall> encoded_checked;  // with check = true
  double flops = 0;
};

class Workload {
 public:
  static Result<Workload> Make(const LoadOptions& options);

  // What the n-th request of a run is, and what is done to it: depends on the seed and n alone.
  struct Draw {
    const WorkItem* item;
    uint64_t seed;  // for the rows to verify
    bool verify;
    bool check;
    bool deadline;
    double cancel_after_ms;  // below 0: not cancelled
  };
  Draw DrawRequest(uint64_t n) const;

  // Null unless the load uses shared memory. The inputs are in one of its regions. The place of an
  // answer is chosen when its request is sent, because requests in flight must not share a place.
  SharedMemory* memory() const { return memory_.get(); }
  // A region of the kind that the load uses.
  Result<std::shared_ptr<SharedRegion>> MakeRegion(int64_t bytes) const;
  // Room that one answer takes there at most.
  int64_t output_bytes() const { return output_bytes_; }

 private:
  // Puts the inputs into shared memory.
  Status Share(const SharedSocket& socket);

  LoadOptions options_;
  std::shared_ptr<SharedMemory> memory_;
  int64_t output_bytes_ = 1;
  std::vector<std::vector<WorkItem>> items_;  // by shape
  std::vector<double> cumulative_weight_;
};

}  // namespace attend::client
