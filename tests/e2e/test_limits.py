# SPDX-License-Identifier: Apache-2.0
"""Tenant limits (--limits): each limit refuses by name and bound, gives a retry hint, and admits
again afterwards; SIGHUP changes limits while calls are in flight."""

import contextlib
import signal
import subprocess
import threading

import grpc
import pytest

import chunked
import harness
import sessions
import strangers
import wire
from limits import Limits, attend, refused


@contextlib.contextmanager
def uploading(service, **fields):
    """While a request of tenant a is in flight, as its client has sent only the header; afterwards
    the rest is sent, and it is served."""
    request = wire.small_request(length=64, **fields)
    header = wire.pb.AttendChunkedRequest(header=chunked.header_of(request))
    stream = chunked.Stream(service, header, metadata=[("x-attend-tenant", "a")])
    messages = [next(stream.call)]  # the grant
    yield
    for chunk in chunked.chunks_of(request, 4096):
        stream.send(chunk)
    stream.half_close()
    messages += stream.call
    assert chunked.assemble(messages).o.shape


def test_requests_in_flight_are_limited(start_server, tmp_path):
    server = start_server(*Limits(tmp_path, "[a]\nrequests-in-flight = 1\n").flags)
    with wire.connect(server.address) as service:
        with uploading(service):
            details, pushback_ms = refused(service, wire.small_request())
            assert "requests-in-flight: the tenant has 1, may have at most 1" in details
            assert pushback_ms > 0
            attend(service, wire.small_request(), "b")
        attend(service, wire.small_request())
    limit = {"tenant": "a", "limit": "in_flight"}
    assert server.metric("attend_tenant_limited_total", **limit) == 1
    assert server.metric("attend_tenant_limit", **limit) == 1
    assert server.metric("attend_tenant_limited_total") == 1  # no other
    assert server.metric("attend_tenant_limited_requests_total", tenant="a") == 1
    assert server.metric("attend_rejected_requests_total", reason="tenant_limit") == 1


# The methods without tensors.
SMALL = [f"/attend.v1.SessionService/{name}Session{'s' if name == 'List' else ''}"
         for name in ("List", "Create", "Fork", "Truncate", "Get")]
SMALL += [f"/inference.GRPCInferenceService/{name}" for name in (
    "ServerMetadata", "SystemSharedMemoryStatus", "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister")]


def test_small_calls_take_a_place_in_flight(start_server, tmp_path):
    """Except those that report the server's state and limits, and those that keep and end
    sessions."""
    server = start_server(*Limits(tmp_path, "[a]\nrequests-in-flight = 1\n").flags, "--oip",
                          "--session-memory=16MiB")
    with wire.connect(server.address) as service, \
            grpc.insecure_channel(server.address) as channel:
        def ask(path, tenant="a"):
            return strangers.ask(channel, path, [("x-attend-tenant", tenant)])

        with uploading(service):
            for path in SMALL:
                answer = ask(path)
                assert answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED, path
                assert answer.message == ("tenant limit requests-in-flight: the tenant has 1, may "
                                          "have at most 1")
                assert ask(path, "b").code != grpc.StatusCode.RESOURCE_EXHAUSTED, path
            for path in ("/attend.v1.AttentionService/GetServerInfo",
                         "/inference.GRPCInferenceService/ServerReady"):
                assert ask(path).code != grpc.StatusCode.RESOURCE_EXHAUSTED
        for path in 3 * SMALL:  # each frees its place before its client learns of its end
            assert ask(path).code != grpc.StatusCode.RESOURCE_EXHAUSTED, path
    assert server.metric("attend_tenant_used", tenant="a", limit="in_flight") == 0
    assert server.metric("attend_tenant_limited_total", tenant="a",
                         limit="in_flight") == len(SMALL)
    assert server.metric("attend_rejected_requests_total", reason="tenant_limit") == len(SMALL)
    # They are not requests, so they do not count among failed requests.
    assert server.metric("attend_tenant_limited_requests_total") == 0
    assert server.metric("attend_requests_total", code="RESOURCE_EXHAUSTED") == 0
    small = {"tenant": "a", "code": "RESOURCE_EXHAUSTED"}
    assert server.metric("attend_tenant_small_calls_total", **small) == len(SMALL)
    assert server.metric("attend_tenant_small_calls_total", tenant="a") == 4 * len(SMALL) + 2
    assert server.metric("attend_tenant_small_calls_total", tenant="b") == len(SMALL)


