# SPDX-License-Identifier: Apache-2.0
"""Calls over the server's transport, on TCP and a Unix socket: small calls, streams and how they
end, callers, and the bounds checked before anything is kept."""

import concurrent.futures
import contextlib
import subprocess
import threading
import time

import grpc
import pytest

import certificates
import harness
import hostile
import strangers
import wire

CODE = grpc.StatusCode
STREAM = "/attend.v1.AttentionService/AttendStream"
HEALTH = "/grpc.health.v1.Health/Check"
SETTINGS_ACK = hostile.frame(hostile.SETTINGS, hostile.ACK, 0, b"")


@pytest.fixture
def start(start_both):
    return start_both


def refusal(call):
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value


def conversation(path, data, stream=1, flags=0):
    """The bytes of a connection with one call and this much of its messages."""
    headers = hostile.call_headers(path)
    return (hostile.HELLO + SETTINGS_ACK +
            hostile.frame(hostile.HEADERS, hostile.END_HEADERS, stream, headers) +
            hostile.frame(hostile.DATA, flags, stream, data))


def test_unary_calls_and_streams_have_the_same_bits(start):
    server = start()
    requests = [wire.small_request(seed=i, length=1 + 37 * i, heads=1 + i % 3, request_id=f"r{i}")
                for i in range(24)]
    bits = []
    for address in server.addresses:
        with wire.connect(address) as service:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                unary = list(pool.map(lambda r: service.Attend(r, timeout=wire.SECONDS), requests))
            streamed = {a.request_id: a
                        for a in service.AttendStream(iter(requests), timeout=wire.SECONDS)}
        assert [a.request_id for a in unary] == [r.request_id for r in requests]
        assert all(list(streamed[a.request_id].raw) == list(a.raw) for a in unary)
        bits.append([list(a.raw) for a in unary])
    assert bits[0] == bits[1]
    assert server.metric("attend_requests_total", code="OK") == 4 * len(requests)


def test_large_messages_both_ways(start):
    server = start()
    request = wire.small_request(length=20_000, heads=2, dim=8)
    request.q.shape[2] = 20_000
    with wire.connect(server.address) as service:
        answer = service.Attend(request, timeout=wire.SECONDS)
        assert sum(len(part) for part in answer.raw) == 20_000 * 2 * 8 * 4
        streamed = list(service.AttendStream(iter([request] * 3), timeout=wire.SECONDS))
    assert all(list(each.raw) == list(answer.raw) for each in streamed)


def test_a_calls_metadata_and_errors(start, tmp_path):
    """The server's id, the span's id, and for a refusal its reason, in any language."""
    server = start("--server-id", "the-server", "--access-log", tmp_path / "access.log")
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with wire.connect(server.address) as service:
        answer, call = service.Attend.with_call(wire.small_request(), timeout=wire.SECONDS,
                                                metadata=[("traceparent", trace)])
        assert answer.raw and ("attend-server-id", "the-server") in call.initial_metadata()
        assert ("traceparent", trace) in call.initial_metadata()
        failed = refusal(lambda: service.Attend(wire.small_request(softcap=-1),
                                                timeout=wire.SECONDS))
        assert failed.code() is CODE.INVALID_ARGUMENT and "softcap is -1" in failed.details()
        assert ("attend-server-id", "the-server") in failed.initial_metadata()
        failed = refusal(lambda: service.Attend(wire.small_request(kernel="ä%\n"),
                                                timeout=wire.SECONDS))
        assert "ä" in failed.details() or "\\x" in failed.details()


def test_unknown_methods_are_unimplemented(start):
    server = start()
    with grpc.insecure_channel(server.address) as channel:
        failed = refusal(lambda: channel.unary_unary("/no.such.Service/Method")(b"", timeout=10))
        assert failed.code() is CODE.UNIMPLEMENTED
        assert "unknown method /no.such.Service/Method" in failed.details()


