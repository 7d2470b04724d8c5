// SPDX-License-Identifier: Apache-2.0
//
// The interface between the backward pass's scheduler (flash_gradients.cc) and its SIMD code
// (flash_gradients_tile.cc, compiled once per instruction set).

#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/cpu/flash_tile.h"

namespace attend::cpu_flash {

// Keys of a key tile. They lie across lanes, in whole panels on every instruction set. At head dim
// 128, K, V, dK and dV of a tile take 200 KiB of L2.
inline constexpr int64_t kGradientKeys = 96;
static_assert(kGradientKeys % kPanelLanesMax == 0);

// Query rows processed together against a key tile.
inline constexpr int64_t kGradientRows = 64;

// Strides of rows in tiles: of elements of Q and dO, of pairs of rows, and of dS.
inline constexpr int64_t kAmxRowStride = kHeadDimMax + kAmxBlock;
inline constexpr int64_t kAmxTurnedStride = kGradientRows / 2 + 16;
inline constexpr int64_t kAmxScoreStride = kGradientKeys + kAmxBlock;
static_assert(kGradientKeys % kAmxBlock == 0 && kGradientRows % kAmxBlock == 0);

// Lanes of the widest vector of any instruction set.
inline constexpr int64_t kLanesMax = 16;

// Floats from one fp32 row of K, Q or dO to the next, chosen so that rows begin in different cache
// sets.
inline constexpr int64_t kRowStride = kHeadDimMax + 16;

// Padded sizes of partial sums: whole vectors and whole blocks on every instruction set.
constexpr int64_t PaddedDim(int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr int64_t PaddedKeys(int64_t keys) { return (keys + 15) / 16 * 16; }
constexpr int64_t PaddedRows(int64_t rows) { return (rows + 7) / 8 * 8; }

// The purpose of a walk over keys.
enum class GradientStep : uint8_t {
  kMeasure,  // computes the terms of the listed rows
  kAdd,      // computes the gradients
  kCorrect,  // adds RowError's correction to dQ and dK of the listed rows
};

// A row's weights are P = exp((score - shift) * unit - base), and dS = P (dP - less). Most rows
// have shift 0 and base LSE. fp32 does not hold a large LSE precisely enough for weights that sum
// to 1, so such rows are measured: shift is their largest score, and base the logarithm of the sum
// relative to it. During measuring, shift is the largest score so far, base that sum, and less is
// sum P dP.
struct RowTerms {
  float shift = 0;
  float base = 0;
  float less = 0;        // delta - dLSE
  float sink = 0;        // sink's weight, if the row was measured
  bool known = false;    // the other fields are valid
  bool special = false;  // some input of the row is NaN or Inf
};
// Rows of a larger |LSE| are measured. Up to here, its rounding moves weights by at most 2^-16.
inline constexpr float kLargeLse = 256;

// Index of a row in an attention's table of RowTerms.
inline int64_t TermsIndex(const Problem& p, const Sequence& s, const RowId& id) {
  return p.packed ? id.h * p.total_q + s.q_row + id.i : (id.b * p.heads_q + id.h) * p.len_q + id.i;
}

// Each row's sums beside dQ, over the keys that it sees.
struct RowSums {
  float d_scores = 0;  // sum of dS, which shows delta's error
  float squares = 0;   // dS^2
  float norms = 0;     // P |K|
};
inline constexpr int64_t kRowSums = 3;

// A row of the band, for one slab of keys.
struct RowState {
  RowTerms terms;
  RowSums sums;
};

// The error of a row's delta, and which gradients it spoils.
struct RowError {
  float error = 0;
  bool of_queries = false;
  bool of_keys = false;
};

// Query rows [row, row + rows) of each of `heads` query heads of one KV head, against a range of
// its keys. They are true rows, numbered head after head; `listed` selects some of them. Sums that
// are null are not computed.
struct GradientTask {
  GradientStep step = GradientStep::kAdd;
  const Attention* attention;
  const Gradients* gradients;
  Sequence sequence;
  int64_t b;
  int64_t head;
  int64_t heads;
  int64_t row;
  int64_t rows;
  KeyRange keys;
  const int32_t* listed = nullptr;  // null: all rows
  int64_t listed_count = 0;
  RowTerms* measured = nullptr;      // by TermsIndex; null: none
  const RowError* errors = nullptr;  // by row, for kCorrect
  RowState* states = nullptr;        // by row; null: not kept
  bool sums = false;                 // add up RowSums
  float* d_q = nullptr;              // [PaddedRows(heads * rows)][PaddedDim(D)], set
  // Key tile after key tile, panels of [PaddedDim][lane], for PaddedKeys(keys) lanes in all. The
  // task adds to them; one that `begins` zeroes them first.
  float* d_k = nullptr;
  float* d_v = nullptr;
  bool begins = false;
  bool d_bias = false;  // add to dBias in place
  bool amx = false;     // keys in AMX's panels, and kAdd's products in tiles
  // Set if a sum in dBias is NaN or Inf.
  std::atomic<bool>* careful = nullptr;
  // Set if some row has NaN or Inf among its inputs, so that its sums may too.
  std::atomic<bool>* special = nullptr;
  const StopFlag* stop = nullptr;  // checked before every tile of rows

  int64_t count() const { return listed == nullptr ? heads * rows : listed_count; }
  int64_t RowAt(int64_t n) const { return listed == nullptr ? n : listed[n]; }
};

// dQ and the other sums of a band of rows, in parts by slab of keys.
struct PartialQueries {
  const float* first;
  int64_t stride;  // from one part to the next
  const RowState* states;
  int64_t states_stride;
  const uint8_t* computed;  // by part; the others count as 0
  int64_t count;
};

// Keys that some, and that all, of a task's rows numbered [first, first + count) see.
struct RowsKeys {
  KeyRange any;
  KeyRange all;
};
RowsKeys KeysOfRows(const GradientTask& task, int64_t first, int64_t count);

// One thread's memory. Left uninitialised, because every part is written before it is read.
struct alignas(128) GradientScratch {
  // The key tile.
  float k[kHeadDimMax * kGradientKeys];      // panels of [dim][lane]
  float v[kHeadDimMax * kGradientKeys];      // the same
  float k_rows[kGradientKeys * kRowStride];  // [key][dim]
  // The tile of rows.
  float q[kGradientRows * kRowStride];
  float d_o[kGradientRows * kRowStride];
  float bias[kGradientRows * kGradientKeys];
  // By row and key: dS of all panels, the rest for one panel.
  float d_score[kGradientRows * kGradientKeys];
  float weight[kGradientRows * kPanelLanesMax];  // the score, then P
  float d_weight[kGradientRows * kPanelLanesMax];
  float slope[kGradientRows * kPanelLanesMax];       // the cap's
  float norms[kGradientKeys];                        // |K| of each key; 0 if not finite
  float sums[kGradientRows * kRowSums * kLanesMax];  // RowSums of the key tile, by lane
  // Dropout's draws for one panel, which may begin within a tile of 16 keys. The spare row takes
  // draws that no row needs.
  uint16_t draws[(kGradientRows + 1) * kDrawStride];
  float rows[4 * kRowStride];  // a few rows during conversion
  float ones[kPanelLanesMax];
  // For flash_gradients_amx-inl.h, in bf16, padded with zeros to whole blocks. Keys: panels of
  // [pair of dims][lane], and K in blocks of columns, each [pair of keys][dim].
  float amx_k[kGradientKeys * kHeadDimMax / 2];
  float amx_v[kGradientKeys * kHeadDimMax / 2];
  float amx_k_pairs[kGradientKeys * kHeadDimMax / 2];
  // Rows: as they are, and turned, [dim][pair of rows]; dO times 2^32.
  uint16_t amx_q[kGradientRows * kAmxRowStride];
  uint16_t amx_d_o[kGradientRows * kAmxRowStride];
  float amx_q_turned[kHeadDimMax * kAmxTurnedStride];
  float amx_d_o_turned[kHeadDimMax * kAmxTurnedStride];
  // dS times 2^32 as [row][key], P or dS of one panel as [pair of rows][lane], and a product.
  uint16_t amx_d_score[kGradientRows * kAmxScoreStride];
  float amx_factors[kGradientRows * kAmxPanelLanes / 2];
  float amx_product[kAmxBlock * kAmxPanelLanes];
  int32_t others[kGradientRows];  // numbers of rows that tiles cannot compute
  uint8_t unfit[kGradientKeys];   // keys that they cannot: 1, or 2 if K is not finite
  // By row: its number and terms, its visible keys and diagonal relative to the key tile, ALiBi's
  // slope, and its address in dBias.
  int64_t row[kGradientRows];
  const RowTerms* terms[kGradientRows];
  RowTerms own_terms[kGradientRows];  // if the task keeps no states
  float begin[kGradientRows];
  float end[kGradientRows];
  float diagonal[kGradientRows];
  float alibi[kGradientRows];
  float* d_bias[kGradientRows];
};

// Functions for one instruction set.
struct GradientFunctions {
  bool tiles;  // `run` takes tasks for AMX
  void (*run)(const GradientTask& task, GradientScratch* scratch);
  // Sums the parts of a task's rows numbered [first, first + count) of dQ and stores them; sets
  // `errors`, by row, unless null. False if any sum is NaN or Inf.
  bool (*store_queries)(const GradientTask& task, const PartialQueries& parts, int64_t first,
                        int64_t count, RowError* errors);
  // Stores the task's dK and dV. False if any sum is NaN or Inf.
  bool (*store_keys)(const GradientTask& task, GradientScratch* scratch);
  // dSink of head h, with `measured` as in GradientTask.
  double (*sum_sink)(const Attention& attention, const Gradients& gradients,
                     const RowTerms* measured, int64_t h, const StopFlag* stop);
};

// Selects the best instruction set of this machine. Called once per call.
GradientFunctions ChooseGradientFunctions();

}  // namespace attend::cpu_flash
