// SPDX-License-Identifier: Apache-2.0
//
// Decoding steps that only read, one per message, from a raw gRPC client over a few streams: the
// server and the wire without the client library, compared with an inline echo of the same bytes.

#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/bench/service/rounds.h"
#include "tests/bench/service/server_process.h"
#include "tests/bench/session_sequence.h"

namespace attend::bench {

inline constexpr int kReadStreams = 4, kReadsInFlight = 16;  // on each stream

struct ReadSamples {
  Samples attend, echo;
};

// The sequences, of `shape`, hold their prompts and take turns. The first wrong answer ends the
// program.
ReadSamples MeasureReads(const ServerProcess& server,
                         const std::vector<std::unique_ptr<Sequence>>& sequences, int rounds,
                         double seconds);

// The values of every round.
nlohmann::ordered_json ReadsJson(const ReadSamples& reads);
// Prints the medians.
void Print(const ReadSamples& reads);

}  // namespace attend::bench
