# SPDX-License-Identifier: Apache-2.0
"""Sessions: K and V that stay at the server, against whole requests and against NumPy float64."""

import contextlib
import time

import grpc
import pytest

import harness
import wire
from reference import Mask, judge
from sessions import Sequence, client, refused, step


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


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_after_a_restart_an_id_is_nobodys(start_server, random, end):
    """Neither a call nor a request on it finds what another has in the same memory since."""
    listen = f"127.0.0.1:{harness.free_port()}"
    first = start_server(listen=listen)
    with client(listen) as tenant:
        before = Sequence(random, tenant.create())
        tenant.attend(step(random, [before], 70, 0)[0])
    getattr(first, end)()
    start_server(listen=listen)
    with client(listen) as tenant:
        after = Sequence(random, tenant.create())
        tenant.attend(step(random, [after], 70, 0)[0])
        guessed = refused(grpc.StatusCode.NOT_FOUND, tenant.call, "GetSession", session=bytes(16))
        for call, fields in (("GetSession", {}), ("KeepAlive", {}), ("ForkSession", {}),
                             ("TruncateSession", {"length": 0}), ("FreeSession", {})):
            assert refused(grpc.StatusCode.NOT_FOUND, tenant.call, call,
                           session=before.session.id, **fields) == guessed
        for new_rows, len_q in ((0, 1), (1, 1)):
            request, _ = step(random, [before], new_rows, len_q)
            assert guessed in refused(grpc.StatusCode.NOT_FOUND, tenant.attend, request)
        assert [each.id for each in tenant.call("ListSessions").sessions] == [after.session.id]
        request, case = step(random, [after], 1, 1)
        judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))


def test_a_cancelled_append_appends_nothing_or_all(sessions_server, random):
    """To all three sequences, or to none."""
    with client(sessions_server.address) as tenant:
        sequences = [Sequence(random, tenant.create()) for _ in range(3)]
        for timeout in (0.001, 0.003, 0.01, 0.03, 0.1):
            before = [(sequence.k, sequence.v) for sequence in sequences]
            request, _ = step(random, sequences, 300, 300, kernel="cpu_reference")
            with contextlib.suppress(grpc.RpcError):
                tenant.attention.Attend(request, timeout=timeout, metadata=tenant.metadata)
            lengths = [length_at_rest(tenant, sequence.session) for sequence in sequences]
            assert lengths in ([sequences[0].length] * 3, [sequences[0].length - 300] * 3)
            if lengths[0] < sequences[0].length:
                for sequence, (k, v) in zip(sequences, before):
                    sequence.k, sequence.v = k, v
        request, case = step(random, sequences, 1, 1)
        judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))


def length_at_rest(tenant, session):
    """Once no append is under way, which a truncation would be refused for."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        length = tenant.call("GetSession", session=session.id).length
        try:
            tenant.call("TruncateSession", session=session.id, length=length)
            return length
        except grpc.RpcError as failure:
            assert failure.code() == grpc.StatusCode.UNAVAILABLE
    raise AssertionError("an append is still under way")
