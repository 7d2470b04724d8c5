// SPDX-License-Identifier: Apache-2.0
//
// What the scheduler of the backward pass (flash_gradients.cc) and its SIMD code
// (flash_gradients_tile.cc, compiled once per instruction set) agree on.

#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/cpu/flash_tile.h"

namespace attend::cpu_flash {

// Keys of a key tile, which lie across lanes: whole panels on every instruction set. With head dim
// 128, K, V, dK and dV of a tile take 200 KiB of L2.
inline constexpr int64_t kGradientKeys = 96;
static_assert(kGradientKeys % kPanelLanesMax == 0);

// Query rows that meet a key tile at a time.
inline constexpr int64_t kGradientRows = 64;

// Floats from one fp32 row of K, Q or dO to the next: rows begin in different cache sets.
inline constexpr int64_t kRowStride = kHeadDimMax + 16;

// Floats of a row of partial sums: whole vectors, and whole blocks, of every instruction set.
constexpr int64_t PaddedDim(int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr int64_t PaddedKeys(int64_t keys) { return (keys + 15) / 16 * 16; }
constexpr int64_t PaddedRows(int64_t rows) { return (rows + 7) / 8 * 8; }

// Query rows [row, row + rows) of each of `heads` query heads of one KV head, against a run of its
// keys. Rows are true rows, and taken head after head. Sums that are null are not wanted.
struct GradientTask {
  const Attention* attention;
  const Gradients* gradients;
  Sequence sequence;
  int64_t b;
  int64_t head;
  int64_t heads;
  int64_t row;
  int64_t rows;
  KeyRange keys;
  float* d_q = nullptr;  // [PaddedRows(heads * rows)][PaddedDim(D)], set
  // Key tile after key tile, panels of [PaddedDim][lane], for PaddedKeys(keys) lanes in all. Added
  // to, but set by a task that `begins` them.
  float* d_k = nullptr;
  float* d_v = nullptr;
  bool begins = false;
  bool d_bias = false;  // dBias is added to where it belongs
  // Set if something that is added to dBias is NaN or Inf.
  std::atomic<bool>* careful = nullptr;
  const StopFlag* stop = nullptr;  // looked at with every tile of rows
};

// dQ of one band of rows, in parts over the keys.
struct PartialQueries {
  const float* first;
  int64_t stride;           // from one part to the next
  const uint8_t* computed;  // by part; the others are 0
  int64_t count;
};

// Keys that some, and that all, of rows [first, first + count) of a task's see.
struct RowsKeys {
  KeyRange any;
  KeyRange all;
};
RowsKeys KeysOfRows(const GradientTask& task, int64_t first, int64_t count);

// Memory of one thread. Uninitialised on purpose: every part is written before it is read.
struct alignas(128) GradientScratch {
  // The key tile.
  float k[kHeadDimMax * kGradientKeys];      // panels of [dim][lane]
  float v[kHeadDimMax * kGradientKeys];      // the same
  float k_rows[kGradientKeys * kRowStride];  // [key][dim]
  // The tile of rows.
  float q[kGradientRows * kRowStride];
  float d_o[kGradientRows * kRowStride];
  float bias[kGradientRows * kGradientKeys];
  // Of each row and key: dS of all panels, the others of one panel.
  float d_score[kGradientRows * kGradientKeys];
  float weight[kGradientRows * kPanelLanesMax];  // the score, then P
  float d_weight[kGradientRows * kPanelLanesMax];
  float slope[kGradientRows * kPanelLanesMax];  // softcap's
  // Dropout's draws of one panel, which may begin within a tile of 16 keys; a row more for nobody.
  uint16_t draws[(kGradientRows + 1) * kDrawStride];
  float rows[4 * kRowStride];  // a few rows on their way in or out
  float ones[kPanelLanesMax];
  // Of each row: LSE as it is subtracted from scores, delta - dLSE, and relative to the key tile
  // the visible keys and the key on the diagonal; ALiBi's slope, and where dBias is.
  float base[kGradientRows];
  float less[kGradientRows];
  float begin[kGradientRows];
  float end[kGradientRows];
  float diagonal[kGradientRows];
  float alibi[kGradientRows];
  float* d_bias[kGradientRows];
};

// The versions for one instruction set.
struct GradientFunctions {
  void (*run)(const GradientTask& task, GradientScratch* scratch);
  // Brings rows [first, first + count) of a task's dQ together and stores them. False if any sum is
  // NaN or Inf.
  bool (*store_queries)(const GradientTask& task, const PartialQueries& parts, int64_t first,
                        int64_t count);
  // Stores the task's dK and dV. False if any sum is NaN or Inf.
  bool (*store_keys)(const GradientTask& task, GradientScratch* scratch);
  // dSink of head h.
  double (*sum_sink)(const Attention& attention, const Gradients& gradients, int64_t h,
                     const StopFlag* stop);
};

// For the best instruction set of this machine; asked once per call.
GradientFunctions ChooseGradientFunctions();

}  // namespace attend::cpu_flash