def test_chunked_calls_over_several_connections(start):
    """Every answer is checked in double precision."""
    server = start()
    done = subprocess.run(
        [harness.binary("attend-client"), "-s", server.address, "load", "--transport", "chunked",
         "--connections", "4", "--shape", "B1,H8,L8192,D32", "--shape", "B2,H3,L700,D64,causal",
         "--count", "6", "--pool", "2", "--warmup", "0", "--verify", "1", "--check", "1"],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.metric("attend_reference_checks_total", transport="chunked", result="ok") == 6
    assert server.metric("attend_reference_checks_total", result="failed") == 0


def test_deadlines_and_cancellations(start):
    """Queued calls end at once, and none is left behind."""
    server = start("--lanes", "1")
    with wire.connect(server.address) as service:
        slow = [service.Attend.future(wire.slow_request(), timeout=wire.SECONDS) for _ in range(3)]
        late = refusal(lambda: service.Attend(wire.slow_request(), timeout=0.05))
        assert late.code() is CODE.DEADLINE_EXCEEDED
        streams = [service.AttendStream(iter([wire.slow_request()]), timeout=wire.SECONDS)
                   for _ in range(3)]
        for call in slow + streams:
            call.cancel()
        harness.wait_for("all to end", lambda: server.metric("attend_inflight_requests") == 0)
        assert service.Attend(wire.small_request(), timeout=wire.SECONDS).raw
    harness.wait_for("the late one to count", lambda: server.metric(
        "attend_requests_total", code="DEADLINE_EXCEEDED") >= 1)


def test_vanished_clients_free_their_memory(start):
    server = start("--lanes", "1")
    for _ in range(10):
        with contextlib.ExitStack() as stack:
            for path in (wire.ATTEND, STREAM, HEALTH, "/attend.v1.AttentionService/GetServerInfo"):
                for part in (b"", b"\0", hostile.grpc_message(bytes(1000), 2000),
                             hostile.grpc_message(wire.slow_request().SerializeToString())):
                    connection = stack.enter_context(hostile.open_socket(server.address))
                    # Some of their frames exceed the limits.
                    with contextlib.suppress(OSError):
                        connection.sendall(conversation(path, part))
    harness.wait_for("no connection", lambda: server.metric("attend_connections") == 0)
    wire.assert_serves(server.address)
    assert server.stop() == 0


def test_callers_are_known_by_their_tokens(start, tmp_path):
    (tmp_path / "tokens").write_text(strangers.TOKENS_FILE)
    server = start("--tokens", tmp_path / "tokens", strangers.TENANTS, "--first-call-timeout", "5")
    request = wire.small_request().SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        for path, message in ((wire.ATTEND, request), (STREAM, request), ("/no.such/Method", b"")):
            answer = strangers.ask(channel, path, (), message)
            assert answer.code is CODE.UNAUTHENTICATED, path
        wrong = strangers.ask(channel, wire.ATTEND, strangers.bearer(strangers.token()), request)
        assert wrong.code is CODE.UNAUTHENTICATED
        good = strangers.ask(channel, wire.ATTEND,
                             strangers.bearer(strangers.TOKENS["blue"]), request)
        assert good.code in (CODE.OK, CODE.CANCELLED)  # `ask` cancels calls that were answered
        informed = strangers.ask(channel, wire.ATTEND,
                                 strangers.bearer(strangers.TOKENS["informed"]), request)
        assert informed.code is CODE.PERMISSION_DENIED
    with hostile.open_socket(server.address) as stranger:
        stranger.sendall(conversation(wire.ATTEND, b"\0"))
        assert hostile.ended(stranger)
    harness.wait_for("it to count", lambda: server.metric(
        "attend_connections_refused_total", reason="stranger") >= 1)


def test_stalled_messages_end_their_connection(start):
    server = start(*hostile.SMALL_LIMITS, "--message-timeout", "0.4")
    half = hostile.grpc_message(bytes(1000), 1 << 20)
    connections = []
    for path, parts in ((wire.ATTEND, (half[:2], half)), (STREAM, (half[:2], half)),
                        (HEALTH, (half[:2],))):
        for part in parts:
            connections.append(hostile.open_socket(server.address))
            connections[-1].sendall(conversation(path, part))
    for connection in connections:
        with connection:
            assert hostile.ended(connection)
    harness.wait_for("all to count", lambda: server.metric(
        "attend_connections_refused_total", reason="stalled") == len(connections))
    wire.assert_serves(server.address)


def test_streams_between_messages_do_not_stall(start):
    server = start(*hostile.SMALL_LIMITS, "--message-timeout", "0.4")
    go = threading.Event()

    def requests():
        yield wire.small_request()
        go.wait()
        yield wire.small_request()

    with wire.connect(server.address) as service:
        answers = service.AttendStream(requests(), timeout=wire.SECONDS)
        assert next(answers).raw
        time.sleep(1)
        go.set()
        assert next(answers).raw


def test_open_calls_are_bounded(start):
    server = start("--max-streams", "10", "--max-calls", "100", "--max-calls-per-peer", "25")
    opens = b"".join(hostile.frame(hostile.HEADERS, hostile.END_HEADERS, stream,
                                   hostile.call_headers(STREAM)) for stream in range(1, 21, 2))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(hostile.open_socket(server.address)) for _ in range(3)]
        for connection in connections:
            connection.sendall(hostile.HELLO + SETTINGS_ACK + opens)
            time.sleep(0.2)
        assert hostile.ended(connections[2])
    harness.wait_for("it to count", lambda: server.metric(
        "attend_connections_refused_total", reason="frames") == 1)
    wire.assert_serves(server.address)


