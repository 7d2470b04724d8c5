// SPDX-License-Identifier: Apache-2.0
//
// Moves an AttendRequest from the pieces in which it arrived to its final place, copying tensor
// bytes once.
//
// One walk over the top-level tags, in any order, finds three kinds of fields. The `raw` entries
// and the repeated numbers (wire_arrays.h) stay where they are and are copied to the request's
// block, whose bytes the memory budget counts, once it has one. The others are small: they are
// gathered and parsed by the generated class. So a message costs its own bytes, a few KiB, and what
// the budget has granted. No memory is allocated for a declared length until it was compared with
// the bytes present and with the tensor's shape.
//
// Independent of gRPC. Pure functions; any thread.

#pragma once

#include <google/protobuf/arena.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/memory/shared_file.h"
#include "server/request/request.h"
#include "server/wire/slice_reader.h"
#include "server/wire/validate.h"
#include "server/wire/wire_arrays.h"

namespace attend {

// Most bytes of the fields that are neither raw nor repeated numbers, tags included. Requests have
// some 600 at most, and up to 64 for each of kRequestSessionsMax sessions; parsed, the worst ones
// take 64 times as much, for as long as one thread needs to decode them.
inline constexpr int64_t kHeaderBytesMax = 20 * 1024;
// Most bytes outside raw entries. The walk runs on the thread that brought the message.
inline constexpr int64_t kFieldBytesMax = int64_t{4} << 20;

// What a walk over the top-level tags finds, without parsing anything.
struct MessageScan {
  int64_t message_bytes = 0;
  int64_t header_bytes = 0;
  std::array<char, kHeaderBytesMax> header;  // the first header_bytes are set
  int64_t array_bytes = 0;
  ArrayRuns arrays{};
  int64_t raw_count = 0;
  struct Raw {
    int64_t offset = 0;  // in the message, or in the file
    int64_t bytes = 0;
    const SharedFile* file = nullptr;  // of other protocols: whose bytes are not in the message
  };
  std::array<Raw, kTensorsMax> raw{};  // the first entries
};

// INVALID_ARGUMENT if this is not an AttendRequest, its small fields are too large or it names more
// than kRequestSessionsMax sessions. `scan` must be new.
Status ScanMessage(std::span<const ByteSpan> slices, MessageScan& scan);

// The same of a message of which only the beginning has come, up to where the first raw entry's
// bytes begin. False if they do not begin in it, or something is wrong.
bool ScanBeginning(std::span<const ByteSpan> slices, MessageScan& scan);

class EarlyInput;

// A decoded message. The bytes that `slices` point to are owned elsewhere.
struct RequestMessage {
  std::span<const ByteSpan> slices;
  MessageScan scan;
  const v1::AttendRequest* fields = nullptr;  // on the arena; without raw and repeated numbers
  EarlyInput* early = nullptr;                // in which tensors may lie already

  WireArrays arrays() const { return WireArrays(slices, scan.arrays); }
};

// Parses the small fields that the scan of `message` has found. INVALID_ARGUMENT if they are
// malformed.
Status ParseMessage(google::protobuf::Arena& arena, RequestMessage& message);

// Checks that each tensor's bytes are where the call can read them: in the message (inline) or in
// shared memory, or all in chunks that follow it; and that the answer goes where the call can write
// it. Sets which are in shared memory. UNIMPLEMENTED for places that this server does not know.
Status CheckSources(const RequestMessage& message, Transport transport, Validated& validated);

// Checks that there is one raw entry of the right length for each inline tensor.
Status CheckRaw(const RequestMessage& message, const Validated& validated);

// Where everything is in the request's two blocks of host memory, each part 256-byte aligned.
// Tensors in shared memory have no place there.
struct MemoryPlan {
  std::array<int64_t, kTensorsMax> tensors{};  // offsets in the input block
  std::array<int64_t, kArrayFields> arrays{};
  int64_t cache_lengths = 0;  // with sessions: int64_t of each sequence
  int64_t cache_pages = 0;    // and the table of their pages
  int64_t input_bytes = 0;
  std::array<int64_t, kOutputsMax> outputs{};  // offsets in the output block, by Output
  int64_t output_bytes = 0;
};

// INVALID_ARGUMENT if the sum overflows. `cache` is as for Validate.
Result<MemoryPlan> PlanMemory(const RequestMessage& message, const Validated& validated,
                              const CacheHold* cache = nullptr);

// Adds LSE to what a forward pass computes, if the answer is to have none: its reference check
// judges it. INVALID_ARGUMENT as above.
Status PlanLseForCheck(Validated& validated, MemoryPlan& plan, Request& request);

// With sessions: takes the pages of what is appended, and writes the page table to the input block,
// which has the plan's size. What CacheHold::Reserve says.
Status ReservePages(const MemoryPlan& plan, Request& request);

// Sets the layout, the attention and its backward pass with their pointers, the spans and the small
// arrays of `request`, whose blocks have the plan's sizes, whose shared tensors have been found and
// whose pages reserved.
void PlaceArrays(const RequestMessage& message, const Validated& validated, const MemoryPlan& plan,
                 Request& request);

}  // namespace attend
