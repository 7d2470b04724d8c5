// SPDX-License-Identifier: Apache-2.0
//
// What a protocol makes of the messages of a call: an AttendRequest from what came, and what goes
// back from what was computed. Everything in between is the same for all protocols. Stateless, or
// thread-safe.

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
#include "server/wire/answer_watch.h"
#include "server/wire/message_slices.h"
#include "server/wire/request_codec.h"

namespace attend {

class MessageFormat {
 public:
  virtual ~MessageFormat() = default;

  // Finds the parts of message.slices; of the scan at least array_bytes, how many bytes of numbers
  // Parse is to read. Quick, so that a transport's loop may call it. May note in `request` whose it
  // is, also if it fails.
  virtual Status Scan(RequestMessage& message, Request& request) const = 0;
  // Sets message.fields, on the arena, and what is missing in its scan. May append to `slices`,
  // which message.slices are of.
  virtual Status Parse(google::protobuf::Arena& arena, MessageSlices& slices,
                       RequestMessage& message, Request& request) const = 0;
  // Checks what the protocol itself says of where tensors are, and notes it in the request, once
  // their sizes are known and fit 64 bits together.
  virtual Status CheckPlaces(const Validated&, Request&) const { return Status(); }

  // What of a successful answer goes to files, before the answer is encoded.
  virtual std::vector<FilePiece> OutputFiles(const Request&) const { return {}; }
  // Of a request that has ended, before it is answered.
  virtual void CountEnd(const Request&, int64_t /*total_ns*/) const {}
  // Takes the request, whose status is OK. `call` is told how much of a large answer was taken.
  virtual OutMessage EncodeReply(std::unique_ptr<Request> request, int64_t total_ns,
                                 WatchedRef call) const = 0;

  // On streams: whether answers come in the order of the requests.
  virtual bool InOrder() const { return false; }
  // The id that an answer to the request has.
  virtual std::string AnswerId(const Request& request) const { return request.request_id; }
  // A stream's answer to a failed request.
  virtual OutMessage EncodeFailure(const std::string& answer_id, const Status& status,
                                   const CacheRefusal& refusal, int64_t retry_after_ms) const = 0;
};

// attend.v1, whose messages are AttendRequest and AttendResponse.
const MessageFormat& AttendFormat();

}  // namespace attend
