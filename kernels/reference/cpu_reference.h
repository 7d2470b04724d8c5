// SPDX-License-Identifier: Apache-2.0
//
// Rung 0: the definition of the answer, in plain loops and double precision. Pure functions of host
// memory on the calling thread; they cache at most kKeptScores scores.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/reference/score_rounding.h"

namespace attend {

// A row's scores are needed twice. Those of its first keys are cached, 1.5 MiB at most; later ones
// are computed twice.
inline constexpr int64_t kKeptScores = 65536;

// One output row: sequence b, query head h, query row i < q_rows of the sequence, from host memory.
// Writes o[Dv] (unrounded) and *lse. Padding rows (i >= q_len) and rows in which no key has weight
// give 0 and -inf; with a sink, the latter's LSE is the sink's logit, which is still in the
// denominator. A key whose score is -inf, from bias or by arithmetic, has no weight, and its V is
// not read. `rounding`, if not null, must be default-initialised. Returns within milliseconds once
// `stop` is set; the output is then meaningless.
void ReferenceRow(const Attention& attention, int64_t b, int64_t h, int64_t i, double* o,
                  double* lse, RowRounding* rounding = nullptr, const StopFlag* stop = nullptr);

// ReferenceRow, rounded once and stored in attention.o and attention.lse.
void StoreReferenceRow(const Attention& attention, int64_t b, int64_t h, int64_t i,
                       const StopFlag* stop = nullptr);

// Computes the whole problem on the calling thread.
void CpuReference(const Attention& attention);

}  // namespace attend
