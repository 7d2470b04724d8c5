# SPDX-License-Identifier: Apache-2.0
"""Overload, deadlines, cancellation, drain, crash and restart of a real server."""

import concurrent.futures
import contextlib
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest

import harness
import hostile
import wire

OK = grpc.StatusCode.OK
SLOW_SECONDS = 60  # for a slow request, which takes a few seconds


def code_of(call):
    """Status of a call made with .future()."""
    try:
        call.result()
    except (grpc.RpcError, grpc.FutureCancelledError):
        pass
    return call.code()


@contextlib.contextmanager
def busy(server, service, length=4096):
    """A slow request occupies the server's only lane until the block ends; yields its call."""
    call = service.Attend.future(wire.slow_request(length), timeout=SLOW_SECONDS)
    harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
    yield call
    assert code_of(call) is OK


def test_full_queue_refuses_and_lives_on(start_server):
    server = start_server("--lanes", "1", "--max-queue", "3")
    with wire.connect(server.address) as service:
        with busy(server, service) as slow:
            calls = [service.Attend.future(wire.small_request(seed=i), timeout=SLOW_SECONDS)
                     for i in range(12)]
            # Refused at once, not when there was room again. Any nine: calls do not arrive in
            # order.
            harness.wait_for("nine to be refused", lambda: slow.done() or
                             sum(call.done() for call in calls) == 9)
            assert not slow.done()
        codes = [code_of(c) for c in calls]
        assert codes.count(OK) == 3
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 9
        for call in (c for c, code in zip(calls, codes) if code is not OK):
            retry = dict(call.trailing_metadata())["grpc-retry-pushback-ms"]
            assert 0 < int(retry) < 60_000
            assert "queue" in call.details()
    assert server.metric("attend_rejected_requests_total", reason="queue_full") == 9
    assert server.metric("attend_requests_total", code="RESOURCE_EXHAUSTED") == 9
    wire.assert_serves(server.address)


def test_deadline_passes_while_the_lane_is_busy(start_server):
    """It is refused, or ends while the batch before it still runs, and frees its place."""
    server = start_server("--lanes", "1")
    with wire.connect(server.address) as service, busy(server, service) as slow:
        waiting = service.Attend.future(wire.small_request(), timeout=0.2)
        assert code_of(waiting) in (grpc.StatusCode.DEADLINE_EXCEEDED,
                                    grpc.StatusCode.RESOURCE_EXHAUSTED)
        harness.wait_for("the server to drop it", lambda: slow.done() or (
            server.metric("attend_queue_requests") == 0 and
            server.metric("attend_inflight_requests") == 1))
        assert not slow.done()
    assert server.metric("attend_kernel_requests_total") == 1
    dropped = sum(server.metric("attend_requests_total", code=code)
                  for code in ("DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"))
    assert dropped == 1


def test_requests_that_cannot_be_in_time_are_refused_on_arrival(start_server):
    """Estimated from the duration of a similar one. A hopeless request has no retry hint; one that
    would only be late now has one."""
    server = start_server("--lanes", "1")
    with wire.connect(server.address) as service:
        begin = time.monotonic()
        assert code_of(service.Attend.future(wire.slow_request(), timeout=SLOW_SECONDS)) is OK
        took = time.monotonic() - begin
        with busy(server, service) as slow:
            late = service.Attend.future(wire.slow_request(), timeout=1.5 * took)
            hopeless = service.Attend.future(wire.slow_request(), timeout=took / 4)
            assert code_of(late) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert code_of(hopeless) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert not slow.done()
        assert 0 < int(dict(late.trailing_metadata())["grpc-retry-pushback-ms"]) <= 1000
        assert late.details().startswith("deadline:") and hopeless.details().startswith("deadline:")
        assert code_of(service.Attend.future(wire.slow_request(), timeout=10 * took)) is OK
    assert server.metric("attend_rejected_requests_total", reason="late") == 2
    assert server.metric("attend_deadline_requests_total", outcome="refused") == 2
    assert server.metric("attend_backlog_seconds", device="cpu") >= 0


