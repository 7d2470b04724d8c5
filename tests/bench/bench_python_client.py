#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attend.Client compared with the C++ client, on one server in one run: the median time of a call
that sends --mib MiB of K and V and one row of Q, one call at a time.

    tests/bench/bench_python_client.py [--build build/release] [--mib 96] [--turns 5]

The two take turns with each transport, so that both run under the same conditions. Exit code 1 if
Python's median exceeds --ratio-max times the C++ client's where the bytes go over sockets. With
shared memory the two do different work: the C++ client's load writes its tensors there once, while
Python's client copies NumPy arrays there in every call unless they are there already.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("client/python", "kernels/python", "tests/e2e")]
HEADS, DIM = 8, 128


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--mib", type=int, default=96, help="K and V together")
    parser.add_argument("--turns", type=int, default=5, help="turns per client")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--ratio-max", type=float, default=1.3)
    return parser.parse_args()


class Cpp:
    """Runs attend-client load, one call at a time."""

    def __init__(self, address, options, folder):
        import harness
        self.command = [
            harness.binary("attend-client"), "load", "--server", address, "--shape",
            f"B1,H{HEADS},Lq1,Lk{rows(options)},D{DIM},dtype=float16", "--concurrency", "1",
            "--warmup", "0.3", "--duration", str(options.seconds), "--connections",
            str(options.connections), "--json", folder / "load.json"]
        self.json = folder / "load.json"

    def turn(self, transport, _):
        name = {"shared": "shm"}.get(transport, transport)
        subprocess.run([str(word) for word in (*self.command, "--transport", name)], check=True,
                       stdout=subprocess.DEVNULL)
        step, = json.loads(self.json.read_text())["steps"]
        return step["latency_from_sent_ms"]["p50"]


class Python:
    def __init__(self, address, options):
        import attend
        self.client = attend.Client(address, connections=options.connections)
        self.seconds = options.seconds
        shape = (1, HEADS, rows(options), DIM)
        random = np.random.default_rng(0)
        self.q = random.standard_normal((1, HEADS, 1, DIM)).astype(np.float16)
        self.plain = [np.empty(shape, np.float16) for _ in range(2)]
        for array in self.plain:
            array[...] = random.standard_normal(shape[-2:]).astype(np.float16)
        self.shared = []

    def share(self):
        for array in self.plain:
            self.shared.append(self.client.empty(array.shape, np.float16))
            self.shared[-1][...] = array

    def turn(self, transport, placed):
        times, until = [], time.perf_counter() + self.seconds
        k, v = self.shared if placed else self.plain
        self.client.attention(self.q, k, v, transport=transport)
        while time.perf_counter() < until or len(times) < 3:
            begin = time.perf_counter()
            self.client.attention(self.q, k, v, transport=transport)
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)


def rows(options):
    """The number of keys that make --mib MiB of K and V."""
    return options.mib * 2**20 // (2 * HEADS * DIM * 2)


def measure(address, options, folder):
    """The lines of the table, and whether Python is within the bound."""
    python, cpp = Python(address, options), Cpp(address, options, folder)
    lines, within = [], True
    for transport, placed in (("inline", False), ("chunked", False), ("shared", False),
                              ("shared", True)):
        if placed:
            python.share()
        times = {Cpp: [], Python: []}
        for _ in range(options.turns):
            for one in (cpp, python):
                times[type(one)].append(one.turn(transport, placed))
        ours, theirs = (statistics.median(times[one]) for one in (Python, Cpp))
        lines.append((transport + (", client.empty" if placed else ""), theirs, ours,
                      ours / theirs))
        within &= transport == "shared" or ours <= options.ratio_max * theirs
    python.client.close()
    return lines, within


def main():
    options = parsed()
    os.environ["ATTEND_BUILD_DIR"] = str(options.build)
    os.environ.setdefault("ATTEND_CLIENT_LIBRARY",
                          str(options.build / "client/c/libattend_client.so"))
    import harness
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        server = harness.Server(folder, "--shared-memory", "--shared-memory-socket",
                                folder / "s.sock")
        try:
            lines, within = measure(server.address, options, folder)
        finally:
            server.stop()
    print(f"{options.mib} MiB up, median of a call in ms, {options.turns} turns each, "
          f"{os.cpu_count()} cores")
    print(f"{'way':24}{'C++':>10}{'Python':>10}{'ratio':>8}")
    for way, theirs, ours, ratio in lines:
        print(f"{way:24}{theirs:10.2f}{ours:10.2f}{ratio:8.2f}")
    if not within:
        print(f"Python is beyond {options.ratio_max} times the C++ client", file=sys.stderr)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
