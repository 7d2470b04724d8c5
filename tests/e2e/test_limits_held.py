# SPDX-License-Identifier: Apache-2.0
"""Tenant limits (--limits) on shared memory and connections, and how GetServerInfo reports them to
callers."""

import contextlib
import json
import re
import signal

import grpc
import pytest

import certificates
import harness
import hostile
import sessions
import strangers
import wire
from limits import Limits, attend, refused


def give_tokens(folder, scopes):
    """The tokens of callers "a" and "b", who belong to the tenants of these names, and the
    flags."""
    tokens = {name: strangers.token() for name in "ab"}
    (folder / "tokens").write_text("".join(
        strangers.line(name, token, f"tenant={name}", f"scopes={scopes}")
        for name, token in tokens.items()))
    return tokens, ("--tokens", folder / "tokens")


def test_shared_memory_is_limited_by_tenant(start_server, tmp_path):
    """The regions of all connections of a tenant count until they are closed."""
    tokens, flags = give_tokens(tmp_path, "compute")
    limits = Limits(tmp_path, "shared-memory = 64KiB\n")
    path = tmp_path / "regions" / "sock"
    server = start_server(*limits.flags, *flags, "--shared-memory", "--shared-memory-socket", path)

    def client(name):
        regions = strangers.Regions(path)
        assert regions.identify(tokens[name]).HasField("identified")
        return regions

    def create(regions, size):
        return regions.ask(create=wire.shm.CreateRegion(bytes=size))

    one, two, other = client("a"), client("a"), client("b")
    assert create(one, 40 << 10).HasField("created")
    error = create(two, 40 << 10).error
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert error.message == (f"tenant limit shared-memory: the tenant has {40 << 10} and asks for "
                             f"{40 << 10} more, may have at most {64 << 10}")
    assert create(other, 64 << 10).HasField("created")
    limit = {"tenant": "a", "limit": "shared_memory"}
    assert server.metric("attend_tenant_used", **limit) == 40 << 10
    assert server.metric("attend_tenant_limited_total", **limit) == 1
    one.close()
    harness.wait_for("its regions to be closed",
                     lambda: server.metric("attend_tenant_used", **limit) == 0)
    assert create(two, 64 << 10).HasField("created")
    limits.change(server, "[a]\nshared-memory = 128KiB\n")
    assert create(two, 64 << 10).HasField("created")
    two.close()
    other.close()


def test_each_tenant_has_its_part_of_shared_memory(start_server, tmp_path):
    """A quarter of the bytes and of the connections is reserved for each of two tenants."""
    tokens, flags = give_tokens(tmp_path, "compute")
    path = tmp_path / "regions" / "sock"
    server = start_server("--tenant=a=1,b=1", *flags, "--shared-memory", "--shared-memory-socket",
                          path, "--shared-memory-max=4MiB", "--shared-memory-client-max=1MiB")

    def client(name):
        regions = strangers.Regions(path)
        assert regions.identify(tokens[name]).HasField("identified")
        return regions

    def create(regions, size=1 << 20):
        return regions.ask(create=wire.shm.CreateRegion(bytes=size))

    def attend(name, token):
        request = wire.small_request()
        request.q.shared_memory.CopyFrom(wire.pb.SharedMemory(region=token, offset=0))
        del request.raw[0]
        with wire.connect(server.address) as service:
            service.Attend(request, timeout=wire.SECONDS,
                           metadata=strangers.bearer(tokens[name]))

    many = [client("a") for _ in range(192)]
    refused = strangers.Regions(path)
    message = refused.identify(tokens["a"]).error.message
    assert "the tenant has 192, its reserved share is 64" in message
    refused.close()
    held = [create(each).created.token for each in many[:3]]
    assert all(held)
    full = create(many[3]).error
    assert full.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert f"the tenant has {3 << 20}, its reserved share is {1 << 20}" in full.message
    other, second = client("b"), client("b")
    region = create(other).created.token
    attend("b", region)
    for token in held:
        attend("a", token)  # none has been closed for it
    assert "its reserved share is" in create(second).error.message
    assert many[0].ask(release=wire.shm.ReleaseRegion(token=held[0])).HasField("released")
    assert create(second).HasField("created"), "of what is in common"
    for each in (*many, other, second):
        each.close()


