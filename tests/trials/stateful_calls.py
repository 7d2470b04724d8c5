# SPDX-License-Identifier: Apache-2.0
"""Calls for the trials that create state on the server, sessions and shared-memory regions, and
calls of the Open Inference Protocol."""

import contextlib

import grpc

import regions
import wire
from caller import CODE, SECONDS, check, code_of

OIP_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
SESSIONS_MOST = 3  # per caller


class Held:
    """A session, which should hold the first `length` rows of `sequence`."""

    def __init__(self, session, sequence, tenant, length=0):
        self.id, self.sequence, self.tenant, self.length = session.id, sequence, tenant, length


def session(caller):
    """A random step of one of the caller's sessions."""
    held = caller.__dict__.setdefault("held", [])
    if len(held) < SESSIONS_MOST and (not held or caller.random.random() < 0.1):
        return _create(caller, held)
    one = caller.random.choice(held)
    step = caller.random.choices((_append, _again, _fork, _truncate, _look, _gone, _mistake),
                                 (10, 1, 1, 1, 1, 0.5, 1))[0]
    return step(caller, held, one)


def _call(caller, method, request, tenant):
    return getattr(caller.sessions, method).future(request, timeout=SECONDS,
                                                   metadata=caller.metadata(tenant))


def _gone(caller, held, one):
    """Drops a session that may have expired, been evicted, or whose length is unknown after a lost
    call."""
    if one in held:
        held.remove(one)
    caller.take("free", _call(caller, "FreeSession", wire.sessions_pb.FreeSessionRequest(
        session=one.id), one.tenant), (CODE.NOT_FOUND,))


def _create(caller, held):
    sequence = caller.random.choice(caller.problems.sequences)
    tenant = caller.random.choice(caller.target.tenants)
    shape = wire.sessions_pb.LayerShape(
        dtype=wire.DTYPES[sequence.dtype], heads_kv=sequence.KV_HEADS, dim=sequence.DIM,
        dim_v=sequence.DIM_V)
    made = caller.take("create", _call(caller, "CreateSession", wire.sessions_pb.
                       CreateSessionRequest(shapes=[shape], lease_seconds=5), tenant))
    if made is not None:
        held.append(Held(made, sequence, tenant))


def _request(caller, one, rows, queries, length=None):
    """A request that appends `rows` rows and attends with the last `queries` of them."""
    sequence, end = one.sequence, one.length + rows
    request = wire.pb.AttendRequest(
        request_id=caller.name("good"), return_lse=True,
        mask=wire.pb.Mask(kind=wire.pb.Mask.KIND_CAUSAL_BOTTOM_RIGHT))
    request.sessions.add(session=one.id, length=one.length if length is None else length,
                         append_id=request.request_id[-32:].encode())
    request.q.CopyFrom(wire.tensor(sequence.dtype, (1, sequence.HEADS, queries, sequence.DIM)))
    request.raw.append(sequence.rows("q", end - queries, end))
    if rows:
        for name, dim in (("k", sequence.DIM), ("v", sequence.DIM_V)):
            getattr(request, name).CopyFrom(
                wire.tensor(sequence.dtype, (1, sequence.KV_HEADS, rows, dim)))
            request.raw.append(sequence.rows(name, one.length, end))
    return request


def _attend(caller, held, one, request, rows, queries):
    code, answer, details = code_of(caller.attention.Attend.future(
        request, timeout=SECONDS, metadata=caller.metadata(one.tenant)))
    caller.end("append", code)
    if code is CODE.OK:
        check(list(answer.session_lengths) == [one.length + rows], "a session's length is wrong")
        expected = one.sequence.answer(one.length + rows, queries) if queries else None
        check(expected is None or list(answer.raw) == expected, "a session's answer has other bits")
        one.length += rows
        return True
    check(code in (*caller.target.refusals, CODE.NOT_FOUND, CODE.OUT_OF_RANGE),
          f"an append: {code.name}: {details}")
    # Unless the append was refused, the rows may or may not have been appended.
    if code is not CODE.RESOURCE_EXHAUSTED:
        _gone(caller, held, one)
    return False


def _sizes(caller, one):
    room = one.sequence.ROWS - one.length
    rows = min(room, caller.random.choice((0, 1, 1, 1, 5, 64, 130)))
    most = one.length + rows
    return rows, min(most, caller.random.choice((1, 1, rows, 0)))


