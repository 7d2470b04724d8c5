# SPDX-License-Identifier: Apache-2.0
"""The shapes, cells with targets, and suites that bench_kernels.py measures."""

import dataclasses
import random

CUDNN, FLASH, EFFICIENT, MATH = "torch cudnn", "torch flash", "torch efficient", "torch math"
PADDED, FLASH_WINDOW = "torch cudnn, padded", "torch flash, window"
FA4, FA2 = "fa4", "fa2"
DETERMINISTIC = ", deterministic"
SM90, SM80, FP32, NAIVE = "cuda_flash_sm90", "cuda_flash_sm80", "cuda_flash_fp32", "cuda_naive"
# Short names of the rivals.
RIVALS = ("cudnn", "flash", "efficient", "math", "fa4", "unfused")
EACH = "auto, one call each"
FULL_OURS, FULL_CUDNN = "auto, full mask", "torch cudnn, full mask"
AUTO = "auto"
TOKENS = 16384


@dataclasses.dataclass(frozen=True)
class Shape:
    """A dense attention with Lq = Lk = length; left and right as in attend_params."""
    batch: int
    heads_q: int
    heads_kv: int
    length: int
    dim: int
    dim_v: int
    dtype: str = "float16"
    left: int = -1
    right: int = -1

    def pairs(self):
        """Visible (query, key) pairs of one sequence and head."""
        n = self.length

        def beyond(bound):  # number of keys hidden on one side, over all queries
            hidden = max(0, n - 1 - bound) if bound >= 0 else 0
            return hidden * (hidden + 1) // 2

        return n * n - beyond(self.left) - beyond(self.right)

    def flops(self):
        """Multiplications and additions over visible pairs."""
        return 2.0 * (self.dim + self.dim_v) * self.pairs() * self.batch * self.heads_q

    def mask(self):
        if self.left < 0:
            return {-1: "full", 0: "causal"}.get(self.right, f"right {self.right}")
        return f"window {self.left}, {self.right}"

    def input_bytes(self):
        kv = self.heads_kv * (self.dim + self.dim_v)
        item = 4 if self.dtype == "float32" else 2
        return self.batch * self.length * item * (self.heads_q * self.dim + kv)

    def unmasked(self):
        return dataclasses.replace(self, left=-1, right=-1)


@dataclasses.dataclass(frozen=True)
class Target:
    """`ours` must reach `ratio` times the TFLOP/s of the fastest of `rivals`."""
    ours: str
    rivals: tuple
    ratio: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """A line of a table: shapes that run together (a single one except in the ragged mix)."""
    suite: str
    name: str
    shapes: tuple
    targets: tuple = ()
    ladder: bool = False  # includes slow rungs and rivals

    def flops(self):
        return sum(shape.flops() for shape in self.shapes)


def is_raced(name, wanted):
    """Whether a rival is selected by the short names of RIVALS in `wanted`, where none selects
    all."""
    short = name.split(",")[0].removeprefix("torch ")
    return not wanted or {FA2: "flash"}.get(short, short) in wanted


def is_listed(name, wanted):
    """Whether a cell's name contains one of the alternatives of --filter, separated by bars."""
    return any(text in name for text in wanted.split("|"))


def cell(suite, shape, ratio=None, ladder=False):
    heads = f"H{shape.heads_q}" + (f"/{shape.heads_kv}" if shape.heads_kv != shape.heads_q else "")
    dims = f"D{shape.dim}" + (f"/{shape.dim_v}" if shape.dim_v != shape.dim else "")
    kind = "" if shape.dtype == "float16" else f" {shape.dtype}"
    name = f"B{shape.batch} {heads} L{shape.length} {dims}{kind} {shape.mask()}"
    targets = () if ratio is None else (Target(AUTO, (CUDNN,), ratio),
                                        Target(SM80, (FLASH,), 1.05))
    return Cell(suite, name, (shape,), targets, ladder)


def grid(suite, dim, heads, lengths, ratio, dim_v=None):
    """16k tokens in sequences of each length, full and causal."""
    def ratio_at(length):
        return ratio(length) if callable(ratio) else ratio

    return [cell(suite, Shape(TOKENS // length, heads, heads, length, dim, dim_v or dim,
                              right=right), ratio_at(length),
                 ladder=length == 2048 and right < 0)
            for right in (-1, 0) for length in lengths]


def windows():
    cells = []
    for left, right in ((255, 0), (1023, 0), (4095, 0), (512, 511)):
        shape = Shape(1, 16, 16, TOKENS, 128, 128, left=left, right=right)
        targets = (Target(AUTO, (FULL_OURS,), 0.7),) if left + right == 1023 else ()
        cells.append(dataclasses.replace(cell("window", shape), targets=targets))
    return cells


def ragged(seed):
    """64 requests whose lengths are the quantiles of a log-uniform distribution, so that seeds
    change only the order of the work."""
    lengths = [round(64 * 128 ** ((n + 0.5) / 64)) for n in range(64)]
    shapes = [Shape(1, 16, 16, length, 128, 128, right=-(n % 2))
              for n, length in enumerate(lengths)]
    random.Random(seed).shuffle(shapes)
    return [Cell("ragged", "64 requests, L 64..8192, H16 D128, half causal", tuple(shapes),
                 (Target(AUTO, (PADDED, CUDNN), 1.5),))]


def exact(suite):
    """float32, which runs on CUDA cores."""
    listed = [Shape(TOKENS // length, 16, 16, length, dim, dim, "float32")
              for length in (2048, 16384) for dim in (64, 128)]
    listed += [Shape(8, 16, 16, 2048, 128, 128, "float32", right=0)]
    listed += [Shape(8, 16, 16, 2048, dim, dim, "float32") for dim in (32, 96, 256)]
    listed.append(Shape(1, 1, 1, 131072, 128, 128, "float32"))
    return [cell(suite, shape, ladder=shape.length <= TOKENS) for shape in listed]


def suites(seed):
    """{name: cells}, in the order of the tables."""
    small = [cell("d64", Shape(4, 8, 8, length, 64, 64), 1.10)
             for length in (256, 512, 1024, 2048, 4096, 4864)]
    powers = [512, 1024, 2048, 4096, 8192, 16384]
    bfloat = [Shape(2, 16, 16, 8192, 128, 128, "bfloat16"),
              Shape(2, 32, 8, 8192, 128, 128, "bfloat16", right=0)]
    d192 = grid("d192", 192, 16, powers[2:], 1.05)
    d192 += grid("d192", 192, 16, powers[4:], 1.05, dim_v=128)
    quick = [cell("quick", Shape(2, 16, 16, 8192, 128, 128, right=right), 1.05)
             for right in (-1, 0)]
    quick += [cell("quick", Shape(4, 8, 8, 4096, 64, 64), 1.10),
              cell("quick", Shape(2, 8, 8, 8192, 256, 256), 1.05)]
    return {
        "d128": grid("d128", 128, 16, powers, 1.05), "d64": small,
        "d64long": grid("d64long", 64, 32, powers,
                        lambda length: 1.15 if length >= 8192 else 1.05),
        "d256": grid("d256", 256, 8, powers[2:], 1.05),
        "d96": grid("d96", 96, 16, powers[2:], 1.05), "d192": d192,
        "bf16gqa": [cell("bf16gqa", shape, 1.05) for shape in bfloat],
        "ragged": ragged(seed), "window": windows(), "fp32": exact("fp32"), "quick": quick,
    }
