# SPDX-License-Identifier: Apache-2.0
"""The backward pass beside PyTorch's cuDNN and FlashAttention-2, in turns. Ours always adds in one
order; the rivals run as PyTorch runs them by default. FLOPs are five products of every visible
pair, whatever a kernel computes."""

import dataclasses
import math
import statistics

import attend_kernels
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

ROWS = 16384  # B times L
WARMUP, ROUNDS = 2, 9
# Of products of 16-bit factors, over the largest gradient: 2^-11 and 2^-8 for each of P, dS and the
# result, with room for sums that cancel.
ERROR_MAX = {"float16": 4e-3, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True)
class Cell:
    dim: int
    length: int
    causal: bool
    heads_q: int = 16
    heads_kv: int = 16
    dim_v: int = 0
    dtype: str = "float16"

    @property
    def name(self):
        dims = f"D{self.dim}" + (f"/{self.dim_v}" if self.dim_v else "")
        heads = "" if self.heads_q == self.heads_kv else f" Hq {self.heads_q} Hkv {self.heads_kv}"
        return f"{dims}{heads} {self.dtype} L{self.length} {'causal' if self.causal else 'full'}"

    @property
    def flops(self):
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        each = 2 * (3 * self.dim + 2 * (self.dim_v or self.dim))
        return each * pairs * self.heads_q * max(1, ROWS // self.length)


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CELLS = [Cell(dim, length, causal) for dim in (64, 128) for causal in (False, True)
         for length in LENGTHS]
CELLS += [Cell(dim, 4096, causal, dim_v=dim_v) for dim, dim_v in ((96, 0), (192, 128), (256, 0))
          for causal in (False, True)]
CELLS += [Cell(128, 8192, True, heads_q=32, heads_kv=8, dtype="bfloat16")]


class Inputs:
    """Q, K and V that want gradients, and dO."""

    def __init__(self, cell):
        def random(heads, dim):
            return torch.randn(max(1, ROWS // cell.length), heads, cell.length, dim,
                               device="cuda:0", dtype=getattr(torch, cell.dtype))

        dim_v = cell.dim_v or cell.dim
        self.q, self.k = random(cell.heads_q, cell.dim), random(cell.heads_kv, cell.dim)
        self.v, self.d_o = random(cell.heads_kv, dim_v), random(cell.heads_q, dim_v)


class Ours:
    name = "attend"

    def prepare(self, cell, x):
        self.causal = cell.causal
        self.o, self.lse = attend_kernels.attention(x.q, x.k, x.v, causal=cell.causal,
                                                    return_lse=True)

    def run(self, x):
        return attend_kernels.attention_backward(x.d_o, x.q, x.k, x.v, self.o, self.lse,
                                                 causal=self.causal)


class Rival:
    """A backend of PyTorch's SDPA, through autograd."""

    def __init__(self, name, backend):
        self.name, self.backend = name, backend

    def prepare(self, cell, x):
        self.leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        with sdpa_kernel(self.backend):
            self.o = sdpa(*self.leaves, is_causal=cell.causal,
                          enable_gqa=cell.heads_q != cell.heads_kv)

    def run(self, x):
        return torch.autograd.grad(self.o, self.leaves, x.d_o, retain_graph=True)


def fault(cell, x, gradients):
    """What is wrong with them, or None: all of one KV head's, against fp32."""
    group = cell.heads_q // cell.heads_kv
    b, head = x.q.shape[0] - 1, cell.heads_kv - 1
    heads = slice(head * group, head * group + group)
    hidden = torch.ones(cell.length, cell.length, dtype=torch.bool, device="cuda:0").triu_(1)
    k, v = x.k[b, head].float(), x.v[b, head].float()
    d_q, d_k, d_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for q, d_o in zip(x.q[b, heads].float(), x.d_o[b, heads].float()):
        weights = q @ k.T / math.sqrt(cell.dim)
        if cell.causal:
            weights.masked_fill_(hidden, -math.inf)
        weights = weights.softmax(-1)
        d_v += weights.T @ d_o
        d_weights = d_o @ v.T
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_scores /= math.sqrt(cell.dim)
        d_q.append(d_scores @ k)
        d_k += d_scores.T @ q
    got = (gradients[0][b, heads], gradients[1][b, head], gradients[2][b, head])
    for name, mine, truth in zip(("dQ", "dK", "dV"), got, (torch.stack(d_q), d_k, d_v)):
        error = (mine.float() - truth).abs().max() / truth.abs().max()
        if not error < ERROR_MAX[cell.dtype]:
            return f"{name} is off by {error:.1e}"
    return None


def timed_ms(contender, x):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    contender.run(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def race(cell, contenders):
    """A line for each: {cell, contender, ms, tflops}, or with `failure` in place of the times."""
    x, lines, runners = Inputs(cell), [], []
    for contender in contenders:
        line = {"cell": cell.name, "contender": contender.name}
        lines.append(line)
        try:
            contender.prepare(cell, x)
            wrong = fault(cell, x, contender.run(x))
        except (RuntimeError, attend_kernels.Error) as error:
            line["failure"] = str(error).splitlines()[0][:100]
            continue
        if wrong:
            line["failure"] = f"wrong answer ({wrong}): not timed"
            continue
        runners.append((contender, line, []))
    for n in range(WARMUP + ROUNDS):
        for contender, _, times in runners:
            ms = timed_ms(contender, x)
            if n >= WARMUP:
                times.append(ms)
    for _, line, times in runners:
        line["ms"] = statistics.median(times)
        line["tflops"] = cell.flops / line["ms"] / 1e9
    return lines


def backward(_):
    """The lines of all cells."""
    contenders = [Ours(), Rival("cudnn", SDPBackend.CUDNN_ATTENTION),
                  Rival("fa2", SDPBackend.FLASH_ATTENTION)]
    lines = []
    for cell in CELLS:
        lines += race(cell, contenders)
        torch.cuda.empty_cache()
        for line in lines[-len(contenders):]:
            print(line, flush=True)
    return lines