def _append(caller, held, one):
    if one.length == one.sequence.ROWS:
        return _gone(caller, held, one)
    rows, queries = _sizes(caller, one)
    request = _request(caller, one, rows, queries)
    if not _attend(caller, held, one, request, rows, queries):
        caller.unanswered.append(request.request_id)


def _again(caller, held, one):
    """An append that is sent twice appends its rows once."""
    rows, queries = _sizes(caller, one)
    if rows == 0:
        return
    request = _request(caller, one, rows, queries)
    if _attend(caller, held, one, request, rows, queries):
        one.length -= rows
        if not _attend(caller, held, one, request, rows, queries):
            one.length += rows  # the first call appended them


def _fork(caller, held, one):
    if len(held) >= SESSIONS_MOST:
        return
    length = caller.random.randrange(one.length + 1)
    made = caller.take("fork", _call(caller, "ForkSession", wire.sessions_pb.ForkSessionRequest(
        session=one.id, length=length), one.tenant), (CODE.NOT_FOUND, CODE.OUT_OF_RANGE))
    if made is None:
        return _gone(caller, held, one)
    held.append(Held(made, one.sequence, one.tenant, length))


def _truncate(caller, held, one):
    length = caller.random.randrange(one.length + 1)
    made = caller.take("truncate", _call(
        caller, "TruncateSession", wire.sessions_pb.TruncateSessionRequest(
            session=one.id, length=length), one.tenant), (CODE.NOT_FOUND, CODE.OUT_OF_RANGE))
    if made is None:
        return _gone(caller, held, one)
    check(made.length == length, "a truncated session has another length")
    one.length = length


def _look(caller, held, one):
    pb = wire.sessions_pb
    name, request = caller.random.choice((("GetSession", pb.GetSessionRequest(session=one.id)),
                                          ("KeepAlive", pb.KeepAliveRequest(session=one.id)),
                                          ("ListSessions", pb.ListSessionsRequest())))
    made = caller.take("look", _call(caller, name, request, one.tenant), (CODE.NOT_FOUND,))
    if made is not None and name != "ListSessions":
        check(made.length <= one.length, "a session has more than was appended")


def _mistake(caller, held, one):
    """Asks for another tenant's session, and gives a wrong length."""
    other = next(each for each in caller.target.tenants if each != one.tenant)
    code, _, details = code_of(_call(caller, "GetSession", wire.sessions_pb.GetSessionRequest(
        session=one.id), other))
    caller.end("another tenant's", code)
    check(code is CODE.NOT_FOUND or code in caller.target.refusals,
          f"another tenant's session: {code.name}: {details}")
    code, _, details = code_of(caller.attention.Attend.future(
        _request(caller, one, 0, min(1, one.length), length=one.length + 1), timeout=SECONDS,
        metadata=caller.metadata(one.tenant)))
    caller.end("wrong length", code)
    check(code in (CODE.FAILED_PRECONDITION, CODE.OUT_OF_RANGE, CODE.NOT_FOUND,
                   *caller.target.refusals), f"a wrong length: {code.name}: {details}")


def free_all(caller):
    for one in list(getattr(caller, "held", [])):
        with contextlib.suppress(grpc.RpcError):
            _call(caller, "FreeSession", wire.sessions_pb.FreeSessionRequest(session=one.id),
                  one.tenant).result()
    caller.held = []


def shared(caller):
    """Calls with tensors in a shared-memory region of the caller's, some of them invalid."""
    if not caller.target.region_socket:
        return
    region_client = None
    try:
        region_client = regions.Client(caller.target.region_socket)
        tenant = caller.random.choice(caller.target.tenants)
        if caller.target.locks is not None:
            reply, _ = region_client.ask(identify=wire.shm.Identify(
                token=caller.target.locks.tokens[tenant]))
            if reply.HasField("error"):
                _end_refused_region(caller, reply)
                return
        _use_region(caller, region_client, tenant)
    except (OSError, IndexError):  # the server accepts no more clients of the socket
        caller.outcomes["region socket", "closed"] += 1
    finally:
        if region_client is not None:
            region_client.close()


def _end_refused_region(caller, reply):
    check(reply.error.code == CODE.RESOURCE_EXHAUSTED.value[0], reply)
    caller.end("region", CODE.RESOURCE_EXHAUSTED)


