# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 frames that no gRPC client needs: they end their connection before they cost much."""

import contextlib
import itertools
import socket
import threading
import time

import grpc
import pytest

import harness
import hostile
import wire


def flood(connection, pieces, bytes_max):
    """Sends the pieces until the server ends the connection; fails if it accepts this many
    bytes."""
    connection.settimeout(30)
    sent = 0
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
            assert sent < bytes_max, f"{sent} bytes were taken"


def endless_headers(fill):
    """A header block that never ends."""
    yield hostile.frame(hostile.HEADERS, 0, 1, hostile.call_headers("/a"))
    while True:
        yield hostile.frame(hostile.CONTINUATION, 0, 1, fill)


def endless_header():
    """One header with a value of 2 GiB."""
    yield hostile.frame(hostile.HEADERS, 0, 1, b"\0\x01x\x7f" + hostile.varint((2 << 30) - 127))
    while True:
        yield hostile.frame(hostile.CONTINUATION, 0, 1, b"v" * (16 << 10))


def streams_without_end(kilobytes):
    """Calls one after the other; the server's settings are never acknowledged."""
    headers = hostile.call_headers("/a", *((b"x%d" % i, b"v" * 1000) for i in range(kilobytes)))
    for stream in range(1, 1 << 30, 2):
        yield hostile.frame(hostile.HEADERS, hostile.END_HEADERS, stream, headers)


def streams_after_an_even_one():
    """gRPC ignores this: the following calls are new ones."""
    headers = hostile.call_headers("/a")
    yield hostile.frame(hostile.HEADERS, hostile.END_HEADERS, 0x7ffffffe, headers)
    yield from streams_without_end(8)


def ends_of_one_call():
    """Empty DATA frames for a call that has ended."""
    yield hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b"")
    yield hostile.frame(hostile.HEADERS, hostile.END_HEADERS, 1, hostile.call_headers("/a"))
    while True:
        yield hostile.frame(hostile.DATA, hostile.END_STREAM, 1, b"") * 100


def headers_to_ended_streams():
    """One call whose headers are sent repeatedly."""
    yield hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b"")
    while True:
        yield hostile.frame(hostile.HEADERS, hostile.END_HEADERS | hostile.END_STREAM, 1,
                            hostile.call_headers("/a")) * 100


@pytest.mark.parametrize("pieces", [
    pytest.param(endless_headers(hostile.literal(b"a", b"b" * 100) * 100), id="continuation"),
    pytest.param(endless_headers(b""), id="empty_continuation"),
    pytest.param(endless_header(), id="one_header"),
    pytest.param(streams_without_end(8), id="streams"),
    pytest.param((hostile.frame(2, 0, 1, bytes(5)) * 100 for _ in itertools.count()),
                 id="priorities"),
    pytest.param((hostile.frame(hostile.SETTINGS, 0, 0, b"") * 100 for _ in itertools.count()),
                 id="settings"),
    pytest.param((hostile.frame(hostile.WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 100
                  for _ in itertools.count()), id="window_updates"),
    pytest.param(headers_to_ended_streams(), id="ended_streams"),
    pytest.param(streams_after_an_even_one(), id="even_stream"),
    pytest.param(ends_of_one_call(), id="ends"),
])
def test_useless_frames_end_their_connection(start_server, pieces):
    """gRPC 1.51 itself accepts most of these forever, and keeps them."""
    server = start_server(*hostile.SMALL_LIMITS)
    wire.assert_serves(server.address)
    with hostile.grows_at_most(server, 64 << 20):
        with hostile.open_socket(server.address) as connection:
            connection.sendall(hostile.HELLO)
            flood(connection, pieces, 64 << 20)
        wire.assert_serves(server.address)
    assert server.metric("attend_connections_refused_total", reason="frames") == 1
    assert 'connection closed reason="frames" peer="127.0.0.1"' in server.log()


def test_calls_that_are_reset_at_once_take_little_memory(start_server):
    """HTTP/2's rapid reset. A busy server may receive all resets late."""
    server = start_server(*hostile.SMALL_LIMITS, "--log-level", "error")
    headers = hostile.call_headers(wire.ATTEND)
    wire.assert_serves(server.address)
    calls = 8_000
    with hostile.grows_at_most(server, calls * (24 << 10)):
        with hostile.open_socket(server.address) as connection:
            connection.sendall(hostile.HELLO + hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b""))
            cancel = hostile.CANCEL.to_bytes(4, "big")
            resets = (hostile.frame(hostile.HEADERS, hostile.END_HEADERS, stream, headers) +
                      hostile.frame(hostile.RST_STREAM, 0, stream, cancel)
                      for stream in range(1, 2 * calls, 2))
            flood(connection, resets, 1 << 30)
        wire.assert_serves(server.address)


def test_unknown_methods_read_no_message(start_server):
    """The bound is that of the method with the smallest messages: 4 KiB."""
    server = start_server(*hostile.SMALL_LIMITS)
    hello = hostile.HELLO + hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b"")
    headers = hostile.frame(hostile.HEADERS, hostile.END_HEADERS, 1,
                            hostile.call_headers("/unknown.Service/Method"))
    with hostile.open_socket(server.address) as connection:
        connection.sendall(hello + headers +
                           hostile.frame(hostile.DATA, 0, 1, hostile.grpc_message(b"", 4097)))
    assert server.metric("attend_connections_refused_total", reason="frames") == 0
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            channel.unary_unary("/unknown.Service/Method")(bytes(1000), timeout=wire.SECONDS)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


