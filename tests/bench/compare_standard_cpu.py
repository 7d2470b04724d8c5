# SPDX-License-Identifier: Apache-2.0
"""compare_standard.py on the CPU: attend.torch, which runs cpu_flash, and PyTorch with the same
number of threads in the same process."""

import os
import statistics
import time

import compare_standard_cells as standard

# Settings of oneDNN and MKL, PyTorch's CPU libraries, as attend has no AMX.
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"}
PAUSE_S = 0.02
TURN = 4  # runs per turn, of which the first does not count


def prepare(options):
    """Prepares the process before PyTorch is loaded."""
    if not options.amx:
        os.environ.update(NO_AMX)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.threads])


def _attentions(shape):
    """{name: attention(q, k, v)}."""
    import attend.torch
    from torch.nn.attention import SDPBackend

    import bench_kernels_contenders as entries
    import bench_kernels_gradients as gradients

    flash, math = (gradients.through_sdpa(backend)
                   for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))
    causal, hidden = shape.right == 0, entries.hidden_by(shape, "cpu")
    return {standard.OURS: lambda q, k, v: attend.torch.scaled_dot_product_attention(
                q, k, v, is_causal=causal),
            standard.CPU_FLASH: lambda q, k, v: flash(shape, q, k, v),
            standard.MATH: lambda q, k, v: math(shape, q, k, v),
            standard.UNFUSED: lambda q, k, v: entries.unfused(q, k, v, hidden)}


def _seconds(attention, leaves, d_o, way):
    """A function that runs the forward pass, or the backward pass alone."""
    import torch
    with torch.set_grad_enabled(way == standard.BACKWARD):
        begin = time.perf_counter()
        o = attention(*leaves)
        if way == standard.BACKWARD:
            begin = time.perf_counter()
            torch.autograd.grad(o, leaves, d_o)
        return time.perf_counter() - begin


def _race(attentions, leaves, d_o, way, options):
    """{name: seconds of all runs}, in turns. The first run of a turn does not count, as the
    previous contender's threads spin for a while."""
    found = {name: [] for name in attentions}
    began, turn = time.perf_counter(), 0
    while turn < options.turns_min or time.perf_counter() - began < options.seconds:
        names = list(attentions)
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            time.sleep(PAUSE_S)
            runs = [_seconds(attentions[name], leaves, d_o, way) for _ in range(TURN)]
            found[name] += runs[1:]
        turn += 1
    return found


def _summary(times):
    low, middle, high = statistics.quantiles(times, n=4)
    return {"ms": 1e3 * middle, "spread": (high - low) / 2 / middle, "runs": len(times)}


def _checked(attention, leaves, d_o, truth, way):
    """({errors}, fault or None) of a new run."""
    import torch
    o = attention(*leaves)
    if way == standard.FORWARD:
        return truth.forward([o.detach()])
    return truth.backward(torch.autograd.grad(o, leaves, d_o))


def times(options, workloads, done):
    """Calls done(rows) with the rows of each shape and pass, as in compare_standard_gpu.times."""
    import torch

    from bench_kernels_truth import Truth
    for workload in workloads:
        for shape in workload.shapes:
            dtype = getattr(torch, shape.dtype)
            *leaves, d_o = (torch.randn(shape.batch, shape.heads_q, shape.length, shape.dim,
                                        dtype=dtype) for _ in range(4))
            truth = Truth(*leaves, d_o, shape.left, shape.right, heads=1)
            for x in leaves:
                x.requires_grad_()
            attentions = _attentions(shape)
            if options.amx:
                attentions.pop(standard.OURS)
            for way in (standard.FORWARD, standard.BACKWARD):
                results, right = {}, {}
                for name, attention in attentions.items():
                    errors, fault = _checked(attention, leaves, d_o, truth, way)
                    results[name] = {"errors": errors}
                    if fault:
                        results[name]["failure"] = f"wrong answer ({fault}): not timed"
                    else:
                        right[name] = attention
                for name, own in _race(right, leaves, d_o, way, options).items():
                    results[name].update(_summary(own))
                done([{**workload.named(), "length": shape.length, "mask": shape.mask(),
                       "pass": way, "contender": name, **result}
                      for name, result in results.items()])


def matmul_gflops(dtype, size=2048):
    """The rate of PyTorch's matrix product, which shows whether AMX is off."""
    import torch
    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    found = []
    for _ in range(6):
        begin = time.perf_counter()
        torch.matmul(a, b)
        found.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(found[1:]) / 1e9
