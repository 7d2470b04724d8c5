# SPDX-License-Identifier: Apache-2.0
"""Unauthenticated callers, callers that try more than they may, and tenants that try to see each
other. Each attack is listed with its result."""

import contextlib
import os
import socket
import subprocess

import grpc
import pytest

import chunked
import harness
import hostile
import sessions
import strangers
import wire
from strangers import NO_TOKEN, TENANTS, TOKENS, TOKENS_FILE, ask, bearer, refusal, rejected

CODE = grpc.StatusCode
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("strangers")
    (made / "tokens").write_text(TOKENS_FILE)
    return made


@pytest.fixture(scope="module")
def locked(folder):
    running = harness.Server(
        folder / "server", TENANTS, "--tokens", folder / "tokens", "--oip",
        "--oip-shared-memory", f"/attend-strangers-{os.getpid()}-", "--session-memory=16MiB",
        "--log-rate=0", "--shared-memory", "--shared-memory-socket", folder / "regions" / "sock",
        "--reference-check=all")
    yield running
    log = running.log()
    assert running.stop() == 0, log
    for name, token in TOKENS.items():
        assert token not in running.log(), f"the token of {name} is in the log"


@pytest.fixture(scope="module")
def channel(locked):
    with grpc.insecure_channel(locked.address, options=wire.UNLIMITED) as made:
        yield made


@pytest.mark.parametrize("of, reason, message", [
    ([], "no_credentials", NO_TOKEN),
    (bearer(strangers.token()), "unknown_caller", "the token is unknown"),
    (bearer(TOKENS["expired"]), "expired", "the token has expired"),
    ([("authorization", "Basic YTpi")], "unknown_caller",
     'the metadata authorization must be "Bearer TOKEN", with a token of 16 to 512 visible '
     'characters'),
    ([("x-attend-tenant", "blue")], "no_credentials", NO_TOKEN),
], ids=("nothing", "a wrong token", "an expired token", "another scheme", "a tenant's name"))
def test_every_method_refuses_unauthenticated_callers_alike(locked, channel, of, reason, message):
    before = rejected(locked, reason)
    methods = strangers.methods()
    for method in methods:
        answer = ask(channel, method.path, of)
        assert answer == (CODE.UNAUTHENTICATED, message, []), method.path
    assert rejected(locked, reason) == before + len(methods)


def test_health_needs_no_token_and_tells_nothing_else(channel):
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"", timeout=wire.SECONDS) == b"\x08\x01"  # SERVING
    assert ask(channel, "/grpc.health.v1.Health/NoSuchMethod") == (CODE.UNAUTHENTICATED, NO_TOKEN,
                                                                   [])


def test_every_method_needs_its_scope(locked, channel):
    holders = {"compute": "computes", "sessions": "sessions", "info": "informed",
               "admin": "operator"}  # has drained the server, so may resume it
    before = rejected(locked, "no_scope")
    refused = 0
    for method in strangers.methods():
        for name in ("computes", "sessions", "informed", "operator"):
            answer = ask(channel, method.path, bearer(TOKENS[name]))
            if method.scope == "any" or holders[method.scope] == name:
                assert answer.code not in (CODE.UNAUTHENTICATED, CODE.PERMISSION_DENIED), \
                    (method, name, answer)
                continue
            assert answer == (CODE.PERMISSION_DENIED,
                              f'the caller "{name}" lacks the scope {method.scope}', []), method
            refused += 1
    assert rejected(locked, "no_scope") == before + refused


def test_sessions_in_requests_need_their_scope(channel):
    service = wire.stub.AttentionServiceStub(channel)
    request = wire.pb.AttendRequest()
    request.CopyFrom(wire.small_request())
    request.sessions.add(session=b"0123456789abcdef")
    answer = refusal(lambda: service.Attend(request, metadata=bearer(TOKENS["computes"]),
                                            timeout=wire.SECONDS))
    assert answer == (CODE.PERMISSION_DENIED,
                      "the request uses sessions, but the caller lacks the scope sessions", [])