def test_unfinished_messages_are_bounded_together(start):
    """One peer uses all of the memory, so one of its own connections ends."""
    server = start("--message-memory-max", "64MiB", "--max-request-bytes", "16MiB",
                   "--memory-budget", "64MiB", "--message-timeout", "60")
    with contextlib.ExitStack() as stack, hostile.grows_at_most(server, 160 << 20):
        for _ in range(12):
            sender = stack.enter_context(hostile.Sender(server.address, STREAM))
            sender.send_all(hostile.grpc_message(bytes(15 << 20), 16 << 20))
        ended = harness.wait_for("some to end", lambda: server.metric(
            "attend_connections_refused_total", reason="messages"))
        assert ended >= 4
    wire.assert_serves(server.address)


def test_unread_messages_of_streams_are_bounded_together(start_server):
    """Each stream has a request that waits for the lane, and reads no other; a window of them is
    kept."""
    server = start_server(*hostile.SMALL_LIMITS[:-2], "--stream-requests-max", "1", "--lanes", "1")
    endless = hostile.shape_request(1, 1, 1 << 19, 1 << 19, 1, 1).SerializeToString()
    message = hostile.grpc_message(wire.small_request(length=128).SerializeToString())
    with contextlib.ExitStack() as stack, hostile.grows_at_most(server, 160 << 20):
        busy = stack.enter_context(hostile.Sender(server.address, STREAM))
        assert busy.send_all(hostile.grpc_message(endless))
        harness.wait_for("it to run", lambda: server.metric("attend_lanes_busy") == 1, 30)
        for _ in range(8):
            sender = stack.enter_context(hostile.Sender(server.address, STREAM))
            for _ in range(16):
                if not sender.send_all(message * 10):
                    break  # the server has ended it
                sender.begin(STREAM)
        ended = harness.wait_for("some to end", lambda: server.metric(
            "attend_connections_refused_total", reason="messages"))
        assert ended >= 2
        assert server.metric("attend_lanes_busy") == 1
    harness.wait_for("the lane to be free", lambda: server.metric("attend_lanes_busy") == 0, 30)
    wire.assert_serves(server.address)


def test_a_far_too_long_message_ends_its_call_at_its_length(start_server):
    """Only the call ends: its connection goes on."""
    server = start_server(*hostile.SMALL_LIMITS)
    with hostile.grows_at_most(server, 16 << 20), grpc.insecure_channel(
            server.address, options=wire.UNLIMITED) as channel:
        for path, size in ((wire.ATTEND, 33 << 20), (HEALTH, 5000), ("/no.such/Method", 5000),
                           ("/attend.v1.AttentionService/GetServerInfo", 129 << 10)):
            failed = refusal(lambda path=path, size=size: channel.unary_unary(path)(
                bytes(size), timeout=wire.SECONDS))
            assert failed.code() in (CODE.RESOURCE_EXHAUSTED, CODE.UNIMPLEMENTED), path
        assert channel.unary_unary(HEALTH)(b"", timeout=10) == b"\x08\x01"
    assert server.metric("attend_connections_refused_total", reason="frames") == 0