def test_requests_beyond_a_tenants_memory_name_its_parts(start_server):
    """A quarter of the budget is reserved for each of two tenants, and half is common."""
    server = start_server("--memory-budget=1MiB", "--tenant=a=1")
    assert "memory reserved per tenant: default 256KiB, a 256KiB; common: 512KiB" in server.log()
    inputs, answer = 3 * 1024 * 64 * 4, 1024 * 64 * 4
    with wire.connect(server.address) as service:
        with pytest.raises(grpc.RpcError) as failure:
            attend(service, wire.small_request(length=1024))
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert failure.value.details() == (
            f"the request's tensors take {inputs} bytes and its answer {answer}, and both must "
            f"fit, each in one piece, into the tenant's part of the memory budget of {1 << 20}, "
            f"which has {256 << 10}, and its common part of {512 << 10}")
        attend(service, wire.small_request(length=512))


def test_with_tokens_default_has_a_part_only_if_it_is_named(start_server, tmp_path):
    """No caller may be "default" here. A caller that becomes it while the server runs gets what
    others leave."""
    tokens, flags = give_tokens(tmp_path, "compute")
    named = start_server("--memory-budget=1536KiB", "--tenant=default=1,a=1,b=1", *flags)
    assert "tenants: default=1, a=1, b=1;" in named.log()
    assert "memory reserved per tenant: default 256KiB, a 256KiB, b 256KiB;" in named.log()
    named.stop()
    server = start_server("--memory-budget=1536KiB", "--tenant=a=1,b=1", *flags)
    assert "tenants: default=0, a=1, b=1;" in server.log()
    assert ("memory reserved per tenant: default 0B, a 384KiB, b 384KiB; common: 768KiB"
            in server.log())
    late = strangers.token()
    (tmp_path / "new").write_text((tmp_path / "tokens").read_text() +
                                  strangers.line("late", late, "scopes=compute"))
    (tmp_path / "new").rename(tmp_path / "tokens")
    harness.wait_for("the new file to be read", lambda: server.metric(
        "attend_tokens_reloads_total", result="ok") == 1)
    with wire.connect(server.address) as service:
        for token in (late, tokens["a"]):
            service.Attend(wire.small_request(), timeout=wire.SECONDS,
                           metadata=strangers.bearer(token))
    assert server.metric("attend_tenant_requests_total", tenant="default", code="OK") == 1


# A channel with its own connection.
OWN = [*wire.UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]


@pytest.mark.parametrize("why", ["scope", "another tenant", "connections"])
def test_refused_callers_are_charged_their_received_bytes(start_server, tmp_path, why):
    """The check reads the headers alone, and keeps nothing of the messages."""
    tokens, flags = give_tokens(tmp_path, "info" if why == "scope" else "compute")
    limits = Limits(tmp_path, "bytes-per-second = 1\nbytes-burst = 1GiB\nconnections = 1\n")
    server = start_server(*limits.flags, *flags)
    message = wire.small_request(length=256).SerializeToString()
    metadata = strangers.bearer(tokens["a"])
    if why == "another tenant":
        metadata.append(("x-attend-tenant", "b"))

    def charged(tenant):
        return server.metric("attend_tenant_used", tenant=tenant, limit="bytes")

    with contextlib.ExitStack() as stack:
        if why == "connections":
            held = stack.enter_context(wire.connect(server.address))
            held.GetServerInfo(wire.pb.GetServerInfoRequest(), metadata=metadata)
        before = charged("a")  # for that answer
        channel = stack.enter_context(grpc.insecure_channel(server.address, OWN))
        answer = strangers.ask(channel, wire.ATTEND, metadata, message)
        expected = "RESOURCE_EXHAUSTED" if why == "connections" else "PERMISSION_DENIED"
        assert answer.code.name == expected, answer
        assert 0 <= before - charged("a") < 60
        unknown = strangers.ask(channel, wire.ATTEND, strangers.bearer(strangers.token()), message)
        assert unknown.code == grpc.StatusCode.UNAUTHENTICATED
        assert 0 <= before - charged("a") < 60
        assert charged("default") == charged("b") == 0


def test_reflection_is_charged_for_its_bytes(start_server, tmp_path):
    limits = Limits(tmp_path, "bytes-per-second = 1\nbytes-burst = 1GiB\n")
    server = start_server(*limits.flags)

    def charged():
        return server.metric("attend_tenant_used", tenant="a", limit="bytes")

    with grpc.insecure_channel(server.address) as channel:
        for request in (strangers.LIST_SERVICES, b"\x22\x1aattend.v1.AttentionService"):
            before = charged()
            stream = channel.stream_stream(strangers.REFLECTION)(
                iter([request]), metadata=[("x-attend-tenant", "a")], timeout=wire.SECONDS)
            answers = list(stream)
            assert len(answers) == 1
            moved = len(request) + len(answers[0])
            assert 0 <= before + moved - charged() < 60 and moved > 60


