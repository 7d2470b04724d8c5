# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 that no client of gRPC's has a use for: it ends its connection before it costs much."""

import contextlib
import itertools
import socket
import threading

import pytest

import hostile
import wire


def flood(connection, pieces, bytes_max):
    """Sends the pieces until the server ends the connection; fails if it takes so many bytes."""
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
    """One header whose value is 2 GiB long."""
    yield hostile.frame(hostile.HEADERS, 0, 1, b"\0\x01x\x7f" + hostile.varint((2 << 30) - 127))
    while True:
        yield hostile.frame(hostile.CONTINUATION, 0, 1, b"v" * (16 << 10))


def streams_without_end(kilobytes):
    """Calls, one after the other; the server's settings are never acknowledged."""
    headers = hostile.call_headers("/a", *((b"x%d" % i, b"v" * 1000) for i in range(kilobytes)))
    for stream in range(1, 1 << 30, 2):
        yield hostile.frame(hostile.HEADERS, hostile.END_HEADERS, stream, headers)


def headers_to_ended_streams():
    """One call, and its headers again and again."""
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
])
def test_frames_that_no_client_needs_end_their_connection(start_server, pieces):
    """gRPC 1.51 itself takes most of these for ever, and keeps what comes."""
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
    """HTTP/2's rapid reset. A busy server may come to all of them late."""
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


SETTINGS_ACK = hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b"")
ONE_NANOSECOND = (b"grpc-timeout", b"1n")
BULKY_METADATA = [(b"x%d" % i, b"v" * 1000) for i in range(9)]  # above what gRPC takes


@pytest.mark.parametrize("path, more", [
    pytest.param(wire.ATTEND, [ONE_NANOSECOND], id="deadline"),
    pytest.param("/attend.v1.AttentionService/AttendStream", [ONE_NANOSECOND], id="stream"),
    pytest.param(wire.ATTEND, BULKY_METADATA, id="metadata"),
    pytest.param("/a", [], id="unknown_method"),
])
def test_calls_that_end_by_themselves_take_little_memory(start_server, path, more):
    """gRPC ends them, so that they are no open streams, and keeps some 20 KiB for each until the
    server has come to it; the metadata too."""
    server = start_server(*hostile.SMALL_LIMITS, "--max-streams", "128", "--log-level", "error")
    headers = hostile.call_headers(path, *more)
    wire.assert_serves(server.address)

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

    # 64 MiB begin to count, and all may have begun 128 calls a second more than were answered.
    with hostile.grows_at_most(server, 320 << 20):
        attackers = [threading.Thread(target=attack) for _ in range(8)]
        for attacker in attackers:
            attacker.start()
        wire.assert_serves(server.address)
        for attacker in attackers:
            attacker.join()
    wire.assert_serves(server.address)
