// SPDX-License-Identifier: Apache-2.0
//
// Leaves a request's tensors where their message arrived, if the device that computes it can read
// them there and it pays off. Thread-safe.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/contract/backend.h"
#include "server/memory/receive_memory.h"
#include "server/request/request.h"
#include "server/wire/message_slices.h"

namespace attend {

class Gathering {
 public:
  // `receive_memory` is null if messages arrive in memory that no device can read. Once messages of
  // `held_bytes_max` bytes are kept, further ones are not.
  Gathering(const ReceiveMemory* receive_memory, int64_t held_bytes_max);

  // Whether a device reads messages where they arrive.
  bool is_on() const { return receive_memory_ != nullptr; }
  // Whether it is worth collecting the pieces. The request's placement must be decided.
  bool MayKeep(const Request& request) const;
  // Gives the message to `request`; `pieces` are its tensors. False: nothing was kept.
  bool Keep(MessageSlices& slices, std::vector<HostPiece> pieces, Request& request) const;

 private:
  struct HeldMessage;

  bool Readable(const HostPiece& piece) const;

  const ReceiveMemory* const receive_memory_;
  const int64_t held_bytes_max_;
  const std::shared_ptr<std::atomic<int64_t>> held_;  // bytes
};

}  // namespace attend
