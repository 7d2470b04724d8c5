# SPDX-License-Identifier: Apache-2.0
"""Incomplete messages: how long they are kept, and how large they may be."""

import contextlib
import itertools
import threading

import grpc
import pytest

import certificates
import harness
import hostile
import wire

KIB, MIB = 1 << 10, 1 << 20
SERVICE = "/attend.v1.AttentionService/"
HEALTH = "/grpc.health.v1.Health/"
INFER_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
SETTINGS_ACK = hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b"")
HALF = hostile.grpc_message(bytes(1000), MIB)
CODE = grpc.StatusCode
ALONE = [*wire.UNLIMITED, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


def call(path, data):
    """The bytes of a connection with one call and this much of a message."""
    return (hostile.HELLO + SETTINGS_ACK +
            hostile.frame(hostile.HEADERS, hostile.END_HEADERS, 1, hostile.call_headers(path)) +
            hostile.frame(hostile.DATA, 0, 1, data))


def closed(server, reason):
    return server.metric("attend_connections_refused_total", reason=reason)


@pytest.fixture(params=("plain", "tls"))
def start(request, start_server, ca):
    """A server with this timeout for messages, and a function that opens sockets to it."""
    def started(seconds, *flags):
        tls = ca.serve() if request.param == "tls" else ()
        server = start_server(*tls, *hostile.SMALL_LIMITS, "--message-timeout", seconds, *flags)
        if request.param == "tls":
            return server, lambda: certificates.open_tls(server.address, ca.context())
        return server, lambda: hostile.open_socket(server.address)
    return started


def wait_for_stalls(server, connect, number):
    """Stalls one message after the other."""
    before = closed(server, "stalled")
    for turn in range(number):
        with connect() as stalling:
            stalling.sendall(call(wire.ATTEND, HALF))
            assert hostile.ended(stalling)
        harness.wait_for("it to count",
                         lambda turn=turn: closed(server, "stalled") == before + turn + 1)


def test_connections_whose_message_stalls_end(start):
    server, connect = start("0.4", "--oip")
    large = [wire.ATTEND, SERVICE + "AttendStream", SERVICE + "AttendChunked", INFER_STREAM]
    small = [SERVICE + "GetServerInfo", HEALTH + "Check", HEALTH + "Watch",
             "/attend.v1.SessionService/GetSession",
             "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
    connections = []
    for path in large + small:
        for data in (HALF[:2], hostile.grpc_message(b"\0", 1000), HALF):
            if data is not HALF or path in large:
                connections.append(connect())
                connections[-1].sendall(call(path, data))
    for connection in connections:
        with connection:
            assert hostile.ended(connection)
    harness.wait_for("all to count", lambda: closed(server, "stalled") == len(connections))
    assert 'connection closed reason="stalled" peer="127.0.0.1"' in server.log()
    harness.wait_for("none to be left", lambda: server.metric("attend_connections") == 0)


def test_idle_streams_between_messages_do_not_time_out(start):
    """Streams may be idle for any time, and a call may wait for its answer."""
    server, connect = start("0.4")
    with connect() as stream:
        message = hostile.grpc_message(wire.small_request().SerializeToString())
        stream.sendall(call(SERVICE + "AttendStream", message))
        wait_for_stalls(server, connect, 2)
        harness.wait_for("its answer", lambda: server.metric(
            "attend_requests_total", code="OK") == 1)
        stream.sendall(hostile.frame(hostile.DATA, 0, 1, message))
        harness.wait_for("another answer", lambda: server.metric(
            "attend_requests_total", code="OK") == 2)


def test_messages_that_wait_for_the_server_do_not_time_out(start_server):
    """On a stream that the server does not read because too many requests are unanswered, half a
    message is in flight."""
    # Long enough for this client's own sending on a busy machine.
    server = start_server(*hostile.SMALL_LIMITS, "--message-timeout", "2", "--lanes", "1")
    endless = hostile.shape_request(1, 1, 1 << 19, 1 << 19, 1, 1).SerializeToString()
    with hostile.Sender(server.address, SERVICE + "AttendStream") as sender:
        for _ in range(4):  # as many as may be unanswered
            assert sender.send_all(hostile.grpc_message(endless))
        harness.wait_for("it to run", lambda: server.metric("attend_lanes_busy") == 1, 30)
        before = sender.sent
        rest = threading.Thread(target=sender.send_all,
                                args=(hostile.grpc_message(bytes(31 * MIB)),))
        rest.start()
        harness.wait_for("its window to be shut", lambda: not sender.takes(1), 30)
        wait_for_stalls(server, lambda: hostile.open_socket(server.address), 2)
        assert rest.is_alive(), "it waits for a window"
        assert server.metric("attend_connections") >= 1
        assert server.metric("attend_lanes_busy") == 1
        sender.socket.shutdown(2)
        rest.join(30)
        assert 0 < sender.sent - before < 31 * MIB
    harness.wait_for("the lane to be free", lambda: server.metric("attend_lanes_busy") == 0, 30)


def test_messages_on_a_busy_connection_do_not_time_out(start_server):
    """A client that sends one message after the other over a slow link."""
    server = start_server(*hostile.SMALL_LIMITS, "--message-timeout", "3")
    with hostile.Sender(server.address, wire.ATTEND) as sender:
        assert sender.send_all(HALF)
        sender.begin(wire.ATTEND)
        assert sender.send_all(hostile.grpc_message(b"", 15 * MIB))
        other = threading.Thread(target=wait_for_stalls, args=(
            server, lambda: hostile.open_socket(server.address), 3))
        other.start()
        while other.is_alive():
            assert sender.send_all(bytes(10 * KIB))
            other.join(0.02)
        assert closed(server, "stalled") == 3, "of the others"
        assert hostile.ended(sender.socket)  # when nothing arrives any more
        assert closed(server, "stalled") == 4
    wire.assert_serves(server.address)


def test_a_too_long_message_is_refused_by_its_declared_length(start):
    """Far above its method's limit; the rest need not arrive."""
    server, connect = start("60", "--oip")
    served = [(SERVICE + "AttendStream", 33 * MIB), (wire.ATTEND, 33 * MIB),
              (INFER_STREAM, 33 * MIB), (SERVICE + "AttendChunked", 9 * MIB),
              (SERVICE + "GetServerInfo", 129 * KIB), (HEALTH + "Check", 5 * KIB),
              (HEALTH + "Watch", 5 * KIB), ("/attend.v1.SessionService/GetSession", 129 * KIB),
              ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", 2 * MIB)]
    with hostile.Http2(server.address, connected=connect()) as client:
        for path, length in served:
            stream = client.open(path)
            client.data(stream, hostile.grpc_message(b"", length))
            client.wait_for_frame(hostile.HEADERS, stream)
        stream = client.open(HEALTH + "Check")
        client.data(stream, hostile.grpc_message(b""), hostile.END_STREAM)
        client.wait_for_frame(hostile.DATA, stream)
    assert closed(server, "frames") == closed(server, "stalled") == 0


def test_a_too_long_message_of_a_stream_is_reported(start_server):
    """Up to twice the limit; the stream goes on if each message is a request."""
    server = start_server(*hostile.SMALL_LIMITS)
    with wire.connect(server.address) as service:
        long = wire.pb.AttendRequest(raw=[bytes(24 * MIB)])
        answers = service.AttendStream(iter([long, wire.small_request()]), timeout=wire.SECONDS)
        codes = sorted(answer.status.code for answer in answers)  # they come in any order
        assert codes == [0, CODE.INVALID_ARGUMENT.value[0]]
        chunk = wire.pb.AttendChunkedRequest(data=bytes(6 * MIB))
        with pytest.raises(grpc.RpcError) as failed:
            list(service.AttendChunked(iter([chunk]), timeout=wire.SECONDS))
        assert failed.value.code() is CODE.INVALID_ARGUMENT
    assert closed(server, "frames") == 0


@pytest.mark.parametrize("paths", [[wire.ATTEND], [SERVICE + "AttendStream"]],
                         ids=["unary", "stream"])
def test_unfinished_messages_of_one_peer_end_no_calls_of_others(start_server, paths):
    """They take three quarters of --message-memory-max (64 MiB here); then the largest are
    ended."""
    server = start_server(*hostile.SMALL_LIMITS)
    done = threading.Event()

    def attack():
        with contextlib.ExitStack() as stack:
            while not done.is_set():
                # A window may stay closed for longer than the socket's timeout, and a connection
                # may end at any moment: the attack goes on.
                with contextlib.suppress(OSError):
                    half = stack.enter_context(
                        hostile.Sender(server.address, paths[0], source="127.0.0.2"))
                    half.send_all(hostile.grpc_message(bytes(15 * MIB), 16 * MIB))

    attackers = [threading.Thread(target=attack) for _ in range(4)]
    for attacker in attackers:
        attacker.start()
    try:
        with grpc.insecure_channel(server.address, options=ALONE) as channel:
            service = wire.stub.AttentionServiceStub(channel)
            large = hostile.shape_request(1, 1, 1 << 18, 16, 8, 8)  # 4 MiB
            calls = itertools.count(1)

            def enough():
                service.Attend(large, timeout=wire.SECONDS)
                return next(calls) >= 20 and closed(server, "messages") >= 12

            harness.wait_for("12 connections to be closed beside 20 calls", enough, 120)
    finally:
        done.set()
        for attacker in attackers:
            attacker.join(60)
    assert 'connection closed reason="messages" peer="127.0.0.2"' in server.log()
    assert 'reason="messages" peer="127.0.0.1"' not in server.log()


def test_one_peer_may_have_several_large_messages_in_flight(start_server):
    server = start_server(*hostile.SMALL_LIMITS)
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(hostile.Sender(server.address, wire.ATTEND))
                  for _ in range(3)]
        for half in halves:
            assert half.send_all(hostile.grpc_message(bytes(15 * MIB), 15 * MIB + 1))
        for half in halves:
            half.data(half.stream, b"\0", hostile.END_STREAM)
            half.wait_for_frame(hostile.HEADERS, half.stream)
    assert closed(server, "messages") == 0
