# SPDX-License-Identifier: Apache-2.0
"""Attacks that end plaintext connections also end TLS connections, where their frames are
encrypted; and attacks on handshakes."""

import contextlib
import itertools
import ssl
import subprocess

import pytest

import certificates
import harness
import hostile
import test_hostile_frames as frames
import wire


def assert_serves(ca, address):
    with ca.channel(address) as channel:
        service = wire.stub.AttentionServiceStub(channel)
        assert service.Attend(wire.small_request(seed=7, check=True),
                              timeout=wire.SECONDS).check.ok


@pytest.mark.parametrize("pieces", [
    pytest.param(lambda: frames.endless_headers(hostile.literal(b"a", b"b" * 100) * 100),
                 id="continuation"),
    pytest.param(lambda: frames.endless_headers(b""), id="empty_continuation"),
    pytest.param(frames.endless_header, id="one_header"),
    pytest.param(lambda: frames.streams_without_end(8), id="streams"),
    pytest.param(lambda: (hostile.frame(2, 0, 1, bytes(5)) * 100 for _ in itertools.count()),
                 id="priorities"),
    pytest.param(lambda: (hostile.frame(hostile.WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 100
                          for _ in itertools.count()), id="window_updates"),
    pytest.param(frames.headers_to_ended_streams, id="ended_streams"),
])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_frames_are_inspected_once_they_are_decrypted(start_server, ca, pieces, version):
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve())
    assert_serves(ca, server.address)
    context = ca.context()
    context.minimum_version = context.maximum_version = version
    with hostile.grows_at_most(server, 64 << 20):
        with certificates.open_tls(server.address, context) as connection:
            connection.sendall(hostile.HELLO)
            with contextlib.suppress(ssl.SSLEOFError):
                frames.flood(connection, pieces(), 64 << 20)
        assert_serves(ca, server.address)
    assert server.metric("attend_connections_refused_total", reason="frames") == 1
    assert 'connection closed reason="frames" peer="127.0.0.1"' in server.log()


def test_open_calls_of_tls_are_bounded(start_server, ca):
    """They count only while the connection is open."""
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve(), "--max-streams", "8", "--max-calls",
                          "12")
    for turn in range(3):
        with certificates.open_tls(server.address, ca.context()) as connection:
            headers = hostile.call_headers(frames.STREAM)
            connection.sendall(hostile.HELLO + frames.SETTINGS_ACK + b"".join(
                hostile.frame(hostile.HEADERS, hostile.END_HEADERS, stream, headers)
                for stream in range(1, 2 * 9, 2)))
            assert hostile.ended(connection)
        harness.wait_for("the connection to count", lambda: server.metric(
            "attend_connections_refused_total", reason="frames") == turn + 1)
        harness.wait_for("it to be closed", lambda: server.metric("attend_connections") == 0)
        assert_serves(ca, server.address)
    assert "PROTOCOL_ERROR" in server.log()  # a connection may not have so many


def client_hello(ca):
    """All that a client sends before the server does."""
    hello, incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ca.context().wrap_bio(incoming, hello, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return hello.read()


def test_half_open_handshakes_end(start_server, ca):
    """Nothing, half a ClientHello, or a whole one and no answer to the server's."""
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve(), "--handshake-timeout", "0.3")
    said = client_hello(ca)
    with hostile.leaves_nothing_of(server, lambda: assert_serves(ca, server.address)), \
            contextlib.ExitStack() as stack:
        for piece in (b"", said[:1], said[:100], said) * 6:
            connection = stack.enter_context(hostile.open_socket(server.address))
            connection.sendall(piece)
            assert hostile.ended(connection)
    assert server.metric("attend_connections_refused_total", reason="silent") == 6
    assert server.metric("attend_connections_refused_total", reason="tls") == 18


def test_floods_of_handshakes_do_not_block_others(start_server, ca):
    """They take the places of one peer, and its oldest are closed."""
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve(), "--max-connections", "32",
                          "--max-connections-per-peer", "16", listen="127.0.0.1:0,[::1]:0")
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            connection = stack.enter_context(hostile.open_socket(server.addresses[0]))
            with contextlib.suppress(OSError):
                connection.sendall(b"\x16\x03\x01\x02\x00")
        with ca.channel(server.addresses[1]) as channel:
            service = wire.stub.AttentionServiceStub(channel)
            assert service.Attend(wire.small_request(check=True), timeout=wire.SECONDS).check.ok
    assert server.metric("attend_connections_refused_total", reason="silent") >= 48 - 32


