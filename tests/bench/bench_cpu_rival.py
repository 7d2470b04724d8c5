# SPDX-License-Identifier: Apache-2.0
"""PyTorch for bench_cpu, which starts this process and sends requests, one line of JSON each:

    {"prepare": {...}, "backward": false}  -> {"name": "flash"}, PyTorch's fastest implementation
    {"run": 1}                             -> {"seconds": 0.001}
    {"python": {...}}                      -> {"numpy": 40.1, ...}, attend.attention's microseconds

It ends at the end of its input. Its first line of output has its version.
"""

import json
import os
import pathlib
import statistics
import sys
import time

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise attend.attention would use a GPU

HERE = pathlib.Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "client/python"), str(HERE.parents[2] / "kernels/python")]

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None


# Implementations with all scores in memory are not tried above this number of scores.
_SCORES_MAX = 1 << 28
_LONG_S = 1  # longer runs are not repeated


def _tensors(shape):
    """q, k, v and dO."""
    dtype = getattr(torch, shape["dtype"])
    rows = ((shape["heads_q"], shape["len_q"]), (shape["heads_kv"], shape["len_k"]),
            (shape["heads_kv"], shape["len_k"]), (shape["heads_q"], shape["len_q"]))
    return [torch.randn(shape["batch"], *each, shape["dim"], dtype=dtype) for each in rows]


def _unfused(q, k, v, hidden):
    scores = (q * q.shape[-1]**-0.5) @ k.mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def _ways(shape):
    """{name: attention(q, k, v)}."""
    grouped = shape["heads_q"] != shape["heads_kv"]
    # PyTorch's causal masks are aligned to the top left, ours to the bottom right, where a single
    # row sees all keys.
    causal = shape["causal"] and shape["len_q"] > 1

    def through(backend):
        def attention(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=grouped)
        return attention
    ways = {"flash": through(SDPBackend.FLASH_ATTENTION)}
    if shape["batch"] * shape["heads_q"] * shape["len_q"] * shape["len_k"] >= _SCORES_MAX:
        return ways
    ways["math"] = through(SDPBackend.MATH)
    if not grouped:
        hidden = torch.ones(shape["len_q"], shape["len_k"], dtype=torch.bool).triu(1)
        ways["unfused"] = lambda q, k, v: _unfused(q, k, v, hidden if causal else None)
    return ways


class Prepared:
    """A problem with PyTorch's fastest implementation of it."""

    def __init__(self, shape, backward):
        *self._leaves, self._d_o = _tensors(shape)
        self._backward = backward
        for leaf in self._leaves:
            leaf.requires_grad_(backward)
        self._way = None
        times = {}
        for name, way in _ways(shape).items():
            self._way = way
            try:
                times[name] = self.run()
            except RuntimeError:  # no kernel for the problem
                continue
            # The first run is slower than later ones.
            if times[name] < min(3 * min(times.values()), _LONG_S):
                times[name] = min(self.run() for _ in range(3))
        self.name = min(times, key=times.get)
        self._way = _ways(shape)[self.name]
        self._group = max(1, int(1e-3 / times[self.name]))

    def run_group(self):
        """Seconds of a run. Short runs are timed in groups, as waking the threads would be most of
        the time of a single one."""
        return statistics.mean(self.run() for _ in range(self._group))

    def run(self):
        begin = time.perf_counter()
        with torch.set_grad_enabled(self._backward):
            o = self._way(*self._leaves)
            if self._backward:
                begin = time.perf_counter()
                torch.autograd.grad(o, self._leaves, self._d_o)
        return time.perf_counter() - begin


def _microseconds(call):
    for _ in range(20):
        call()
    found = []
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(100):
            call()
        found.append((time.perf_counter() - begin) / 100)
    return 1e6 * statistics.median(found)


def python_call(shape):
    """Times whole calls of attend.attention in this process."""
    found = {}
    try:
        import attend
        import numpy
        dims = ((shape["heads_q"], shape["len_q"]), (shape["heads_kv"], shape["len_k"]),
                (shape["heads_kv"], shape["len_k"]))
        arrays = [numpy.random.default_rng().standard_normal(
            (shape["batch"], *each, shape["dim"]), dtype=numpy.float32) for each in dims]
        found["numpy"] = _microseconds(lambda: attend.attention(*arrays))
        if torch is not None:
            tensors = _tensors(shape)[:3]
            found["torch"] = _microseconds(lambda: attend.attention(*tensors))
            found["PyTorch"] = _microseconds(
                lambda: torch.nn.functional.scaled_dot_product_attention(*tensors))
    except (ImportError, RuntimeError) as failure:
        found["failure"] = str(failure)
    return found


def main():
    version = ""
    if torch is not None:
        torch.set_num_threads(int(sys.argv[1]))
        version = f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    print(json.dumps({"version": version}), flush=True)
    prepared = None
    for line in sys.stdin:
        question = json.loads(line)
        if "prepare" in question:
            prepared = Prepared(question["prepare"], question["backward"])
            answer = {"name": prepared.name}
        elif "run" in question:
            answer = {"seconds": prepared.run_group()}
        else:
            answer = python_call(question["python"])
        print(json.dumps(answer), flush=True)


main()