def test_cancelled_call_leaves_the_queue(start_server):
    server = start_server("--lanes", "1")
    with wire.connect(server.address) as service, busy(server, service) as slow:
        waiting = [service.Attend.future(wire.small_request(seed=i), timeout=SLOW_SECONDS)
                   for i in range(5)]
        harness.wait_for("five in the queue", lambda: slow.done() or
                         server.metric("attend_queue_requests") == 5)
        for call in waiting[:4]:
            call.cancel()
        harness.wait_for("four to leave", lambda: slow.done() or
                         server.metric("attend_queue_requests") == 1)
        assert not slow.done()
        assert code_of(waiting[4]) is OK
    assert server.metric("attend_requests_total", code="CANCELLED") == 4
    assert server.metric("attend_kernel_requests_total") == 2


def test_higher_priority_runs_before_earlier_arrival(start_server):
    server = start_server("--lanes", "1", "--max-batch-requests", "1")
    order = []
    with wire.connect(server.address) as service, busy(server, service) as slow:
        calls = []
        for n, priority in enumerate((-5, 0, 7)):
            call = service.Attend.future(wire.small_request(seed=n, priority=priority),
                                         timeout=SLOW_SECONDS)
            calls.append((priority, call))
            harness.wait_for("it to be queued", lambda: slow.done() or
                             server.metric("attend_queue_requests") == len(calls))
        assert not slow.done()
        for priority, call in calls:
            order.append((call.result().timings.queue_ns, priority))
    # All waited for the same lane; a request that came later but ran earlier waited less.
    assert [priority for _, priority in sorted(order)] == [7, 0, -5]


class Callers:
    """Threads that call in a closed loop, without retries, until stopped."""

    def __init__(self, address, count=6):
        self._address = address
        self._stop = threading.Event()
        self.answered = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._loops = [self._pool.submit(self._loop, n) for n in range(count)]

    def _loop(self, seed):
        outcomes = []
        request = wire.small_request(seed=seed, length=64)
        with wire.connect(self._address) as service:
            while not self._stop.is_set():
                try:
                    answer = service.Attend(request, timeout=wire.SECONDS)
                    assert len(answer.raw[0]) == 64 * 64 * 4
                    outcomes.append(OK)
                    self.answered += 1
                except grpc.RpcError as error:
                    outcomes.append(error.code())
                    time.sleep(0.01)
        return outcomes

    def finish(self):
        """The status of every call."""
        self._stop.set()
        outcomes = [one for loop in self._loops for one in loop.result(wire.SECONDS)]
        self._pool.shutdown()
        return outcomes


def test_sigterm_under_load_loses_nothing(start_server):
    """Exit code 0; callers saw only OK or UNAVAILABLE; running requests finished."""
    server = start_server()
    with wire.connect(server.address) as service:
        slow = service.Attend.future(wire.slow_request(), timeout=SLOW_SECONDS)
        # Before other signals that could be taken for it.
        harness.wait_for("the slow one to run",
                         lambda: server.metric("attend_inflight_requests") >= 1)
        callers = Callers(server.address)
        harness.wait_for("answers", lambda: callers.answered > 20, 30)
        assert not slow.done()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log()
        codes = callers.finish()
        assert code_of(slow) is OK
    assert set(codes) == {OK, grpc.StatusCode.UNAVAILABLE}


def test_health_while_draining(start_server):
    """Watch reports NOT_SERVING and new calls are refused while the last accepted one still
    runs."""
    server = start_server("--lanes", "1")
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=SLOW_SECONDS)
        assert next(watch) == b"\x08\x01"
        service = wire.stub.AttentionServiceStub(channel)
        # It would take minutes, and runs until it is cancelled.
        endless = service.Attend.future(hostile.shape_request(1, 1, 1 << 19, 1 << 19, 1, 1),
                                        timeout=SLOW_SECONDS)
        harness.wait_for("the lane to be busy",
                         lambda: server.metric("attend_lanes_busy") == 1, 30)
        server.signal(signal.SIGTERM)
        assert next(watch) == b"\x08\x02"
        with pytest.raises(grpc.RpcError) as error:
            service.Attend(wire.small_request(), timeout=wire.SECONDS)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        asked = harness.run_client("--server", server.address, "info", "--health", check=False)
        assert (asked.returncode, asked.stdout) == (1, "NOT_SERVING\n")
        assert not endless.done()
        endless.cancel()
    assert server.wait() == 0


