#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Races attend's CUDA kernels against PyTorch's SDPA on one GPU, in one process.

Correctness comes first: every contender's output is poisoned, computed, and compared on sampled
rows with a float64 reference, under the bound that kernels/check_rows.h derives; attend's kernels
get no time printed if they miss it. Then all contenders take turns on the same fresh random inputs
(CUDA events, median over the rounds). Prints a Markdown table, writes everything as JSON to --out.

    python3 tests/bench/bench_cuda.py --library build/cuda/kernels/cuda/libattend_kernels.so \\
        --out bench_cuda.json [--tune]
"""

import argparse
import ctypes
import json
import math
import os
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
WEIGHT_ROUNDINGS = 8  # as in kernels/check_rows.cc
REFERENCE_BYTES_MAX = 4 << 30  # of float64 scores at a time


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride_b", ctypes.c_int64),
                ("stride_h", ctypes.c_int64), ("stride_l", ctypes.c_int64)]


class Params(ctypes.Structure):
    """attend_params of kernels/attend_c.h."""
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64), ("device", ctypes.c_int32), ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int64), ("heads_q", ctypes.c_int64), ("heads_kv", ctypes.c_int64),
        ("len_q", ctypes.c_int64), ("len_k", ctypes.c_int64), ("dim", ctypes.c_int64),
        ("dim_v", ctypes.c_int64), ("packed", ctypes.c_int32), ("alignment", ctypes.c_int32),
        ("total_q", ctypes.c_int64), ("total_k", ctypes.c_int64), ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64), ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
        ("q", Tensor), ("k", Tensor), ("v", Tensor), ("o", Tensor), ("lse", ctypes.c_void_p),
        ("lse_stride_b", ctypes.c_int64), ("lse_stride_h", ctypes.c_int64),
        ("bias", ctypes.c_void_p), ("bias_stride_b", ctypes.c_int64),
        ("bias_stride_h", ctypes.c_int64), ("bias_stride_q", ctypes.c_int64),
        ("bias_dtype", ctypes.c_int32), ("config", ctypes.c_int32),
        ("alibi_slopes", ctypes.c_void_p), ("alibi_stride_b", ctypes.c_int64),
        ("sinks", ctypes.c_void_p), ("q_lengths", ctypes.c_void_p),
        ("kv_lengths", ctypes.c_void_p), ("q_offsets", ctypes.c_void_p),
        ("kv_offsets", ctypes.c_void_p), ("kernel", ctypes.c_char_p),
        ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_int64),
    ]


class Attend:
    """libattend_kernels.so."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.attend_last_error.restype = ctypes.c_char_p
        self.lib.attend_config_name.restype = ctypes.c_char_p
        self.lib.attend_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        for name in ("attend_workspace_bytes", "attend_configs"):
            getattr(self.lib, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.lib.attend_config_name.argtypes = [ctypes.c_void_p, ctypes.c_int32]

    def check(self, code):
        if code != 0:
            raise RuntimeError(f"code {code}: {self.lib.attend_last_error().decode()}")

    def params(self, kernel, q, k, v, o, causal, config=-1):
        def tensor(t):
            assert t.stride(3) == 1
            return Tensor(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))

        p = Params()
        p.struct_bytes = ctypes.sizeof(Params)
        p.device = q.device.index
        p.dtype = DTYPES[q.dtype]
        p.batch, p.heads_q, p.len_q, p.dim = q.shape
        p.heads_kv, p.len_k = k.shape[1], k.shape[2]
        p.dim_v = v.shape[3]
        p.window_left, p.window_right = -1, 0 if causal else -1
        p.scale = 1 / math.sqrt(p.dim)
        p.q, p.k, p.v, p.o = tensor(q), tensor(k), tensor(v), tensor(o)
        p.kernel = kernel.encode()
        p.config = config
        return p

    def workspace_bytes(self, params):
        out = ctypes.c_int64()
        self.check(self.lib.attend_workspace_bytes(ctypes.byref(params), ctypes.byref(out)))
        return out.value

    def configs(self, params):
        out = ctypes.c_int32()
        self.check(self.lib.attend_configs(ctypes.byref(params), ctypes.byref(out)))
        return [self.lib.attend_config_name(ctypes.byref(params), n).decode()
                for n in range(out.value)]

    def run(self, params):
        stream = torch.cuda.current_stream().cuda_stream
        self.check(self.lib.attend_run(ctypes.byref(params), stream))


