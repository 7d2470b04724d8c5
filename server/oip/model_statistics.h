// SPDX-License-Identifier: Apache-2.0
//
// The data of ModelStatistics: sums over ended requests, by model. A request is counted as a whole
// under one lock, so that no reader sees only some of its phases. Thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "inference/grpc_service.pb.h"
#include "kernels/util/mutex.h"
#include "server/oip/models.h"
#include "server/request/request.h"

namespace attend::oip {

class ModelStatistics {
 public:
  void Count(const Model& model, const Request& request, int64_t total_ns);
  void Fill(const Model& model, inference::ModelStatistics& out) const;

 private:
  template <class Number>
  struct Phases {
    Number input_ns = 0;
    Number infer_ns = 0;
    Number output_ns = 0;
  };
  // Each request adds its share of the batch that it ran in.
  struct Batches {
    double count = 0;
    Phases<double> phases;
  };
  struct Sums {
    uint64_t succeeded = 0;
    uint64_t succeeded_ns = 0;
    uint64_t failed = 0;
    uint64_t failed_ns = 0;
    uint64_t queue_ns = 0;
    Phases<uint64_t> phases;
    uint64_t elements = 0;
    double batches = 0;
    uint64_t last_ms = 0;                 // since 1970
    std::map<uint64_t, Batches> by_size;  // in elements
  };
  struct Entry {
    mutable Mutex mutex;
    Sums sums ATTEND_GUARDED_BY(mutex);
  };

  std::array<Entry, kModelCount> models_;
};

}  // namespace attend::oip
