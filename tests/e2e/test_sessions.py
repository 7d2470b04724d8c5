# SPDX-License-Identifier: Apache-2.0
"""Sessions: K and V that stay at the server, against whole requests and against NumPy float64."""

import contextlib
import time

import grpc
import numpy as np
import pytest

import harness
import wire
from reference import Case, Mask, judge, round_to, to_bytes

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 32, 24


@pytest.fixture(scope="module")
def sessions_server(tmp_path_factory):
    running = harness.Server(tmp_path_factory.mktemp("sessions"), "--tenant=a=1,b=1")
    yield running
    assert running.stop() == 0, running.log()


@contextlib.contextmanager
def client(address, tenant="a"):
    with grpc.insecure_channel(address, options=wire.UNLIMITED) as channel:
        yield Client(channel, tenant)


class Client:
    """A tenant's calls."""

    def __init__(self, channel, tenant):
        self.attention = wire.stub.AttentionServiceStub(channel)
        self.sessions = wire.sessions_stub.SessionServiceStub(channel)
        self.metadata = [("x-attend-tenant", tenant)]

    def call(self, name, **fields):
        request = {"CreateSession": "CreateSessionRequest", "ForkSession": "ForkSessionRequest",
                   "TruncateSession": "TruncateSessionRequest", "KeepAlive": "KeepAliveRequest",
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
    """What a session's layer should hold, [Hkv, length, D] and [Hkv, length, Dv]."""

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
    """A request that appends to all sequences and reads them, and the case that it computes; the
    sequences grow."""
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_a_prompt_and_steps_have_the_bits_of_whole_requests(sessions_server, random, dtype, layout):
    """What a session answers is what the same request answers that brings all of K and V."""
    mask = wire.make_mask(Mask("causal"))
    with client(sessions_server.address) as tenant:
        session = tenant.create(dtype)
        sequence = Sequence(random, session, dtype)
        for new_rows, len_q in ((70, 70), (1, 1), (1, 1), (63, 5), (64, 64), (0, 3), (1, 1)):
            request, case = step(random, [sequence], new_rows, len_q, layout, mask=mask)
            answer = tenant.attend(request)
            assert list(answer.session_lengths) == [sequence.length]
            case.mask = Mask("causal")
            judge(case, *wire.read_answer(case, layout, answer))
            whole = tenant.attend(wire.make_request(case, layout, return_lse=True))
            assert list(answer.raw) == list(whole.raw), "bits"
        assert tenant.call("GetSession", session=session.id).length == sequence.length


def test_sequences_of_different_lengths_in_one_request(sessions_server, random):
    with client(sessions_server.address) as tenant:
        sequences = [Sequence(random, tenant.create()) for _ in range(3)]
        for rows, sequence in zip((5, 130, 64), sequences):
            tenant.attend(step(random, [sequence], rows, 0)[0])
        for _ in range(3):
            request, case = step(random, sequences, 1, 1, check=True)
            answer = tenant.attend(request)
            assert answer.check.ok and answer.check.rows_checked > 0
            judge(case, *wire.read_answer(case, "BHLD", answer))


def test_layers_have_lengths_of_their_own(sessions_server, random):
    with client(sessions_server.address) as tenant:
        session = tenant.create(layers=3)
        for layer, rows in enumerate((4, 9, 2)):
            tenant.attend(step(random, [Sequence(random, session, layer=layer)], rows, 0)[0])
        info = tenant.call("GetSession", session=session.id)
        assert list(info.layer_lengths) == [4, 9, 2] and info.length == 2
        info = tenant.call("TruncateSession", session=session.id, length=3)
        assert list(info.layer_lengths) == [3, 3, 2]


def test_an_append_that_is_sent_again_appends_once(sessions_server, random):
    with client(sessions_server.address) as tenant:
        sequence = Sequence(random, tenant.create())
        request, _ = step(random, [sequence], 7, 2, append_ids=[b"first"])
        first = tenant.attend(request)
        again = tenant.attend(request)
        assert list(again.raw) == list(first.raw) and list(again.session_lengths) == [7]
        request.sessions[0].append_id = b"second"
        details = refused(grpc.StatusCode.FAILED_PRECONDITION, tenant.attend, request)
        assert "length is 0, the layer has 7 tokens" in details
        request, case = step(random, [sequence], 1, 1, append_ids=[b"third"])
        judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))


def test_forks_share_and_part(sessions_server, random):
    with client(sessions_server.address) as tenant:
        session = tenant.create()
        sequence = Sequence(random, session)
        tenant.attend(step(random, [sequence], 200, 0)[0])
        fork = Sequence(random, tenant.call("ForkSession", session=session.id, length=150))
        fork.k, fork.v = sequence.k[:, :150], sequence.v[:, :150]
        info = tenant.call("GetSession", session=fork.session.id)
        assert info.length == 150 and info.shared_bytes == 2 * info.bytes // 3  # 2 of 3 pages
        for each in (fork, sequence, fork):
            request, case = step(random, [each], 30, 4)
            judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))
        details = refused(grpc.StatusCode.OUT_OF_RANGE, tenant.call, "ForkSession",
                          session=session.id, length=231)
        assert "length is 231, must be in [0, 230]" in details
        tenant.call("FreeSession", session=session.id)
        request, case = step(random, [fork], 1, 1)
        judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))


