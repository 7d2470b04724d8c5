// SPDX-License-Identifier: Apache-2.0
//
// Ways to compute a call, each from tensors in this process's memory to tensors in this process's
// memory: here, or by a server.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/load/load_options.h"
#include "client/local/local_call.h"

namespace attend::client {

// Nanoseconds. What neither the client nor the phases account for is gRPC's and the network's.
struct CallTime {
  int64_t total_ns = 0;
  int64_t client_ns = 0;  // encoding, and copies into shared memory
  PhaseTimings phases;    // of the computation here, or as the server measured them
};

class Way {
 public:
  virtual ~Way() = default;
  virtual const std::string& name() const = 0;  // "here, cpu", "served, inline"
  // Computes call n once.
  virtual Result<CallTime> Run(size_t n, const LocalCall::NowNs& now) = 0;
  // What the last Run of call n computed; only after one.
  virtual const AttentionResult& result(size_t n) const = 0;
};

// `calls`, at least one, must outlive the way. On the CPU (ATTEND_CPU) or that GPU.
Result<std::unique_ptr<Way>> MakeHere(int32_t device, const std::vector<AttentionCall>& calls);
// How a served call's tensors travel.
enum class Served {
  kMessages,  // inline, or in chunks from options.client.chunked_bytes_min on
  kShared,    // each call copies its tensors to shared memory, as a client does with any tensor
  kInPlace    // they were made there
};
// One call after another to the server of options.client: the client's asynchronous call. Shared
// memory is that of options.shared_memory_socket; the answer stays there, in a region that calls
// use again and again, as those of the C and Python clients do.
Result<std::unique_ptr<Way>> MakeServed(const LoadOptions& options, Served served,
                                        const std::vector<AttentionCall>& calls);

}  // namespace attend::client
