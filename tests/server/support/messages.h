// SPDX-License-Identifier: Apache-2.0
//
// Random attentions as AttendRequest messages, and back, for tests of the wire. Uses only the
// generated classes, so that the server's hand-written code is compared with independent code.

#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "server/wire/slice_reader.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

struct WireProblem {
  ProblemSpec spec;
  OwnedAttention owned;
  v1::AttendRequest request;
};

// The message that asks for `owned`. Gaps are left out; rows beyond the true lengths are included.
v1::AttendRequest ToRequest(const ProblemSpec& spec, const OwnedAttention& owned);

// RandomSpec with features that only the wire adds: some have dropout, from the first sequence,
// head and row on.
ProblemSpec RandomWireSpec(uint64_t seed, double work_max = 2e5);
// Any combination of features in any layout, drawn from `seed`. `trees`: some requests have one in
// place of a bias of bits, which `owned` has.
WireProblem RandomWireProblem(uint64_t seed, double work_max = 2e5, bool trees = true);
// B1 H2 Lq = Lk = length, D = Dv = dim, no features: the valid request between invalid ones.
WireProblem PlainWireProblem(uint64_t seed, int64_t length = 8, int64_t dim = 16,
                             DType dtype = DType::kFloat32);

// Checks shapes and lengths of the answer, and every row of O and LSE, against double precision.
// Empty if all are right.
std::string Judge(WireProblem& problem, const v1::AttendResponse& response);

// The message with its top-level fields in random order; elements of repeated fields keep theirs.
std::string Shuffled(const std::string& message, std::mt19937_64& random);

// The bytes in pieces of random sizes, some empty, each allocated separately so that sanitizers see
// a read beyond its end.
class Pieces {
 public:
  Pieces(std::string_view bytes, std::mt19937_64& random);
  explicit Pieces(std::string_view bytes);  // in one piece
  std::span<const ByteSpan> spans() const { return spans_; }

 private:
  void Add(std::string_view bytes);
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<ByteSpan> spans_;
};

}  // namespace attend::test