def test_only_some_callers_may_name_other_tenants(channel):
    service = wire.stub.AttentionServiceStub(channel)

    def attend(name, tenant):
        return service.Attend(wire.small_request(), timeout=wire.SECONDS,
                              metadata=bearer(TOKENS[name], ("x-attend-tenant", tenant)))

    attend("blue", "blue")
    attend("gate", "green")
    for other in ("green", "default", "unknown"):
        assert refusal(lambda other=other: attend("blue", other)) == (
            CODE.PERMISSION_DENIED,
            'the caller belongs to tenant "blue" and may not call for another '
            '(x-attend-tenant)', [])
    assert refusal(lambda: attend("gate", "unknown")).code == CODE.PERMISSION_DENIED


def test_server_info_reveals_only_what_the_caller_needs(channel):
    service = wire.stub.AttentionServiceStub(channel)

    def info(name):
        return service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS,
                                     metadata=bearer(TOKENS[name]))

    assert list(info("blue").tenants) == ["blue"]
    assert list(info("gate").tenants) == ["default", "blue", "green"]
    whole, part = info("blue"), info("computes")
    assert whole.build and whole.kernels and whole.uptime_seconds > 0 and whole.devices[0].lanes
    assert not part.build and not part.kernels and part.uptime_seconds == 0
    assert part.limits == whole.limits and part.shared_memory == whole.shared_memory
    assert [device.name for device in part.devices] == ["cpu"] and part.devices[0].units == 0


class Tenant:
    """A tenant's calls, made with its token."""

    def __init__(self, channel, name):
        self.client = sessions.Client(channel, name)
        self.client.metadata = bearer(TOKENS[name])
        self.oip = wire.oip_stub.GRPCInferenceServiceStub(channel)
        self.metadata = bearer(TOKENS[name])

    def triton(self, method, request):
        return getattr(self.oip, method)(request, timeout=wire.SECONDS, metadata=self.metadata)


@pytest.fixture
def blue(channel):
    return Tenant(channel, "blue")


@pytest.fixture
def green(channel):
    return Tenant(channel, "green")


def test_another_tenants_session_looks_absent(blue, green, random):
    made = blue.client.create(layers=1)
    unused = os.urandom(len(made.id))
    for call, fields in (("GetSession", {}), ("KeepAlive", {}), ("ForkSession", {}),
                         ("TruncateSession", {"length": 0}), ("KeepDraft", {"length": 0}),
                         ("FreeSession", {})):
        answers = [refusal(lambda id=id: green.client.call(call, session=id, **fields))
                   for id in (made.id, unused)]
        assert answers[0] == answers[1] and answers[0].code == CODE.NOT_FOUND, call
    answers = []
    for id in (made.id, unused):
        sequence = sessions.Sequence(random, wire.sessions_pb.Session(id=id))
        request, _ = sessions.step(random, [sequence], new_rows=1, len_q=1)
        answers.append(refusal(lambda: green.client.attend(request)))
    assert answers[0] == answers[1] and answers[0].code == CODE.NOT_FOUND
    assert not green.client.call("ListSessions").sessions
    assert [each.id for each in blue.client.call("ListSessions").sessions] == [made.id]
    blue.client.call("FreeSession", session=made.id)


def test_another_tenants_upload_looks_absent(channel):
    service = wire.stub.AttentionServiceStub(channel)
    request = wire.small_request(length=256)

    def join(name, token):
        call = service.AttendChunked(iter([wire.pb.AttendChunkedRequest(token=token)]),
                                     timeout=wire.SECONDS, metadata=bearer(TOKENS[name]))
        return refusal(lambda: list(call))

    header = wire.pb.AttendChunkedRequest(header=chunked.header_of(request))
    first = chunked.Stream(service, header, metadata=bearer(TOKENS["blue"]))
    token = next(first.call).grant.token
    answers = [join("green", each) for each in (token, os.urandom(len(token)))]
    assert answers[0] == answers[1] == (CODE.NOT_FOUND, "no request has this token", [])
    for chunk in chunked.chunks_of(request, 1 << 20):
        first.send(chunk)
    first.half_close()
    assert chunked.assemble(list(first.call)).o.byte_length == len(request.raw[0])