def test_truncated_tokens_are_replaced(sessions_server, random):
    """Speculative tokens: some are rejected, others come in their place; a fork keeps its own."""
    with client(sessions_server.address) as tenant:
        sequence = Sequence(random, tenant.create())
        tenant.attend(step(random, [sequence], 100, 0)[0])
        fork = Sequence(random, tenant.call("ForkSession", session=sequence.session.id))
        fork.k, fork.v = sequence.k, sequence.v
        for cut in (97, 64, 30):
            tenant.call("TruncateSession", session=sequence.session.id, length=cut)
            sequence.k, sequence.v = sequence.k[:, :cut], sequence.v[:, :cut]
            for each in (sequence, fork):
                request, case = step(random, [each], 5, 5)
                judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))


def test_streams_and_chunks(sessions_server, random):
    with client(sessions_server.address) as tenant:
        sequence = Sequence(random, tenant.create())
        request, case = step(random, [sequence], 300, 20)
        raw = list(request.raw)
        del request.raw[:]
        for name in ("q", "k", "v"):
            getattr(request, name).chunked.SetInParent()
        answer = send_chunks(tenant, request, dict(zip((1, 2, 3), raw)))
        judge(case, *wire.read_answer(case, "BHLD", answer))
        requests = [step(random, [sequence], 1, 1, request_id=str(n)) for n in range(4)]
        for request, case in requests:
            answers = tenant.attention.AttendStream(iter([request]), timeout=wire.SECONDS,
                                                    metadata=tenant.metadata)
            answer = next(iter(answers))
            assert answer.status.code == 0, answer.status
            judge(case, *wire.read_answer(case, "BHLD", answer))


def send_chunks(tenant, header, tensors):
    def messages():
        yield wire.pb.AttendChunkedRequest(header=header)
        for number, data in tensors.items():
            for at in range(0, len(data), 10000):
                yield wire.pb.AttendChunkedRequest(tensor=number, offset=at,
                                                   data=data[at:at + 10000])

    answer, parts = None, {4 + 1: bytearray(), 6: bytearray()}
    for message in tenant.attention.AttendChunked(messages(), timeout=wire.SECONDS,
                                                  metadata=tenant.metadata):
        if message.HasField("response"):
            answer = message.response
        elif message.data:
            parts[message.tensor][message.offset:message.offset + len(message.data)] = message.data
    answer.raw.extend(bytes(part) for part in parts.values())
    return answer


def test_ids_are_the_tenants_own(sessions_server, random):
    with client(sessions_server.address, "a") as a, client(sessions_server.address, "b") as b:
        session = a.create()
        guessed = refused(grpc.StatusCode.NOT_FOUND, b.call, "GetSession", session=bytes(16))
        assert refused(grpc.StatusCode.NOT_FOUND, b.call, "GetSession",
                       session=session.id) == guessed
        for call, fields in (("ForkSession", {}), ("TruncateSession", {"length": 0}),
                             ("FreeSession", {}), ("KeepAlive", {})):
            assert refused(grpc.StatusCode.NOT_FOUND, b.call, call, session=session.id,
                           **fields) == guessed
        request, _ = step(random, [Sequence(random, session)], 1, 1)
        assert guessed in refused(grpc.StatusCode.NOT_FOUND, b.attend, request)
        assert session.id in [each.id for each in a.call("ListSessions").sessions]
        assert session.id not in [each.id for each in b.call("ListSessions").sessions]
        a.call("FreeSession", session=session.id)
        assert guessed in refused(grpc.StatusCode.NOT_FOUND, a.attend, request)


@pytest.mark.parametrize("change,words", [
    (lambda r: r.sessions[0].__setattr__("layer", 1), "sessions[0].layer is 1, must be in [0, 0]"),
    (lambda r: r.sessions[0].__setattr__("layer", -1), "sessions[0].layer is -1"),
    (lambda r: r.sessions.append(r.sessions[0]), "sessions[1] names a session a second time"),
    (lambda r: r.sessions[0].__setattr__("append_id", b"x" * 33), "append_id has 33 bytes"),
    (lambda r: r.kv_lengths.append(1), "kv_lengths must be empty"),
    (lambda r: r.__setattr__("layout", 3), "must have 3"),
    (lambda r: r.ClearField("v"), "v is not set"),
    (lambda r: r.q.__setattr__("dtype", 1), "must equal"),
    (lambda r: r.k.shape.__setitem__(1, 4), "must equal"),
    (lambda r: r.k.shape.__setitem__(2, -1), "k.shape[2] is -1"),
    (lambda r: r.k.shape.__setitem__(2, 1 << 40), "would exceed"),
    (lambda r: r.raw.__delitem__(2), "raw has 2 entries, must have 3"),
])
def test_what_is_malformed_changes_nothing(sessions_server, random, change, words):
    with client(sessions_server.address) as tenant:
        sequence = Sequence(random, tenant.create())
        request, _ = step(random, [sequence], 2, 1)
        change(request)
        assert words in refused(grpc.StatusCode.INVALID_ARGUMENT, tenant.attend, request)
        assert tenant.call("GetSession", session=sequence.session.id).length == 0


