# SPDX-License-Identifier: Apache-2.0
"""Calls with small messages: health, reflection, sessions and operator calls; a flood from one
tenant does not block another's calls."""

import concurrent.futures
import contextlib
import pathlib
import resource
import threading
import time

import grpc
import numpy as np
import pytest

import harness
import hostile
import sessions
import strangers
import wire

CODE = grpc.StatusCode
HEALTH = "/grpc.health.v1.Health/"
SERVING, NOT_SERVING, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
VERSIONS = ("v1", "v1alpha")


def reflection(version):
    return f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"


def refusal(call):
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value


def operator(channel, method, message=b""):
    return channel.unary_unary(f"/attend.v1.AdminService/{method}")(message, timeout=wire.SECONDS)


def test_watches_of_health_see_each_change(start_both, tmp_path):
    server = start_both()
    own = f"unix:{tmp_path}/socket"
    with grpc.insecure_channel(server.address) as channel, grpc.insecure_channel(own) as admin:
        watch = channel.unary_stream(HEALTH + "Watch")
        watches = [watch(b"", timeout=60),
                   watch(b"\x0a\x1aattend.v1.AttentionService", timeout=60)]
        unknown = watch(b"\x0a\x07nothing", timeout=60)
        assert [next(each) for each in (*watches, unknown)] == [SERVING, SERVING, UNKNOWN]
        for _ in range(3):
            operator(admin, "Drain")
            assert [next(each) for each in watches] == [NOT_SERVING] * 2
            assert channel.unary_unary(HEALTH + "Check")(b"", timeout=10) == NOT_SERVING
            operator(admin, "Undrain")
            assert [next(each) for each in watches] == [SERVING] * 2
        for each in (*watches, unknown):
            each.cancel()
        wrong = refusal(lambda: next(watch(b"\xff\xff", timeout=10)))
        assert wrong.code() is CODE.INVALID_ARGUMENT
        long = refusal(lambda: next(watch(bytes(4090), timeout=10)))
        assert long.code() is CODE.INVALID_ARGUMENT
        late = refusal(lambda: [next(one) for one in [watch(b"", timeout=0.2)] for _ in range(2)])
        assert late.code() is CODE.DEADLINE_EXCEEDED
        empty = channel.stream_stream(HEALTH + "Watch")(iter([]), timeout=10)
        assert empty.code() is CODE.INVALID_ARGUMENT
        assert empty.details() == "the call has no message"
    assert server.stop() == 0


def test_watches_end_with_their_server(start_both):
    server = start_both()
    with grpc.insecure_channel(server.address) as channel:
        watches = [channel.unary_stream(HEALTH + "Watch")(b"", timeout=60) for _ in range(40)]
        assert all(next(each) == SERVING for each in watches)
        ends = threading.Thread(target=server.stop)
        ends.start()
        for each in watches:
            with contextlib.suppress(grpc.RpcError):
                assert list(each) == [NOT_SERVING]
            assert each.code() in (CODE.CANCELLED, CODE.UNAVAILABLE)
        ends.join()
    assert server.process.returncode == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_reflection(start_both, version):
    server = start_both()
    symbol = b"attend.v1.SessionService"
    requests = [b"\x3a\x00", b"\x22" + bytes([len(symbol)]) + symbol, b"\x22\x02no", b""]
    with grpc.insecure_channel(server.address) as channel:
        method = channel.stream_stream(reflection(version))
        listed, described, unknown, nothing = list(method(iter(requests * 1), timeout=30))
        assert symbol in listed and b"grpc.reflection.v1alpha.ServerReflection" in listed
        assert b"KeepAlive" in described and b"no not found" in unknown
        assert b"message_request is not set" in nothing
        assert list(method(iter([]), timeout=30)) == []
        answers = list(method(iter(requests[:2] * 200), timeout=wire.SECONDS))
        assert answers == [listed, described] * 200
        wrong = method(iter([b"\x3a\x00", b"\xff\xff"]), timeout=30)
        assert next(wrong) == listed
        assert refusal(lambda: next(wrong)).code() is CODE.INVALID_ARGUMENT
        long = method(iter([bytes((64 << 10) + 1)]), timeout=30)
        assert long.code() is CODE.INVALID_ARGUMENT and "must have at most 65536" in long.details()


