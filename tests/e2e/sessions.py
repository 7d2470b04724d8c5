# SPDX-License-Identifier: Apache-2.0
"""Calls on sessions, and their expected contents."""

import contextlib

import grpc
import numpy as np
import pytest

import wire
from reference import Case, round_to, to_bytes

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 32, 24


@contextlib.contextmanager
def client(address, tenant="a"):
    with grpc.insecure_channel(address, options=wire.UNLIMITED) as channel:
        yield Client(channel, tenant)


class Client:
    """The calls of one tenant."""

    def __init__(self, channel, tenant):
        self.attention = wire.stub.AttentionServiceStub(channel)
        self.sessions = wire.sessions_stub.SessionServiceStub(channel)
        self.metadata = [("x-attend-tenant", tenant)]

    def call(self, name, **fields):
        request = {"CreateSession": "CreateSessionRequest", "ForkSession": "ForkSessionRequest",
                   "TruncateSession": "TruncateSessionRequest", "KeepAlive": "KeepAliveRequest",
                   "KeepDraft": "KeepDraftRequest",
                   "FreeSession": "FreeSessionRequest", "GetSession": "GetSessionRequest",
                   "ListSessions": "ListSessionsRequest"}[name]
        return getattr(self.sessions, name)(
            getattr(wire.sessions_pb, request)(**fields), timeout=wire.SECONDS,
            metadata=self.metadata)

    def create(self, dtype="float32", layers=1, **fields):
        shape = wire.sessions_pb.LayerShape(dtype=wire.DTYPES[dtype], heads_kv=KV_HEADS, dim=DIM,
                                            dim_v=DIM_V)
        return self.call("CreateSession", shapes=[shape], layers=layers, **fields)

    def attend(self, request):
        return self.attention.Attend(request, timeout=wire.SECONDS, metadata=self.metadata)


def values(random, dtype, *shape):
    return round_to(dtype, random.standard_normal(shape, np.float32))


class Sequence:
    """The expected contents of a session's layer, [Hkv, length, D] and [Hkv, length, Dv]."""

    def __init__(self, random, session, dtype="float32", layer=0):
        self.random, self.session, self.dtype, self.layer = random, session, dtype, layer
        self.k = np.zeros((KV_HEADS, 0, DIM), np.float32)
        self.v = np.zeros((KV_HEADS, 0, DIM_V), np.float32)

    @property
    def length(self):
        return self.k.shape[1]

    def use(self, **fields):
        return wire.pb.SessionUse(session=self.session.id, layer=self.layer, length=self.length,
                                  **fields)

    def grow(self, k, v):
        self.k = np.concatenate([self.k, k], axis=1)
        self.v = np.concatenate([self.v, v], axis=1)


def step(random, sequences, new_rows, len_q, layout="BHLD", append_ids=None, **fields):
    """A request that appends to all sequences and attends to them, and the case that it computes;
    the sequences grow."""
    dtype = sequences[0].dtype
    batch = len(sequences)
    q = values(random, dtype, batch, HEADS, len_q, DIM)
    k = values(random, dtype, batch, KV_HEADS, new_rows, DIM)
    v = values(random, dtype, batch, KV_HEADS, new_rows, DIM_V)
    request = wire.pb.AttendRequest(layout=wire.LAYOUTS[layout], return_lse=True, **fields)
    for b, sequence in enumerate(sequences):
        name = {} if append_ids is None else {"append_id": append_ids[b]}
        request.sessions.append(sequence.use(**name))
    for name, array in (("q", q), ("k", k), ("v", v)):
        if name != "q" and new_rows == 0:
            continue
        placed = wire.arrange(layout, array)
        getattr(request, name).CopyFrom(wire.tensor(dtype, placed.shape))
        request.raw.append(to_bytes(dtype, placed))
    for b, sequence in enumerate(sequences):
        sequence.grow(k[b], v[b])
    return request, case_of(sequences, q)


def case_of(sequences, q):
    longest = max(sequence.length for sequence in sequences)

    def padded(arrays):
        return np.stack([np.pad(a, ((0, 0), (0, longest - a.shape[1]), (0, 0))) for a in arrays])

    return Case(q=q, k=padded([s.k for s in sequences]), v=padded([s.v for s in sequences]),
                dtype=sequences[0].dtype, kv_lengths=[s.length for s in sequences])


def refused(code, call, *args, **fields):
    with pytest.raises(grpc.RpcError) as failure:
        call(*args, **fields)
    assert failure.value.code() == code, failure.value
    return failure.value.details()