TCP_ESTABLISHED, TCP_CLOSE = 1, 7  # as the kernel counts states


def test_ended_connections_are_reset(start_server):
    """Otherwise a client whose bytes no longer fit into the server's socket would wait for a
    minute."""
    server = start_server(*hostile.SMALL_LIMITS)
    nothing = hostile.frame(2, 0, 1, bytes(5))
    with hostile.open_socket(server.address) as connection:
        connection.sendall(hostile.HELLO + nothing * 16_000)

        def state():
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

        # Slowly: if the server has not read everything, its system resets the connection.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while state() == TCP_ESTABLISHED:
                connection.sendall(nothing * 400)
                time.sleep(0.05)
        harness.wait_for("a reset", lambda: state() == TCP_CLOSE)


STREAM = "/attend.v1.AttentionService/AttendStream"


def open_streams(connection, number):
    """Opens this many idle streams; returns the first one's number once the server knows all of
    them."""
    first = connection.open(STREAM)
    for _ in range(number - 1):
        connection.open(STREAM)
    connection.send(hostile.PING, 0, 0, bytes(8))
    connection.wait_for_frame(hostile.PING)
    return first


def hold_streams(address, number):
    """A connection with this many idle streams. Those of a connection that has just ended may count
    until gRPC has dropped them."""
    made = []

    def made_one():
        connection = hostile.Http2(address)
        with contextlib.suppress(AssertionError, OSError):
            open_streams(connection, number)
            made.append(connection)
            return True
        connection.socket.close()
        return False

    harness.wait_for(f"{number} calls to be free", made_one)
    return made[0]


def test_open_calls_are_bounded_in_all_and_for_each_peer(start_server, tmp_path):
    path = tmp_path / "a.sock"
    server = start_server(*hostile.SMALL_LIMITS, "--max-streams", "8", "--max-calls", "12",
                          listen=f"127.0.0.1:0,unix:{path}")

    def opens_too_many(connection, error):
        ended = server.metric("attend_connections_refused_total", reason="frames")
        connection.open("/a")
        connection.wait_for_close()
        assert server.metric("attend_connections_refused_total", reason="frames") == ended + 1
        assert error in server.log()

    # A peer may have a quarter of all calls, but at least as many as one connection.
    with hostile.Http2(server.address) as held:
        first = open_streams(held, 6)
        with hold_streams(server.address, 2) as other:
            opens_too_many(other, "more open calls than --max-calls-per-peer allows")
        with hold_streams(server.address, 2) as other:  # those of the other one are no longer open
            held.reset(first)
            open_streams(held, 1)
            opens_too_many(other, "more open calls than --max-calls-per-peer allows")
        wire.assert_serves(f"unix:{path}")
        with hold_streams(f"unix:{path}", 5) as other:  # the last is for peers without one
            opens_too_many(other, "more open calls than --max-calls allows")
    # Nor do calls count on connections that clients or gRPC have ended, nor answered calls.
    for _ in range(5):
        hold_streams(server.address, 8).socket.close()
        with hold_streams(server.address, 8) as ended:
            ended.send(hostile.GOAWAY, 0, 0, bytes(7))  # one byte too few
            ended.wait_for_close()
    hold_streams(server.address, 7).socket.close()
    with wire.connect(f"unix:{path}") as service:
        for seed in range(20):  # on one connection
            assert service.Attend(wire.small_request(seed=seed), timeout=10).HasField("o")


SETTINGS_ACK = hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b"")
ONE_NANOSECOND = (b"grpc-timeout", b"1n")
BULKY_METADATA = [(b"x%d" % i, b"v" * 1000) for i in range(9)]  # above the limit of gRPC


@pytest.mark.parametrize("path, more", [
    pytest.param(wire.ATTEND, [ONE_NANOSECOND], id="deadline"),
    pytest.param(STREAM, [ONE_NANOSECOND], id="stream"),
    pytest.param(wire.ATTEND, BULKY_METADATA, id="metadata"),
    pytest.param("/a", [], id="unknown_method"),
])
def test_calls_that_end_by_themselves_take_little_memory(start_server, tmp_path, path, more):
    """gRPC ends them, so that they are no longer open streams, and keeps some 20 KiB with its
    metadata for each until the server has processed it."""
    others = f"unix:{tmp_path}/a.sock"  # the attackers may have all the calls of one peer
    server = start_server(*hostile.SMALL_LIMITS, "--max-streams", "128", "--log-level", "error",
                          listen=f"127.0.0.1:0,{others}")
    headers = hostile.call_headers(path, *more)
    wire.assert_serves(others)

    def read(connection):
        with connection, contextlib.suppress(OSError):
            hostile.ended(connection)

    def attack():
        with hostile.open_socket(server.address) as connection:
            reader = threading.Thread(target=read, args=(connection.dup(),))
            reader.start()
            with contextlib.suppress(OSError):
                connection.sendall(hostile.HELLO + SETTINGS_ACK)
                for stream in range(1, 40_000, 2):
                    connection.sendall(hostile.frame(
                        hostile.HEADERS, hostile.END_HEADERS | hostile.END_STREAM, stream,
                        headers))
                connection.shutdown(socket.SHUT_WR)
            reader.join()

    # The bound applies from 64 MiB on, and all may have begun 128 calls a second more than were
    # answered.
    with hostile.grows_at_most(server, 320 << 20):
        attackers = [threading.Thread(target=attack) for _ in range(8)]
        for attacker in attackers:
            attacker.start()
        wire.assert_serves(others)
        for attacker in attackers:
            attacker.join()
    wire.assert_serves(others)
