# SPDX-License-Identifier: Apache-2.0
"""Unauthenticated callers over TLS, their data, certificates as callers' identities, tokens sent in
plaintext, and a tenant's own socket."""

import subprocess

import grpc
import pytest

import harness
import hostile
import sessions
import strangers
import wire
from strangers import NO_TOKEN, TENANTS, TOKENS, TOKENS_FILE, ask, bearer, refusal, rejected

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def encrypted(ca, tmp_path_factory):
    """TLS, with optional client certificates: "client" is tenant blue."""
    made = tmp_path_factory.mktemp("encrypted")
    (made / "tokens").write_text(
        TOKENS_FILE + "name=shown cn=client tenant=blue scopes=compute\n"
        "name=web uri=spiffe://prod/web tenant=green scopes=compute,sessions\n"
        "name=named dns=web.prod.example tenant=blue scopes=sessions\n"
        "name=ended uri=spiffe://prod/ended scopes=compute,sessions expires=2020-01-01\n")
    running = harness.Server(made / "server", TENANTS, *ca.serve_mtls("--tls-client-cert=allow"),
                             "--tokens", made / "tokens", "--oip", "--session-memory=16MiB",
                             "--log-rate=0", *hostile.SMALL_LIMITS)
    yield running
    log = running.log()
    assert running.stop() == 0, log
    for name, token in TOKENS.items():
        assert token not in log, f"the token of {name} is in the log"


@pytest.mark.parametrize("of, reason, message", [
    ([], "no_credentials", NO_TOKEN),
    (bearer(strangers.token()), "unknown_caller", "the token is unknown"),
    (bearer(TOKENS["expired"]), "expired", "the token has expired"),
], ids=("nothing", "a wrong token", "an expired token"))
def test_unauthenticated_callers_are_answered_the_same_over_tls(encrypted, ca, of, reason, message):
    before = rejected(encrypted, reason)
    with ca.channel(encrypted.address) as channel:
        methods = strangers.methods()
        for method in methods:
            answer = ask(channel, method.path, of)
            assert answer == (CODE.UNAUTHENTICATED, message, []), method.path
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=wire.SECONDS) == b"\x08\x01"
    assert rejected(encrypted, reason) == before + len(methods)


def test_tokens_and_scopes_hold_over_tls(encrypted, ca):
    with ca.channel(encrypted.address) as channel:
        service = wire.stub.AttentionServiceStub(channel)
        for name in ("blue", "computes", "gate"):
            service.Attend(wire.small_request(), metadata=bearer(TOKENS[name]),
                           timeout=wire.SECONDS)
        assert refusal(lambda: service.Attend(
            wire.small_request(), metadata=bearer(TOKENS["informed"]), timeout=wire.SECONDS)) == (
                CODE.PERMISSION_DENIED, 'the caller "informed" lacks the scope compute', [])


def test_certificates_identify_callers(encrypted, ca):
    def attend(client, **options):
        with ca.channel(encrypted.address, client) as channel:
            service = wire.stub.AttentionServiceStub(channel)
            return service.Attend(wire.small_request(), timeout=wire.SECONDS, **options)

    attend("client")
    attend("client", metadata=[("x-attend-tenant", "blue")])
    attend("other", metadata=bearer(TOKENS["green"]))
    assert refusal(lambda: attend("other")) == (
        CODE.UNAUTHENTICATED, "no token, and no name in the client's certificate is known", [])
    assert refusal(lambda: attend("client", metadata=[("x-attend-tenant", "green")])).code == \
        CODE.PERMISSION_DENIED
    # A wrong token is refused despite a valid certificate.
    assert refusal(lambda: attend("client", metadata=bearer(strangers.token()))) == (
        CODE.UNAUTHENTICATED, "the token is unknown", [])
    with ca.channel(encrypted.address, "client") as channel:
        answer = ask(channel, "/attend.v1.SessionService/ListSessions")
    assert answer == (CODE.PERMISSION_DENIED, 'the caller "shown" lacks the scope sessions', [])


@pytest.mark.parametrize("name, names, answer", [
    ("uri", "URI:spiffe://prod/web", "green"),
    ("one-of-several", "DNS:a.example,URI:spiffe://prod/web,DNS:b.example,IP:10.0.0.1", "green"),
    ("dns", "DNS:a.example,DNS:web.prod.example", "blue"),
    ("first-uris", "DNS:web.prod.example,URI:spiffe://prod/web", "green"),
    ("ended", "URI:spiffe://prod/ended", "the certificate's entry in --tokens has expired"),
    ("part", "URI:spiffe://prod/web/more,DNS:prod.example,DNS:x.web.prod.example", None),
    ("star", "DNS:*.prod.example", None),
    ("case", "URI:SPIFFE://prod/web", None),
    # Names of different kinds are not interchangeable.
    ("kind", "DNS:client,URI:web.prod.example", None),
], ids=lambda value: value if value and " " not in value and ":" not in value else "")
def test_alternative_names_identify_callers(encrypted, ca, name, names, answer):
    ca.issue(f"named-{name}", names=names)
    with ca.channel(encrypted.address, f"named-{name}") as channel:
        calls = sessions.Client(channel, "")
        calls.metadata = []
        if answer in ("blue", "green"):
            made = calls.create()
            calls.metadata = bearer(TOKENS[answer])
            assert made.id in [each.id for each in calls.call("ListSessions").sessions]
            return
        why = answer or "no token, and no name in the client's certificate is known"
        assert refusal(calls.create) == (CODE.UNAUTHENTICATED, why, [])


