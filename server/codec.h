// SPDX-License-Identifier: Apache-2.0
//
// An AttendRequest from the pieces it arrived in to its final place, tensor bytes copied once.
//
// The small fields in front of the first `raw` entry are parsed by the generated class; the entries
// are found by their tags alone and copied from where they lie. A message in any other order goes
// through the generated class as a whole and is copied from its strings: same answer, same errors,
// one copy more. No memory is taken for a declared length before it was compared with the bytes
// that are there and with the tensor's shape.
//
// Knows no gRPC. Pure functions; any thread.

#pragma once

#include <google/protobuf/arena.h>
#include <google/protobuf/message_lite.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "kernels/status.h"
#include "server/request.h"
#include "server/slice_reader.h"
#include "server/validate.h"

namespace attend {

// What a walk over the top-level tags finds, without parsing or copying anything.
struct MessageScan {
  int64_t message_bytes = 0;
  int64_t header_bytes = 0;  // everything in front of the first raw entry
  bool in_order = false;     // header, then raw entries and nothing else
  int64_t raw_count = 0;
  struct Raw {
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  std::array<Raw, kTensorsMax> raw{};  // the first entries, if in_order
};

// INVALID_ARGUMENT if a field declares more bytes than there are.
Status ScanMessage(std::span<const ByteSpan> slices, MessageScan& scan);

// A message taken apart.
struct ParsedMessage {
  MessageScan scan;
  // On the arena. Holds `raw` only if !scan.in_order.
  const v1::AttendRequest* request = nullptr;

  int64_t raw_count() const { return scan.in_order ? scan.raw_count : request->raw_size(); }
  int64_t raw_bytes(int i) const {
    return scan.in_order ? scan.raw[i].bytes : static_cast<int64_t>(request->raw(i).size());
  }
};

// The first `bytes` of the slices by the generated parser. False if they are no such message.
bool ParseSlices(std::span<const ByteSpan> slices, int64_t bytes,
                 google::protobuf::MessageLite& out);

// Parses what `scan` found, on `arena`. INVALID_ARGUMENT if it is no AttendRequest.
Status ParseMessage(std::span<const ByteSpan> slices, const MessageScan& scan,
                    google::protobuf::Arena& arena, ParsedMessage& out);

// That each tensor's bytes are where the call takes them from: in the message (inline) or in shared
// memory, or all in chunks that follow it; and that O and LSE go where the call can put them. Notes
// which lie in shared memory. UNIMPLEMENTED for places that this server does not know.
Status CheckSources(const v1::AttendRequest& request, Transport transport, Validated& validated);

// That there is one raw entry of the right length for each inline tensor.
Status CheckRaw(const ParsedMessage& message, const Validated& validated);

// Where everything lies in the request's two blocks of host memory, each part 256-byte aligned.
// What lies in shared memory has no place there.
struct MemoryPlan {
  std::array<int64_t, kTensorsMax> tensors{};  // offsets in the input block
  int64_t q_lengths = 0, kv_lengths = 0, cu_q = 0, cu_kv = 0, alibi = 0, sinks = 0;
  int64_t input_bytes = 0;
  int64_t o = 0;  // offsets in the output block
  int64_t lse = 0;
  int64_t output_bytes = 0;
};

// INVALID_ARGUMENT if the sum overflows.
Result<MemoryPlan> PlanMemory(const v1::AttendRequest& request, const Validated& validated);

// Sets the layout, the attention with its pointers, the spans and the small arrays of `request`,
// whose blocks have the plan's sizes and whose shared tensors have been found.
void PlaceArrays(const v1::AttendRequest& message, const Validated& validated,
                 const MemoryPlan& plan, Request& request);

// Copies the inline tensors' bytes to their places.
void CopyTensors(std::span<const ByteSpan> slices, const ParsedMessage& message,
                 const Validated& validated, const MemoryPlan& plan, Request& request);
// The same as pieces of a copy that somebody else does while slices and arena live.
std::vector<CopyPiece> TensorPieces(std::span<const ByteSpan> slices, const ParsedMessage& message,
                                    const Validated& validated, const MemoryPlan& plan,
                                    Request& request);

}  // namespace attend