class Shape:
    def __init__(self, batch, heads, length, dim, dtype, causal=False):
        self.batch, self.heads, self.length, self.dim = batch, heads, length, dim
        self.dtype, self.causal = dtype, causal

    def name(self):
        dtype = str(self.dtype).removeprefix("torch.")
        return (f"B{self.batch} H{self.heads} L{self.length} D{self.dim} {dtype}"
                + (" causal" if self.causal else ""))

    def flops(self):
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.dim * pairs * self.batch * self.heads

    def inputs(self):
        size = (self.batch, self.heads, self.length, self.dim)
        return [torch.randn(size, device="cuda:0", dtype=self.dtype) for _ in range(3)]


def plain_rows(scores, v, dtype):
    """Standard attention in the tensors' precision: weights and O rounded to the dtype."""
    weights = torch.softmax(scores, dim=-1).to(dtype).float()
    return (weights @ v.float()).to(dtype).double()


def check_rows(shape, inputs, output):
    """Worst ratio of error to bound over sampled rows of every sequence and head, and the largest
    error. Above 1 is wrong. See kernels/check_rows.h for the bound."""
    if not torch.isfinite(output).all():
        return math.inf, math.inf
    q, k, v = inputs
    u32, unit = UNIT_ROUNDOFF[torch.float32], UNIT_ROUNDOFF[shape.dtype]
    count = max(2, min(64, REFERENCE_BYTES_MAX // (8 * shape.heads * shape.length) // 4))
    rows = torch.cat([torch.tensor([0, shape.length - 1]),
                      torch.randint(shape.length, (count - 2,))]).to(q.device)
    scale = 1 / math.sqrt(shape.dim)
    worst_needed, plain_ratio, worst_error = 0.0, 0.0, 0.0
    for b in range(shape.batch):
        qd, kd, vd = q[b][:, rows].double(), k[b].double(), v[b].double()
        scores = scale * (qd @ kd.mT)
        magnitude = abs(scale) * (qd.abs() @ kd.abs().mT).amax(-1, keepdim=True)
        plain_scores = (q[b][:, rows].float() @ k[b].float().mT) * scale
        if shape.causal:
            hidden = torch.arange(shape.length, device=q.device)[None, :] > rows[:, None]
            scores.masked_fill_(hidden, -math.inf)
            plain_scores.masked_fill_(hidden, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        reference = weights @ vd
        w = weights @ vd.abs()
        fp32_part = u32 * (WEIGHT_ROUNDINGS + (2 + math.sqrt(shape.dim) / 2) * magnitude) * w
        rounding = unit * w + fp32_part
        floor = unit * reference.abs() + fp32_part
        plain = plain_rows(plain_scores, v[b], shape.dtype)
        error = (output[b][:, rows].double() - reference).abs()
        plain_ratio = max(plain_ratio, ((plain - reference).abs() / rounding).max().item())
        needed = (error - floor).clamp(min=0) / (2 * rounding)
        worst_needed = max(worst_needed, needed.max().item())
        worst_error = max(worst_error, error.max().item())
    return (worst_needed / plain_ratio if worst_needed > 0 else 0.0), worst_error


class Contender:
    """Something that fills an output from (q, k, v): attend's kernel or PyTorch's."""

    def __init__(self, name, rounds, is_attend):
        self.name, self.rounds, self.is_attend = name, rounds, is_attend
        self.times_ms, self.result = [], {}


class AttendContender(Contender):
    def __init__(self, attend, kernel, config, label, rounds):
        super().__init__(label, rounds, True)
        self.attend, self.kernel, self.config = attend, kernel, config

    def prepare(self, shape, sets):
        self.outputs = [torch.empty_like(q) for q, _, _ in sets]
        self.params = [self.attend.params(self.kernel, q, k, v, o, shape.causal, self.config)
                       for (q, k, v), o in zip(sets, self.outputs)]
        bytes_needed = self.attend.workspace_bytes(self.params[0])
        self.workspace = torch.empty(bytes_needed + 256, dtype=torch.uint8, device="cuda:0")
        for params in self.params:
            params.workspace = (self.workspace.data_ptr() + 255) // 256 * 256
            params.workspace_bytes = bytes_needed
        self.result["beside_bytes"] = bytes_needed

    def poison(self, n):
        self.outputs[n].fill_(math.nan)

    def run(self, n):
        self.attend.run(self.params[n])
        return self.outputs[n]

    def release(self):
        del self.outputs, self.params, self.workspace


class TorchContender(Contender):
    def __init__(self, backend, label, rounds):
        super().__init__(label, rounds, False)
        self.backend = backend

    def prepare(self, shape, sets):
        self.shape, self.sets = shape, sets

    def poison(self, n):
        pass

    def run(self, n):
        q, k, v = self.sets[n]
        with sdpa_kernel(self.backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.shape.causal)

    def release(self):
        del self.sets


def first_run(contender, shape, sets):
    """Runs and checks once on every input set. False if it must not be timed."""
    contender.prepare(shape, sets)
    worst = error = 0.0
    for n, inputs in enumerate(sets):
        contender.poison(n)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = contender.run(n)
        torch.cuda.synchronize()
        if not contender.is_attend:
            beside = torch.cuda.max_memory_allocated() - before
            beside -= output.numel() * output.element_size()
            contender.result["beside_bytes"] = max(0, beside)
        ratio, largest = check_rows(shape, inputs, output)
        worst, error = max(worst, ratio), max(error, largest)
        if contender.is_attend and n == 0:
            contender.first = output.clone()
        del output
    contender.result.update(error_over_bound=worst, max_abs_error=error, correct=worst <= 1.0)
    return contender.result["correct"] or not contender.is_attend


def race(shape, contenders):
    sets = [shape.inputs() for _ in range(2 if shape.length < 100000 else 1)]
    running = []
    for contender in contenders:
        try:
            if first_run(contender, shape, sets):
                running.append(contender)
            else:
                contender.result["failure"] = "wrong answer: not timed"
        except (RuntimeError, torch.OutOfMemoryError) as failure:
            contender.result["failure"] = str(failure).splitlines()[0][:100]
        torch.cuda.empty_cache() if not contender.is_attend else None
    for turn in range(max((c.rounds for c in running), default=0)):
        for contender in running:
            if turn >= contender.rounds:
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the GPU waits here while the CPU enqueues the rest
            begin.record()
            contender.run(turn % len(sets))
            end.record()
            end.synchronize()
            contender.times_ms.append(begin.elapsed_time(end))
    for contender in running:
        median = statistics.median(contender.times_ms)
        contender.result.update(ms=median, tflops=shape.flops() / median / 1e9,
                                times_ms=contender.times_ms)
        if contender.is_attend:
            contender.poison(0)
            same = torch.equal(contender.run(0), contender.first)
            contender.result["same_bits"] = same
            if not same:
                contender.result.update(correct=False, failure="two runs differ: a race")
                contender.result.pop("ms")
            del contender.first
    for contender in contenders:
        if hasattr(contender, "workspace") or hasattr(contender, "sets"):
            contender.release()
    torch.cuda.empty_cache()
    return {c.name: c.result for c in contenders}


def contenders_for(attend, shape, tune, with_quadratic):
    rounds = 9 if shape.length < 100000 else 3
    rivals = [TorchContender(SDPBackend.EFFICIENT_ATTENTION, "torch efficient", rounds)]
    if shape.dtype != torch.float32:
        rivals.append(TorchContender(SDPBackend.FLASH_ATTENTION, "torch flash", rounds))
    ours = [AttendContender(attend, "cuda_flash_fp32", -1, "cuda_flash_fp32", rounds)]
    if tune:
        probe = [torch.empty(1, 1, 1, shape.dim, device="cuda:0", dtype=shape.dtype)] * 4
        names = attend.configs(attend.params("cuda_flash_fp32", *probe, shape.causal))
        ours += [AttendContender(attend, "cuda_flash_fp32", n, f"config {n} {name}", rounds)
                 for n, name in enumerate(names)]
    if with_quadratic:
        ours.append(AttendContender(attend, "cuda_naive", -1, "cuda_naive", 3))
        rivals.append(TorchContender(SDPBackend.MATH, "torch math", 3))
    return ours + rivals


def print_table(title, results):
    rival = results.get("torch efficient", {}).get("ms")
    print(f"\n### {title}\n")
    print("| contender | ms | TFLOP/s | x torch efficient | error / bound | max error "
          "| bytes beside tensors |")
    print("|---|---|---|---|---|---|---|")
    for name, r in results.items():
        if "ms" in r:
            speed = f"{rival / r['ms']:.2f}" if rival else "-"
            time = f"{r['ms']:.3f} | {r['tflops']:.1f} | {speed}"
        else:
            time = f"{r.get('failure', 'not run')} | - | -"
        beside = f"{r['beside_bytes'] / 2**20:.0f} MiB" if "beside_bytes" in r else "-"
        print(f"| {name} | {time} | {r.get('error_over_bound', math.nan):.2f} | "
              f"{r.get('max_abs_error', math.nan):.1e} | {beside} |", flush=True)


def shapes(quick):
    float32, tokens = torch.float32, 16384
    listed = [Shape(tokens // length, 16, length, dim, float32)
              for length in (2048, 16384) for dim in (64, 128)]
    if quick:
        return listed[:2]
    listed += [Shape(8, 16, 2048, 128, float32, causal=True),
               Shape(8, 16, 2048, 96, float32), Shape(8, 16, 2048, 256, float32),
               Shape(8, 16, 2048, 32, float32)]
    listed += [Shape(8, 16, 2048, dim, dtype)
               for dim in (64, 128) for dtype in (torch.float16, torch.bfloat16)]
    return listed + [Shape(1, 1, 131072, 128, float32)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--library", default=os.path.join(
        here, "../../build/cuda/kernels/cuda/libattend_kernels.so"))
    parser.add_argument("--out", help="write everything measured there as JSON")
    parser.add_argument("--tune", action="store_true", help="race every compiled tile config")
    parser.add_argument("--quick", action="store_true", help="the two shapes of L 2048 only")
    parser.add_argument("--seed", type=int, help="of the inputs (default: a fresh one)")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    seed = torch.seed() % 2**32 if args.seed is None else args.seed
    torch.manual_seed(seed)
    attend = Attend(args.library)
    device = torch.cuda.get_device_name(0)
    print(f"{device}, torch {torch.__version__}, seed {seed}")
    report = {"device": device, "torch": torch.__version__, "seed": seed, "shapes": {}}
    wrong = []
    for shape in shapes(args.quick):
        # The quadratic ones take seconds where L is large; 131072^2 scores would be 64 GiB.
        quadratic = shape.dtype == torch.float32 and not shape.causal and shape.length < 100000
        results = race(shape, contenders_for(attend, shape, args.tune, quadratic))
        print_table(shape.name(), results)
        report["shapes"][shape.name()] = results
        wrong += [f"{name} at {shape.name()}: {r.get('failure')}" for name, r in results.items()
                  if not name.startswith("torch") and "ms" not in r
                  and "cudaErrorInvalidValue" not in r.get("failure", "")]
        if args.out:
            with open(args.out, "w", encoding="utf-8") as out:
                json.dump(report, out, indent=1)
    for fault in wrong:
        print(f"FAILED {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
