# SPDX-License-Identifier: Apache-2.0
"""Failures, provoked: real servers, a real Prometheus with the project's rules at a shorter time
scale (alerts.MINUTE_MS), the alert that fires, and the section of the page that it links to."""

import contextlib
import pathlib
import re
import resource
import shutil
import signal
import time

import grpc
import pytest

import alerts
import certificates
import evidence
import harness
import hostile
import session_scenarios
import strangers
import wire

FIRES_SECONDS_MAX = 120


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    running = alerts.Prometheus(tmp_path_factory.mktemp("prometheus"),
                                [scenario.__name__ for scenario in SCENARIOS])
    yield running
    running.stop()


@pytest.fixture
def watched(request, prometheus, start_server):
    """watched(*flags): a server of this test that Prometheus scrapes from now on. watched.before:
    the scenario's metric at the first scrape."""
    def start(*args, **options):
        server = start_server(*args, **options)
        scenario = request.node.callspec.params["scenario"].__name__
        prometheus.watch(scenario, server)
        if start.before is None:
            start.before = evidence.before(scenario, server, prometheus)
        return server
    start.before = None
    return start


def faulty(fault):
    """Makes `watched` start a server with fake devices."""
    return {"program": harness.program_of_tests("attend-faulty-server"),
            "env": {"ATTEND_FAULT": fault}}


def send(server, request=None, tenant="default", timeout=wire.SECONDS):
    """The code of one request."""
    with wire.connect(server.address) as service:
        try:
            service.Attend(request or wire.small_request(), timeout=timeout,
                           metadata=[("x-attend-tenant", tenant)])
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            return error.code()


# Causes of alerts. A scenario is a context manager inside whose block they must fire, for the
# server that it yields, which `watched` made.


@contextlib.contextmanager
def a_device_is_lost(watched, _):
    server = watched(**faulty("lose"))
    with harness.at_once(1, lambda: send(server)):
        yield server


@contextlib.contextmanager
def a_gpu_is_left_out(watched, _):
    yield watched(**faulty("left-out"))


@contextlib.contextmanager
def answers_are_wrong(watched, folder):
    server = watched("--check-dump-dir", folder / "dumps", **faulty("corrupt"))
    with harness.at_once(1, lambda: send(server, wire.small_request(check=True))):
        yield server


@contextlib.contextmanager
def answers_in_shared_memory_are_wrong(watched, folder):
    server = watched("--shared-memory", "--shared-memory-socket", folder / "sockets" / "shm.sock",
                     **faulty("corrupt"))
    with harness.at_once(1, lambda: harness.run_client(
            "--server", server.address, "check", "--quick", "--transport", "shm", check=False)):
        yield server


@contextlib.contextmanager
def dumps_cannot_be_written(watched, _):
    server = watched("--check-dump-dir", "/dev/full/dumps", "--check-dump-interval", "0",
                     **faulty("corrupt"))
    with harness.at_once(1, lambda: send(server, wire.small_request(check=True))):
        yield server


@contextlib.contextmanager
def no_thread_answers(watched, _):
    """Each call occupies a thread, until none is left."""
    server = watched(**faulty("stuck"))
    with harness.at_once(1, lambda: send(server, wire.small_request(softcap=-1), timeout=0.2)):
        yield server


@contextlib.contextmanager
def the_log_cannot_be_written(watched, _):
    """On a full disk."""
    server = watched("--log-file", "/dev/full", "--log-rate", "0")
    with harness.at_once(1, lambda: send(server, wire.small_request(softcap=-1))):
        yield server


@contextlib.contextmanager
def more_requests_than_the_queue_takes(watched, _, flags=(), tenant="default"):
    server = watched("--lanes", "1", "--max-queue", "1", *flags)
    with harness.at_once(6, lambda: send(server, wire.slow_request(1024), tenant)):
        yield server


@contextlib.contextmanager
def more_requests_than_deadlines_allow(watched, _):
    server = watched("--lanes", "1")
    begun = time.monotonic()
    send(server, wire.slow_request(1024), timeout=60)
    timeout = 3 * (time.monotonic() - begun)
    with harness.at_once(6, lambda: send(server, wire.slow_request(1024), timeout=timeout)):
        yield server


def one_tenant_floods(watched, folder):
    return more_requests_than_the_queue_takes(watched, folder, ("--tenant", "a=1,b=1"), "a")


@contextlib.contextmanager
def requests_take_long(watched, _):
    server = watched()
    with harness.at_once(2, lambda: send(server, wire.slow_request(8192), timeout=120)):
        yield server


@contextlib.contextmanager
def unread_answers(server, number):
    """Calls with answers of 6 MiB that are not read. Yields a function that makes another one."""
    with hostile.Http2(server.address, window=0) as reader:
        def more():
            stream = reader.open(wire.ATTEND)
            reader.data(stream, hostile.grpc_message(hostile.unread_request()),
                        hostile.END_STREAM)

        for _ in range(number):
            more()
        yield more


