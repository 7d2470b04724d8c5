// SPDX-License-Identifier: Apache-2.0
//
// The rows of the table. Each measures its cells one after another and adds their figures, or the
// reason if there are none.

#pragma once

#include <span>

#include "tests/bench/service/bench.h"

namespace attend::bench {

struct Row {
  const char* name;
  const char* what;
  bool by_default;
  void (*run)(Bench& bench);
};
std::span<const Row> Rows();

// Throughput.
void RunInline(Bench& bench);
void RunChunked(Bench& bench);
void RunSharedMemory(Bench& bench);
void RunCudaIpc(Bench& bench);
// Small requests.
void RunSmall(Bench& bench);
void RunStream(Bench& bench);
void RunLatency(Bench& bench);
void RunWire(Bench& bench);
// TLS, with small and large requests.
void RunTls(Bench& bench);
// Batches, and the cost of observability.
void RunBatches(Bench& bench);
void RunMetrics(Bench& bench);
void RunObserve(Bench& bench);
// Several GPUs.
void RunGpus(Bench& bench);

}  // namespace attend::bench
