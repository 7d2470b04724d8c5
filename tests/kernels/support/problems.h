// SPDX-License-Identifier: Apache-2.0
//
// Random attentions that own their memory, for tests of every kernel and of the server. All inputs
// lie in one block and all outputs in another, as WorkItem asks. Whatever a kernel must not read
// (gaps between strides, rows beyond the true lengths, bytes between tensors) holds NaN; whatever
// it must not write holds a pattern that GuardsIntact looks for.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"

namespace attend::test {

// How dense tensors are laid out in memory. Packed problems are LHD; kStrided then adds gaps.
enum class Layout {
  kBHLD,
  kBLHD,
  kStrided,  // gaps after every row, head and sequence
};

// Which pages a sequence's keys are in, if they are in pages.
enum class PageOrder {
  kShuffled,    // its own, in random order
  kDescending,  // its own, each right before its predecessor
  kShared,      // all sequences share those of the first half of the keys
};

struct ProblemSpec {
  // batch, len_q, len_k, total_q and total_k of a packed problem are filled in from the lengths.
  Problem problem;
  Layout layout = Layout::kBHLD;
  // Dense: true lengths per sequence, or empty for none. Packed: the sequences, same count in both.
  std::vector<int64_t> q_lengths;
  std::vector<int64_t> kv_lengths;
  bool bias_per_sequence = true;  // false: that dimension is broadcast
  bool bias_per_head = true;
  bool bias_per_query = true;
  DType bias_dtype = DType::kFloat32;
  double bias_masked_share = 0;  // share of bias elements that are -inf
  bool alibi_per_sequence = false;
  int64_t misaligned_elements = 0;  // q, k, v, o begin that many elements past a 64-byte boundary
  double magnitude_q = 1;           // standard deviation of Q's elements; K's and V's is 1
  PageOrder page_order = PageOrder::kShuffled;
  DropoutPlace dropout;  // if problem.dropout > 0
};

// float32 by default, scale 1/sqrt(D), no mask, LSE returned.
ProblemSpec MakeSpec(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t len_q, int64_t len_k,
                     int64_t dim, int64_t dim_v, DType dtype = DType::kFloat32);

// Any combination of features, shapes and layouts, drawn from `seed`; small enough (multiply-adds
// <= work_max) for every row to be checked in double.
ProblemSpec RandomSpec(uint64_t seed, double work_max = 2e6);

// RandomSpec with features that kernels support but requests do not have: half of the problems are
// in pages, of every order, and some are parts of longer sequences.
ProblemSpec RandomKernelSpec(uint64_t seed, double work_max = 2e6);

// The same with K and V in pages; nothing changes if it is packed. From the same seed it has the
// same values, unless sequences share pages.
ProblemSpec InPages(ProblemSpec spec, int64_t page_rows);

// The same with dropout: of any rate, and with any seed and place in a whole, drawn from `seed`.
ProblemSpec WithDropout(ProblemSpec spec, uint64_t seed);

// Describe's text and the details that only the spec has, for failures.
std::string Describe(const ProblemSpec& spec);

struct AlignedFree {
  void operator()(std::byte* data) const;
};
using Block = std::unique_ptr<std::byte[], AlignedFree>;
Block MakeBlock(int64_t bytes);  // 256-byte aligned, uninitialised

// Movable; the views in `attention` stay valid when it moves.
struct OwnedAttention {
  Attention attention;
  Block input_block;
  Block output_block;
  HostSpan input;
  HostSpan output;

  WorkItem Item(const Selection& selection) const;

  // Fills O and LSE with NaN and everything around them with the guard pattern.
  void ResetOutput();

  // False if anything in the output block beside the rows of O and LSE was written.
  bool GuardsIntact() const;

  // The whole output block, to compare two runs bit for bit.
  std::vector<std::byte> OutputBytes() const;

  // Element d of row i of sequence b and head h, as a mutable address; b's own row numbering.
  void* Q(int64_t b, int64_t h, int64_t i, int64_t d);
  void* K(int64_t b, int64_t h_kv, int64_t j, int64_t d);
  void* V(int64_t b, int64_t h_kv, int64_t j, int64_t d);
  void* O(int64_t b, int64_t h, int64_t i, int64_t d);
};

// Memory for `spec` with values drawn from `seed`; output reset.
OwnedAttention MakeAttention(const ProblemSpec& spec, uint64_t seed);

// Sets an element of an input to `value`, rounded to the problem's dtype.
void Set(const Attention& attention, void* element, float value);
float Get(const Attention& attention, const void* element);

// Sets elements of Q, K and V, drawn from `seed`, to NaN, Inf of either sign or a subnormal number:
// a few or many, of one input or of all.
void SetSpecials(OwnedAttention* owned, uint64_t seed);

// A random seed, or ATTEND_TEST_SEED if set; print it on failure.
uint64_t FreshSeed();

// 1, or ATTEND_TEST_SCALE: what sweep lengths are multiplied by (sanitizer builds use less).
double TestScale();

}  // namespace attend::test
