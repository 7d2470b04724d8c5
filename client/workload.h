// SPDX-License-Identifier: Apache-2.0
//
// The requests of a load, made and encoded before it starts: for every shape of the mix a few with
// different inputs. Immutable afterwards and shared by all threads.

#pragma once

#include <memory>
#include <vector>

#include "client/codec.h"
#include "client/load_options.h"

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

 private:
  LoadOptions options_;
  std::vector<std::vector<WorkItem>> items_;  // by shape
  std::vector<double> cumulative_weight_;
};

}  // namespace attend::client