def test_reflection_can_be_disabled(start_both):
    server = start_both("--no-reflection")
    with grpc.insecure_channel(server.address) as channel:
        for version in VERSIONS:
            call = channel.stream_stream(reflection(version))(iter([b"\x3a\x00"]), timeout=30)
            assert call.code() is CODE.UNIMPLEMENTED
            assert f"unknown method {reflection(version)}" in call.details()


def test_reflection_ends_as_the_server_drains(start_both, tmp_path):
    server = start_both()
    with grpc.insecure_channel(server.address) as channel, \
            grpc.insecure_channel(f"unix:{tmp_path}/socket") as admin:
        streams = [strangers.Stream(channel.stream_stream(reflection(v))) for v in VERSIONS]
        for each in streams:
            assert each.ask(b"\x3a\x00")
        operator(admin, "Drain")
        for each in streams:
            assert refusal(lambda each=each: next(each.call)).code() is CODE.UNAVAILABLE
            each.close()


def test_a_session_from_its_creation_to_its_end(start_both):
    server = start_both()
    random = np.random.default_rng(3)
    for address in server.addresses:
        with sessions.client(address) as tenant:
            made = tenant.create(layers=3, lease_seconds=60)
            sequence = sessions.Sequence(random, made)
            request, _ = sessions.step(random, [sequence], new_rows=70, len_q=1)
            first = tenant.attend(request)
            assert tenant.call("GetSession", session=made.id).layer_lengths == [70, 0, 0]
            fork = tenant.call("ForkSession", session=made.id, length=0)
            assert fork.length == 0 and fork.id != made.id
            cut = tenant.call("TruncateSession", session=made.id, length=0)
            assert cut.layer_lengths == [0, 0, 0]
            assert list(tenant.attend(request).raw) == list(first.raw)
            assert tenant.call("KeepAlive", session=made.id).lease_seconds_left > 59
            ids = [each.id for each in tenant.call("ListSessions").sessions]
            assert ids == sorted([made.id, fork.id])
            for each in (made, fork):
                tenant.call("FreeSession", session=each.id)
            gone = refusal(lambda tenant=tenant, made=made: tenant.call(
                "GetSession", session=made.id))
            assert gone.code() is CODE.NOT_FOUND
            wrong = refusal(lambda tenant=tenant: tenant.call("ListSessions", page_size=-1))
            assert wrong.code() is CODE.INVALID_ARGUMENT and "page_size is -1" in wrong.details()


def test_disabled_sessions_are_refused(start_both):
    server = start_both("--session-memory", "0")
    with sessions.client(server.address) as tenant:
        for name in ("ListSessions", "GetSession", "KeepAlive", "FreeSession"):
            failed = refusal(lambda name=name: tenant.call(name))
            assert failed.code() is CODE.UNIMPLEMENTED and "session" in failed.details()


def test_operator_calls_are_answered(start_both, tmp_path):
    server = start_both("--tenant", "team=2", "--log-level", "warn")
    with grpc.insecure_channel(f"unix:{tmp_path}/socket") as admin:
        status = wire.admin_pb.GetStatusResponse.FromString(operator(admin, "GetStatus"))
        assert status.log_level == "warn" and not status.draining
        assert [each.name for each in status.tenants] == ["default", "team"]
        operator(admin, "SetLogLevel", b"\x0a\x05debug")
        failed = refusal(lambda: operator(admin, "SetLogLevel", b"\x0a\x01x"))
        assert failed.code() is CODE.INVALID_ARGUMENT
        with sessions.client(server.address, "team") as tenant:
            tenant.create(lease_seconds=60)
            freed = operator(admin, "FreeSessions", b"\x12\x04team")
            assert wire.admin_pb.FreeSessionsResponse.FromString(freed).freed == 1
            assert not tenant.call("ListSessions").sessions
        assert server.log().count("admin call method") == 4
    with grpc.insecure_channel(server.address) as stranger:
        for method in ("GetStatus", "Drain", "Undrain", "SetLogLevel", "ListSessions",
                       "FreeSessions", "EvictTenant"):
            failed = refusal(lambda method=method: operator(stranger, method))
            assert failed.code() is CODE.PERMISSION_DENIED


