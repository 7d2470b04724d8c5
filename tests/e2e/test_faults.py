# SPDX-License-Identifier: Apache-2.0
"""Clients killed and servers stopped in the middle of a call: nothing is left behind."""

import contextlib
import pathlib
import signal
import subprocess
import sys

import grpc
import pytest

import harness
import wire
from chunked import Stream, assemble, chunks_of, header_of

CODE = grpc.StatusCode
ANSWER_BYTES = 32 << 20  # bytes of doomed_client.py


class DoomedClient:
    """A client process in the middle of a call, until killed."""

    def __init__(self, server, way, moment):
        stubs = pathlib.Path(wire.pb.__file__).parents[2]
        script = pathlib.Path(__file__).with_name("doomed_client.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(stubs), server.address, way, moment],
            stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "there\n"

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def held(server):
    return server.metric("attend_host_memory_used_bytes")


def wait_until_nothing_is_held(server):
    harness.wait_for("the memory to be back", lambda: held(server) == 0, 30)
    harness.wait_for("nothing in flight",
                     lambda: server.metric("attend_inflight_requests") == 0, 30)
    assert server.metric("attend_queue_requests") == 0


@pytest.mark.parametrize("moment", ["upload", "answer"])
@pytest.mark.parametrize("way", ["unary", "stream", "chunked"])
def test_a_killed_client_frees_its_memory(start_server, way, moment):
    """SIGKILL in the middle of a message: the memory is freed, and other clients notice nothing."""
    server = start_server("--memory-budget", "128MiB")
    client = DoomedClient(server, way, moment)
    with contextlib.ExitStack() as stack:
        stack.callback(client.kill)
        if moment == "answer":
            harness.wait_for("the answer alone to be held", lambda: held(server) == ANSWER_BYTES)
        elif way == "chunked":
            harness.wait_for("memory, taken at the header", lambda: held(server) > 0)
        else:
            assert held(server) == 0, "gRPC has no whole message yet"
        wire.assert_serves(server.address)
    wait_until_nothing_is_held(server)
    wire.assert_serves(server.address)
    # Counted once, and not as refused by the server. On a stream there was no request yet.
    cancelled = moment == "upload" and way != "stream"
    harness.wait_for("its end to be counted", lambda: cancelled ==
                     server.metric("attend_requests_total", code="CANCELLED"))
    assert server.metric("attend_requests_total", code="OK") == 2 + (moment == "answer")
    assert server.metric("attend_requests_total") == 2 + cancelled + (moment == "answer")
    assert server.metric("attend_rejected_requests_total") == 0
    wait_until_nothing_is_held(server)
    assert server.stop() == 0, server.log()


def test_a_call_without_a_message_is_refused_with_the_reason(start_server):
    """The client is told the reason, and not to retry."""
    server = start_server()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_unary(wire.ATTEND)
        with pytest.raises(grpc.RpcError) as error:
            call(iter([]), timeout=wire.SECONDS)
    assert error.value.code() is CODE.INVALID_ARGUMENT
    assert error.value.details() == "the call has no message"
    harness.wait_for("its end to be counted", lambda: server.metric(
        "attend_requests_total", code="INVALID_ARGUMENT") == 1)
    assert server.metric("attend_rejected_requests_total", reason="invalid") == 1
    assert server.metric("attend_rejected_requests_total") == 1


def test_clients_killed_one_after_another(start_server):
    """More of them than fit into the budget at once."""
    server = start_server("--memory-budget", "64MiB")
    for _ in range(4):
        client = DoomedClient(server, "chunked", "upload")
        harness.wait_for("its upload", lambda: held(server) > 16 << 20)
        client.kill()
        harness.wait_for("the memory to be back", lambda: held(server) == 0, 30)
    wire.assert_serves(server.address)
    assert server.metric("attend_requests_total", code="CANCELLED") == 4
    assert server.stop() == 0, server.log()


@contextlib.contextmanager
def striped(server, request, count):
    """The streams of a request, each on its own connection, all joined; and the request's token."""
    with contextlib.ExitStack() as stack:
        services = [stack.enter_context(wire.connect(server.address)) for _ in range(count)]
        first = Stream(services[0], wire.pb.AttendChunkedRequest(header=header_of(request)))
        token = next(first.call).grant.token
        streams = [first] + [Stream(service, wire.pb.AttendChunkedRequest(token=token))
                             for service in services[1:]]
        for stream in streams[1:]:
            assert next(stream.call).HasField("grant")
        yield streams, token


def test_sigterm_during_a_striped_upload(start_server):
    """Every stream gets the same status, and the server ends normally, whatever is still being
    sent."""
    server = start_server("--drain-timeout", "20")
    request = wire.small_request(seed=1, length=16384)  # 12 MiB
    chunks = list(chunks_of(request, 100_000))[:-1]  # never complete
    with striped(server, request, 4) as (streams, _), wire.connect(server.address) as another:
        silent = Stream(another)  # open, but its token has not been sent
        for i, chunk in enumerate(chunks):
            streams[i % 4].send(chunk)
            if i == len(chunks) // 2:
                server.signal(signal.SIGTERM)
        assert {stream.fail()[0] for stream in streams} == {CODE.UNAVAILABLE}
        assert silent.fail()[0] is CODE.UNAVAILABLE
    assert server.wait(30) == 0, server.log()


def test_sigterm_after_a_striped_upload(start_server):
    """A complete request is computed and its answer sent over all streams; streams that have not
    joined are refused."""
    server = start_server("--lanes", "1")
    request = wire.slow_request(seed=2, return_lse=True)
    with striped(server, request, 3) as (streams, token), wire.connect(server.address) as another:
        silent = Stream(another)
        for i, chunk in enumerate(chunks_of(request, 100_000)):
            streams[i % 3].send(chunk)
        for stream in streams:
            stream.half_close()
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        server.signal(signal.SIGTERM)
        assert silent.fail()[0] is CODE.UNAVAILABLE
        late = Stream(another, wire.pb.AttendChunkedRequest(token=token))
        assert late.fail()[0] is CODE.UNAVAILABLE
        answer = assemble([message for stream in streams for message in stream.call])
    assert [len(raw) for raw in answer.raw] == [4096 * 32 * 4, 4096 * 4]
    assert server.wait() == 0, server.log()
