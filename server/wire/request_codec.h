// SPDX-License-Identifier: Apache-2.0
//
// Moves an AttendRequest from the pieces in which it arrived to its final place, copying tensor
// bytes once.
//
// One pass over the top-level tags, in any order, finds three kinds of fields. The `raw` entries
// and the arrays (wire_arrays.h) stay in place, and are copied to the request's block,
// which the memory budget counts, once it has been granted. The other fields are small: they are
// gathered and parsed by the generated class. So a message costs its own bytes, a few KiB, and what
// the budget has granted. No memory is allocated for a declared length before it has been compared
// with the bytes present and with the tensor's shape.
//
// Independent of the transport. Pure functions; any thread.

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

// Maximum size of the fields that are neither raw nor arrays, tags included. Requests
// need about 600 bytes at most, plus up to 64 for each of kRequestSessionsMax sessions. In the
// worst case they take 64 times as much once parsed, while one thread decodes them.
inline constexpr int64_t kHeaderBytesMax = 20 * 1024;
// Maximum size outside raw entries, because the pass runs on the receiving thread.
inline constexpr int64_t kFieldBytesMax = int64_t{4} << 20;

// The result of a pass over the top-level tags, without parsing.
struct MessageScan {
  int64_t message_bytes = 0;
  int64_t header_bytes = 0;
  std::array<char, kHeaderBytesMax> header;  // only the first header_bytes are set
  int64_t array_bytes = 0;
  ArrayRuns arrays{};
  int64_t raw_count = 0;
  struct Raw {
    int64_t offset = 0;  // in the message, or in the file
    int64_t bytes = 0;
    const SharedFile* file = nullptr;  // set by protocols whose tensors may be in files
  };
  std::array<Raw, kTensorsMax> raw{};  // the first entries
};

// INVALID_ARGUMENT: not an AttendRequest, small fields too large, or more than kRequestSessionsMax
// sessions. `scan` must be new.
Status ScanMessage(std::span<const ByteSpan> slices, MessageScan& scan);

// The same for the beginning of a message, up to where the first raw entry's bytes begin. False if
// they do not begin in it, or it is malformed.
bool ScanBeginning(std::span<const ByteSpan> slices, MessageScan& scan);

class EarlyInput;

// A decoded message. The bytes of `slices` are owned elsewhere.
struct RequestMessage {
  std::span<const ByteSpan> slices;
  MessageScan scan;
  const v1::AttendRequest* fields = nullptr;  // on the arena; without raw and arrays
  EarlyInput* early = nullptr;                // may already hold the tensors; null: none

  WireArrays arrays() const { return WireArrays(slices, scan.arrays); }
};

// Parses the small fields found by the scan. INVALID_ARGUMENT if they are malformed.
Status ParseMessage(google::protobuf::Arena& arena, RequestMessage& message);

// Checks that the call can read each tensor: in the message (inline), in shared memory, or, for
// AttendChunked, in the chunks that follow; and that it can write the answer where it should go.
// Sets which tensors are in shared memory. UNIMPLEMENTED for places unknown to this server.
Status CheckSources(const RequestMessage& message, Transport transport, Validated& validated);

// Checks that each inline tensor has one raw entry of the right length.
Status CheckRaw(const RequestMessage& message, const Validated& validated);

// The layout of the request's two blocks of host memory; each part is 256-byte aligned. Tensors in
// shared memory have no place there.
struct MemoryPlan {
  std::array<int64_t, kTensorsMax> tensors{};  // offsets in the input block
  std::array<int64_t, kArrayFields> arrays{};
  int64_t tree_bias = 0;      // the tree written out, Validated::tree_bytes
  int64_t cache_lengths = 0;  // with sessions: int64_t per sequence
  int64_t cache_pages = 0;    // with sessions: the page table
  int64_t input_bytes = 0;
  std::array<int64_t, kOutputsMax> outputs{};  // offsets in the output block, by Output
  int64_t output_bytes = 0;
};

// INVALID_ARGUMENT if the sum overflows. `cache` as in Validate.
Result<MemoryPlan> PlanMemory(const RequestMessage& message, const Validated& validated,
                              const CacheHold* cache = nullptr);

// Adds LSE to the outputs of a forward pass that does not return it, because the reference check
// needs it. INVALID_ARGUMENT as above.
Status PlanLseForCheck(Validated& validated, MemoryPlan& plan, Request& request);

// With sessions: takes pages for the appended rows and writes the page table to the input block,
// which must have the planned size. Returns the status of CacheHold::Reserve.
Status ReservePages(const MemoryPlan& plan, Request& request);

// Sets the layout, the attention and its backward pass with their pointers, the spans and the small
// arrays of `request`. Its blocks must have the planned sizes, its shared tensors must have been
// found.
void PlaceArrays(const RequestMessage& message, const Validated& validated, const MemoryPlan& plan,
                 Request& request);

// After PlaceArrays, once: writes the request's tree, if it has one, to its bias. Takes time in
// proportion to Request::tree_bytes.
void WriteTreeBias(Request& request);

}  // namespace attend