def test_another_tenants_region_looks_absent(locked, channel):
    service = wire.stub.AttentionServiceStub(channel)
    regions = strangers.Regions(locked.folder.parent / "regions" / "sock")
    assert regions.identify(TOKENS["blue"]).HasField("identified")
    region = regions.ask(create=wire.shm.CreateRegion(bytes=1 << 16)).created.token

    def attend(name, token):
        request = wire.small_request()
        request.q.shared_memory.CopyFrom(wire.pb.SharedMemory(region=token, offset=0))
        del request.raw[0]
        return service.Attend(request, timeout=wire.SECONDS, metadata=bearer(TOKENS[name]))

    attend("blue", region)
    answers = [refusal(lambda token=token: attend("green", token))
               for token in (region, os.urandom(16))]
    assert answers[0] == answers[1] and answers[0].code == CODE.NOT_FOUND
    others = strangers.Regions(locked.folder.parent / "regions" / "sock")
    assert others.identify(TOKENS["green"]).HasField("identified")
    answers = [others.ask(release=wire.shm.ReleaseRegion(token=token)).error
               for token in (region, os.urandom(16))]
    assert answers[0] == answers[1] and answers[0].code == CODE.NOT_FOUND.value[0]
    attend("blue", region)
    others.close()
    regions.close()


def test_the_regions_socket_authenticates_clients(locked):
    path = locked.folder.parent / "regions" / "sock"
    unauthenticated, denied = CODE.UNAUTHENTICATED.value[0], CODE.PERMISSION_DENIED.value[0]
    regions = strangers.Regions(path)

    def counted(reason):
        return locked.metric("attend_rejected_requests_total", reason=reason)

    before = {reason: counted(reason) for reason in ("no_credentials", "unknown_caller", "expired")}
    for request in ({"create": wire.shm.CreateRegion(bytes=4096)},
                    {"release": wire.shm.ReleaseRegion(token=bytes(16))}):
        error = regions.ask(**request).error
        assert error.code == unauthenticated, error
        assert error.message == "no token: the connection's first packet must be identify"
    for token, tenant, code, message in (
            ("", "", unauthenticated, "the metadata authorization must be"),
            (strangers.token(), "", unauthenticated, "the token is unknown"),
            (TOKENS["expired"], "", unauthenticated, "the token has expired"),
            (TOKENS["sessions"], "", denied, 'the caller "sessions" lacks the scope compute'),
            (TOKENS["blue"], "green", denied, "may not call for another")):
        error = regions.identify(token, tenant).error
        assert error.code == code and message in error.message, error
    # Like calls, so that the alert AttendCallersUnknown sees them. Here, no token is a wrong token.
    assert counted("no_credentials") == before["no_credentials"] + 2
    assert counted("unknown_caller") == before["unknown_caller"] + 2
    assert counted("expired") == before["expired"] + 1
    assert regions.identify(TOKENS["gate"], "green").HasField("identified")
    assert regions.identify(TOKENS["gate"]).error.code == CODE.FAILED_PRECONDITION.value[0]
    regions.close()