def test_unread_answers_are_dropped_after_the_timeout(start):
    server = start(*hostile.SMALL_LIMITS, "--write-timeout", "0.5")
    with hostile.Http2(server.address, 1 << 24) as reader:
        reader.send(hostile.WINDOW_UPDATE, 0, 0, (1 << 24).to_bytes(4, "big"))
        for _ in range(3):
            stream = reader.open(wire.ATTEND)
            reader.data(stream, hostile.grpc_message(hostile.unread_request()), hostile.END_STREAM)
        harness.wait_for("one to be given up", lambda: server.metric(
            "attend_unread_calls_total") >= 1, 30)
        harness.wait_for("their memory", lambda: server.metric(
            "attend_host_memory_used_bytes") == 0, 30)
        wire.assert_serves(server.address)


def test_padded_frames_are_accepted(start_server):
    server = start_server()
    message = hostile.grpc_message(b"")
    padded = bytes([9]) + message + bytes(9)
    padded_flag, end_stream = 0x08, 0x01
    with hostile.open_socket(server.address) as connection:
        connection.sendall(conversation(HEALTH, padded, flags=padded_flag | end_stream))
        came = b""
        while b"\x08\x01" not in came:
            more = connection.recv(1 << 16)
            assert more
            came += more


def test_old_connections_lose_no_call(start):
    server = start("--max-connection-age", "0.3")
    until = time.monotonic() + 3
    options = [("grpc.enable_retries", 0)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        call = channel.unary_unary(HEALTH)
        while time.monotonic() < until:
            assert call(b"", timeout=10) == b"\x08\x01"


def test_a_drain_answers_what_it_has_accepted(start):
    server = start()
    with wire.connect(server.address) as service:
        calls = [service.Attend.future(wire.slow_request(), timeout=wire.SECONDS) for _ in range(2)]
        harness.wait_for("one to run", lambda: server.metric("attend_lanes_busy") >= 1)
        assert server.stop() == 0
        codes = {call.code() for call in calls}
    assert codes <= {CODE.OK, CODE.UNAVAILABLE} and CODE.OK in codes


def test_attend_client_runs(start, tmp_path):
    server = start()
    for address in server.addresses:
        for words in (["info"], ["load", "--duration", "0.3", "--concurrency", "16"],
                      ["load", "--duration", "0.3", "--concurrency", "16", "--stream"]):
            done = subprocess.run([harness.binary("attend-client"), "-s", address, *words],
                                  capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr


def test_tls_asks_for_certificates_and_carries_calls(start_server, ca, foreign):
    server = start_server(*ca.serve_mtls("--tls-crl", ca.crl))
    with ca.channel(server.address, "client", options=wire.UNLIMITED) as channel:
        service = wire.stub.AttentionServiceStub(channel)
        requests = [wire.small_request(seed=i, length=1 + 997 * i, heads=8, check=True,
                                       request_id=f"r{i}") for i in range(6)]
        unary = [service.Attend(r, timeout=wire.SECONDS) for r in requests]
        streamed = service.AttendStream(iter(requests), timeout=wire.SECONDS)
        assert {a.request_id: a.raw for a in streamed} == {a.request_id: a.raw for a in unary}
        assert all(answer.check.ok for answer in unary)
    alerts = [certificates.greet(server.address, context) for context in (
        ca.context("revoked"), ca.context("client", shown_by=foreign))]
    assert alerts == ["SSLV3_ALERT_CERTIFICATE_REVOKED", "TLSV1_ALERT_UNKNOWN_CA"]
    assert server.metric("attend_connections_refused_total", reason="tls") == 2
    assert server.stop() == 0


def functions(path):
    """The functions that a file exports, except those that any file may define too."""
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True,
                            check=True).stdout
    return {words[2].split("@")[0] for words in map(str.split, listed.splitlines())
            if len(words) == 3 and words[1] in "Ti"}


def test_no_function_of_a_library_is_replaced():
    server = harness.binary("attend-server")
    linked = subprocess.run(["ldd", server], capture_output=True, text=True, check=True).stdout
    libraries = [words[2] for words in map(str.split, linked.splitlines()) if len(words) == 4]
    for library in libraries:
        assert not functions(server) & functions(library), library
    assert "nghttp2_session_send" in set.union(*map(functions, libraries))
