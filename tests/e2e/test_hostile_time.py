# SPDX-License-Identifier: Apache-2.0
"""Server time that one caller can take: work ends when it is no longer wanted."""

import grpc
import pytest

import harness
import hostile
import wire

# Ten minutes of a core, below the default limit of two threads: nothing here waits for its end.
ENDLESS = dict(length=1 << 20, dim=1)
CODE = grpc.StatusCode


def outcome(call):
    """The status of a call made with .future()."""
    try:
        call.result()
    except (grpc.RpcError, grpc.FutureCancelledError):
        pass
    return call.code()


def runs(server):
    harness.wait_for("a lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)


def is_idle(server):
    harness.wait_for("the lane to be free", lambda: server.metric("attend_lanes_busy") == 0, 30)
    harness.wait_for("the memory to be back",
                     lambda: server.metric("attend_host_memory_used_bytes") == 0, 30)
    wire.assert_serves(server.address)


@pytest.fixture
def server(start_server):
    return start_server(*hostile.SMALL_LIMITS, "--lanes", "1")


@pytest.mark.parametrize("kernel", ["cpu_flash", "cpu_reference"])
def test_a_deadline_stops_a_running_request(server, kernel):
    length = {"cpu_flash": ENDLESS["length"], "cpu_reference": 1 << 17}[kernel]
    request = wire.small_request(length=length, dim=1, kernel=kernel)
    with wire.connect(server.address) as service:
        assert outcome(service.Attend.future(request, timeout=1)) is CODE.DEADLINE_EXCEEDED
        is_idle(server)
        # It ran on the only lane, so the next large one would wait for it.
        service.Attend(wire.small_request(length=2048, dim=64), timeout=wire.SECONDS)


def test_cancelled_calls_and_streams_stop_running_requests(server):
    with wire.connect(server.address) as service:
        call = service.Attend.future(wire.small_request(**ENDLESS), timeout=600)
        runs(server)
        call.cancel()
        is_idle(server)
        stream = service.AttendStream(iter([wire.small_request(**ENDLESS)]), timeout=600)
        runs(server)
        stream.cancel()
        is_idle(server)
    assert server.metric("attend_requests_total", code="CANCELLED") == 2


def test_requests_that_would_take_hours_are_refused(server):
    with wire.connect(server.address) as service:
        limits = service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS).limits
        assert limits.request_gflop_max == 2 * 90 * 600
        request = wire.small_request(length=1 << 18, dim=1, kernel="cpu_reference")
        with pytest.raises(grpc.RpcError) as refused:
            service.Attend(request, timeout=wire.SECONDS)
        assert refused.value.code() is CODE.INVALID_ARGUMENT
        assert "max-request-gflop" in refused.value.details()
        assert "cpu_reference" in refused.value.details()
        (answer,) = service.AttendStream(iter([request]), timeout=wire.SECONDS)
        assert answer.status.code == CODE.INVALID_ARGUMENT.value[0]
    is_idle(server)


def test_unwanted_checks_are_dropped_and_their_memory_freed(start_server):
    server = start_server(*hostile.SMALL_LIMITS, "--max-checks", "16")
    # Each occupies the checker for a second or two.
    request = wire.small_request(length=8192, dim=1, check=True, softcap=30.0)
    with wire.connect(server.address) as service:
        calls = [service.Attend.future(request, timeout=600) for _ in range(24)]
        harness.wait_for("those without a place to be refused",
                         lambda: sum(call.done() for call in calls) >= 8, 30)
        for call in calls:
            call.cancel()
        is_idle(server)
    refused = server.metric("attend_reference_checks_total", result="refused")
    assert refused == server.metric("attend_rejected_requests_total", reason="checks") > 0
    assert server.metric("attend_rejected_requests_total", reason="queue_full") == 0


def test_clients_deadlines_are_counted_as_such(server):
    with wire.connect(server.address) as service:
        call = service.Attend.future(wire.small_request(**ENDLESS), timeout=600)
        runs(server)
        late = [service.Attend.future(wire.small_request(seed=n), timeout=1) for n in range(20)]
        # Behind work that is expected to run for long they are refused; otherwise they expire in
        # the queue.
        codes = {CODE.DEADLINE_EXCEEDED, CODE.RESOURCE_EXHAUSTED}
        assert {outcome(each) for each in late} <= codes
        harness.wait_for("all to be counted", lambda: sum(server.metric(
            "attend_requests_total", code=code.name) for code in codes) == 20, 30)
        assert server.metric("attend_requests_total", code="CANCELLED") == 0
        call.cancel()
