# SPDX-License-Identifier: Apache-2.0
"""Bad requests: each gets its status and a message that names field and bound; the next valid one
is answered."""

import time

import grpc
import pytest

import harness
import wire

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture(autouse=True)
def still_serves(server):
    yield
    assert not server.ended(), server.log()
    wire.assert_serves(server.address)


def refused(server, request, seconds=wire.SECONDS):
    """Code and message of a call that must fail."""
    with wire.connect(server.address) as service:
        with pytest.raises(grpc.RpcError) as error:
            service.Attend(request, timeout=seconds)
    return error.value.code(), error.value.details()


def packed(request, cu_q, cu_kv):
    request.layout = 3
    for tensor in (request.q, request.k, request.v):
        tensor.shape[:] = (16, 1, 64)
    request.cu_q.extend(cu_q)
    request.cu_kv.extend(cu_kv)


# One of each kind, as plain Python sends them; tests/server/support/bad_requests.cc has all of
# them.
@pytest.mark.parametrize("change,words,code", [
    (lambda r: r.q.shape.__setitem__(2, -16), ["q.shape[2]", "-16"], INVALID),
    (lambda r: r.raw.__delitem__(2), ["raw"], INVALID),
    (lambda r: packed(r, [0, 9, 5, 16], [0, 5, 9, 16]), ["cu_q", "5"], INVALID),
    (lambda r: setattr(r, "kernel", "cuda_naive"), ["cuda_naive"], UNIMPLEMENTED),
], ids=("shape", "bytes", "packed", "kernel"))
def test_bad_requests_are_refused_by_field_and_bound(server, change, words, code):
    request = wire.small_request(seed=1)
    change(request)
    before = server.metric("attend_host_memory_used_bytes")
    got, message = refused(server, request)
    assert got is code, (got, message)
    assert all(word in message for word in words), message
    assert 0 < len(message) <= 1024
    assert server.metric("attend_host_memory_used_bytes") == before


def test_random_and_truncated_bytes_do_no_harm(server, random):
    """Every message is answered with an ordinary status and crashes nothing."""
    good = wire.small_request(seed=2, length=5, return_lse=True).SerializeToString()
    allowed = {grpc.StatusCode.OK, INVALID, UNIMPLEMENTED, EXHAUSTED}
    messages = [random.bytes(int(n)) for n in random.integers(0, 4000, 60)]
    messages += [good[:int(n)] for n in random.integers(0, len(good), 60)]
    for _ in range(120):  # a few bytes of the metadata changed: nearly valid, so it gets further
        broken = bytearray(good)
        for at in random.integers(0, 80, int(random.integers(1, 4))):
            broken[at] = int(random.integers(256))
        messages.append(bytes(broken))
    codes = set()
    with grpc.insecure_channel(server.address, options=wire.UNLIMITED) as channel:
        call = channel.unary_unary(wire.ATTEND)
        for message in messages:
            try:
                call(message, timeout=wire.SECONDS)
                codes.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    assert codes <= allowed, codes
    assert INVALID in codes


def test_an_empty_message_is_refused(server):
    code, message = refused(server, wire.pb.AttendRequest())
    assert code == INVALID and "q" in message


def test_a_too_large_message_is_refused(start_server):
    """It can never fit, so clients must not retry; the operator sees it."""
    small = start_server("--max-request-bytes", "1MiB")
    code, message = refused(small, wire.small_request(length=2048))
    assert code == INVALID and "must have at most 1048576" in message
    assert small.metric("attend_rejected_requests_total", reason="too_large") == 1
    assert small.metric("attend_requests_total", code="INVALID_ARGUMENT") == 1
    wire.assert_serves(small.address)


def test_a_request_above_all_memory_is_not_retryable(start_server):
    """A request that can never fit is invalid; one that does not fit now is retryable."""
    small = start_server("--memory-budget", "1MiB")
    code, message = refused(small, wire.small_request(length=2048))
    assert code == INVALID and "1048576" in message
    assert small.metric("attend_rejected_requests_total", reason="too_large") == 1
    wire.assert_serves(small.address)


def test_a_request_without_free_memory_is_retryable(start_server):
    small = start_server("--memory-budget", "5MiB", "--lanes", "1")
    with wire.connect(small.address) as service:
        slow = service.Attend.future(wire.slow_request(), timeout=60)  # 2 MiB in all
        harness.wait_for("the lane to be busy", lambda: small.metric("attend_lanes_busy") == 1)
        with pytest.raises(grpc.RpcError) as error:
            service.Attend(wire.small_request(length=4096), timeout=wire.SECONDS)  # 4 MiB
        assert not slow.done()
        assert error.value.code() == EXHAUSTED and "memory" in error.value.details()
        assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        slow.result()
        assert small.metric("attend_rejected_requests_total", reason="memory") == 1
        service.Attend(wire.small_request(length=4096), timeout=wire.SECONDS)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_refused(server, compression):
    """Refused: their inflated size is only known after inflating."""
    with wire.connect(server.address, compression=compression) as service:
        with pytest.raises(grpc.RpcError) as error:
            service.Attend(wire.small_request(), timeout=wire.SECONDS)
    assert error.value.code() == UNIMPLEMENTED and compression.name.lower() in error.value.details()


def test_a_deadline_in_the_past_is_refused(server):
    """One that reaches the server with a microsecond left ends as DEADLINE_EXCEEDED."""
    started = time.monotonic()
    code, _ = refused(server, wire.slow_request(length=4096), seconds=1e-6)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < wire.SECONDS
