# SPDX-License-Identifier: Apache-2.0
"""Strangers who come over TLS, what they send, certificates as names of callers, and tokens that
would come in the clear; and a tenant's own socket."""

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
    """TLS, on which clients may show certificates: "client" is tenant blue."""
    made = tmp_path_factory.mktemp("encrypted")
    (made / "tokens").write_text(TOKENS_FILE + "name=shown cn=client tenant=blue scopes=compute\n")
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
    (bearer(strangers.token()), "unknown_caller", "the token is not known"),
    (bearer(TOKENS["expired"]), "expired", "the token has expired"),
], ids=("nothing", "a wrong token", "an expired token"))
def test_strangers_are_answered_the_same_over_tls(encrypted, ca, of, reason, message):
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
                CODE.PERMISSION_DENIED, 'the caller "informed" has no scope compute', [])


def test_certificates_say_who_calls(encrypted, ca):
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
    # A wrong token is not mended by a right certificate.
    assert refusal(lambda: attend("client", metadata=bearer(strangers.token()))) == (
        CODE.UNAUTHENTICATED, "the token is not known", [])
    with ca.channel(encrypted.address, "client") as channel:
        answer = ask(channel, "/attend.v1.SessionService/ListSessions")
    assert answer == (CODE.PERMISSION_DENIED, 'the caller "shown" has no scope sessions', [])


def test_what_strangers_send_is_not_kept(encrypted, ca):
    """256 MiB in messages, refused by their headers: gRPC takes no more of each than a window."""
    message = bytes(16 << 20)
    with ca.channel(encrypted.address, options=wire.UNLIMITED) as channel:
        attend = channel.unary_unary(wire.ATTEND)
        refusal(lambda: attend(message, timeout=wire.SECONDS))  # what is made once
        with hostile.grows_at_most(encrypted, 64 << 20):
            calls = [attend.future(message, timeout=wire.SECONDS) for _ in range(16)]
            for call in calls:
                assert refusal(call.result).code == CODE.UNAUTHENTICATED


def test_tokens_are_not_taken_in_the_clear(tmp_path):
    (tmp_path / "tokens").write_text(TOKENS_FILE)
    for flags in ([], ["--insecure"]):
        done = subprocess.run(
            [str(harness.binary("attend-server")), "--listen=0.0.0.0:0", "--metrics-listen=off",
             f"--tokens={tmp_path / 'tokens'}", TENANTS, *flags],
            capture_output=True, text=True, timeout=60, env=harness.clean_env())
        assert done.returncode == 2, done.stderr
    assert "--tokens: with --listen 0.0.0.0:0 tokens would come in the clear" in done.stderr


@pytest.mark.parametrize("asks", (False, True), ids=("without tokens", "with tokens"))
def test_a_tenants_socket_is_for_its_tenant(start_server, tmp_path, asks):
    (tmp_path / "tokens").write_text(TOKENS_FILE)
    start_server(TENANTS, "--session-memory=16MiB",
                 *(["--tokens", tmp_path / "tokens"] if asks else []),
                 listen=f"127.0.0.1:0,unix:{tmp_path}/blue.sock?tenant=blue")
    with grpc.insecure_channel(f"unix:{tmp_path}/blue.sock") as channel:
        calls = sessions.Client(channel, "green")  # which says nothing here
        made = calls.create()
        assert [each.id for each in calls.call("ListSessions").sessions] == [made.id]
        service = wire.stub.AttentionServiceStub(channel)
        told = service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS)
        assert list(told.tenants) == ["blue"]
        if asks:
            calls.metadata = bearer(TOKENS["green"])
            assert refusal(calls.create) == (CODE.PERMISSION_DENIED,
                                             "the socket is another tenant's", [])
            calls.metadata = bearer(TOKENS["blue"])
            assert [each.id for each in calls.call("ListSessions").sessions] == [made.id]