def test_sessions_are_kept_and_freed_while_all_places_are_taken(start_server, tmp_path):
    """Clients try only once to free a session, so a refusal would leave its memory in use."""
    server = start_server(*Limits(tmp_path, "[a]\nrequests-in-flight = 1\n").flags,
                          "--session-memory=16MiB")
    with wire.connect(server.address) as service, sessions.client(server.address, "a") as calls:
        made = calls.create()
        with uploading(service):
            details, _ = refused(service, wire.small_request())
            assert "requests-in-flight" in details
            assert calls.call("KeepAlive", session=made.id).id == made.id
            calls.call("FreeSession", session=made.id)
        sessions.refused(grpc.StatusCode.NOT_FOUND, calls.call, "GetSession", session=made.id)
        assert server.metric("attend_tenant_used", tenant="a", limit="in_flight") == 0


def test_small_calls_are_charged_and_no_rate_refuses_them(start_server, tmp_path):
    """A tenant in debt must neither lose a session's lease nor be unable to free its memory."""
    limits = Limits(tmp_path, SLOW_BYTES)
    server = start_server(*limits.flags, "--session-memory=16MiB")
    with wire.connect(server.address) as service, sessions.client(server.address, "a") as calls:
        made, other = calls.create(), calls.create()
        for name in ("KeepAlive", "FreeSession"):
            before = charged(server)
            calls.call(name, session=made.id)
            assert charged(server) > before, name
        attend(service, wire.small_request())
        limits.change(server, "bytes-per-second = 1\nbytes-burst = 1KiB\n")
        refused(service, wire.small_request())
        calls.call("KeepAlive", session=other.id)
        calls.call("FreeSession", session=other.id)
        refused(service, wire.small_request())


def test_checks_are_limited(start_server, tmp_path):
    server = start_server(*Limits(tmp_path, "checks = 1\n").flags)
    with wire.connect(server.address) as service:
        with uploading(service, check=True):
            details, _ = refused(service, wire.small_request(check=True))
            assert "checks: the tenant has 1, may have at most 1" in details
            attend(service, wire.small_request())
            attend(service, wire.small_request(check=True), "b")
        assert attend(service, wire.small_request(check=True)).check.ok


@pytest.mark.parametrize("key,name,rate", [("bytes-per-second", "bytes", "1000"),
                                           ("gflop-per-second", "cost", "0.001")])
def test_rates_are_limited(start_server, tmp_path, key, name, rate):
    """The first request, larger than the burst, is served and puts the tenant into debt for many
    seconds; other tenants, and requests under other limits, are served."""
    limits = Limits(tmp_path, f"{key} = {rate}\n")
    server = start_server(*limits.flags)
    request = wire.small_request(length=512)
    with wire.connect(server.address) as service:
        attend(service, request)
        details, pushback_ms = refused(service, request)
        assert f"tenant limit {key}" in details
        assert f"retry in {pushback_ms} ms" in details and 1000 < pushback_ms < 1e7
        attend(service, request, "b")
        used = server.metric("attend_tenant_used", tenant="a", limit=name)
        assert used > server.metric("attend_tenant_limit", tenant="a", limit=name)
        limits.change(server, f"[a]\n{key} = none\n")
        attend(service, request)
    assert server.metric("attend_tenant_limited_total", tenant="a", limit=name) == 1
    assert server.metric("attend_tenant_limited_requests_total", tenant="a") == 1


def test_only_bytes_of_tensors_are_charged(start_server, tmp_path):
    server = start_server(*Limits(tmp_path, "bytes-per-second = 1\nbytes-burst = 1GiB\n").flags)
    with wire.connect(server.address) as service:
        attend(service, wire.small_request(length=16))
    used = server.metric("attend_tenant_used", tenant="a", limit="bytes")
    assert 0 <= 4 * 16 * 64 * 4 - used < 60  # one byte is returned each second