@pytest.mark.parametrize("way", ["tcp", "ipv6", "unix", "tls"])
def test_connections_are_limited_by_tenant(start_server, tmp_path, way):
    """Counts open connections on which a tenant has called, however many calls each has."""
    listen, tls = "127.0.0.1:0", ()
    if way == "ipv6":
        listen = "[::1]:0"
    elif way == "unix":
        listen = f"unix:{tmp_path}/a.sock"
    elif way == "tls":
        ca = certificates.Authority(tmp_path / "ca")
        tls = ca.serve()
    limits = Limits(tmp_path, "[a]\nconnections = 2\n")
    server = start_server(*limits.flags, *tls, listen=listen)

    def connection():
        if way == "tls":
            return ca.channel(server.address, options=OWN)
        return grpc.insecure_channel(server.address, options=OWN)

    def used(tenant="a"):
        return server.metric("attend_tenant_used", tenant=tenant, limit="connections")

    channels = [connection() for _ in range(3)]
    services = [wire.stub.AttentionServiceStub(channel) for channel in channels]
    for service in services[:2]:
        for _ in range(3):
            attend(service, wire.small_request())
    assert used() == 2
    words = "tenant limit connections: the tenant has 2, may have at most 2"
    details, pushback_ms = refused(services[2], wire.small_request())
    assert details == words and pushback_ms > 0
    with pytest.raises(grpc.RpcError) as failure:
        next(services[2].AttendStream(iter(()), metadata=[("x-attend-tenant", "a")],
                                      timeout=wire.SECONDS))
    assert failure.value.details() == words
    attend(services[2], wire.small_request(), "b")  # open, like those of others
    attend(services[0], wire.small_request(), "b")
    assert used("b") == 2
    assert server.metric("attend_rejected_requests_total", reason="tenant_limit") == 2
    assert server.metric("attend_tenant_limited_total", tenant="a", limit="connections") == 2
    # The methods of these calls were not checked.
    assert server.metric("attend_requests_total", code="RESOURCE_EXHAUSTED") == 0
    assert server.metric("attend_tenant_limited_requests_total") == 0
    assert server.metric("attend_tenant_small_calls_total", tenant="a",
                         code="RESOURCE_EXHAUSTED") == 2
    assert words in server.log()
    channels[0].close()
    harness.wait_for("the connection to be closed", lambda: used() == 1)
    attend(services[2], wire.small_request())
    limits.change(server, "[a]\nconnections = 1\n")
    attend(services[1], wire.small_request())  # open connections stay
    with connection() as late:
        details, _ = refused(wire.stub.AttentionServiceStub(late), wire.small_request())
        assert details == "tenant limit connections: the tenant has 2, may have at most 1"
    for channel in channels[1:]:
        channel.close()
    harness.wait_for("all to be closed", lambda: used() == 0 and used("b") == 0)


def test_reflection_counts_as_a_stream(start_server, tmp_path):
    """It takes a place, has a line in the access log, and ends with a drain."""
    limits = Limits(tmp_path, "streams = 1\n")
    access = tmp_path / "access"
    server = start_server(*limits.flags, "--access-log", access)
    with grpc.insecure_channel(server.address) as channel:
        method = channel.stream_stream(strangers.REFLECTION)
        first = strangers.Stream(method)
        assert b"AttentionService" in first.ask(strangers.LIST_SERVICES)
        second = strangers.Stream(method)
        with pytest.raises(grpc.RpcError) as failure:
            second.ask(strangers.LIST_SERVICES)
        assert failure.value.details() == (
            "tenant limit streams: the tenant has 1, may have at most 1")
        first.requests.put(None)  # half-closes
        assert not list(first.call)
        harness.wait_for("the place", lambda: server.metric(
            "attend_tenant_used", tenant="default", limit="streams") == 0)
        given_up = strangers.Stream(method)
        assert given_up.ask(strangers.LIST_SERVICES)
        given_up.call.cancel()
        harness.wait_for("its line", lambda: '"code":"CANCELLED"' in access.read_text())
        third = strangers.Stream(method)
        assert third.ask(strangers.LIST_SERVICES)
        server.signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as failure:
            next(third.call)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert failure.value.details() == "the server is draining"
        for stream in (second, third):
            stream.close()
    assert server.wait() == 0
    lines = [json.loads(line) for line in access.read_text().splitlines()]
    assert {line["method"] for line in lines} == {strangers.REFLECTION}
    assert [line["code"] for line in lines] == [
        "RESOURCE_EXHAUSTED", "OK", "CANCELLED", "UNAVAILABLE"]
    assert lines[1]["bytes_in"] == len(strangers.LIST_SERVICES) and lines[1]["bytes_out"] > 0


