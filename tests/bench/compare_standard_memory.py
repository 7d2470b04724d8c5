# SPDX-License-Identifier: Apache-2.0
"""compare_standard.py: peaks of GPU memory, and the largest batch that fits into a limit.

All memory comes from PyTorch's allocator: inputs, outputs and gradients, PyTorch's own tensors, and
the workspaces that are passed to attend's C ABI (which allocates no GPU memory itself). So the
allocator's peak and its limit cover everything."""

import dataclasses
import gc

import torch

import bench_kernels_contenders as entries
import compare_standard_cells as standard
import compare_standard_gpu as gpu
from bench_kernels_truth import Truth
from bench_kernels_turns import DOES_NOT_FIT, reason

MIB = 1 << 20


def _inputs(shape, seed, with_gradients):
    """(sets, dO) of an attention, determined by the seed."""
    generator = torch.Generator(device="cuda:0").manual_seed(seed)

    def random(heads, dim):
        return torch.randn(shape.batch, heads, shape.length, dim, device="cuda:0",
                           dtype=getattr(torch, shape.dtype), generator=generator)

    tensors = (random(shape.heads_q, shape.dim), random(shape.heads_kv, shape.dim),
               random(shape.heads_kv, shape.dim_v))
    return [[(shape, tensors)]], random(shape.heads_q, shape.dim_v) if with_gradients else None


def _contender(attend, name, d_o):
    """The contender of this name, of the forward pass, or with the gradients if there is a dO."""
    lineup = gpu.forward_lineup(attend) if d_o is None else gpu.backward_lineup(attend, [d_o])
    return next(one for one in lineup if one.name == name)


def _run(attend, name, shape, seed, with_gradients, judge=None):
    """Runs a contender once, without catching exceptions. `judge` raises if the answer is wrong."""
    sets, d_o = _inputs(shape, seed, with_gradients)
    contender = _contender(attend, name, d_o)
    try:
        contender.prepare(sets)
        with contender.context():
            outputs = contender.run_once() if with_gradients else contender.run(0)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        if judge is not None:
            judge(outputs)
        return peak
    finally:
        contender.release()


def _settle():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _attempt(*arguments, **more):
    """{"bytes": peak of a run} or {"failure": reason}."""
    before = _settle()
    try:
        found = {"bytes": _run(*arguments, **more) - before}
    except (entries.CannotRun, RuntimeError) as failure:
        found = {"failure": reason(failure)}
    _settle()
    return found


def _raise_if_wrong(judgement):
    fault = judgement[1]
    if fault:
        raise RuntimeError(f"wrong answer ({fault})")


def _ways(name):
    return [False] if name in standard.NO_GRADIENTS else [False, True]


def _warm_up(attend, shape, seed):
    """Lets cuBLAS allocate the 32 MiB per thread that it keeps from its first product on."""
    for name in standard.GPU_NAMES:
        for way in _ways(name):
            _attempt(attend, name, shape, seed, way)


def peaks(attend, shapes, seed, done):
    """Calls done(rows) for every length: the peaks of a call, including inputs and outputs."""
    _warm_up(attend, shapes[0], seed)
    for shape in shapes:
        sets, d_o = _inputs(shape, seed, True)
        truth = Truth(*sets[0][0][1], d_o, shape.left, shape.right, heads=1)
        del sets, d_o
        rows = []
        for name in standard.GPU_NAMES:
            for way in _ways(name):
                judge = truth.backward if way else truth.forward
                found = _attempt(attend, name, shape, seed, way,
                                 judge=lambda o, judge=judge: _raise_if_wrong(judge(o)))
                rows.append({"length": shape.length, "contender": name,
                             "pass": standard.BOTH if way else standard.FORWARD, **found})
        done(rows)


class _Limit:
    """Limits PyTorch's allocator."""

    def __init__(self, byte_count):
        total = torch.cuda.get_device_properties(0).total_memory
        if byte_count > total:
            raise entries.CannotRun(f"the GPU has {total} bytes, below {byte_count}")
        self.share = byte_count / total

    def __enter__(self):
        torch.cuda.set_per_process_memory_fraction(self.share)

    def __exit__(self, *_):
        torch.cuda.set_per_process_memory_fraction(1.0)


def _fits(attend, name, shape, batch, seed, way):
    one = dataclasses.replace(shape, batch=batch)
    found = _attempt(attend, name, one, seed, way)
    if "failure" in found and found["failure"] != DOES_NOT_FIT:
        raise entries.CannotRun(found["failure"])
    return "bytes" in found


def _largest(attend, name, shape, seed, way):
    """{"batch", "bytes_each"}. The batch is estimated from two peaks, which give the bytes of a
    sequence and the rest, and confirmed by runs under the limit."""
    small, large = (_attempt(attend, name, dataclasses.replace(shape, batch=batch), seed, way)
                    for batch in (1, 3))
    for found in (small, large):
        if "failure" in found:
            return found
    each = (large["bytes"] - small["bytes"]) / 2
    computed = int((standard.LIMIT_BYTES - (small["bytes"] - each)) // each)
    with _Limit(standard.LIMIT_BYTES):
        batch = max(computed, 0)
        step = max(1, batch // 100)
        while batch > 0 and not _fits(attend, name, shape, batch, seed, way):
            batch = max(0, batch - step)
        while _fits(attend, name, shape, batch + 1, seed, way):
            batch += 1
    return {"batch": batch, "computed": computed, "bytes_each": each}


def batches(attend, shapes, seed, done):
    """Calls done(rows) for every shape: the largest batches within LIMIT_BYTES."""
    for shape in shapes:
        for name in standard.GPU_NAMES:
            rows = []
            for way in _ways(name):
                try:
                    found = _largest(attend, name, shape, seed, way)
                except entries.CannotRun as failure:
                    found = {"failure": str(failure)}
                rows.append({"cell": f"D{shape.dim} H{shape.heads_q} L{shape.length} "
                                     f"{shape.dtype} {shape.mask()}", "contender": name,
                             "pass": standard.BOTH if way else standard.FORWARD, **found})
            done(rows)