def test_data_of_unauthenticated_callers_is_not_kept(encrypted, ca):
    """256 MiB in messages that are refused by their headers: gRPC accepts only a window of each."""
    message = bytes(16 << 20)
    with ca.channel(encrypted.address, options=wire.UNLIMITED) as channel:
        attend = channel.unary_unary(wire.ATTEND)
        refusal(lambda: attend(message, timeout=wire.SECONDS))  # memory that is allocated once
        with hostile.grows_at_most(encrypted, 64 << 20):
            calls = [attend.future(message, timeout=wire.SECONDS) for _ in range(16)]
            for call in calls:
                assert refusal(call.result).code == CODE.UNAUTHENTICATED


@pytest.mark.parametrize("compression", (grpc.Compression.NoCompression, grpc.Compression.Gzip))
@pytest.mark.parametrize("method", ("Check", "Watch"))
def test_data_of_unauthenticated_health_checks_is_not_kept(encrypted, ca, method, compression):
    """The method needs no credentials. The call is ended by the message's length."""
    message = bytes(16 << 20) if compression == grpc.Compression.NoCompression else bytes(64 << 20)
    before = encrypted.metric("attend_connections_refused_total", reason="frames")
    with ca.channel(encrypted.address, options=wire.UNLIMITED) as channel:
        check = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
        service = b"\x0a\x1aattend.v1.AttentionService"
        assert next(check(service, timeout=wire.SECONDS)) == b"\x08\x01"
        with hostile.grows_at_most(encrypted, 32 << 20):
            for _ in range(4):
                call = check(message, timeout=wire.SECONDS, compression=compression)
                assert refusal(lambda: next(call)).code == CODE.RESOURCE_EXHAUSTED
        assert next(check(service, timeout=wire.SECONDS)) == b"\x08\x01"
    assert encrypted.metric("attend_connections_refused_total", reason="frames") == before


def test_tokens_over_plaintext_are_refused(tmp_path):
    (tmp_path / "tokens").write_text(TOKENS_FILE)
    for flags in ([], ["--insecure"]):
        done = subprocess.run(
            [str(harness.binary("attend-server")), "--listen=0.0.0.0:0", "--metrics-listen=off",
             f"--tokens={tmp_path / 'tokens'}", TENANTS, *flags],
            capture_output=True, text=True, timeout=60, env=harness.clean_env())
        assert done.returncode == 2, done.stderr
    assert "--tokens: with --listen 0.0.0.0:0 tokens would be sent in the clear" in done.stderr


def test_grpcs_traces_have_no_token(start_server, tmp_path):
    (tmp_path / "tokens").write_text(TOKENS_FILE)
    server = start_server(TENANTS, "--tokens", tmp_path / "tokens", "--log-level=debug",
                          env={"GRPC_TRACE": "http,api,tcp", "GRPC_VERBOSITY": "debug"})
    with wire.connect(server.address) as service:
        service.Attend(wire.small_request(), metadata=bearer(TOKENS["blue"]), timeout=wire.SECONDS)
    harness.wait_for("the call's line", lambda: "request done" in server.log())
    token = TOKENS["blue"]
    assert token not in server.log() and token.encode().hex(" ") not in server.log()


@pytest.mark.parametrize("asks", (False, True), ids=("without tokens", "with tokens"))
def test_a_tenants_socket_is_for_its_tenant(start_server, tmp_path, asks):
    (tmp_path / "tokens").write_text(TOKENS_FILE)
    start_server(TENANTS, "--session-memory=16MiB",
                 *(["--tokens", tmp_path / "tokens"] if asks else []),
                 listen=f"127.0.0.1:0,unix:{tmp_path}/blue.sock?tenant=blue")
    with grpc.insecure_channel(f"unix:{tmp_path}/blue.sock") as channel:
        calls = sessions.Client(channel, "green")  # which has no effect here
        made = calls.create()
        assert [each.id for each in calls.call("ListSessions").sessions] == [made.id]
        service = wire.stub.AttentionServiceStub(channel)
        told = service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS)
        assert list(told.tenants) == ["blue"]
        if asks:
            calls.metadata = bearer(TOKENS["green"])
            assert refusal(calls.create) == (CODE.PERMISSION_DENIED,
                                             "the socket belongs to another tenant", [])
            calls.metadata = bearer(TOKENS["blue"])
            assert [each.id for each in calls.call("ListSessions").sessions] == [made.id]