@pytest.mark.parametrize("by", ["signal", "operator"])
def test_a_drain_asks_clients_to_go_and_closes_after_their_last_call(start_server, tmp_path, by):
    socket = f"unix:{tmp_path}/own.sock"
    server = start_server("--listen", socket)
    with hostile.Http2(server.address) as busy, hostile.Http2(server.address) as idle:
        watch = busy.open("/grpc.health.v1.Health/Watch")
        busy.data(watch, hostile.grpc_message(b""), hostile.END_STREAM)
        assert b"\x08\x01" in busy.wait_for_frame(hostile.DATA, watch)
        idle.wait_for_frame(hostile.SETTINGS)
        if by == "signal":
            server.signal(signal.SIGTERM)
        else:
            harness.run_client("--server", socket, "admin", "drain")
        highest, last = [busy.wait_for_frame(hostile.GOAWAY) for _ in range(2)]
        no_error = bytes(4)
        assert highest == (2**31 - 1).to_bytes(4, "big") + no_error
        assert last == watch.to_bytes(4, "big") + no_error, "sent once the ping has been answered"
        idle.wait_for_frame(hostile.GOAWAY)
        idle.wait_for_close()
        busy.reset(watch)
        busy.wait_for_close()


def test_calls_across_a_drain_and_its_end_are_answered_or_refused_with_a_time_to_retry(
        start_server, tmp_path):
    socket = f"unix:{tmp_path}/own.sock"
    server = start_server("--listen", socket)
    with grpc.insecure_channel(server.address, options=[("grpc.enable_retries", 0)]) as channel:
        service = wire.stub.AttentionServiceStub(channel)

        def refused():
            """Whether the server drains; a call that was lost has no time to retry. grpcio itself
            gives up a call that it has not sent yet, as it may not retry."""
            call = service.Attend.future(wire.small_request(), timeout=wire.SECONDS)
            if call.code() is OK:
                return False
            assert call.code() is grpc.StatusCode.UNAVAILABLE, call.details()
            assert "grpc-retry-pushback-ms" in dict(call.trailing_metadata()) or \
                call.details() == "GOAWAY received", call.details()
            return True

        for command, drained in 3 * [("drain", True), ("undrain", False)]:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                done = pool.submit(harness.run_client, "--server", socket, "admin", command)
                harness.wait_for(command, lambda: refused() is drained and done.done())
                done.result()


def test_second_sigterm_ends_at_once(start_server):
    server = start_server("--lanes", "1")
    with wire.connect(server.address) as service:
        slow = service.Attend.future(wire.slow_request(8192), timeout=SLOW_SECONDS)
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        server.signal(signal.SIGTERM)
        harness.wait_for("draining", lambda: server.ended() or "drain" in server.log().lower())
        assert not server.ended()

        # A second signal within the first second counts as the same one.
        def ended_by_another():
            server.signal(signal.SIGTERM)
            return server.ended()
        harness.wait_for("a later signal to end it", ended_by_another)
        assert server.wait() == 128 + signal.SIGTERM
        assert code_of(slow) is grpc.StatusCode.UNAVAILABLE


def test_drain_timeout(start_server):
    """A request that outlasts --drain-timeout is stopped, its client is told so, and the server
    ends normally."""
    server = start_server("--lanes", "1", "--drain-timeout", "1")
    with wire.connect(server.address) as service:
        slow = service.Attend.future(wire.slow_request(8192), timeout=SLOW_SECONDS)
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        server.signal(signal.SIGTERM)
        assert server.wait(40) == 0
        assert code_of(slow) is grpc.StatusCode.UNAVAILABLE