@contextlib.contextmanager
def memory_is_full(watched, _):
    server = watched("--memory-budget", "64MiB", "--write-timeout", "0")
    with unread_answers(server, 0) as more:
        # A call that arrived during others may have been refused, so further ones follow.
        harness.wait_for("answers that fill the budget", lambda: server.metric(
            "attend_host_memory_used_bytes") > 0.9 * 2**26 or more(), FIRES_SECONDS_MAX)
        with harness.at_once(1, lambda: send(server, wire.small_request(length=8192, dim=64))):
            yield server


@contextlib.contextmanager
def clients_do_not_read(watched, _):
    server = watched("--memory-budget", "256MiB", "--write-timeout", "0.2")

    def turn():
        with contextlib.suppress(OSError, AssertionError):  # the server ends with the block
            ended = server.metric("attend_unread_calls_total") + 20
            with unread_answers(server, 20):
                harness.wait_for("their end", lambda: server.metric(
                    "attend_unread_calls_total") >= ended, 30)

    with harness.at_once(1, turn):
        yield server


@contextlib.contextmanager
def more_connections_than_are_taken(watched, _):
    server = watched("--max-connections", "4", "--max-connections-per-peer", "4")
    harness.wait_for("places to be free", lambda: server.metric("attend_connections") == 0)
    with contextlib.ExitStack() as held:
        for _ in range(4):
            connection = held.enter_context(hostile.open_socket(server.address))
            connection.sendall(hostile.HELLO)
            assert hostile.admitted(connection)

        def refuse():
            with contextlib.suppress(OSError), hostile.open_socket(server.address) as refused:
                hostile.ended(refused)

        with harness.at_once(1, refuse):
            yield server


@contextlib.contextmanager
def no_descriptor_is_left(watched, _):
    server = watched()
    pid = server.process.pid
    taken = {int(descriptor.name) for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE,
                     (free, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))

    def knock():
        with contextlib.suppress(OSError), hostile.open_socket(server.address) as refused:
            hostile.ended(refused)

    with harness.at_once(1, knock):
        yield server


@contextlib.contextmanager
def a_drain_waits(watched, _):
    server = watched("--lanes", "1", "--drain-timeout", "600")
    with wire.connect(server.address) as service:
        stuck = service.Attend.future(wire.slow_request(32768), timeout=600)
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        server.signal(signal.SIGTERM)
        yield server
        stuck.cancel()


@contextlib.contextmanager
def it_is_down(watched, _):
    server = watched()
    server.kill()
    yield server


@contextlib.contextmanager
def it_restarts(watched, _):
    servers = [watched()]

    def restart():
        servers[-1].kill()
        servers.append(watched())

    with harness.at_once(1, restart):
        yield servers[0]


@contextlib.contextmanager
def a_certificate_ends(watched, folder):
    """Its replacement is unusable too."""
    authority = certificates.Authority(folder / "ca")
    cert, key = authority.issue("old", days=2, usage="serverAuth")
    server = watched("--tls-cert", cert, "--tls-key", key)
    shutil.copy(authority.issue("new", usage="serverAuth")[1], key)
    yield server


@contextlib.contextmanager
def a_changed_file_is_wrong(watched, folder):
    limits = folder / "limits.toml"
    limits.write_text("")
    server = watched("--limits", limits)
    limits.write_text("streams = 0\n")

    def reload():
        server.signal(signal.SIGHUP)
        send(server)

    with harness.at_once(1, reload):
        yield server


@contextlib.contextmanager
def clients_give_no_time(watched, _):
    """Deadlines that expire before their requests can be computed. The server itself is healthy."""
    server = watched()
    with harness.at_once(1, lambda: send(server, wire.slow_request(1024), timeout=0.008)):
        yield server


@contextlib.contextmanager
def the_server_reads_late(watched, _):
    """It is stopped until the deadline of a call has expired, then continued, repeatedly."""
    server = watched()
    with wire.connect(server.address) as service:
        def turn():
            with contextlib.suppress(grpc.RpcError):  # the server ends with the block
                service.Attend(wire.small_request(), timeout=wire.SECONDS)
                server.signal(signal.SIGSTOP)
                try:
                    service.Attend(wire.small_request(), timeout=0.1)
                finally:
                    # The client reports the expired deadline to its caller before it resets the
                    # call.
                    time.sleep(0.05)
                    server.signal(signal.SIGCONT)

        with harness.at_once(1, turn):
            yield server


