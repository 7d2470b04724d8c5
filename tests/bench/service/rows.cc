// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/rows.h"

namespace attend::bench {

std::span<const Row> Rows() {
  static constexpr Row kRows[] = {
      {"inline", "bytes/s of unary calls, 1 to 16 connections, against bare gRPC and raw TCP", true,
       RunInline},
      {"chunked", "one 192 MiB request over 8 connections, against raw TCP over 8", true,
       RunChunked},
      {"shared_memory", "the same request in shared memory, against page-locked copies", true,
       RunSharedMemory},
      {"cuda_ipc", "requests in GPU memory of the client, against the kernel in a plain loop", true,
       RunCudaIpc},
      {"small", "calls/s of small requests, against a bare echo and a Python server", true,
       RunSmall},
      {"stream", "the same on AttendStream, against our own unary calls", true, RunStream},
      {"latency", "time that attend adds to an echo and its kernel, idle, Unix socket", true,
       RunLatency},
      {"wire", "small calls and streams over each transport, against the fastest echo of gRPC's",
       false, RunWire},
      {"tls", "small and large calls over TLS, against bare gRPC over TLS and attend without TLS",
       true, RunTls},
      {"batches", "requests/s of mixed lengths, against one launch per request", true, RunBatches},
      {"metrics", "small requests with metrics and sampled checks, against both off", true,
       RunMetrics},
      {"observe", "small requests with an access log and spans, against neither", true, RunObserve},
      {"gpus", "2 and 4 GPUs, shared memory and in process, against one; needs --device cuda:all",
       false, RunGpus},
  };
  return kRows;
}

}  // namespace attend::bench
