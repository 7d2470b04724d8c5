# SPDX-License-Identifier: Apache-2.0
"""Decoding: few query rows and long K and V, dense and in pages, compared with PyTorch's cuDNN and
the device's memory bandwidth. Calls are captured in a graph over enough sets of inputs that none is
still in the cache when it is used again."""

import ctypes
import dataclasses
import math
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import bench_kernels_contenders as entries

CACHE_BYTES = 160 << 20  # an H200's L2 has 50 MB
CALLS_LEAST, ROUNDS = 8, 15
SETS_MAX = 24
ERROR_MAX = 8e-3  # for weights rounded to bfloat16, relative to the largest output


@dataclasses.dataclass(frozen=True)
class Cell:
    """`lengths`: numbers of keys by sequence. `rows`: number of query rows."""
    name: str
    lengths: tuple
    rows: int = 1
    heads_q: int = 64
    heads_kv: int = 8
    dim: int = 128

    def bytes(self):
        return sum(self.lengths) * self.heads_kv * self.dim * 4


CELLS = [
    Cell("B1 2k", (2048,)), Cell("B1 8k", (8192,)), Cell("B1 128k", (131072,)),
    Cell("B8 32k", (32768,) * 8), Cell("B32 8k", (8192,) * 32),
    Cell("B8 32k, 2 rows", (32768,) * 8, rows=2), Cell("B8 32k, 4 rows", (32768,) * 8, rows=4),
    Cell("B8 32k, 8 rows", (32768,) * 8, rows=8),
    *(Cell(f"{name}, {rows} rows", lengths, rows=rows)
      for name, lengths in (("B8 32k", (32768,) * 8), ("B1 128k", (131072,)))
      for rows in (16, 24, 32, 64, 128, 512)),
    Cell("B33, one 100x", (131072,) + (1312,) * 32), Cell("B33 even", (5248,) * 33),
    Cell("B32 32k D256", (32768,) * 32, heads_q=32, heads_kv=2, dim=256),
]