def test_a_refused_request_evicts_nobody(start_server, random):
    server = start_server("--session-memory=17MiB")
    with client(server.address) as tenant:
        idle = Sequence(random, tenant.create())
        request, _ = step(random, [idle], 2, 1)
        tenant.attend(request)
        needy = tenant.create()
        for rows in (1 << 20, 1 << 29, (1 << 63) - 1):
            request, _ = step(random, [Sequence(random, needy)], 2, 1)
            request.k.shape[2] = request.v.shape[2] = rows
            with pytest.raises(grpc.RpcError) as refusal:
                tenant.attend(request)
            assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert tenant.call("GetSession", session=idle.session.id).length == 2


@pytest.mark.parametrize("fields,words", [
    ({"layers": 513}, "layers is 513"), ({"layers": -1}, "layers is -1"),
    ({"lease_seconds": -1.0}, "lease_seconds is -1"),
    ({"lease_seconds": float("nan")}, "lease_seconds is nan"),
    ({"device": "cuda:9"}, 'device is "cuda:9"'),
])
def test_sessions_that_cannot_be(sessions_server, fields, words):
    with client(sessions_server.address) as tenant:
        assert words in refused(grpc.StatusCode.INVALID_ARGUMENT, tenant.create, **fields)


def test_a_lease_ends(start_server, random):
    server = start_server("--session-lease=1")
    with client(server.address) as tenant:
        kept, left = tenant.create(), tenant.create()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            tenant.call("KeepAlive", session=kept.id)
            if [each.id for each in tenant.call("ListSessions").sessions] == [kept.id]:
                break
            time.sleep(0.1)
        refused(grpc.StatusCode.NOT_FOUND, tenant.call, "GetSession", session=left.id)
        tenant.call("GetSession", session=kept.id)


def test_what_is_evicted_is_said_and_appended_again(start_server, random):
    server = start_server("--session-memory=24MiB")
    with client(server.address) as tenant:
        idle = Sequence(random, tenant.create())
        tenant.attend(step(random, [idle], 20000, 0)[0])
        busy = Sequence(random, tenant.create())
        tenant.attend(step(random, [busy], 20000, 0)[0])
        info = tenant.call("GetSession", session=idle.session.id)
        assert 0 <= info.length < 20000
        request, _ = step(random, [idle], 0, 1)
        details = refused(grpc.StatusCode.OUT_OF_RANGE, tenant.attend, request)
        assert f"the layer has {info.length} tokens: the others were evicted" in details
        pinned = tenant.create(pinned=True)
        full = Sequence(random, pinned)
        tenant.attend(step(random, [full], 20000, 0)[0])
        request, _ = step(random, [Sequence(random, tenant.create())], 60000, 0)
        details = refused(grpc.StatusCode.RESOURCE_EXHAUSTED, tenant.attend, request)
        assert "(session-memory)" in details
        assert tenant.call("GetSession", session=pinned.id).length == 20000


def test_sessions_can_be_off(start_server):
    server = start_server("--session-memory=0")
    with client(server.address) as tenant:
        assert "--session-memory" in refused(grpc.StatusCode.UNIMPLEMENTED, tenant.create)


def test_a_cancelled_append_appends_nothing_or_all(sessions_server, random):
    with client(sessions_server.address) as tenant:
        session = tenant.create()
        sequence = Sequence(random, session)
        for timeout in (0.001, 0.003, 0.01, 0.03, 0.1):
            before = sequence.k, sequence.v
            request, _ = step(random, [sequence], 500, 500, kernel="cpu_reference")
            with contextlib.suppress(grpc.RpcError):
                tenant.attention.Attend(request, timeout=timeout, metadata=tenant.metadata)
            until = time.monotonic() + 20
            while time.monotonic() < until:  # it may still run
                length = tenant.call("GetSession", session=session.id).length
                try:
                    tenant.call("TruncateSession", session=session.id, length=length)
                    break
                except grpc.RpcError as failure:
                    assert failure.code() == grpc.StatusCode.UNAVAILABLE
            assert length in (sequence.length, sequence.length - 500)
            if length < sequence.length:
                sequence.k, sequence.v = before
        request, case = step(random, [sequence], 1, 1)
        judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))
