# SPDX-License-Identifier: Apache-2.0
"""The cost of recomputing rows (kernels/cuda/ragged/redo_rows.cuh): the same shape with inputs that
need it and with ordinary inputs, in turns."""

import math
import statistics

import torch

import bench_kernels_cells as cells
import bench_kernels_contenders as entries
import bench_kernels_race as race

ROUNDS = 7
MOST = 3.3e38  # bfloat16's largest number is 3.39e38


def far_scores(q, k, v):
    """Scores beyond 2^24, which tiles cannot represent."""
    return q * 2.0**14, k * 2.0**14, v


def large_values(q, k, v):
    """Values whose sums overflow, though their means do not."""
    return q, k, (torch.sigmoid(v.float()) * MOST).to(v.dtype)


def one_nan(q, k, v):
    """NaN in the values of one token, and so in every row that sees it."""
    spoilt = v.clone()
    spoilt[:, :, v.shape[2] // 2] = math.nan
    return q, k, spoilt


def fault(name, output, v, causal):
    """The fault of the output, or None."""
    if name == "one NaN":
        first = v.shape[2] // 2 if causal else 0
        right = output[:, :, first:].isnan().all() and output[:, :, :first].isfinite().all()
        return None if right else "NaN is missing or misplaced"
    if not output.isfinite().all():
        return "not finite"
    low, high = v.float().amin(2, keepdim=True), v.float().amax(2, keepdim=True)
    slack = (high - low) / 64 + high.abs() / 64
    inside = (output.float() / 4 >= (low - slack) / 4).all() and \
        (output.float() / 4 <= high / 4 + slack / 4).all()
    return None if inside else "outside of V's range"


CASES = {"ordinary": lambda q, k, v: (q, k, v), "far scores": far_scores,
         "large values": large_values, "one NaN": one_nan}


def redo(attend):
    """[{kernel, mask, case, ms, ratio}], with `failure` instead of the times if there is none.
    `ratio`: to ordinary inputs with the same kernel and mask. B1 H16 L4096 D128 bfloat16."""
    found = []
    for right in (-1, 0):
        shape = cells.Shape(1, 16, 16, 4096, 128, 128, dtype="bfloat16", right=right)
        (_, tensors), = race.make_sets(cells.cell("redo", shape))[0]
        for kernel in ("cuda_flash_sm90", "cuda_flash_sm80", "cuda_flash_fp32"):
            running, lines = [], []
            for name, change in CASES.items():
                line = {"kernel": kernel, "mask": shape.mask(), "case": name}
                lines.append(line)
                changed = change(*tensors)
                contender = entries.AttendContender(attend, kernel)
                try:
                    contender.prepare([[(shape, changed)]])
                    contender.poison(0)
                    output = contender.run(0)[0]
                    torch.cuda.synchronize()
                except entries.CannotRun as failure:
                    line["failure"] = str(failure)
                    continue
                wrong = fault(name, output, changed[2], right == 0)
                if wrong:
                    line["failure"] = f"wrong answer ({wrong}): not timed"
                    continue
                running.append((contender, line, []))
            for _ in range(ROUNDS):
                for contender, _, times in running:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    contender.run(0)
                    end.record()
                    end.synchronize()
                    times.append(begin.elapsed_time(end))
            for contender, line, times in running:
                line["ms"] = statistics.median(times)
                line["ratio"] = line["ms"] / running[0][1]["ms"]
                contender.release()
            found += lines
    return found
