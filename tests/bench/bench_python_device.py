#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attend.Client with torch tensors on a GPU compared with the C++ client with memory of that GPU
shared by CUDA IPC, on one server in one run: the median time of a call with 96 MiB of inputs.

    tests/bench/bench_python_device.py --server ADDRESS --client DIST/bin/attend-client

The contenders take turns. The C++ client's tensors are in shared memory from the start, and its
answers stay there, as do Python's in memory of client.empty; on a separate stream that the client
knows to be idle, a call enqueues nothing. Other tensors are copied there within the GPU in every
call, and the answer is copied out. Python's time includes synchronising the stream after the
call."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("client/python", "kernels/python")]
SHAPE = "B1,H16,L8192,D128,dtype=float16"


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--client", required=True)
    parser.add_argument("--turns", type=int, default=5, help="turns per variant")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    return parser.parse_args()


def cpp(options, folder):
    report = folder / "load.json"
    subprocess.run([options.client, "load", "--server", options.server, "--shape", SHAPE,
                    "--transport", "cuda-ipc", "--concurrency", "1", "--pool", "1", "--warmup",
                    "0.3", "--duration", str(options.seconds), "--json", str(report)], check=True,
                   stdout=subprocess.DEVNULL)
    step, = json.loads(report.read_text())["steps"]
    return step["latency_from_sent_ms"]["p50"]


def median_ms(call, seconds):
    times, until = [], time.perf_counter() + seconds
    for _ in range(3):
        call()
    while time.perf_counter() < until or len(times) < 3:
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main():
    options = parsed()
    import attend
    import attend_kernels
    import torch
    client = attend.Client(options.server)
    q, k, v = (torch.randn(1, 16, 8192, 128, device="cuda", dtype=torch.float16)
               for _ in range(3))

    there = [torch.from_dlpack(client.empty(x.shape, x.dtype, device=x.device)) for x in (q, k, v)]
    for to, x in zip(there, (q, k, v)):
        to.copy_(x)
    stream = torch.cuda.Stream()

    def by(transport, tensors=(q, k, v)):
        client.attention(*tensors, transport=transport)
        torch.cuda.synchronize()

    def on_a_stream():
        with torch.cuda.stream(stream):
            by("auto", there)

    def here():
        attend_kernels.attention(q, k, v)
        torch.cuda.synchronize()

    ways = {"Python, client.empty, a separate stream": on_a_stream,
            "Python, client.empty, the default stream": lambda: by("auto", there),
            "Python, CUDA IPC": lambda: by("auto"), "Python, in chunks": lambda: by("chunked"),
            "in this process": here}
    times = {"C++, CUDA IPC": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            times["C++, CUDA IPC"].append(cpp(options, pathlib.Path(folder)))
            for name, call in ways.items():
                times.setdefault(name, []).append(median_ms(call, options.seconds))
    print(f"{torch.cuda.get_device_name()}, {SHAPE}: median of a call in ms, {options.turns} turns")
    cpp_ms = statistics.median(times["C++, CUDA IPC"])
    for name, each in times.items():
        median = statistics.median(each)
        print(f"{name:42}{median:9.2f}   ({min(each):.2f} to {max(each):.2f})   "
              f"{median / cpp_ms:.2f} of C++'s")
    client.close()


if __name__ == "__main__":
    main()
