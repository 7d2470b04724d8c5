# SPDX-License-Identifier: Apache-2.0
"""Requests and answers through Python's grpcio, with freshly generated stubs."""

import contextlib
import importlib
import pathlib
import shutil
import subprocess
import sys

import grpc
import numpy as np

from harness import ROOT
from reference import from_bytes, round_to, to_bytes

ATTEND = "/attend.v1.AttentionService/Attend"
SECONDS = 30  # for an ordinary call
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "bit": 4}
DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
LAYOUTS = {"BHLD": 1, "BLHD": 2, "LHD": 3}

pb = None    # attention_pb2, after generate()
shm = None   # shared_memory_pb2
stub = None  # attention_pb2_grpc
sessions_pb = None    # session_pb2
sessions_stub = None  # session_pb2_grpc
admin_pb = None       # admin_pb2
oip_pb = None         # inference.grpc_service_pb2
oip_stub = None       # inference.grpc_service_pb2_grpc


def generate(folder):
    """Generates the Python stubs and imports them as wire.pb, wire.shm and wire.stub."""
    global pb, shm, stub, sessions_pb, sessions_stub, admin_pb, oip_pb, oip_stub
    proto = ROOT / "proto"
    subprocess.run(
        ["protoc", f"-I{proto}", f"--python_out={folder}", f"--grpc_out={folder}",
         f"--plugin=protoc-gen-grpc={shutil.which('grpc_python_plugin')}",
         str(proto / "attend/v1/attention.proto"), str(proto / "attend/v1/session.proto"),
         str(proto / "attend/v1/shared_memory.proto"), str(proto / "attend/v1/admin.proto"),
         str(proto / "inference/model_config.proto"),
         str(proto / "inference/grpc_service.proto")], check=True)
    sys.path.insert(0, str(folder))
    pb = importlib.import_module("attend.v1.attention_pb2")
    shm = importlib.import_module("attend.v1.shared_memory_pb2")
    stub = importlib.import_module("attend.v1.attention_pb2_grpc")
    sessions_pb = importlib.import_module("attend.v1.session_pb2")
    sessions_stub = importlib.import_module("attend.v1.session_pb2_grpc")
    admin_pb = importlib.import_module("attend.v1.admin_pb2")
    oip_pb = importlib.import_module("inference.grpc_service_pb2")
    oip_stub = importlib.import_module("inference.grpc_service_pb2_grpc")
    assert pathlib.Path(pb.__file__).is_relative_to(folder)


@contextlib.contextmanager
def connect(address, **options):
    with grpc.insecure_channel(address, options=UNLIMITED, **options) as channel:
        yield stub.AttentionServiceStub(channel)


def tensor(dtype, shape):
    return pb.Tensor(dtype=DTYPES[dtype], shape=shape)


def arrange(layout, array, lengths=None):
    """Converts BHLD to the layout; LHD concatenates the first `lengths` rows of each sequence."""
    if layout == "BHLD":
        return array
    blhd = array.transpose(0, 2, 1, 3)
    if layout == "BLHD":
        return blhd
    return np.concatenate([blhd[b, :n] for b, n in enumerate(lengths)], axis=0)


def make_mask(mask):
    names = {("none", False): 1, ("none", True): 1, ("causal", False): 2, ("causal", True): 3,
             ("window", False): 4, ("window", True): 5}
    message = pb.Mask(kind=names[mask.kind, mask.top_left])
    if mask.left >= 0:
        message.window_left = mask.left
    if mask.kind == "window" and mask.right >= 0:
        message.window_right = mask.right
    return message


def make_request(case, layout="BHLD", bias_dtype="float32", **fields):
    """The request of a reference.Case. LHD packs the true lengths, which are then required."""
    request = pb.AttendRequest(layout=LAYOUTS[layout], mask=make_mask(case.mask), **fields)
    for name, array, lengths in (("q", case.q, case.q_lengths), ("k", case.k, case.kv_lengths),
                                 ("v", case.v, case.kv_lengths)):
        placed = arrange(layout, array, lengths)
        getattr(request, name).CopyFrom(tensor(case.dtype, placed.shape))
        request.raw.append(to_bytes(case.dtype, placed))
    if layout == "LHD":
        request.cu_q.extend([0, *np.cumsum(case.q_lengths).tolist()])
        request.cu_kv.extend([0, *np.cumsum(case.kv_lengths).tolist()])
    else:
        request.q_lengths.extend(case.q_lengths or [])
        request.kv_lengths.extend(case.kv_lengths or [])
    if case.scale is not None:
        request.scale = case.scale
    request.softcap = case.softcap
    if case.bias is not None:
        request.bias.CopyFrom(tensor(bias_dtype, case.bias.shape))
        request.raw.append(to_bytes(bias_dtype, case.bias))
    if case.alibi is not None:
        request.alibi_slopes.extend(case.alibi.ravel().tolist())
    if case.sinks is not None:
        request.sinks.extend(case.sinks.tolist())
    return request


def read_answer(case, layout, answer):
    """O as BHLD and LSE as [B, Hq, Lq] (None if absent), padding filled as the contract says."""
    assert DTYPE_NAMES[answer.o.dtype] == case.dtype
    o = from_bytes(case.dtype, answer.raw[0], tuple(answer.o.shape))
    lse = None
    if answer.HasField("lse"):
        lse = from_bytes("float32", answer.raw[1], tuple(answer.lse.shape))
    if layout == "BLHD":
        return o.transpose(0, 2, 1, 3), lse
    if layout == "LHD":
        batch, heads, len_q, _ = case.q.shape
        dense = np.zeros((batch, heads, len_q, o.shape[2]), np.float32)
        dense_lse = np.full((batch, heads, len_q), -np.inf, np.float32)
        start = 0
        for b, rows in enumerate(case.q_lengths):
            dense[b, :, :rows] = o[start:start + rows].transpose(1, 0, 2)
            if lse is not None:
                dense_lse[b, :, :rows] = lse[:, start:start + rows]
            start += rows
        return dense, None if lse is None else dense_lse
    return o, lse


def small_request(seed=0, length=16, heads=1, dim=64, dtype="float32", **fields):
    """A valid request with random data, [1, heads, length, dim]."""
    random = np.random.default_rng(seed)
    request = pb.AttendRequest(**fields)
    for name in ("q", "k", "v"):
        shape = (1, heads, length, dim)
        getattr(request, name).CopyFrom(tensor(dtype, shape))
        array = round_to(dtype, random.standard_normal(shape, np.float32))
        request.raw.append(to_bytes(dtype, array))
    return request


def slow_request(length=4096, **fields):
    """A request that keeps a lane busy for a second or more: it uses the double-precision kernel. 2
    MiB in all; doubling the length makes it four times as slow."""
    return small_request(length=length, dim=32, kernel="cpu_reference", **fields)


def assert_serves(address):
    """Checks that the server answers an ordinary request correctly."""
    with connect(address) as service:
        answer = service.Attend(small_request(seed=7, check=True), timeout=SECONDS)
    assert answer.check.ok and answer.check.rows_checked > 0
