// SPDX-License-Identifier: Apache-2.0
//
// How a protocol maps between its messages and requests: an AttendRequest from a received message,
// and the reply from what was computed. Everything in between is common to all protocols. Stateless
// or thread-safe.

#pragma once

#include <google/protobuf/arena.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/memory/copy_pieces.h"
#include "server/request/request.h"
#include "server/util/message.h"
#include "server/wire/message_slices.h"
#include "server/wire/request_codec.h"

namespace attend {

class MessageFormat {
 public:
  virtual ~MessageFormat() = default;

  // Finds the parts of message.slices. Must set at least scan.array_bytes, the bytes of numbers
  // that Parse will read. Fast enough for a transport loop. May identify the request in `request`,
  // even on failure.
  virtual Status Scan(RequestMessage& message, Request& request) const = 0;
  // Sets message.fields, on the arena, and the rest of the scan. May append to `slices`, which own
  // message.slices.
  virtual Status Parse(google::protobuf::Arena& arena, MessageSlices& slices,
                       RequestMessage& message, Request& request) const = 0;
  // Checks and records the protocol's own information about where tensors are, once their sizes are
  // known and their sum fits 64 bits.
  virtual Status CheckPlaces(const Validated&, Request&) const { return Status(); }

  // The parts of a successful answer that are written to files before it is encoded.
  virtual std::vector<FilePiece> OutputFiles(const Request&) const { return {}; }
  // Counts a request that has ended, before it is answered.
  virtual void CountEnd(const Request&, int64_t /*total_ns*/) const {}
  // Takes the request, whose status is OK.
  virtual OutMessage EncodeReply(std::unique_ptr<Request> request, int64_t total_ns) const = 0;

  // On streams: whether answers are sent in request order.
  virtual bool InOrder() const { return false; }
  // The id in an answer to the request.
  virtual std::string AnswerId(const Request& request) const { return request.request_id; }
  // A stream's answer to a failed request.
  virtual OutMessage EncodeFailure(const std::string& answer_id, const Status& status,
                                   const CacheRefusal& refusal, int64_t retry_after_ms) const = 0;
};

// attend.v1, whose messages are AttendRequest and AttendResponse.
const MessageFormat& AttendFormat();

}  // namespace attend
