#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of a call over the Open Inference Protocol compared with Attend: the same attention with
both, in turns, on one server that this starts. Messages are made once and answers are not parsed,
so that Python's overhead is the same.

    ATTEND_BUILD_DIR=build/release tests/bench/oip_beside_attend.py [--seconds N]
"""

import argparse
import pathlib
import sys
import tempfile
import time

import grpc
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

import harness  # noqa: E402
import wire  # noqa: E402

# name: (Hq, Hkv, Lq, Lk, D) of one BF16 sequence
SIZES = {"small (24 KiB in)": (4, 2, 16, 32, 64), "16 MiB in": (32, 32, 1, 1024, 128)}


def messages(shape):
    """The same request as ModelInferRequest and as AttendRequest."""
    heads_q, heads_kv, len_q, len_k, dim = shape
    random = np.random.default_rng(1)
    infer = wire.oip_pb.ModelInferRequest(model_name="attention_bf16_bhld_full")
    attend = wire.pb.AttendRequest()
    for name, heads, rows in (("q", heads_q, len_q), ("k", heads_kv, len_k),
                              ("v", heads_kv, len_k)):
        array = random.standard_normal((1, heads, rows, dim)).astype(np.float32)
        raw = wire.to_bytes("bfloat16", array)
        infer.inputs.add(name=name, datatype="BF16", shape=array.shape)
        infer.raw_input_contents.append(raw)
        getattr(attend, name).CopyFrom(wire.tensor("bfloat16", array.shape))
        attend.raw.append(raw)
    infer.outputs.add(name="o")
    return infer.SerializeToString(), attend.SerializeToString()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="seconds per size")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wire.generate(folder)
        server = harness.Server(folder, "--oip")
        try:
            with grpc.insecure_channel(server.address, options=wire.UNLIMITED) as channel:
                compare(channel, args.seconds)
        finally:
            server.stop()


def compare(channel, seconds):
    ways = {"ModelInfer": channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"),
            "Attend": channel.unary_unary(wire.ATTEND)}
    print("| Request | Way | p50 us | p10 us | calls |\n|---|---|---|---|---|")
    for size, shape in SIZES.items():
        requests = dict(zip(ways, messages(shape)))
        times = {way: [] for way in ways}
        until = time.monotonic() + seconds
        warm = 5
        while time.monotonic() < until:
            for way, call in ways.items():
                begin = time.perf_counter()
                call(requests[way], timeout=wire.SECONDS)
                if not warm:
                    times[way].append(1e6 * (time.perf_counter() - begin))
            warm = max(0, warm - 1)
        for way, each in times.items():
            print(f"| {size} | {way} | {np.median(each):.0f} | {np.percentile(each, 10):.0f} "
                  f"| {len(each)} |")


if __name__ == "__main__":
    main()
