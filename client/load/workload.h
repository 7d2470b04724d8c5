// SPDX-License-Identifier: Apache-2.0
//
// The requests of a load, made and encoded before it starts: a few with different inputs per shape
// of the mix. Immutable afterwards and shared by all threads.

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

  // The n-th request of a run and its treatment; a function of the seed and n only.
  struct Draw {
    const WorkItem* item;
    uint64_t seed;  // for the rows to verify
    bool verify;
    bool check;
    bool deadline;
    double cancel_after_ms;  // negative: not cancelled
  };
  Draw DrawRequest(uint64_t n) const;

  // Null unless the load uses shared memory. One of its regions has the inputs. An answer's place
  // is chosen at its request's send, because requests in flight must not share one.
  SharedMemory* memory() const { return memory_.get(); }
  // A region of the kind that the load uses.
  Result<std::shared_ptr<SharedRegion>> MakeRegion(int64_t bytes) const;
  // The most bytes that one answer takes there.
  int64_t output_bytes() const { return output_bytes_; }

 private:
  // Moves the inputs to shared memory.
  Status Share(const SharedSocket& socket);

  LoadOptions options_;
  std::shared_ptr<SharedMemory> memory_;
  int64_t output_bytes_ = 1;
  std::vector<std::vector<WorkItem>> items_;  // by shape
  std::vector<double> cumulative_weight_;
};

}  // namespace attend::client