def test_systemd_is_notified(start_server, tmp_path):
    """sd_notify's datagrams: READY once the server serves, STOPPING as soon as it drains, with the
    time that this may take."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(harness.START_SECONDS_MAX)
        server = start_server("--lanes", "1", "--drain-timeout", "60",
                              env={"NOTIFY_SOCKET": str(path)})
        ready = manager.recv(4096).decode().split("\n")
        assert ready == ["READY=1", f"STATUS=serving on {server.address}"]
        with wire.connect(server.address) as service:
            with busy(server, service) as slow:
                server.signal(signal.SIGTERM)
                stopping = manager.recv(4096).decode().split("\n")
                assert not slow.done()
        assert stopping[0] == "STOPPING=1" and "EXTEND_TIMEOUT_USEC=70000000" in stopping
        assert server.wait() == 0
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(4096)


def test_a_missing_service_manager_does_no_harm(start_server, tmp_path):
    server = start_server(env={"NOTIFY_SOCKET": str(tmp_path / "gone")})
    wire.assert_serves(server.address)
    assert "cannot notify the service manager" in server.log()
    assert server.stop() == 0


def test_sigint_drains_like_sigterm(start_server):
    server = start_server()
    wire.assert_serves(server.address)
    server.signal(signal.SIGINT)
    assert server.wait() == 0


def test_kill_and_restart_on_the_same_port(start_server):
    """After SIGKILL a server can use the same port at once, and callers reconnect by themselves."""
    port = harness.free_port()
    listen = f"127.0.0.1:{port}"
    server = start_server(listen=listen)
    callers = Callers(listen, count=2)
    harness.wait_for("answers", lambda: callers.answered > 5, 30)
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    again = start_server(listen=listen)
    seen = callers.answered
    harness.wait_for("answers again", lambda: callers.answered > seen + 5, 30)
    codes = set(callers.finish())
    assert codes <= {OK, grpc.StatusCode.UNAVAILABLE}, codes
    assert again.stop() == 0


def test_a_taken_port_fails_the_start(start_server, tmp_path):
    """A second server on a taken port reports it in one line and has a separate exit code."""
    server = start_server()
    with pytest.raises(AssertionError, match="ended at once"):
        harness.Server(tmp_path / "second", listen=server.address)
    log = (tmp_path / "second" / "server.log").read_text()
    assert server.address in log or server.address.rsplit(":", 1)[1] in log
    wire.assert_serves(server.address)


def test_the_death_of_a_server_is_reported_with_its_log(start_server):
    """Reported by readers of its process or its metrics."""
    server = start_server()
    harness.wait_for("the log's thread", lambda: "serving gRPC" in server.log())
    server.kill()
    for read in (hostile.rss_bytes, hostile.descriptors, lambda s: s.metric("attend_draining")):
        with pytest.raises(AssertionError, match="(?s)ended of SIGKILL.*serving gRPC"):
            read(server)


def test_probes_fail_while_no_thread_answers(start_server):
    """And only for that long."""
    server = start_server(program=harness.program_of_tests("attend-faulty-server"),
                          env={"ATTEND_FAULT": "stuck"})

    def probe(path):
        try:
            with urllib.request.urlopen(f"http://{server.metrics_address}{path}", timeout=10) as a:
                return a.read().decode()
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"

    assert probe("/healthz") == probe("/readyz") == "ok\n"

    def send_bad_call():
        with wire.connect(server.address) as service, contextlib.suppress(grpc.RpcError):
            service.Attend(wire.small_request(softcap=-1), timeout=0.2)

    with harness.at_once(1, send_bad_call):
        harness.wait_for("/healthz to fail",
                         lambda: probe("/healthz") == "503 the server does not answer calls\n", 90)
        assert probe("/readyz") == "503 not ready\n"
    server.signal(signal.SIGUSR1)
    harness.wait_for("/healthz to be well", lambda: probe("/healthz") == "ok\n")
    wire.assert_serves(server.address)
