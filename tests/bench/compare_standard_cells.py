# SPDX-License-Identifier: Apache-2.0
"""The workloads of compare_standard.py, and the names of its contenders."""

import dataclasses

import bench_kernels_cells as cells

OURS = "attend"
NAIVE, UNFUSED, MATH, FLASH, CUDNN = ("cuda_naive", "unfused PyTorch", "PyTorch math",
                                      "FlashAttention-2", "cuDNN")
CPU_FLASH = "PyTorch CPU flash"
GPU_NAMES = (NAIVE, UNFUSED, MATH, FLASH, CUDNN, OURS)
CPU_NAMES = (UNFUSED, MATH, CPU_FLASH, OURS)
NO_GRADIENTS = (NAIVE,)  # has no backward pass
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
MASKS = (-1, 0)  # right sides of windows: full and causal
LIMIT_BYTES = 16 << 30


@dataclasses.dataclass(frozen=True)
class Workload:
    """The shapes of a figure, of all lengths and masks."""
    key: str
    title: str
    shapes: tuple

    def named(self):
        return {"workload": self.key, "title": self.title}


def _workload(key, title, shape_of, lengths):
    return Workload(key, title, tuple(shape_of(length, right) for right in MASKS
                                      for length in lengths))


def gpu_workloads(quick):
    """B4 H8 as in flash-attention's own comparisons, and 16k tokens."""
    short = (256, 1024, 4096) if quick else (256, 512, 1024, 2048, 3072, 4096, 4864)
    powers = (512, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    return [
        _workload("d64", "D64, B4 H8, fp16",
                  lambda n, right: cells.Shape(4, 8, 8, n, 64, 64, right=right), short),
        _workload("d128", "D128, H16, B x L = 16k, fp16",
                  lambda n, right: cells.Shape(cells.TOKENS // n, 16, 16, n, 128, 128, right=right),
                  powers)]


def training_steps(quick):
    """Forward and backward through attend.torch: (shape, share of dropped weights)."""
    lengths = (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16384)
    found = [cells.Shape(cells.TOKENS // n, 16, 16, n, dim, dim, right=right)
             for dim in (64, 128) for right in MASKS for n in lengths]
    found += [cells.Shape(cells.TOKENS // n, 32, 8, n, 128, 128, "bfloat16", right=0)
              for n in lengths[-2:]]
    # Not causal, as the check relies on rows that see many keys.
    dropping = [cells.Shape(4, 16, 16, 4096, dim, dim) for dim in (64, 128)]
    return [(shape, 0.0) for shape in found] + [(shape, 0.1) for shape in dropping]


def memory_shapes(quick):
    lengths = [2**n for n in range(9, 18, 4 if quick else 1)]
    return [cells.Shape(1, 16, 16, n, 128, 128) for n in lengths]


def batch_shapes():
    """Shapes of which the largest batch within LIMIT_BYTES is searched."""
    return [cells.Shape(1, 8, 8, 4096, 64, 64), cells.Shape(1, 16, 16, 4096, 128, 128)]


def cpu_workloads(quick, lengths=None):
    lengths = lengths or ((512,) if quick else (512, 1024, 2048, 4096))
    return [_workload(f"cpu_d{dim}_{dtype}", f"D{dim}, B1 H8, {dtype}",
                      lambda n, right, dim=dim, dtype=dtype:
                      cells.Shape(1, 8, 8, n, dim, dim, dtype, right=right), lengths)
            for dtype in ("float32", "bfloat16") for dim in (64, 128)]