def test_another_tenants_file_and_name_look_absent(blue, green):
    key = f"/attend-strangers-{os.getpid()}-blue:one"
    pb = wire.oip_pb
    file = os.open("/dev/shm" + key, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, 4096)
        blue.triton("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(
            name="one", key=key, byte_size=4096))
        answers = [refusal(lambda name=name: green.triton(
            "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=name)))
            for name in ("one", "two")]
        assert [answer.code for answer in answers] == [CODE.NOT_FOUND] * 2
        assert answers[0].message.replace("one", "two") == answers[1].message
        assert not green.triton("SystemSharedMemoryStatus",
                                pb.SystemSharedMemoryStatusRequest()).regions
        answers = [refusal(lambda key=key: green.triton(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name="x", key=key, byte_size=4096)))
            for key in (key, key.replace("one", "two"))]
        assert [answer.code for answer in answers] == [CODE.PERMISSION_DENIED] * 2
        assert answers[0].message.replace("one", "two") == answers[1].message
        green.triton("SystemSharedMemoryUnregister",
                     pb.SystemSharedMemoryUnregisterRequest(name="one"))
        assert list(blue.triton("SystemSharedMemoryStatus",
                                pb.SystemSharedMemoryStatusRequest()).regions) == ["one"]
    finally:
        os.close(file)
        os.unlink("/dev/shm" + key)


def test_tokens_change_while_the_server_runs(start_server, tmp_path):
    file = tmp_path / "tokens"
    old, new = strangers.token(), strangers.token()

    def write(text):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    write(strangers.line("old", old, "scopes=compute"))
    server = start_server("--tokens", file)
    with wire.connect(server.address) as service:
        def attends(token):
            try:
                service.Attend(wire.small_request(), metadata=bearer(token), timeout=wire.SECONDS)
            except grpc.RpcError as error:
                assert error.code() == CODE.UNAUTHENTICATED, error
                return False
            return True

        def reloads(result):
            return server.metric("attend_tokens_reloads_total", result=result)

        assert attends(old) and not attends(new)
        write("what is this\n")
        harness.wait_for("the broken file to be seen", lambda: reloads("failed") == 1)
        assert attends(old), "a broken file changes nothing"
        write(strangers.line("new", new, "scopes=compute"))
        harness.wait_for("the new file to be read", lambda: reloads("ok") == 1)
        assert attends(new) and not attends(old)
    assert "line 1 has an unknown field" in server.log()


@pytest.mark.parametrize("name", ("authorization", "x-attend-tenant"))
def test_duplicate_credentials_are_refused(locked, channel, name):
    metadata = [*bearer(TOKENS["gate"]), ("x-attend-tenant", "blue")]
    metadata.append(next(each for each in metadata if each[0] == name))
    assert ask(channel, wire.ATTEND, metadata) == (
        CODE.UNAUTHENTICATED, f"the metadata {name} is given more than once", [])


def test_a_broken_file_keeps_the_server_from_starting(tmp_path):
    file = tmp_path / "tokens"
    token = strangers.token()
    file.write_text(f"name=a token={token} scopes=compute\n")
    done = subprocess.run([str(harness.binary("attend-server")), "--listen=127.0.0.1:0",
                           "--metrics-listen=off", "--device=cpu", f"--tokens={file}"],
                          capture_output=True, text=True, timeout=60, env=harness.clean_env())
    assert done.returncode == 1 and f"tokens {file}: line 1 has an unknown field" in done.stderr
    assert token not in done.stderr


def test_headers_that_abort_other_versions_are_refused(locked):
    """CVE-2023-1428: a header for which gRPC's parser has no value, followed by more than 8 KiB."""
    service = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"),
               (b":path", wire.ATTEND.encode()), (b"te", b"trailers"),
               (b"content-type", b"application/grpc")]
    for wrong in ((b"te", b"x"), (b":scheme", b"x"), (b":method", b"x"),
                  (b"grpclb_client_stats", b"x"), (b"lb-cost-bin", b"!!"), (b"grpc-status", b"x")):
        headers = [each for each in service if each[0] != wrong[0]]
        for sent in ([wrong, *headers], [*headers, wrong]):
            block = b"".join(hostile.literal(*each) for each in (
                *sent, (b"x-long", b"y" * 9000), (b"x-more", b"z")))
            frame = hostile.frame(hostile.HEADERS, hostile.END_HEADERS | hostile.END_STREAM, 1,
                                  block)
            with hostile.open_socket(locked.address) as connection:
                connection.sendall(hostile.HELLO + frame)
                with contextlib.suppress(OSError):  # it may have ended by now
                    connection.shutdown(socket.SHUT_WR)
                assert hostile.ended(connection)  # once it has answered
            assert not locked.ended(), locked.log()
