# SPDX-License-Identifier: Apache-2.0
"""Gradients against NumPy float64: from Python with freshly generated stubs, and from attend-client
as a user runs it."""

import grpc
import numpy as np
import pytest

import wire
from gradients import NAMES, judge_gradients, make_backward
from harness import run_client
from reference import Case, Mask, from_bytes, round_to, to_bytes
from tensor_files import read_safetensors, write_safetensors


def make_case(random, dtype="float32", batch=2, heads=4, kv_heads=2, len_q=33, len_k=45, dim=64,
              dim_v=48, **fields):
    def values(*shape):
        return round_to(dtype, random.standard_normal(shape, np.float32))

    return Case(values(batch, heads, len_q, dim), values(batch, kv_heads, len_k, dim),
                values(batch, kv_heads, len_k, dim_v), dtype, **fields)


def ask(server, case, d_o, d_lse, o, lse, wanted=(), **fields):
    request = wire.make_request(case, **fields)
    backward = request.backward
    for name, dtype, array in (("o", case.dtype, o), ("lse", "float32", lse),
                               ("d_o", case.dtype, d_o), ("d_lse", "float32", d_lse)):
        getattr(backward, name).CopyFrom(wire.tensor(dtype, array.shape))
        request.raw.append(to_bytes(dtype, array))
    backward.wanted.extend(wire.pb.TensorName.Value(f"TENSOR_NAME_{name.upper()}")
                           for name in wanted)
    with wire.connect(server.address) as service:
        answer = service.Backward(request, timeout=wire.SECONDS)
    assert not answer.HasField("o") and answer.kernel and answer.device == "cpu"
    there = [name for name in NAMES if answer.gradients.HasField(name)]
    got = {}
    for name, raw in zip(there, answer.raw, strict=True):
        tensor = getattr(answer.gradients, name)
        got[name] = from_bytes(wire.DTYPE_NAMES[tensor.dtype], raw, tuple(tensor.shape))
    return got


@pytest.mark.parametrize("kernel", ["cpu_flash", "cpu_reference"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mask", [Mask(), Mask("causal"), Mask("window", left=9, right=2)], ids=str)
def test_gradients(server, random, kernel, dtype, mask):
    case = make_case(random, dtype, mask=mask)
    parts = make_backward(case, random)
    got = ask(server, case, *parts, kernel=kernel)
    assert set(got) == {"d_q", "d_k", "d_v"}
    judge_gradients(case, *parts[:2], got)


def test_every_term_of_the_scores(server, random):
    case = make_case(random, softcap=5.0, alibi=np.float32([0.5, 0.25, 0.1, 0]),
                     sinks=np.float32([0.5, -1, 2, 0]), q_lengths=[33, 7], kv_lengths=[45, 20],
                     bias=random.standard_normal((2, 1, 33, 45), np.float32))
    parts = make_backward(case, random)
    got = ask(server, case, *parts, wanted=NAMES)
    assert set(got) == set(NAMES)
    judge_gradients(case, *parts[:2], got)


def test_attend_refuses_gradients(server, random):
    case = make_case(random)
    request = wire.make_request(case)
    request.backward.SetInParent()
    with wire.connect(server.address) as service, pytest.raises(grpc.RpcError) as failure:
        service.Attend(request, timeout=wire.SECONDS)
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "call Backward" in failure.value.details()


@pytest.mark.parametrize("transport", ["inline", "chunked", "shm"])
@pytest.mark.parametrize("forward", ["given", "asked for"])
def test_client_run(start_server, random, tmp_path, transport, forward):
    server = start_server("--shared-memory", "--shared-memory-socket", tmp_path / "regions")
    case = make_case(random, mask=Mask("causal"))
    d_o, d_lse, o, lse = make_backward(case, random)
    tensors = {"q": case.q, "k": case.k, "v": case.v, "d_o": d_o, "d_lse": d_lse}
    if forward == "given":
        tensors |= {"o": o, "lse": lse}
    write_safetensors(tmp_path / "in.safetensors", "float32", tensors)
    done = run_client("run", "--server", server.address, "--backward", "--causal", "--transport",
                      transport, "--safetensors", tmp_path / "in.safetensors", "--out",
                      tmp_path / "out.safetensors")
    assert "d_k float32 [2, 2, 45, 64]" in done.stdout and "cpu_flash" in done.stdout
    judge_gradients(case, d_o, d_lse, read_safetensors(tmp_path / "out.safetensors"))


def test_client_run_one_gradient_as_npy(server, random, tmp_path):
    case = make_case(random, dtype="float16")
    d_o, d_lse, _, _ = make_backward(case, random)
    for name, array in (("q", case.q), ("k", case.k), ("v", case.v), ("d_o", d_o)):
        np.save(tmp_path / f"{name}.npy", array.astype("float16"))
    files = [part for name in ("q", "k", "v", "d-o")
             for part in (f"--{name}", tmp_path / f"{name.replace('-', '_')}.npy")]
    run_client("run", "--server", server.address, "--backward", *files, "--gradients", "d_v",
               "--out", tmp_path / "d_v.npy")
    judge_gradients(case, d_o, np.zeros_like(d_lse), {"d_v": np.load(tmp_path / "d_v.npy")})


@pytest.mark.parametrize("args,words", [
    (["--d-o", "x.npy"], ["--backward"]), (["--backward"], ["--d-o"]),
    (["--backward", "--d-o", "x", "--return-lse"], ["--return-lse"]),
    (["--backward", "--gradients", "d_o"], ["d_o"]),
], ids=str)
def test_client_bad_use(random, tmp_path, args, words):
    np.save(tmp_path / "t.npy", np.zeros((1, 1, 2, 4), np.float32))
    files = [part for name in "qkv" for part in (f"--{name}", tmp_path / "t.npy")]
    done = run_client("run", *files, *args, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout
    assert all(word in done.stderr for word in words), done.stderr
