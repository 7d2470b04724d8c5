# SPDX-License-Identifier: Apache-2.0
"""Unauthenticated clients that hold connections to a server that requires credentials: they cannot
lock callers out. And callers that send more than their method accepts."""

import contextlib

import grpc
import pytest

import harness
import hostile
import strangers
import wire
from strangers import TENANTS, TOKENS, TOKENS_FILE, Stream, bearer, refusal

CODE = grpc.StatusCode
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING = b"\x08\x01"
# One connection per channel.
ALONE = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


@pytest.fixture(params=("tls", "plain"))
def start(request, start_server, ca, tmp_path):
    """A server that authenticates callers, and a function that opens channels to it."""
    (tmp_path / "tokens").write_text(TOKENS_FILE)

    def started(*flags):
        tls = ca.serve() if request.param == "tls" else ()
        server = start_server(TENANTS, *tls, "--tokens", tmp_path / "tokens",
                              *hostile.SMALL_LIMITS, *flags)
        if request.param == "tls":
            return server, lambda: ca.channel(server.address, options=ALONE)
        return server, lambda: grpc.insecure_channel(server.address, options=ALONE)

    return started


# One method of each service, and a caller who may use it.
SMALL = [("/attend.v1.AttentionService/GetServerInfo", "blue"),
         ("/attend.v1.SessionService/ListSessions", "sessions"),
         ("/attend.v1.AdminService/GetStatus", "operator"),
         ("/inference.GRPCInferenceService/ServerMetadata", "informed"),
         ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "informed")]


def send_large(server, connect, of):
    """Twice 32 MiB to each small method, none of it kept. `connect` makes channels, `of` a caller's
    metadata."""
    def ask(path, name, number):
        with connect() as channel:
            return strangers.ask(channel, path, of(name), bytes(number)).code

    for path, name in SMALL:
        before = server.metric("attend_connections_refused_total", reason="frames")
        with hostile.grows_at_most(server, 16 << 20):
            assert [ask(path, name, 32 << 20) for _ in range(2)] == [CODE.RESOURCE_EXHAUSTED] * 2
        assert server.metric("attend_connections_refused_total", reason="frames") == before
        if not path.startswith("/grpc.reflection"):
            assert ask(path, name, 100 << 10) == CODE.INVALID_ARGUMENT, path  # the sender is told


def ended(server):
    return server.metric("attend_connections_refused_total", reason="stranger")


def open_stream(channel):
    """A caller's connection, on which a request was answered."""
    stream = Stream(wire.stub.AttentionServiceStub(channel).AttendStream, TOKENS["blue"])
    stream.ask(wire.small_request())
    return stream


def test_connections_without_calls_time_out(start):
    server, channel = start("--first-call-timeout", "0.5")
    with channel() as callers, channel() as watching, channel() as strange:
        stream = open_stream(callers)
        # Idle callers do the same, and health checks have no credentials.
        health = watching.unary_stream(WATCH)(b"", timeout=wire.SECONDS)
        assert next(health) == SERVING
        for turn in (1, 2):  # it connects again
            strange.unary_unary(CHECK)(b"", timeout=wire.SECONDS)
            answer = strangers.ask(strange, wire.ATTEND, bearer(strangers.token()))
            assert answer.code == CODE.UNAUTHENTICATED
            harness.wait_for("two connections to be left",
                             lambda turn=turn: ended(server) == turn
                             and server.metric("attend_connections") == 2)
        health.cancel()
        harness.wait_for("one connection to be left",
                         lambda: server.metric("attend_connections") == 1)
        assert ended(server) == 3
        stream.ask(wire.small_request())
        stream.close()
    assert 'connection closed reason="stranger" peer="127.0.0.1"' in server.log()


def test_a_connection_whose_caller_is_removed_times_out(start, tmp_path):
    """Its connection ends although a call on it was accepted once; those of other callers stay,
    however long they are idle."""
    server, channel = start("--first-call-timeout", "0.5")

    def let_in(*names):
        text = "".join(strangers.line(name, TOKENS[name], "scopes=compute") for name in names)
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(tmp_path / "tokens")

    def call(on, name):
        wire.stub.AttentionServiceStub(on).Attend(
            wire.small_request(), metadata=bearer(TOKENS[name]), timeout=wire.SECONDS)

    with channel() as gone, channel() as shared, channel() as stays:
        for on, name in ((gone, "blue"), (shared, "blue"), (shared, "gate"), (stays, "green")):
            call(on, name)
        assert server.metric("attend_connections") == 3
        let_in("green", "gate")
        harness.wait_for("one to end", lambda: server.metric("attend_connections") == 2)
        let_in("green", "blue")
        harness.wait_for("another to end", lambda: server.metric("attend_connections") == 1)
        assert ended(server) == 2
        call(stays, "green")


def test_unauthenticated_connections_make_room_for_callers(start):
    """Whatever the number and age of unauthenticated connections."""
    server, channel = start("--max-connections", "8", "--max-connections-per-peer", "8",
                            "--first-call-timeout", "3600")
    with contextlib.ExitStack() as stack:
        stream = open_stream(stack.enter_context(channel()))
        watches = []
        for _ in range(7):
            watch = stack.enter_context(channel()).unary_stream(WATCH)(b"", timeout=wire.SECONDS)
            assert next(watch) == SERVING
            watches.append(watch)
        assert server.metric("attend_connections") == 8 and ended(server) == 0
        for turn in range(2):
            with channel() as another:
                wire.stub.AttentionServiceStub(another).Attend(
                    wire.small_request(), metadata=bearer(TOKENS["green"]), timeout=wire.SECONDS)
                assert refusal(lambda: next(watches[turn])).code == CODE.UNAVAILABLE
            assert ended(server) == turn + 1
            harness.wait_for("the connections to be closed",
                             lambda: server.metric("attend_connections") == 7)
            watch = stack.enter_context(channel()).unary_stream(WATCH)(b"", timeout=wire.SECONDS)
            assert next(watch) == SERVING
        stream.ask(wire.small_request())  # a caller that came first is never closed for others
        stream.close()