def test_small_calls_of_callers_with_tokens(start_both, tmp_path):
    """Each method requires its scope; only health requires none."""
    (tmp_path / "tokens").write_text(strangers.TOKENS_FILE)
    server = start_both("--tokens", tmp_path / "tokens", strangers.TENANTS)
    scopes = {"sessions": "sessions", "info": "informed", "admin": "operator", "any": "gate"}
    small = [each for each in strangers.methods()
             if each.path.startswith(("/attend.v1.Session", "/attend.v1.Admin", "/grpc.reflection"))
             or each.path.endswith("GetServerInfo")]
    assert len(small) == 18
    with grpc.insecure_channel(server.address) as channel:
        for path, scope in small:
            assert strangers.ask(channel, path).code is CODE.UNAUTHENTICATED, path
            for other, name in scopes.items():
                answer = strangers.ask(channel, path, strangers.bearer(strangers.TOKENS[name]))
                refused = answer.code is CODE.PERMISSION_DENIED
                allowed = scope in (other, "any") or (name == "gate" and scope != "admin")
                assert refused != allowed, (path, name, answer)
        assert strangers.ask(channel, HEALTH + "Check").code in (CODE.OK, CODE.CANCELLED)
        assert channel.unary_stream(HEALTH + "Watch")(b"", timeout=10).initial_metadata() == ()


def test_a_flood_of_one_tenants_lists_does_not_stop_anothers_calls(start_both):
    """A list visits a thousand layers; the number of waiting lists is bounded, and other calls take
    turns."""
    server = start_both("--tenant=a=1,b=1", "--max-streams", "2000")
    with sessions.client(server.address) as flooding, sessions.client(server.address, "b") as other:
        mine = other.create(lease_seconds=60)
        for _ in range(40):
            flooding.create(layers=512, lease_seconds=60)
        done = threading.Event()

        def flood():
            asks = wire.sessions_pb.ListSessionsRequest()
            calls = []
            while not done.is_set():
                calls = [each for each in calls if not each.done()]
                while len(calls) < 300:
                    calls.append(flooding.sessions.ListSessions.future(
                        asks, timeout=60, metadata=flooding.metadata))
                time.sleep(0.001)
            for each in calls:
                each.cancel()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            flooded = pool.submit(flood)
            time.sleep(0.5)
            waits = []
            for _ in range(100):
                began = time.monotonic()
                other.call("KeepAlive", session=mine.id)
                waits.append(time.monotonic() - began)
            done.set()
            flooded.result()
    assert sorted(waits)[90] < 0.5, waits
    wire.assert_serves(server.address)


def test_running_out_of_descriptors_is_survived(start_both):
    """The server pauses accepting, closes new connections, and reports it; calls on open
    connections continue."""
    server = start_both()
    pid = server.process.pid
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream(HEALTH + "Watch")(b"", timeout=60)
        assert next(watch) == SERVING
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = {int(fd.name) for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
        free = next(fd for fd in range(len(taken) + 1) if fd not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
        refused = [hostile.open_socket(server.address) for _ in range(20)]
        assert next(watch) == NOT_SERVING
        before = hostile.cpu_seconds(server)
        service = wire.stub.AttentionServiceStub(channel)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert service.Attend(wire.small_request(), timeout=wire.SECONDS).raw
            time.sleep(0.1)
        assert hostile.cpu_seconds(server) - before < 0.5, "it turns"
        for each in refused:
            with each:
                assert hostile.ended(each)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert next(watch) == SERVING
        watch.cancel()
    wire.assert_serves(server.address)
    assert server.metric("attend_accept_errors_total") > 0
    assert server.stop() == 0