def test_refusals_on_streams_have_a_retry_hint(start_server, tmp_path):
    server = start_server(*Limits(tmp_path, "bytes-per-second = 1000\n").flags)
    requests = [wire.small_request(length=256, request_id=str(n)) for n in range(3)]
    with wire.connect(server.address) as service:
        answers = list(service.AttendStream(iter(requests), timeout=wire.SECONDS))
    by_id = {answer.request_id: answer.status for answer in answers}
    assert sorted(by_id) == ["0", "1", "2"]
    codes = [status.code for status in by_id.values()]
    assert codes.count(0) >= 1 and codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]) >= 1
    for status in by_id.values():
        if status.code != 0:
            assert "bytes-per-second" in status.message and status.retry_after_ms > 1000


def test_open_streams_are_limited(start_server, tmp_path):
    server = start_server(*Limits(tmp_path, "[a]\nstreams = 1\n").flags)

    def stream(tenant, requests=()):
        return service.AttendStream(iter(requests), timeout=wire.SECONDS,
                                    metadata=[("x-attend-tenant", tenant)])

    with wire.connect(server.address) as service:
        gate = threading.Event()

        def hold():
            yield wire.small_request()
            gate.wait()

        held = stream("a", hold())
        next(held)
        with pytest.raises(grpc.RpcError) as failure:
            next(stream("a"))
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "streams: the tenant has 1, may have at most 1" in failure.value.details()
        assert int(dict(failure.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        assert not list(stream("b"))
        attend(service, wire.small_request())  # which does not count as a stream
        gate.set()
        assert not list(held)
        # Its place is free before its client learns of its end.
        assert len(list(stream("a", [wire.small_request()]))) == 1
    assert server.metric("attend_tenant_limited_total", tenant="a", limit="streams") == 1
    assert server.metric("attend_requests_total", code="RESOURCE_EXHAUSTED") == 1
    assert server.metric("attend_tenant_limited_requests_total", tenant="a") == 1


def charged(server):
    return server.metric("attend_tenant_used", tenant="a", limit="bytes")


# One byte is returned each second.
SLOW_BYTES = "bytes-per-second = 1\nbytes-burst = 1GiB\n"


def test_refused_requests_are_charged_their_received_bytes(start_server, tmp_path):
    """Charged for its message, but neither for its answer nor for its cost."""
    limits = Limits(tmp_path, SLOW_BYTES + "[a]\ngflop-per-second = 1\n")
    server = start_server(*limits.flags, "--max-queue=1", "--lanes=1")
    request = wire.small_request()
    with wire.connect(server.address) as service:
        running = service.Attend.future(wire.slow_request(length=16384), timeout=600)
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        waiting = service.Attend.future(request, timeout=600)
        harness.wait_for("the queue to be full",
                         lambda: server.metric("attend_queue_requests") == 1)
        details, _ = refused(service, request)
        assert "queue" in details
        assert 0 <= request.ByteSize() - charged(server) < 60
        assert server.metric("attend_tenant_used", tenant="a", limit="cost") == 0
        running.cancel()
        waiting.cancel()


@pytest.mark.parametrize("wrong", ["too large", "cannot be read", "not valid", "no such region",
                                   "no such session", "no place"])
def test_invalid_requests_are_charged_their_received_bytes(start_server, tmp_path, wrong):
    """Each of these messages is read completely."""
    limits = Limits(tmp_path, SLOW_BYTES)
    server = start_server(*limits.flags, "--max-request-bytes=1MiB", "--session-memory=16MiB",
                          "--shared-memory", "--shared-memory-socket", tmp_path / "shm.sock")
    request = wire.small_request(length=256)
    if wrong == "too large":
        request = wire.small_request(length=1600)
    elif wrong == "not valid":
        request.q.shape[0] = -1
    elif wrong == "no such region":
        request.q.shared_memory.region = bytes(16)
        del request.raw[0]
    elif wrong == "no such session":
        request.sessions.add(session=b"none")
    message = request.SerializeToString()
    if wrong == "cannot be read":
        message += b"\xff" * 1000
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(wire.connect(server.address))
        if wrong == "no place":
            limits.change(server, SLOW_BYTES + "requests-in-flight = 1\n")
            stack.enter_context(uploading(service))
        before = charged(server)
        channel = stack.enter_context(grpc.insecure_channel(server.address, wire.UNLIMITED))
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(wire.ATTEND)(message, timeout=wire.SECONDS,
                                             metadata=[("x-attend-tenant", "a")])
        assert 0 <= before + len(message) - charged(server) < 60


def test_sessions_are_limited(start_server, tmp_path):
    limits = Limits(tmp_path, "[a]\nsessions = 2\n")
    server = start_server(*limits.flags)
    with sessions.client(server.address, "a") as a, sessions.client(server.address, "b") as b:
        made = [a.create(), a.create()]
        for details in (sessions.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, a.create),
                        sessions.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, a.call, "ForkSession",
                                         session=made[0].id)):
            assert "tenant limit sessions: the tenant has 2, may have at most 2" in details
        for _ in range(3):
            b.create()
        assert server.metric("attend_tenant_used", tenant="a", limit="sessions") == 2
        assert server.metric("attend_tenant_limited_total", tenant="a", limit="sessions") == 2
        assert server.metric("attend_rejected_requests_total", reason="tenant_limit") == 2
        assert server.metric("attend_tenant_limited_requests_total") == 0
        a.call("FreeSession", session=made[0].id)
        a.call("ForkSession", session=made[1].id)


