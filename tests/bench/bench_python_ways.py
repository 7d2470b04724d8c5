#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of client/python's pages: the cost of padding, and of each way to call attend,
compared with PyTorch's own attention in this process. On the CPU, one call at a time, medians in
ms.

    tests/bench/bench_python_ways.py [--build build/release] [--only padded|ways|decode|draft]

PyTorch's lines are left out if it is not installed.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("client/python", "kernels/python", "tests/e2e")]

import attend  # noqa: E402

RANDOM = np.random.default_rng(0)


def torch_or_none():
    try:
        import torch
        return torch
    except ImportError:
        return None


def in_turns(functions, seconds):
    """{name: median of a call in ms}. The functions take turns."""
    times = {name: [] for name in functions}
    for function in functions.values():
        function()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or min(map(len, times.values())) < 5:
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(each) for name, each in times.items()}


def show(title, medians):
    print(f"\n{title}")
    for name, median in medians.items():
        print(f"  {name:44}{median:10.2f} ms")


def local(torch, q, k, v, **options):
    """PyTorch's own attention on the same arrays."""
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def padded(client, seconds):
    """32 sequences of 16 to 512 tokens, as in an encoder's batch."""
    lengths = RANDOM.integers(16, 513, 32)
    batch, longest, heads, dim = len(lengths), int(lengths.max()), 8, 64
    dense = [RANDOM.standard_normal((batch, longest, heads, dim), np.float32) for _ in range(3)]
    seen = np.arange(longest) < lengths[:, None]
    packed = [x[seen] for x in dense]
    offsets = np.concatenate([[0], lengths.cumsum()])
    mask = seen[:, None, None, :]
    functions = {
        "padded, a mask of bool": lambda: client.attention(*dense, layout="BLHD", bias=mask),
        "padded, q_lengths and kv_lengths": lambda: client.attention(
            *dense, layout="BLHD", q_lengths=lengths, kv_lengths=lengths),
        "packed": lambda: client.attention(*packed, layout="LHD", cu_seqlens_q=offsets,
                                           cu_seqlens_k=offsets),
    }
    torch = torch_or_none()
    if torch:
        turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in dense]
        functions["PyTorch in process, padded, the mask"] = local(
            torch, *turned, attn_mask=torch.from_numpy(mask))
    show(f"{batch} sequences of {lengths.min()} to {longest} tokens, {lengths.sum()} of "
         f"{batch * longest} rows, H{heads} D{dim} float32", in_turns(functions, seconds))


def ways(client, alone, seconds):
    """One attention, in process and by a server."""
    for rows in (128, 1024, 4096):
        q, k, v = (RANDOM.standard_normal((1, 8, rows, 64), np.float32) for _ in range(3))
        shared = [client.empty(q.shape) for _ in range(3)]
        for array, given in zip(shared, (q, k, v)):
            array[...] = given
        functions = {
            "attend.attention in process": lambda: attend.attention(q, k, v, causal=True),
            "served, in a message or chunks": lambda: alone.attention(q, k, v, causal=True),
            "served, shared memory": lambda: client.attention(q, k, v, causal=True,
                                                              transport="shared"),
            "served, arrays of client.empty": lambda: client.attention(*shared, causal=True),
        }
        torch = torch_or_none()
        if torch:
            functions["PyTorch in process"] = local(torch, q, k, v, is_causal=True)
        show(f"B1 H8 L{rows} D64 float32 causal", in_turns(functions, seconds))


def decode(client, seconds):
    """Decoding one token after 4096."""
    shape = (1, 8, 4096, 64)
    q, k, v = (RANDOM.standard_normal((1, 8, 1, 64), np.float32) for _ in range(3))
    keys, values = (RANDOM.standard_normal(shape, np.float32) for _ in range(2))
    with client.session(8, 64, dtype="float32") as session:
        session.append(keys, values)

        def token():
            session.decode(q, k, v)
            session.truncate(shape[2])

        functions = {"session.decode, and truncate again": token,
                     "all of K and V sent": lambda: client.attention(q, keys, values)}
        torch = torch_or_none()
        if torch:
            functions["PyTorch in process"] = local(torch, q, keys, values)
        show("a token's attention over 4096, H8 D64 float32, of one layer",
             in_turns(functions, seconds))


def draft(client, seconds):
    """Drafts of several sizes after 4096 tokens: appended, attended, and truncated."""
    length, heads, kv_heads, dim = 4096, 32, 8, 128
    keys, values = (RANDOM.standard_normal((1, kv_heads, length, dim), np.float32)
                    for _ in range(2))
    with client.session(kv_heads, dim, dtype="float32") as session:
        session.append(keys, values)
        for tokens in (4, 16, 64):
            q = RANDOM.standard_normal((1, heads, tokens, dim), np.float32)
            k, v = (RANDOM.standard_normal((1, kv_heads, tokens, dim), np.float32)
                    for _ in range(2))
            parents = [int(RANDOM.integers(-1, n)) if n else -1 for n in range(tokens)]
            tree = attend.tree_from_parents(parents)
            mask = np.ones((1, 1, tokens, length + tokens), bool)
            mask[..., length:] = tree
            path = np.flatnonzero(tree[0, -1])

            def step(**options):
                session.attend(q, k, v, **options)
                session.truncate(length)

            def kept():
                session.attend(q, k, v, tree=tree)
                session.keep_draft(length, path)
                session.truncate(length)

            functions = {"all of it seen, and truncate": step,
                         "causal, and truncate": lambda: step(causal=True),
                         "a tree, and truncate": lambda: step(tree=tree),
                         "the whole mask, and truncate": lambda: step(bias=mask),
                         f"a tree, keep_draft of {len(path)}, and truncate": kept}
            show(f"a draft of {tokens} tokens over {length}, H{heads} Hkv{kv_heads} D{dim} "
                 f"float32, one layer", in_turns(functions, seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--only", choices=("padded", "ways", "decode", "draft"))
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per table")
    options = parser.parse_args()
    os.environ["ATTEND_BUILD_DIR"] = str(options.build)
    import harness
    for variable, path in harness.libraries().items():
        os.environ.setdefault(variable, str(path))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        server = harness.Server(folder, "--shared-memory", "--shared-memory-socket",
                                folder / "s.sock")
        try:
            with attend.Client(server.address) as client, \
                    attend.Client(server.address, shared_memory=False) as alone:
                if options.only in (None, "padded"):
                    padded(client, options.seconds)
                if options.only in (None, "ways"):
                    ways(client, alone, options.seconds)
                if options.only in (None, "decode"):
                    decode(client, options.seconds)
                if options.only in (None, "draft"):
                    draft(client, options.seconds)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