def test_unread_answers_leave_others_their_part_of_the_memory_budget(start_server, tmp_path):
    """Although "a" may have only one request in flight: answers no longer count once they are
    ready."""
    limits = Limits(tmp_path, "[a]\nrequests-in-flight = 1\n")
    server = start_server(*limits.flags, *hostile.SMALL_LIMITS, "--write-timeout", "0")

    def of_tenant(count, name):
        return sum(server.metric("attend_tenant_requests_total", tenant=name, code=code)
                   for code in ("OK", "RESOURCE_EXHAUSTED")) >= count

    with hostile.Http2(server.address, window=0) as reader:
        for number in range(1, 15):
            stream = reader.open(wire.ATTEND, (b"x-attend-tenant", b"a"))
            reader.data(stream, hostile.grpc_message(hostile.unread_request()), hostile.END_STREAM)
            harness.wait_for("its answer", lambda count=number: of_tenant(count, "a"))
        assert server.metric("attend_rejected_requests_total", reason="memory") >= 4
        request = wire.pb.AttendRequest.FromString(hostile.unread_request())
        with wire.connect(server.address) as service:
            for _ in range(3):
                attend(service, request, "b")
            # Half of 64 MiB is common, and each tenant has a third of the other half: 6 answers.
            harness.wait_for("b's memory to be back", lambda: (
                server.metric("attend_host_memory_used_bytes") == 6 * (6 << 20)))
            details, _ = refused(service, request, "a")
            words = (r"tensor memory: request needs 6291456 bytes, the memory budget of 67108864 "
                     r"has no free block that large, neither in the tenant's own \d+ nor in the "
                     r"common \d+")
            assert re.fullmatch(words, details), details


def test_callers_see_their_own_tenants_limits(start_server, tmp_path):
    tokens, flags = give_tokens(tmp_path, "compute,sessions")
    limits = Limits(tmp_path, "[a]\nstreams = 4\nconnections = 9\nbytes-per-second = 1000\n"
                              "bytes-burst = 2000\nsession-memory = 1MiB\n")
    server = start_server(*limits.flags, *flags)

    def told(name):
        with wire.connect(server.address) as service:
            info = service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS,
                                         metadata=bearer(name))
        assert info.tenant.name == name and list(info.tenants) == [name]
        return {limit.name: limit for limit in info.tenant.limits}

    def bearer(name):
        return [("authorization", "Bearer " + tokens[name])]

    assert sorted(told("a")) == sorted(told("b")) == [
        "bytes-per-second", "checks", "connections", "gflop-per-second", "requests-in-flight",
        "session-memory", "sessions", "shared-memory", "small-calls-in-flight", "streams"]
    with wire.connect(server.address) as service:
        service.Attend(wire.small_request(length=64), timeout=wire.SECONDS, metadata=bearer("a"))
        with pytest.raises(grpc.RpcError):
            service.Attend(wire.small_request(), timeout=wire.SECONDS, metadata=bearer("a"))
    seen = told("a")
    assert (seen["streams"].most, seen["streams"].used) == (4, 0)
    assert seen["connections"].used >= 1 and seen["connections"].most == 9
    rate = seen["bytes-per-second"]
    assert (rate.per_second, rate.most, rate.refused) == (1000, 2000, 1)
    assert rate.used > rate.most  # in debt
    assert not seen["checks"].HasField("most")
    assert told("b").pop("small-calls-in-flight").most == 256
    assert all(limit.HasField("most") == (name == "small-calls-in-flight") and limit.refused == 0
               for name, limit in told("b").items())
    (tmp_path / "a.token").write_text(tokens["a"])
    (tmp_path / "a.token").chmod(0o600)
    said = harness.run_client("info", "--server", server.address, "--token-file",
                              tmp_path / "a.token").stdout
    assert "tenant       a\n" in said
    rate = r"bytes-per-second +1000 B a second, burst 1.953 KiB; taken .*, refused 1 time\n"
    assert re.search(rate, said), said
    assert re.search(r"streams +at most 4; taken 0, refused 0 times", said), said
    assert "no limit" not in said  # parts that are neither reserved nor in use


def test_callers_see_their_session_memory(start_server, tmp_path, random):
    server = start_server(*Limits(tmp_path, "[a]\nsession-memory = 1MiB\n").flags)
    with sessions.client(server.address, "a") as a:
        a.attend(sessions.step(random, [sessions.Sequence(random, a.create())], 64, 1)[0])
        with wire.connect(server.address) as service:
            info = service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS,
                                         metadata=[("x-attend-tenant", "a")])
    memory, = [limit for limit in info.tenant.limits if limit.name == "session-memory"]
    assert memory.used == server.metric("attend_session_tenant_bytes", tenant="a") > 0
    assert memory.most == 1 << 20