@contextlib.contextmanager
def a_caller_has_no_token(watched, folder):
    """One client that reconnects repeatedly."""
    (folder / "tokens").write_text(strangers.line("me", strangers.token(), "scopes=compute"))
    server = watched("--tokens", folder / "tokens")
    with harness.at_once(1, lambda: send(server)):
        yield server


SCENARIOS = {
    a_certificate_ends: ["AttendCertificateExpires"],
    a_changed_file_is_wrong: ["AttendReloadFails"],
    a_caller_has_no_token: ["AttendCallersUnknown"],
    a_device_is_lost: ["AttendDeviceUnhealthy"],
    a_gpu_is_left_out: ["AttendDevicesLeftOut"],
    answers_are_wrong: ["AttendReferenceCheckFailed"],
    answers_in_shared_memory_are_wrong: ["AttendReferenceCheckFailedInSharedMemory"],
    dumps_cannot_be_written: ["AttendDumpsFail"],
    the_log_cannot_be_written: ["AttendLogFails"],
    no_thread_answers: ["AttendAnswersNothing"],
    more_requests_than_the_queue_takes: ["AttendQueueSaturated", "AttendErrorBudgetBurnsFast",
                                         "AttendErrorBudgetBurns"],
    more_requests_than_deadlines_allow: ["AttendDeadlinesNotKept"],
    requests_take_long: ["AttendLatencyBudgetBurnsFast", "AttendLatencyBudgetBurns"],
    one_tenant_floods: ["AttendTenantRefused"],
    memory_is_full: ["AttendMemoryBudgetNearlySpent", "AttendMemoryRefused"],
    clients_do_not_read: ["AttendAnswersUnread"],
    clients_give_no_time: ["AttendDeadlinesTooShort"],
    the_server_reads_late: ["AttendCallersGiveUp"],
    more_connections_than_are_taken: ["AttendConnectionsRefused"],
    no_descriptor_is_left: ["AttendNotAccepting", "AttendDescriptorsNearlySpent"],
    a_drain_waits: ["AttendDrainLasts"],
    it_is_down: ["AttendDown"],
    it_restarts: ["AttendRestarting"],
    session_scenarios.sessions_push_each_other_out: ["AttendSessionsEvictedEarly"],
    session_scenarios.sessions_have_no_room: ["AttendSessionsRefused"],
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_failure_raises_its_alert(scenario, prometheus, watched, tmp_path):
    wanted = set(SCENARIOS[scenario])
    with scenario(watched, tmp_path) as server:
        harness.wait_for(f"{wanted} to fire",
                         lambda: wanted <= set(prometheus.firing(scenario.__name__)),
                         FIRES_SECONDS_MAX)
        annotations = prometheus.firing(scenario.__name__)
        for alert in wanted & set(annotations):
            anchor = alerts.runbooks()[alert]
            assert annotations[alert]["runbook"] == f"deploy/operate.md#{anchor}"
        if scenario is clients_give_no_time:
            assert set(annotations) == wanted, "it is not the server's doing"
        evidence.assert_seen(scenario.__name__, wanted, server, prometheus, watched.before)
        server.kill()  # calls in flight end at once


def test_every_alert_is_provoked_and_has_its_section():
    runbooks = alerts.runbooks()
    assert sorted(sum(SCENARIOS.values(), [])) == sorted(runbooks)
    assert {scenario.__name__ for scenario in SCENARIOS} == set(evidence.SEEN)
    sections = alerts.sections()
    assert set(runbooks.values()) == set(sections)
    assert len(sections) >= 10
    for anchor, text in sections.items():
        wanted = {alert for alert, at in runbooks.items() if at == anchor}
        heading = re.search(r"(?s)\*\*Alerts?\.\*\*(.*?)\n\n", text)[1]
        assert set(re.findall(r"`(Attend\w+)`", heading)) == wanted, anchor
        assert "**What to do.**" in text, anchor


def test_the_page_names_what_exists(server):
    text = alerts.PAGE.read_text()
    exposed = set(re.findall(r"^# TYPE (\S+) ", server.metrics_text(), re.M))
    exposed |= {name for name in re.findall(r"attend_gpu_\w+", text)}
    named = set(re.findall(r"`((?:attend|process)_[a-z_]+)", text))
    assert named <= exposed, named - exposed
    flags = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    known = set(re.findall(r"--[a-z][a-z-]+", (harness.ROOT / "server/app/README.md").read_text()))
    assert flags <= known, flags - known


def test_the_shortened_rules_differ_only_in_durations():
    rules = alerts.RULES.read_text()
    short = alerts.shortened(rules)
    assert not re.search(r"\[\d+[smh]\]|for: \d+[smh]$", short, re.M)
    assert re.sub(r"\d+ms", "T", short) == re.sub(r"(\[|for: )\d+[smh](?=\]|$)", r"\1T", rules,
                                                  flags=re.M)
