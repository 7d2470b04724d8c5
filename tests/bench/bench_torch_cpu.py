# SPDX-License-Identifier: Apache-2.0
"""attend.torch against PyTorch's own attention on the CPU, forward and backward, on the same
threads in the same process.

    tests/bench/bench_torch_cpu.py --library build/release/kernels/c/libattend_kernels.so

Prints a table of milliseconds and of PyTorch's time over ours. The two take turns, and the medians
count. Our answers are checked first. AMX is off unless --amx, for PyTorch alone: ours has none.
"""

import argparse
import itertools
import os
import pathlib
import statistics
import sys
import time

NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"}
PAUSE_S = 0.02


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", help="libattend_kernels.so (default: as attend_kernels does)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--amx", action="store_true")
    return parser.parse_args()


def prepare(options):
    """The process, before PyTorch is loaded."""
    if options.library:
        os.environ["ATTEND_KERNELS_LIBRARY"] = options.library
    if not options.amx:
        os.environ.update(NO_AMX)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.threads])
    root = pathlib.Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "kernels/python"), str(root / "tests/python")]


def run(attention, tensors, d_o, causal, backward):
    """Seconds of the forward pass, or of the backward pass alone."""
    begin = time.perf_counter()
    o = attention(*tensors, is_causal=causal)
    if backward:
        begin = time.perf_counter()
        o.backward(d_o)
    return time.perf_counter() - begin


def race(torch, rivals, tensors, d_o, causal, backward, seconds):
    """The median seconds of each rival. They take turns of five runs, of which the first does not
    count: then the threads of the one before, which spin for a while, are asleep."""
    times = [[] for _ in rivals]
    until = time.perf_counter() + seconds
    while not times[-1] or time.perf_counter() < until:
        for attention, own in zip(rivals, times):
            time.sleep(PAUSE_S)
            for turn in range(5):
                for x in tensors:
                    x.grad = None
                with torch.set_grad_enabled(backward):
                    taken = run(attention, tensors, d_o, causal, backward)
                if turn:
                    own.append(taken)
    return [statistics.median(own) for own in times]


def check(torch, attention, tensors, d_o, causal):
    """Raises if O and the gradients of the first head are off by more than their bounds."""
    import reference
    for x in tensors:
        x.grad = None
    o = attention(*tensors, is_causal=causal)
    o.backward(d_o)
    head = [x.detach()[:, :1].double().numpy() for x in (*tensors, d_o)]
    options = dict(causal=causal, alignment="top_left")
    truth = dict(o=reference.attention(*head[:3], **options)[0],
                 **reference.gradients(*head, **options))
    within = reference.bounds(*head, unit=torch.finfo(o.dtype).eps / 2, **options)
    for name, answer in dict(o=o, **{n: x.grad for n, x in zip("qkv", tensors)}).items():
        off = abs(answer.detach()[:, :1].double().numpy() - truth[name])
        assert (off <= within[name]).all(), f"{name} is wrong"


def main():
    options = parse()
    prepare(options)
    import attend.torch
    import torch
    torch.set_num_threads(options.threads)
    rivals = (attend.torch.scaled_dot_product_attention,
              torch.nn.functional.scaled_dot_product_attention)
    print(f"PyTorch {torch.__version__}, {options.threads} threads, B1 H{options.heads}, AMX "
          f"{'as the machine has it' if options.amx else 'off'}; ms of attend and of PyTorch")
    print("| | forward | | ratio | backward | | ratio | both |\n|---|---|---|---|---|---|---|---|")
    for dtype, dim, length, causal in itertools.product(
            (torch.float32, torch.bfloat16), options.dims, options.lengths, (False, True)):
        shape = (1, options.heads, length, dim)
        tensors = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
        d_o = torch.randn(shape).to(dtype)
        check(torch, rivals[0], tensors, d_o, causal)
        forward, backward = (race(torch, rivals, tensors, d_o, causal, way, options.seconds)
                             for way in (False, True))
        cells = [f"{str(dtype)[6:]} D{dim} L{length}{' causal' if causal else ''}"]
        for ours, theirs in (forward, backward):
            cells += [f"{1e3 * ours:.2f}", f"{1e3 * theirs:.2f}", f"{theirs / ours:.2f}"]
        cells.append(f"{(forward[1] + backward[1]) / (forward[0] + backward[0]):.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