def test_session_memory_is_limited(start_server, tmp_path, random):
    """The tenant's own idle sessions make room; an append that still does not fit is refused
    without evictions."""
    limits = Limits(tmp_path, "[a]\nsession-memory = 256KiB\n")
    server = start_server(*limits.flags)
    row_bytes = sessions.KV_HEADS * (sessions.DIM + sessions.DIM_V) * 4
    rows = (200 << 10) // row_bytes
    with sessions.client(server.address, "a") as a, sessions.client(server.address, "b") as b:
        first = sessions.Sequence(random, a.create())
        a.attend(sessions.step(random, [first], rows, 1)[0])
        other = sessions.Sequence(random, b.create())
        b.attend(sessions.step(random, [other], 4 * rows, 1)[0])
        second = sessions.Sequence(random, a.create())
        a.attend(sessions.step(random, [second], rows, 1)[0])
        assert server.metric("attend_sessions_evictions_total", cause="own") == 1
        assert server.metric("attend_session_tenant_bytes", tenant="a") <= 256 << 10
        third = sessions.Sequence(random, a.create())
        request, _ = sessions.step(random, [third], 2 * rows, 1)
        details = sessions.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, a.attend, request)
        assert "tenant limit session-memory: " in details and str(256 << 10) in details
        # Nothing was evicted for the refused one.
        assert server.metric("attend_sessions_evictions_total") == 1
        assert server.metric("attend_tenant_limited_total", tenant="a",
                             limit="session_memory") == 1
        assert server.metric("attend_rejected_requests_total", reason="tenant_limit") == 1
        assert server.metric("attend_rejected_requests_total", reason="sessions") == 0
        assert server.metric("attend_tenant_limited_requests_total", tenant="a") == 1
        limits.change(server, "")
        a.attend(request)


def test_limits_change_under_calls_and_a_wrong_file_changes_nothing(start_server, tmp_path):
    limits = Limits(tmp_path, "")
    server = start_server(*limits.flags)
    with wire.connect(server.address) as service:
        with uploading(service), uploading(service):
            attend(service, wire.small_request())
            limits.change(server, "[a]\nrequests-in-flight = 1\n")
            assert "has 2, may have at most 1" in refused(service, wire.small_request())[0]
            limits.change(server, "[a]\nrequests-in-flight = many\n", result="failed")
            assert "line 2: [a] requests-in-flight is" in server.log()
            limits.path.unlink()
            server.signal(signal.SIGHUP)
            harness.wait_for("a second failure", lambda: server.metric(
                "attend_reloads_total", what="limits", result="failed") == 2)
            assert "may have at most 1" in refused(service, wire.small_request())[0]
        limits.change(server, "")
        attend(service, wire.small_request())
    assert server.stop() == 0


@pytest.mark.parametrize("text,words", [
    ("[unknown]\n", "[unknown] must be a tenant"),
    ("streams = 0\n", "line 1: streams is \"0\", must be a whole number in [1, 16777216], or none"),
    (None, "cannot be read: No such file"),
])
def test_a_wrong_file_fails_the_start(tmp_path, text, words):
    path = tmp_path / "limits.toml"
    if text is not None:
        path.write_text(text)
    done = subprocess.run([str(harness.binary("attend-server")), f"--limits={path}"],
                          capture_output=True, text=True, timeout=30, env=harness.clean_env())
    assert done.returncode == 2
    assert str(path) in done.stderr and words in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
