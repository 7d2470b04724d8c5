# SPDX-License-Identifier: Apache-2.0
"""Sessions: K and V that stay on the server, compared with whole requests and with NumPy
float64."""

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
    """A request on a session has the answer of the same request with all of K and V."""
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


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_after_a_restart_old_ids_are_unknown(start_server, random, end):
    """Neither a call nor a request on it finds the contents that another session has put there
    since."""
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
                             ("TruncateSession", {"length": 0}), ("KeepDraft", {"length": 0}),
                             ("FreeSession", {})):
            assert refused(grpc.StatusCode.NOT_FOUND, tenant.call, call,
                           session=before.session.id, **fields) == guessed
        for new_rows, len_q in ((0, 1), (1, 1)):
            request, _ = step(random, [before], new_rows, len_q)
            assert guessed in refused(grpc.StatusCode.NOT_FOUND, tenant.attend, request)
        assert [each.id for each in tenant.call("ListSessions").sessions] == [after.session.id]
        request, case = step(random, [after], 1, 1)
        judge(case, *wire.read_answer(case, "BHLD", tenant.attend(request)))


def test_a_cancelled_append_appends_nothing_or_all(sessions_server, random):
    """To all three sequences or to none."""
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
    """Once no append is in progress, during which truncations are refused."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        length = tenant.call("GetSession", session=session.id).length
        try:
            tenant.call("TruncateSession", session=session.id, length=length)
            return length
        except grpc.RpcError as failure:
            assert failure.code() == grpc.StatusCode.UNAVAILABLE
    raise AssertionError("an append is still under way")