class Inputs:
    """A set: Q, and K and V, either dense (equal lengths) or in pages of `page_rows`."""

    def __init__(self, cell, page_rows):
        def random(*sizes):
            return torch.randn(*sizes, device="cuda:0", dtype=torch.bfloat16)

        longest, count = max(cell.lengths), len(cell.lengths)
        self.q = random(count, cell.heads_q, cell.rows, cell.dim)
        self.out = torch.full_like(self.q, math.nan)
        self.table = self.kv_lengths = None
        if page_rows == 0:
            self.k, self.v = (random(count, cell.heads_kv, longest, cell.dim) for _ in range(2))
            return
        needed = [-(-length // page_rows) for length in cell.lengths]
        self.k, self.v = (random(sum(needed), cell.heads_kv, page_rows, cell.dim)
                          for _ in range(2))
        order = torch.randperm(sum(needed), dtype=torch.int32)
        table = torch.full((count, max(needed)), -1, dtype=torch.int32)
        for b, numbers in enumerate(order.split(needed)):
            table[b, :len(numbers)] = numbers
        self.table = table.to("cuda:0")
        if len(set(cell.lengths)) > 1:
            self.kv_lengths = torch.tensor(cell.lengths, dtype=torch.int64, device="cuda:0")

    def keys(self, tensor, b, head, length):
        """The rows of K or V of sequence b."""
        if self.table is None:
            return tensor[b, head, :length]
        rows = tensor.shape[2]
        numbers = self.table[b, :-(-length // rows)].long()
        return tensor[numbers, head].reshape(-1, tensor.shape[3])[:length]


def fault(cell, inputs, output):
    """Compares a few heads with fp32; returns the fault or None."""
    if not output.isfinite().all():
        return "not finite"
    group = cell.heads_q // cell.heads_kv
    for b in {0, len(cell.lengths) // 2, len(cell.lengths) - 1}:
        for head in (0, cell.heads_kv - 1):
            k, v = (inputs.keys(x, b, head, cell.lengths[b]).float() for x in (inputs.k, inputs.v))
            heads = slice(head * group, head * group + group)
            weights = (inputs.q[b, heads].float() @ k.T / math.sqrt(cell.dim)).softmax(-1)
            expected = weights @ v
            error = (output[b, heads].float() - expected).abs().max() / expected.abs().max()
            if not error < ERROR_MAX:
                return f"off by {error:.1e}"
    return None


class Ours:
    """One call of the C ABI on each set."""

    def __init__(self, attend, cell, kernel, page_rows, config=-1):
        self.attend, self.cell, self.kernel, self.page_rows = attend, cell, kernel, page_rows
        self.config = config
        self.name = kernel + (f", pages of {page_rows}" if page_rows else "")

    def params(self, inputs):
        library, cell = entries._library, self.cell
        p = library.Params(
            struct_bytes=ctypes.sizeof(library.Params), dtype=library.DTYPES["bfloat16"],
            batch=len(cell.lengths), heads_q=cell.heads_q, heads_kv=cell.heads_kv,
            len_q=cell.rows, len_k=max(cell.lengths), dim=cell.dim, dim_v=cell.dim,
            window_left=-1, window_right=-1, scale=1 / math.sqrt(cell.dim), config=self.config,
            kernel=self.kernel.encode(), page_rows=self.page_rows)
        for name, x in zip("qkvo", (inputs.q, inputs.k, inputs.v, inputs.out)):
            setattr(p, name, library.TensorStruct(x.data_ptr(), *x.stride()[:3]))
        if inputs.table is not None:
            p.kv_pages, p.kv_pages_stride = inputs.table.data_ptr(), inputs.table.stride(0)
        if inputs.kv_lengths is not None:
            p.kv_lengths = inputs.kv_lengths.data_ptr()
        return p

    def prepare(self, sets):
        self.list = [self.params(one) for one in sets]
        needed = ctypes.c_int64()
        self.attend.check(self.attend.lib.attend_workspace_bytes(ctypes.byref(self.list[0]),
                                                                 ctypes.byref(needed)))
        self.workspace = torch.zeros(needed.value + 256, dtype=torch.uint8, device="cuda:0")
        for p in self.list:
            p.workspace = (self.workspace.data_ptr() + 255) // 256 * 256
            p.workspace_bytes = needed.value

    def run(self, n, inputs):
        stream = torch.cuda.current_stream().cuda_stream
        self.attend.check(self.attend.lib.attend_run(ctypes.byref(self.list[n]), stream))
        return inputs.out


class Cudnn:
    """PyTorch's SDPA with cuDNN as the only backend."""
    name, page_rows = "cudnn", 0

    def prepare(self, sets):
        """Nothing to prepare."""

    def run(self, _, inputs):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(inputs.q, inputs.k, inputs.v, enable_gqa=True)


def graph_us(contender, sets):
    """Microseconds per call: the median time of a graph, divided by its number of calls."""
    calls = max(CALLS_LEAST, len(sets))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for n, inputs in enumerate(sets):
            contender.run(n, inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for n in range(calls):
            contender.run(n % len(sets), sets[n % len(sets)])
    times = []
    for n in range(ROUNDS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times += [begin.elapsed_time(end)] if n >= 3 else []
    return statistics.median(times) / calls * 1e3


def read_tbs():
    """Memory bandwidth of the device in TB/s, measured by a sum over 4 GiB."""
    x = torch.ones(1 << 30, device="cuda:0")
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x.sum()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return x.numel() * 4 / min(times) / 1e9


def race(cell, attend, page_rows, contenders):
    """Lines of one layout."""
    # The tensors of a long cell alone exceed the cache.
    count = min(SETS_MAX, max(1, -(-CACHE_BYTES // cell.bytes())))
    sets = [Inputs(cell, page_rows) for _ in range(count)]
    lines = []
    for contender in contenders:
        line = {"cell": cell.name, "contender": contender.name}
        lines.append(line)
        try:
            contender.prepare(sets)
            sets[0].out.fill_(math.nan)
            wrong = fault(cell, sets[0], contender.run(0, sets[0]))
            if wrong:
                line["failure"] = f"wrong answer ({wrong}): not timed"
                continue
            line["us"] = graph_us(contender, sets)
            line["tbs"] = cell.bytes() / line["us"] / 1e6
        except (entries.CannotRun, RuntimeError) as failure:
            line["failure"] = str(failure).splitlines()[0][:100]
    return lines


def decode(attend):
    """[{cell, contender, us, tbs}], with `failure` instead of the times if there is none."""
    lines = [{"cell": "read", "contender": "torch.sum", "us": 0.0, "tbs": read_tbs()}]
    for cell in CELLS:
        if len(set(cell.lengths)) == 1:
            rivals = [Ours(attend, cell, "auto", 0), Ours(attend, cell, "cuda_flash_sm90", 0),
                      Cudnn()]
            lines += race(cell, attend, 0, rivals)
        for page_rows in (16, 64):
            lines += race(cell, attend, page_rows, [Ours(attend, cell, "auto", page_rows)])
        torch.cuda.empty_cache()
        for line in lines:
            if line["cell"] == cell.name:
                print(line, flush=True)
    return lines