def test_watches_are_bounded(start):
    """8 on a connection; a caller's connection may have 64, and more once these end."""
    _, channel = start()

    def watch(connection):
        return connection.unary_stream(WATCH)(b"", timeout=wire.SECONDS)

    def is_answered():
        with contextlib.suppress(grpc.RpcError):
            return next(watch(callers)) == SERVING

    with channel() as strange, channel() as callers:
        stream = open_stream(callers)
        for connection, most in ((strange, 8), (callers, 64)):
            watches = [watch(connection) for _ in range(most)]  # they stay open while referenced
            assert [next(each) for each in watches] == [SERVING] * most
            answer = refusal(lambda: next(watch(connection)))
            assert answer.code == CODE.RESOURCE_EXHAUSTED
            assert f"has {most} watches" in answer.message
            assert connection.unary_unary(CHECK)(b"", timeout=wire.SECONDS) == SERVING
        watches[0].cancel()
        harness.wait_for("a place", is_answered)
        stream.close()


def test_the_oldest_watch_makes_room(start):
    """The total for all unauthenticated peers is 1,024."""
    _, channel = start("--max-connections", "140", "--max-connections-per-peer", "140",
                       "--max-calls", "2000", "--max-calls-per-peer", "2000")
    with contextlib.ExitStack() as stack:
        callers = stack.enter_context(channel())
        stream = open_stream(callers)
        of_caller = callers.unary_stream(WATCH)(b"", timeout=wire.SECONDS)
        watches = []
        for _ in range(128):
            strange = stack.enter_context(channel())
            watches += [strange.unary_stream(WATCH)(b"", timeout=wire.SECONDS) for _ in range(8)]
        assert all(next(watch) == SERVING for watch in [of_caller, *watches])
        with channel() as another:
            watch = another.unary_stream(WATCH)(b"", timeout=wire.SECONDS)
            assert next(watch) == SERVING
            # Which of them was first is not known here.
            harness.wait_for("one to end", lambda: any(each.done() for each in watches))
            assert [each.code() for each in watches if each.done()] == [CODE.RESOURCE_EXHAUSTED]
        stream.ask(wire.small_request())
        stream.close()


def test_a_peers_watches_do_not_end_anothers(start, tmp_path):
    """A Unix socket's user counts as another peer than 127.0.0.1."""
    path = f"unix:{tmp_path}/socket"
    _, channel = start("--listen", path, "--max-connections", "140", "--max-connections-per-peer",
                       "140", "--max-calls", "2000", "--max-calls-per-peer", "2000")
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(grpc.insecure_channel(path, options=ALONE))
        first = other.unary_stream(WATCH)(b"", timeout=wire.SECONDS)
        assert next(first) == SERVING  # the oldest of all
        watches = []
        for _ in range(129):
            strange = stack.enter_context(channel())
            watches += [strange.unary_stream(WATCH)(b"", timeout=wire.SECONDS) for _ in range(8)]
        for each in watches:  # by then all have begun
            with contextlib.suppress(grpc.RpcError):
                assert next(each) == SERVING
        harness.wait_for("nine to make room", lambda: sum(each.done() for each in watches) == 9)
        assert not first.done()


def test_without_tokens_connections_do_not_time_out(start_server):
    server = start_server("--first-call-timeout", "0.1", "--max-connections", "2",
                          "--max-connections-per-peer", "2")
    with grpc.insecure_channel(server.address, options=ALONE) as channel, \
            grpc.insecure_channel(server.address, options=ALONE) as other:
        for each in (channel, other):
            watch = each.unary_stream(WATCH)(b"", timeout=wire.SECONDS)
            assert next(watch) == SERVING
        with hostile.open_socket(server.address) as refused:
            refused.sendall(b"PRI")
            assert hostile.ended(refused)
        assert next(channel.unary_stream(WATCH)(b"", timeout=wire.SECONDS)) == SERVING
    assert ended(server) == 0
    assert server.metric("attend_connections_refused_total", reason="limit") + server.metric(
        "attend_connections_refused_total", reason="peer_limit") >= 1


def test_small_methods_refuse_large_messages_of_callers(start):
    server, connect = start("--oip", "--session-memory=16MiB")
    send_large(server, connect, lambda name: bearer(TOKENS[name]))
    # Requests may have 16 MiB.
    for number, code in ((24 << 20, CODE.INVALID_ARGUMENT), (40 << 20, CODE.RESOURCE_EXHAUSTED)):
        with connect() as channel:
            answer = strangers.ask(channel, wire.ATTEND, bearer(TOKENS["blue"]), bytes(number))
            assert answer.code == code


def test_small_methods_refuse_large_messages_without_tokens(start_server, tmp_path):
    server = start_server("--oip", "--session-memory=16MiB", *hostile.SMALL_LIMITS,
                          listen=f"127.0.0.1:0,unix:{tmp_path}/attend.sock")
    send_large(server, lambda: grpc.insecure_channel(f"unix:{tmp_path}/attend.sock"),
               lambda name: ())