def _use_region(caller, region_client, tenant):
    if caller.random.random() < 0.1:
        region_client.socket.send(caller.random.randbytes(caller.random.randrange(1, 100)))
        region_client.socket.recv(4096)
        return
    reply, files = region_client.ask(create=wire.shm.CreateRegion(bytes=1 << 18))
    if not reply.HasField("created"):
        _end_refused_region(caller, reply)
        return
    region = regions.Region(reply.created.token, regions.mmap.mmap(files[0], reply.created.bytes),
                            files[0])
    try:
        for _ in range(caller.random.randrange(1, 5)):
            if not _attend_in_region(caller, region, tenant):
                break
        if caller.random.random() < 0.5:
            region_client.ask(release=wire.shm.ReleaseRegion(token=region.token))
    finally:
        region.close()


def _attend_in_region(caller, region, tenant):
    """False if the region must not be used again: after a lost connection, the call's batch may
    still write to it."""
    problem = caller.random.choice(caller.problems.forward)
    size, sizes = 1 << 18, sum(len(raw) + regions.ALIGN for raw in problem.request.raw)
    if sizes + sum(len(raw) + regions.ALIGN for raw in problem.answer) + (64 << 10) > size:
        return True
    request = region.take(problem.message(request_id=caller.name("good")))
    request.lse_placement.shared_memory.offset = size - (64 << 10)  # after the longest O
    wrong = caller.random.random() < 0.2
    if wrong:
        request.q.shared_memory.offset = caller.random.choice((1, size, 1 << 40, (1 << 64) - 256))
    code, answer, details = code_of(caller.attention.Attend.future(
        request, timeout=SECONDS, metadata=caller.metadata(tenant)))
    caller.end("shared memory", code)
    caller.note(request.request_id, code)
    if wrong:
        check(code is CODE.INVALID_ARGUMENT or code in caller.target.refusals,
              f"a wrong offset: {code.name}: {details}")
    elif code is CODE.OK:
        got = [region.bytes_of(each) for each in (answer.o, answer.lse)]
        check(got == problem.answer, "shared memory: the answer has other bits")
    else:
        check(code in caller.target.refusals, f"shared memory: {code.name}: {details}")
    return code not in (CODE.CANCELLED, CODE.DEADLINE_EXCEEDED, CODE.UNAVAILABLE)


def oip(caller):
    """Calls of the Open Inference Protocol."""
    pb = wire.oip_pb
    if caller.random.random() < 0.2:
        name, request = caller.random.choice((
            ("ServerReady", pb.ServerReadyRequest()),
            ("ServerMetadata", pb.ServerMetadataRequest()),
            ("ModelMetadata", pb.ModelMetadataRequest(name="attention_fp32_bhld_full")),
            ("ModelStatistics", pb.ModelStatisticsRequest()),
            ("RepositoryIndex", pb.RepositoryIndexRequest())))
        caller.take("oip", getattr(caller.oip, name).future(request, timeout=SECONDS,
                                                            metadata=caller.metadata()))
        return
    sequence = caller.random.choice(caller.problems.sequences)
    length = caller.random.choice((1, 17, 60, 150))
    queries = min(length, caller.random.choice((1, 16, 60)))
    request = pb.ModelInferRequest(model_name=f"attention_{OIP_DTYPES[sequence.dtype]}_bhld_causal",
                                   id=caller.name("good"))
    begins = {"q": length - queries, "k": 0, "v": 0}
    for name, begin in begins.items():
        heads = sequence.HEADS if name == "q" else sequence.KV_HEADS
        dim = sequence.DIM_V if name == "v" else sequence.DIM
        request.inputs.add(name=name, datatype=OIP_DTYPES[sequence.dtype].upper(),
                           shape=(1, heads, length - begin, dim))
        request.raw_input_contents.append(sequence.rows(name, begin, length))
    wrong = caller.random.random() < 0.2
    if wrong:
        request.inputs[0].shape[2] += caller.random.choice((-queries - 1, 1, 1 << 40))
    code, answer, details = code_of(caller.oip.ModelInfer.future(
        request, timeout=SECONDS, metadata=caller.metadata()))
    caller.end("oip infer", code)
    caller.note(request.id, code)
    if code is CODE.OK:
        check(not wrong, "a wrong shape was answered")
        check(list(answer.raw_output_contents) == sequence.answer(length, queries),
              "oip: the answer has other bits")
    else:
        check(code in caller.target.refusals or wrong and code is CODE.INVALID_ARGUMENT,
              f"oip infer: {code.name}: {details}")
