# SPDX-License-Identifier: Apache-2.0
"""Clients that attack the server's memory: none gets more than documented, and none keeps it."""

import contextlib
import threading
import time

import grpc
import harness
import hostile
import pytest
import wire

MIB = 1 << 20
ATTEND_STREAM = "/attend.v1.AttentionService/AttendStream"
RAW_TAG = hostile.varint(1000 << 3 | 2)


def packed(field, payload):
    return hostile.varint(field << 3 | 2) + hostile.varint(len(payload)) + payload


def send(address, message):
    """The status code of an Attend call with these bytes."""
    with grpc.insecure_channel(address, options=wire.UNLIMITED) as channel:
        call = channel.unary_unary(wire.ATTEND, request_serializer=None,
                                   response_deserializer=None)
        try:
            call(message, timeout=wire.SECONDS)
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            return error.code()


OUT_OF_ORDER = "a tensor before its fields"
MARGIN = 2 * MIB  # for 64 KiB, the connection and what malloc keeps

# 8 MiB each. Parsed by generated code, they take 8 to 60 times as much.
BULKY = {
    "one-byte numbers": lambda: packed(9, bytes(8 * MIB)),
    "empty raw entries": lambda: (RAW_TAG + b"\0") * (8 * MIB // 3) + b"\xf8\x7d\x01",
    "a shape": lambda: packed(2, packed(2, b"\1" * (8 * MIB))),
    "unknown strings": lambda: b"\xfa\x7d\0" * (8 * MIB // 3),
    "unknown groups": lambda: b"\x7b\x7c" * (4 * MIB),
    OUT_OF_ORDER: lambda: packed(1000, bytes(8 * MIB)) + b"\xf8\x7d\x01",
}


@pytest.mark.parametrize("what", BULKY)
@pytest.mark.parametrize("path", [wire.ATTEND, ATTEND_STREAM])
def test_fields_of_any_kind_and_order_cost_at_most_twice_their_bytes(start_server, path, what):
    """Three times if tensors come before the fields that describe them."""
    server = start_server(*hostile.SMALL_LIMITS)
    wire.assert_serves(server.address)
    message = BULKY[what]()
    times = 3 if what == OUT_OF_ORDER else 2
    with hostile.grows_at_most(server, times * len(message) + MARGIN), \
         grpc.insecure_channel(server.address, options=wire.UNLIMITED) as channel:
        if path == ATTEND_STREAM:
            call = channel.stream_stream(
                path, response_deserializer=wire.pb.AttendResponse.FromString)
            answer, = call(iter([message]), timeout=wire.SECONDS)
            assert answer.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        else:
            assert send(server.address, message) == grpc.StatusCode.INVALID_ARGUMENT
    wire.assert_serves(server.address)


def test_millions_of_tiny_tiles_stay_within_the_budget(start_server):
    server = start_server(*hostile.SMALL_LIMITS)
    wire.assert_serves(server.address)
    message = hostile.shape_request(1 << 20, 4, 1, 0, 1, 1).SerializeToString()
    # Twice in, once out, and lists of tiles; each may end in a huge page where those are enabled.
    huge_page = 2 * MIB
    with hostile.grows_at_most(server, 4 * (len(message) + huge_page)):
        assert send(server.address, message) == grpc.StatusCode.OK


def test_stuck_readers_do_not_delay_a_drain(start_server):
    server = start_server(*hostile.SMALL_LIMITS, "--write-timeout", "1", "--drain-timeout", "60")
    with hostile.Http2(server.address, window=0) as reader:
        for path in (wire.ATTEND, ATTEND_STREAM):
            stream = reader.open(path)
            reader.data(stream, hostile.grpc_message(hostile.unread_request()), hostile.END_STREAM)
        harness.wait_for("answers that wait",
                         lambda: server.metric("attend_host_memory_used_bytes") >= 12 * MIB)
        harness.wait_for("their memory to be back",
                         lambda: server.metric("attend_host_memory_used_bytes") == 0, 30)
        assert server.metric("attend_unread_calls_total") >= 1
        stream = reader.open(wire.ATTEND)
        reader.data(stream, hostile.grpc_message(hostile.unread_request()), hostile.END_STREAM)
        harness.wait_for("another one",
                         lambda: server.metric("attend_host_memory_used_bytes") >= 6 * MIB)
        assert server.stop() == 0, server.log()


def test_very_slow_readers_lose_their_call(start_server):
    """Small answers are read one by one, with a large one behind them."""
    server = start_server("--memory-budget", "64MiB", "--cpu-threads", "2", "--write-timeout", "2")
    small = hostile.shape_request(1, 1, 40, 1, 1, 256, "float32").SerializeToString()  # 40 KiB
    turns = 20
    with hostile.Http2(server.address, window=0) as reader:
        stream = reader.open(ATTEND_STREAM)
        for message in [small] * turns + [hostile.unread_request()]:
            reader.data(stream, hostile.grpc_message(message))
        harness.wait_for("answers that wait",
                         lambda: server.metric("attend_host_memory_used_bytes") >= 6 * MIB)
        begun = time.monotonic()
        for turn in range(turns):  # one a second
            with contextlib.suppress(OSError):
                reader.grant(0, 41 << 10)
                reader.grant(stream, 41 << 10)
            harness.wait_for("the end of the call or the next turn", lambda: (
                server.metric("attend_unread_calls_total") or
                time.monotonic() > begun + turn + 1))
            if server.metric("attend_unread_calls_total"):
                break
        assert server.metric("attend_unread_calls_total") == 1
        harness.wait_for("their memory to be back",
                         lambda: server.metric("attend_host_memory_used_bytes") == 0, 30)


def test_all_attacks_together_take_at_most_the_documented_memory(start_server):
    """Unread answers, incomplete messages, idle streams and bulky messages at the same time."""
    server = start_server(*hostile.SMALL_LIMITS, "--write-timeout", "0")
    budget = grpc_max = 64 * MIB  # the latter by default: four messages
    calls = 4 * 200
    program = 64 * MIB
    wire.assert_serves(server.address)
    with contextlib.ExitStack() as stack, \
         hostile.grows_at_most(server, budget + grpc_max + (calls << 15) + program):
        before = hostile.rss_bytes(server)
        for _ in range(4):
            idle = stack.enter_context(hostile.Http2(server.address))
            for _ in range(200):
                idle.open(ATTEND_STREAM)
        for _ in range(10):
            reader = stack.enter_context(hostile.Http2(server.address, window=0))
            stream = reader.open(wire.ATTEND)
            reader.data(stream, hostile.grpc_message(hostile.unread_request()), hostile.END_STREAM)
        harness.wait_for("the budget to be full",
                         lambda: server.metric("attend_host_memory_used_bytes") >= 56 * MIB)

        def send_halves():
            for _ in range(2):
                half = stack.enter_context(hostile.Sender(server.address, wire.ATTEND))
                half.send_all(hostile.grpc_message(bytes(15 * MIB), 16 * MIB))

        senders = [threading.Thread(target=send_halves) for _ in range(6)]
        for sender in senders:
            sender.start()
        for message in BULKY.values():
            send(server.address, message())
        for sender in senders:
            sender.join(60)
        assert hostile.rss_bytes(server) - before >= budget + grpc_max // 2, "it is weak"
    wire.assert_serves(server.address)