def test_handshakes_of_one_peer_do_not_delay_others(start_server, ca):
    """With a key that takes milliseconds, 600 ClientHellos of one peer take longer than a handshake
    may last. A client of another peer is answered among them."""
    cert, key = ca.issue("slow", usage="serverAuth", key=("RSA", "rsa_keygen_bits:4096"))
    server = start_server(*hostile.SMALL_LIMITS, "--tls-cert", cert, "--tls-key", key,
                          "--handshake-timeout", "1", "--max-connections", "1024",
                          "--max-connections-per-peer", "700")
    said = client_hello(ca)
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            connection = stack.enter_context(
                hostile.open_socket(server.address, source="127.0.0.2"))
            connection.sendall(said)
        assert certificates.greet(server.address, ca.context()) is None
    with ca.channel(server.address) as channel:
        service = wire.stub.AttentionServiceStub(channel)
        assert service.Attend(wire.small_request(check=True), timeout=wire.SECONDS).check.ok


def test_handshakes_of_many_peers_make_room(start_server, ca):
    """Clients that send nothing after their ClientHello take every place."""
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve(), "--max-connections", "32",
                          "--max-connections-per-peer", "8")
    said = client_hello(ca)
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(certificates.open_tls(server.address, ca.context()))
        kept.sendall(certificates.PREFACE)
        assert hostile.admitted(kept)
        for host, _ in itertools.product(range(2, 10), range(8)):
            connection = stack.enter_context(
                hostile.open_socket(server.address, source=f"127.0.0.{host}"))
            connection.sendall(said)
        harness.wait_for("those that made room to be closed",
                         lambda: server.metric("attend_connections") == 32)
        assert certificates.greet(server.address, ca.context()) is None
        # A connection with a completed handshake is not closed for another.
        kept.sendall(hostile.frame(hostile.PING, 0, 0, b"answered"))
        answer = b""
        while b"answered" not in answer:
            more = kept.recv(1 << 16)
            assert more
            answer += more
    assert server.metric("attend_connections_refused_total", reason="silent") >= 32


def test_renegotiation_is_refused(start_server, ca):
    """OpenSSL's client gives up at the first refusal."""
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve())
    client = subprocess.Popen(
        ["openssl", "s_client", "-connect", server.address, "-alpn", "h2", "-tls1_2", "-CAfile",
         ca.ca], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with client:
        try:
            shown = b""
            while hostile.frame(hostile.SETTINGS, 0, 0, b"")[3:] not in shown:
                shown += client.stdout.read(1)  # the server's settings would disturb the client
            client.stdin.write(b"R\n")  # printed by s_client
            said = client.stderr.read()
            assert client.wait(60) != 0
        finally:
            client.kill()
    assert b"RENEGOTIATING" in said and b"no renegotiation" in said
    assert_serves(ca, server.address)


def test_random_bytes_after_a_handshake_end_the_connection(start_server, ca, random):
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve())
    with hostile.leaves_nothing_of(server, lambda: assert_serves(ca, server.address)):
        for number in (1, 100, 20_000):
            with hostile.open_socket(server.address) as plain:
                # The records are made here and corrupted in transit.
                outgoing, incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
                client = ca.context().wrap_bio(incoming, outgoing, server_hostname="localhost")
                while True:
                    try:
                        client.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        plain.sendall(outgoing.read())
                        incoming.write(plain.recv(1 << 16))
                plain.sendall(outgoing.read())
                client.write(hostile.HELLO)
                record = bytearray(outgoing.read())
                record[5:] = random.bytes(len(record) - 5)
                with contextlib.suppress(ConnectionError):
                    plain.sendall(bytes(record) + random.bytes(number))
                assert hostile.ended(plain)


def test_requests_for_new_keys_are_bounded(start_server, ca):
    """Each costs the server a key, and some 30 bytes."""
    server = start_server(*hostile.SMALL_LIMITS, *ca.serve())
    client = subprocess.Popen(
        ["openssl", "s_client", "-connect", server.address, "-alpn", "h2", "-tls1_3", "-CAfile",
         ca.ca], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    with client:
        def ended():
            with contextlib.suppress(BrokenPipeError):
                client.stdin.write(b"K\n")  # s_client's command for such a request
            return server.metric("attend_connections_refused_total", reason="frames") == 1
        try:
            harness.wait_for("the connection to be ended", ended, 30)
        finally:
            client.kill()
    assert "TLS handshake messages" in server.log()
    assert_serves(ca, server.address)
