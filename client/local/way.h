// SPDX-License-Identifier: Apache-2.0
//
// Ways to compute a call from tensors in this process's memory to tensors in this process's memory:
// here, or on a server.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/load/load_options.h"
#include "client/local/local_call.h"

namespace attend::client {

// Nanoseconds. The part of total_ns in neither client_ns nor phases is gRPC's and the network's.
struct CallTime {
  int64_t total_ns = 0;
  int64_t client_ns = 0;  // encoding, and copies to shared memory
  PhaseTimings phases;    // measured here, or by the server
};

class Way {
 public:
  virtual ~Way() = default;
  virtual const std::string& name() const = 0;  // "here, cpu", "served, inline"
  // Computes call n once.
  virtual Result<CallTime> Run(size_t n, const LocalCall::NowNs& now) = 0;
  // The result of call n's last Run; requires one.
  virtual const AttentionResult& result(size_t n) const = 0;
};

// `calls` must not be empty and must outlive the way. `device`: ATTEND_CPU or a GPU.
Result<std::unique_ptr<Way>> MakeHere(int32_t device, const std::vector<AttentionCall>& calls);
// How a served call's tensors are sent.
enum class Served {
  kMessages,  // inline, or in chunks from options.client.chunked_bytes_min on
  kShared,    // each call copies its tensors to shared memory, as a client does with arbitrary
              // tensors
  kInPlace    // they were created there
};
// One call after another to the server of options.client, through the client's asynchronous call.
// Shared memory is from options.shared_memory_socket; the answer stays there, in a region that is
// reused, as in the C and Python clients.
Result<std::unique_ptr<Way>> MakeServed(const LoadOptions& options, Served served,
                                        const std::vector<AttentionCall>& calls);

}  // namespace attend::client
