# SPDX-License-Identifier: Apache-2.0
"""Clients accepted and refused with --tls-cert and --tls-client-ca, and what refused ones are
told."""

import contextlib
import pathlib
import shutil
import socket
import ssl
import threading

import grpc
import pytest

import certificates
import harness
import wire

TLS_ONLY = b"this port accepts only TLS"


def attend(channel, **request):
    service = wire.stub.AttentionServiceStub(channel)
    return service.Attend(wire.small_request(check=True, **request), timeout=wire.SECONDS)


def assert_serves(ca, address, client=None):
    with ca.channel(address, client) as channel:
        assert attend(channel, seed=7).check.ok


def test_tls_serves_clients_that_trust_the_authority(start_server, ca):
    server = start_server(*ca.serve())
    assert_serves(ca, server.address)
    assert certificates.greet(server.address, ca.context()) is None
    expiry = server.metric("attend_tls_expiry_timestamp_seconds", of="cert")
    shown = ssl._ssl._test_decode_cert(str(ca.server))
    assert expiry == ssl.cert_time_to_seconds(shown["notAfter"])
    assert server.metric("attend_tls_expiry_timestamp_seconds", of="crl") == 0


def test_unix_sockets_stay_plaintext_beside_tls(start_server, ca, tmp_path):
    server = start_server(*ca.serve_mtls(), listen=f"127.0.0.1:0,unix:{tmp_path}/a.sock")
    wire.assert_serves(f"unix:{tmp_path}/a.sock")
    assert_serves(ca, server.address, "client")


