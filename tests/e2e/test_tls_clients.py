# SPDX-License-Identifier: Apache-2.0
"""attend-client and the Python package over TLS: flags, environment, and errors for servers that
they cannot use."""

import numpy as np
import pytest

import certificates
import harness


@pytest.fixture(scope="module")
def mtls(tmp_path_factory, ca):
    """A server that requires certificates, with a revocation list."""
    running = harness.Server(tmp_path_factory.mktemp("mtls"),
                             *ca.serve_mtls("--tls-crl", ca.crl))
    yield running
    assert running.stop() == 0, running.log()


def flags(ca, client=None, of=None):
    """Arguments for attend-client; `client`: the name of its certificate, issued by `of` if that is
    another authority."""
    shown = ()
    if client is not None:
        shown = ("--tls-cert", getattr(of or ca, client),
                 "--tls-key", getattr(of or ca, f"{client}_key"))
    return ("--tls-ca", ca.ca, *shown)


def said(address, *flags, **options):
    """The error message of `attend-client info`."""
    done = harness.run_client("info", "--server", address, "--attempts", "1", *flags, check=False,
                              **options)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("attend-client: UNAVAILABLE: "), done.stderr
    return done.stderr


def test_every_command_speaks_tls(mtls, ca):
    done = harness.run_client("check", "--quick", "--server", mtls.address, *flags(ca, "client"))
    assert "ok" in done.stdout
    env = {"ATTEND_SERVER": mtls.address, "ATTEND_TLS_CA": str(ca.ca),
           "ATTEND_TLS_CERT": str(ca.client), "ATTEND_TLS_KEY": str(ca.client_key)}
    assert harness.run_client("info", "--health", env=env).returncode == 0
    done = harness.run_client("check", "--quick", "--transport", "chunked", "--connections", "2",
                              env=env)
    assert "ok" in done.stdout


def test_server_and_client_may_share_an_environment(start_server, ca):
    """As a container's health check shares the environment of the server that it checks."""
    env = {"ATTEND_LISTEN_TLS_CERT": str(ca.server), "ATTEND_LISTEN_TLS_KEY": str(ca.server_key),
           "ATTEND_TLS_CLIENT_CA": str(ca.ca), "ATTEND_TLS_CA": str(ca.ca),
           "ATTEND_TLS_CERT": str(ca.client), "ATTEND_TLS_KEY": str(ca.client_key)}
    server = start_server(env=env)
    assert harness.run_client("info", "--health",
                              env={**env, "ATTEND_SERVER": server.address}).returncode == 0


def test_the_client_reports_why_the_server_refuses_it(mtls, ca, foreign):
    assert "it accepts only clients with a certificate" in said(mtls.address, *flags(ca))
    assert "this client's certificate has been revoked" in \
        said(mtls.address, *flags(ca, "revoked"))
    ca.issue("late", days=-1)
    assert "this client's certificate has expired" in said(mtls.address, *flags(ca, "late"))
    assert "signed by an authority that the server does not trust" in \
        said(mtls.address, *flags(ca, "client", of=foreign))
    assert "or takes TLS only" in said(mtls.address)


def test_the_client_reports_why_it_refuses_the_server(start_server, server, ca, foreign, tmp_path):
    tls = start_server(*ca.serve())
    unsigned = "is not signed by an authority in tls_ca"
    assert f"{unsigned} {foreign.ca}" in said(tls.address, *flags(foreign))
    assert f"{unsigned} system" in said(tls.address, "--tls-ca", "system")
    wrong = said(tls.address, *flags(ca), "--tls-server-name", "elsewhere.example")
    assert "the server's certificate is not for elsewhere.example" in wrong
    done = harness.run_client("info", "--server", tls.address, *flags(ca), "--tls-server-name",
                              "localhost")
    assert "cpu" in done.stdout
    # No server starts with an expired certificate, but its certificate may expire later.
    ca.issue("short", days=-1, usage="serverAuth")
    with certificates.s_server(ca.short, ca.short_key) as address:
        assert "the server's certificate has expired" in said(address, *flags(ca))
    plaintext = said(server.address, *flags(ca))
    assert f"there is no TLS at {server.address}, it is a plaintext port" in plaintext


def test_wrong_files_are_named(ca, foreign, tmp_path):
    def refused(*flags):
        done = harness.run_client("info", "--server", "127.0.0.1:1", *flags, check=False)
        assert done.returncode in (1, 2)
        return done.stderr
    missing = tmp_path / "missing.pem"
    assert f"tls_ca {missing}: No such file or directory" in refused("--tls-ca", missing)
    assert f"tls_ca {ca.client_key} has no certificate in PEM" in \
        refused("--tls-ca", ca.client_key)
    assert "tls_cert needs tls_key" in refused("--tls-ca", ca.ca, "--tls-cert", ca.client)
    assert "tls_cert needs tls_ca" in refused("--tls-cert", ca.client, "--tls-key", ca.client_key)
    assert f"tls_key {foreign.client_key} is not the key of tls_cert {ca.client}" in refused(
        "--tls-ca", ca.ca, "--tls-cert", ca.client, "--tls-key", foreign.client_key)


def test_unix_sockets_need_no_tls_flags(server, start_server, tmp_path):
    local = start_server(listen=f"unix:{tmp_path}/a.sock")
    env = {"ATTEND_TLS_CA": str(tmp_path / "nowhere")}
    done = harness.run_client("info", "--server", local.address, env=env)
    assert "cpu" in done.stdout


def test_python_speaks_tls(libraries, mtls, ca, monkeypatch):
    import attend
    q = np.ones((1, 1, 4, 8), np.float32)
    with attend.Client(mtls.address, tls_ca=str(ca.ca), tls_cert=str(ca.client),
                       tls_key=str(ca.client_key)) as client:
        assert np.allclose(client.attention(q, q, q), q)
    for name, value in (("CA", ca.ca), ("CERT", ca.client), ("KEY", ca.client_key)):
        monkeypatch.setenv(f"ATTEND_TLS_{name}", str(value))
    with attend.Client(mtls.address) as client:
        assert np.allclose(client.attention(q, q, q), q)
    with attend.Client(mtls.address, tls_cert="", tls_key="", attempts=1) as client, \
            pytest.raises(attend.Error, match="only clients with a certificate"):
        client.server_info()
    with pytest.raises(attend.Error, match="tls_ca /nowhere: No such file or directory"):
        attend.Client(mtls.address, tls_ca="/nowhere")
    with pytest.raises((attend.Error, TypeError), match="tls_ca"):
        attend.Client(mtls.address, tls_ca=7)
