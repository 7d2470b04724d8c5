# SPDX-License-Identifier: Apache-2.0
"""The Python server that bench_service compares with gives correct answers, over sockets and with a
torch that is made of NumPy."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SERVER = ROOT / "tests/bench/python_server.py"
METHOD = "/attend.v1.AttentionService/Attend"
SHAPE = (2, 3, 8, 16)

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory):
    path = tmp_path_factory.mktemp("descriptors") / "attention"
    subprocess.run(["protoc", f"-I{ROOT / 'proto'}", f"--descriptor_set_out={path}",
                    str(ROOT / "proto/attend/v1/attention.proto")], check=True)
    return path


@pytest.fixture(scope="module")
def classes(descriptors):
    spec = importlib.util.spec_from_file_location("python_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.message_classes(descriptors)


def start(descriptors, *arguments, torch=HERE / "numpy_torch"):
    environment = dict(os.environ, PYTHONPATH=str(torch))
    return subprocess.Popen(
        [sys.executable, str(SERVER), "--descriptors", str(descriptors), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def attend(descriptors, classes):
    """The server's Attend method."""
    request_class, response_class = classes
    process = start(descriptors)
    ready, address = process.stdout.readline().split()
    assert ready == "ready"
    with grpc.insecure_channel(address) as channel:
        yield channel.unary_unary(METHOD, request_serializer=request_class.SerializeToString,
                                  response_deserializer=response_class.FromString)
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def make_request(request_class, dtype, **fields):
    random = np.random.default_rng()
    request = request_class(request_id="r", **fields)
    arrays = [random.standard_normal(SHAPE).astype(dtype) for _ in range(3)]
    for name, array in zip("qkv", arrays):
        tensor = getattr(request, name)
        tensor.dtype = {"float16": 1, "float32": 3}[dtype]
        tensor.shape.extend(SHAPE)
        request.raw.append(array.tobytes())
    return request, arrays


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_attention(attend, classes, dtype, scale):
    request, (q, k, v) = make_request(classes[0], dtype, layout=1)
    if scale is not None:
        request.scale = scale
    answer = attend(request, timeout=30)
    assert answer.request_id == "r"
    assert answer.o.dtype == request.q.dtype
    assert tuple(answer.o.shape) == SHAPE
    o = np.frombuffer(answer.raw[0], dtype).reshape(SHAPE)
    for b in range(SHAPE[0]):
        for h in range(SHAPE[1]):
            weights = np.exp((scale or 0.25) * q[b, h].astype(float) @ k[b, h].astype(float).T)
            want = weights / weights.sum(axis=1, keepdims=True) @ v[b, h].astype(float)
            unit = np.finfo(dtype).eps
            assert np.all(np.abs(o[b, h] - want) <= unit * (1 + np.abs(want)))


@pytest.mark.parametrize("name,value", [("return_lse", True), ("layout", 2)])
def test_unknown_fields_are_refused(attend, classes, name, value):
    request, _ = make_request(classes[0], "float32", **{name: value})
    with pytest.raises(grpc.RpcError) as error:
        attend(request, timeout=30)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert name in error.value.details()


def test_the_server_says_why_it_cannot_start(descriptors, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    for process, reason in ((start(descriptors, "--device", "cuda:0"), "PyTorch sees no GPU"),
                            (start(descriptors, torch=tmp_path), "Python: no torch here")):
        out, _ = process.communicate(timeout=60)
        assert out == f"cannot {reason}\n"
        assert process.returncode == 1