# OpenSSL's name for the alert that the server sends.
@pytest.mark.parametrize("who, alert", [
    ("without", "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
    ("late", "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
    ("revoked", "SSLV3_ALERT_CERTIFICATE_REVOKED"),
    ("foreign", "TLSV1_ALERT_UNKNOWN_CA"),
    ("server", "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE"),
])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_refused_clients_get_only_an_alert(start_server, ca, foreign, who, alert, version):
    server = start_server(*ca.serve_mtls("--tls-crl", ca.crl))
    if who == "late":
        ca.issue("late", days=-1)
    context = {"without": ca.context,
               "foreign": lambda: ca.context("client", shown_by=foreign)}.get(
                   who, lambda: ca.context(who))()
    context.minimum_version = context.maximum_version = version
    if who == "without" and version == ssl.TLSVersion.TLSv1_2:
        alert = "SSLV3_ALERT_HANDSHAKE_FAILURE"
    assert certificates.greet(server.address, context) == alert
    assert server.metric("attend_connections_refused_total", reason="tls") == 1
    assert 'connection closed reason="tls" peer="127.0.0.1"' in server.log()
    assert_serves(ca, server.address, "client")
    assert server.metric("attend_connections_refused_total", reason="tls") == 1


def test_clients_without_a_certificate_may_be_allowed(start_server, ca, foreign):
    server = start_server(*ca.serve_mtls("--tls-client-cert", "allow"))
    assert_serves(ca, server.address)
    assert_serves(ca, server.address, "client")
    context = ca.context("client", shown_by=foreign)  # but a wrong certificate is refused
    assert certificates.greet(server.address, context) == "TLSV1_ALERT_UNKNOWN_CA"


def test_older_versions_and_other_protocols_are_refused(start_server, ca):
    server = start_server(*ca.serve())
    old = ca.context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    assert certificates.greet(server.address, old) == "TLSV1_ALERT_PROTOCOL_VERSION"
    http1 = ca.context()
    http1.set_alpn_protocols(["http/1.1"])
    assert "alert no application protocol" in certificates.greet(server.address, http1)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        without = ssl.create_default_context(cafile=ca.ca)  # offers no protocol
        without.minimum_version = without.maximum_version = version
        assert "alert no application protocol" in certificates.greet(server.address, without)
    harness.wait_for("the lines", lambda: server.log().count(
        'error="no application protocol"') == 3)
    weak = ca.context()
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    # whose recorded traffic could be decrypted with the server's key
    weak.set_ciphers("AES128-SHA:@SECLEVEL=0")
    assert certificates.greet(server.address, weak) == "SSLV3_ALERT_HANDSHAKE_FAILURE"
    assert server.metric("attend_connections_refused_total", reason="tls") == 5
    assert_serves(ca, server.address)


def test_plaintext_is_told_to_use_tls(start_server, ca):
    server = start_server(*ca.serve())
    host, port = server.address.rsplit(":", 1)
    for said in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(said)
            answer = b""
            while more := connection.recv(4096):
                answer += more
        assert TLS_ONLY in answer
        goaway = bytes((0, 0, 8 + len(TLS_ONLY), 7))
        assert answer.startswith(b"HTTP/1.1 400 " if said.startswith(b"GET") else goaway)
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        attend(channel)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert server.metric("attend_connections_refused_total", reason="plaintext") == 3
    assert_serves(ca, server.address)


def test_sessions_of_tls_are_not_resumed(start_server, ca):
    """Otherwise a client revoked since would be accepted again."""
    server = start_server(*ca.serve_mtls())
    context = ca.context("client")
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context.minimum_version = context.maximum_version = version
        session = None
        for _ in range(2):
            host, port = server.address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout=10) as plain, \
                    context.wrap_socket(plain, server_hostname=host, session=session) as connection:
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                assert connection.recv(9)
                assert not connection.session_reused
                session = connection.session


@pytest.mark.parametrize("flags, error", [
    (("--tls-cert", "{ca.server}"), "--tls-cert: needs --tls-key"),
    (("--tls-key", "{ca.server_key}"), "--tls-key: needs --tls-cert"),
    (("--tls-client-ca", "{ca.ca}"), "--tls-client-ca: needs --tls-cert and --tls-key"),
    (("--tls-cert", "{ca.server}", "--tls-key", "{ca.client_key}"),
     "tls-key {ca.client_key} is not the key of tls-cert {ca.server}"),
    (("--tls-cert", "{ca.server}", "--tls-key", "/nowhere"),
     "tls-key /nowhere cannot be read: No such file or directory"),
    (("--tls-cert", "{ca.server_key}", "--tls-key", "{ca.server_key}"),
     "tls-cert {ca.server_key} has no certificate in PEM"),
    (("--tls-cert", "{late[0]}", "--tls-key", "{late[1]}"), "tls-cert {late[0]} expired at 20"),
    (("--tls-cert", "{ca.server}", "--tls-key", "{ca.server_key}", "--tls-client-ca", "{ca.ca}",
      "--tls-crl", "{ca.ca}"), "tls-crl {ca.ca} has no revocation list in PEM"),
])
def test_wrong_files_fail_the_start_and_are_named(tmp_path, ca, flags, error):
    late = ca.issue("late_server", days=-1, usage="serverAuth")
    wanted = [flag.format(ca=ca, late=late) for flag in flags]
    with pytest.raises(AssertionError) as failed:
        harness.Server(tmp_path, *wanted).kill()
    assert error.format(ca=ca, late=late) in str(failed.value)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_needs_tls_or_insecure(start_server, tmp_path, ca, address):
    with pytest.raises(AssertionError) as failed:
        harness.Server(tmp_path, listen=address).kill()
    assert f"--listen: {address} is beyond loopback" in str(failed.value)
    assert "--tls-cert and --tls-key, or --insecure" in str(failed.value)
    server = start_server("--insecure", listen=address)
    wire.assert_serves("127.0.0.1:" + server.address.rsplit(":", 1)[1])
    server = start_server(*ca.serve(), listen=address)
    assert_serves(ca, "127.0.0.1:" + server.address.rsplit(":", 1)[1])


# Files that change while the server runs.


class Files:
    """Copies of a certificate and its key that can be replaced."""

    def __init__(self, folder, ca):
        self.cert, self.key = pathlib.Path(folder, "cert.pem"), pathlib.Path(folder, "key.pem")
        shutil.copy(ca.server, self.cert)
        shutil.copy(ca.server_key, self.key)

    def flags(self):
        return "--tls-cert", self.cert, "--tls-key", self.key


def shown(ca, address):
    """The certificate that the server shows."""
    with certificates.open_tls(address, ca.context()) as connection:
        return connection.getpeercert(binary_form=True)


def der(path):
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_certificates_are_replaced_under_load_without_failed_calls(start_server, ca, tmp_path):
    files = Files(tmp_path, ca)
    server = start_server(*files.flags())
    ends = threading.Event()
    done, wrong = [], []

    def load(reconnect):
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(ca.channel(server.address))
            while not ends.is_set():
                try:
                    assert attend(channel).check.ok
                    done.append(reconnect)
                except Exception as error:  # noqa: BLE001
                    wrong.append(error)
                    return
                if reconnect:  # a handshake for each call
                    channel.close()
                    channel = stack.enter_context(ca.channel(
                        server.address, options=[("grpc.use_local_subchannel_pool", 1)]))

    callers = [threading.Thread(target=load, args=(reconnect,)) for reconnect in (False, True)]
    for caller in callers:
        caller.start()
    try:
        for turn in range(2):
            cert, key = ca.issue(f"turn{turn}", usage="serverAuth")
            failed = server.metric("attend_tls_reloads_total", result="failed")
            before = shown(ca, server.address)
            certificates.replace(files.cert, cert)  # and its key is late
            harness.wait_for("the wrong pair to be seen", lambda: server.metric(
                "attend_tls_reloads_total", result="failed") > failed)
            assert shown(ca, server.address) == before
            assert f"tls-key {files.key} is not the key of tls-cert {files.cert}" in server.log()
            certificates.replace(files.key, key)
            harness.wait_for("the new certificate",
                             lambda: shown(ca, server.address) == der(cert))
            said = len(done)
            harness.wait_for("calls", lambda: len(done) > said + 10 or wrong)
    finally:
        ends.set()
        for caller in callers:
            caller.join()
    assert not wrong
    assert set(done) == {False, True}
    assert "certificates reloaded" in server.log()


def test_revoked_clients_are_refused(start_server, ca, tmp_path):
    """Lists in a folder; clients revoked later get no new connection."""
    own = certificates.Authority(tmp_path / "own", clients="client other")
    lists = tmp_path / "lists"
    lists.mkdir()
    shutil.copy(own.crl, lists / "crl.pem")
    server = start_server(*own.serve_mtls("--tls-crl", lists))
    assert certificates.greet(server.address, own.context("client")) is None
    assert certificates.greet(server.address, own.context("revoked")) == \
        "SSLV3_ALERT_CERTIFICATE_REVOKED"
    own.revoke("client", lists / "crl.pem")
    harness.wait_for("the new list", lambda: certificates.greet(
        server.address, own.context("client")) == "SSLV3_ALERT_CERTIFICATE_REVOKED")
    assert certificates.greet(server.address, own.context("other")) is None
    assert server.metric("attend_tls_expiry_timestamp_seconds", of="crl") > 0
