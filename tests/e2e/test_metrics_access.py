# SPDX-License-Identifier: Apache-2.0
"""Scrapes and probes: TLS, secrets, files that change, and responses before, during and after
serving."""

import base64
import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest

import harness
import hostile
import wire

TOKEN, OTHER = "a-token-of-a-scraper", "another-token-of-one"


def trust(ca):
    return ssl.create_default_context(cafile=ca.ca)


def ask(address, path, authorization=None, context=None):
    """(status, body)"""
    headers = {"Authorization": authorization} if authorization else {}
    scheme = "https" if context else "http"
    request = urllib.request.Request(f"{scheme}://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def scrapers(path, scopes="info", **tokens):
    """A file for --metrics-auth."""
    path.write_text("".join(
        f"name={name} sha256={hashlib.sha256(token.encode()).hexdigest()} scopes={scopes}\n"
        for name, token in tokens.items()))
    return path


def tls_flags(pair):
    return "--metrics-tls-cert", pair[0], "--metrics-tls-key", pair[1]


def serial(address, ca):
    """The serial number of the certificate that the endpoint shows."""
    with socket.create_connection(address.split(":")) as plain, \
            trust(ca).wrap_socket(plain, server_hostname="localhost") as secure:
        return secure.getpeercert()["serialNumber"]


def basic(name, token):
    return "Basic " + base64.b64encode(f"{name}:{token}".encode()).decode()


def test_probes_need_no_token_and_metrics_do(start_server, tmp_path):
    path = scrapers(tmp_path / "auth", prometheus=TOKEN)
    server = start_server("--metrics-auth", path)
    for allowed in (f"Bearer {TOKEN}", f"bearer {TOKEN}", basic("prometheus", TOKEN)):
        status, text = ask(server.metrics_address, "/metrics", allowed)
        assert status == 200 and "attend_build_info" in text
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    for refused in (None, "Bearer", f"Bearer {OTHER}", f"Bearer {TOKEN}x", basic("grafana", TOKEN),
                    basic("prometheus", OTHER), f"Bearer {digest}", TOKEN, "Basic ====",
                    f"Digest {TOKEN}"):
        status, text = ask(server.metrics_address, "/metrics", refused)
        assert status == 401 and "attend_" not in text, refused
    for probe in ("/healthz", "/readyz"):
        assert ask(server.metrics_address, probe) == (200, "ok\n")
    assert ask(server.metrics_address, "/")[0] == 404
    assert TOKEN not in server.log()


def test_a_caller_without_the_scope_is_refused_by_name(start_server, tmp_path):
    path = scrapers(tmp_path / "auth", scopes="compute,sessions,admin", a=TOKEN)
    server = start_server("--metrics-auth", path)
    assert ask(server.metrics_address, "/metrics", f"Bearer {TOKEN}") == (
        403, "the caller needs the scope info\n")


def test_changed_tokens_apply_at_once(start_server, tmp_path):
    path = scrapers(tmp_path / "auth", a=TOKEN)
    server = start_server("--metrics-auth", path)
    assert ask(server.metrics_address, "/metrics", f"Bearer {TOKEN}")[0] == 200
    path.write_text("name=old sha256=cut sh")
    assert ask(server.metrics_address, "/metrics", f"Bearer {TOKEN}")[0] == 200
    assert "changed file cannot be used; the previous one stays in use" in server.log()
    os.replace(scrapers(tmp_path / "new", b=OTHER), path)
    assert ask(server.metrics_address, "/metrics", f"Bearer {TOKEN}")[0] == 401
    assert ask(server.metrics_address, "/metrics", f"Bearer {OTHER}")[0] == 200


def test_each_file_has_its_own_gauge(start_server, ca, tmp_path):
    """The gauge of the metrics address is independent of gRPC's."""
    pairs = {name: [tmp_path / f"{name}.pem", tmp_path / f"{name}.key"] for name in ("grpc", "own")}

    def issue(name):
        for issued, used in zip(ca.issue(name, usage="serverAuth"), pairs[name]):
            shutil.copy(issued, used)

    for name in pairs:
        issue(name)
    auth = scrapers(tmp_path / "auth", a=TOKEN)
    server = start_server("--tls-cert", pairs["grpc"][0], "--tls-key", pairs["grpc"][1],
                          "--metrics-auth", auth, *tls_flags(pairs["own"]))

    def failed():
        _, text = ask(server.metrics_address, "/metrics", f"Bearer {TOKEN}", trust(ca))
        found = re.findall(r'attend_reload_failed\{what="(.*)"\} (\d)', text)
        return {what for what, value in found if value == "1"}

    assert failed() == set()
    shutil.copy(ca.issue("other", usage="serverAuth")[0], pairs["grpc"][0])  # not for that key
    harness.wait_for("gRPC's certificate to be refused", lambda: failed() == {"tls"})
    issue("own")
    auth.write_text("name=a sha256=cut sh")
    assert ask(server.metrics_address, "/metrics", f"Bearer {TOKEN}", trust(ca))[0] == 200
    assert failed() == {"tls", "metrics-auth"}
    issue("grpc")
    scrapers(auth, a=TOKEN)
    harness.wait_for("the files to be taken", lambda: failed() == set())


def test_old_tls_versions_and_plaintext_are_refused(start_server, ca):
    server = start_server(*tls_flags(ca.issue("scraped", usage="serverAuth")))
    status, text = ask(server.metrics_address, "/metrics", context=trust(ca))
    assert status == 200 and "attend_build_info" in text
    assert ask(server.metrics_address, "/readyz", context=trust(ca)) == (200, "ok\n")
    status, text = ask(server.metrics_address, "/metrics")
    assert (status, text) == (400, "this address requires https\n")
    assert f"https://{server.metrics_address}/metrics" in server.log()
    old = trust(ca)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(urllib.error.URLError, match="(?i)version"):
        ask(server.metrics_address, "/metrics", context=old)
    with pytest.raises(urllib.error.URLError, match="certificate"):
        ask(server.metrics_address, "/metrics", context=ssl.create_default_context())
    wire.assert_serves(server.address)


def test_a_changed_certificate_is_shown_and_a_wrong_one_is_not(start_server, ca, tmp_path):
    pair = [tmp_path / "server.pem", tmp_path / "server.key"]
    for issued, used in zip(ca.issue("first", usage="serverAuth"), pair):
        shutil.copy(issued, used)
    server = start_server(*tls_flags(pair))
    first = serial(server.metrics_address, ca)
    second = ca.issue("second", usage="serverAuth")
    shutil.copy(second[0], pair[0])  # now the certificate does not fit the key
    assert serial(server.metrics_address, ca) == first
    assert "certificates not reloaded; the previous ones stay in use" in server.log()
    shutil.copy(second[1], pair[1])
    harness.wait_for("the new certificate",
                     lambda: serial(server.metrics_address, ca) != first)


def test_the_certificates_expiry_is_a_metric(start_server, ca):
    pair = ca.issue("ends", days=7, usage="serverAuth")
    server = start_server(*tls_flags(pair))
    text = ask(server.metrics_address, "/metrics", context=trust(ca))[1]
    said = re.search(r'attend_tls_expiry_timestamp_seconds\{of="metrics_cert"\} (\S+)', text)
    shown = ssl._ssl._test_decode_cert(str(pair[0]))
    assert float(said[1]) == ssl.cert_time_to_seconds(shown["notAfter"])
    assert 'attend_tls_expiry_timestamp_seconds{of="cert"} 0\n' in text


def test_incomplete_handshakes_do_not_block_scrapes(start_server, ca):
    server = start_server(*tls_flags(ca.issue("scraped", usage="serverAuth")))
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    with contextlib.ExitStack() as held:
        for sent in (hello, b"", b"\x16\x03\x01\xff\xff" + bytes(5000), b"\x80\x00\x00"):
            for _ in range(25):
                held.enter_context(hostile.open_socket(server.metrics_address)).sendall(sent)
        assert ask(server.metrics_address, "/metrics", context=trust(ca))[0] == 200


def test_a_draining_server_is_alive_but_not_ready(start_server, tmp_path):
    """While a request runs; none of these need a token."""
    server = start_server("--lanes", "1", "--drain-timeout", "120", "--metrics-auth",
                          scrapers(tmp_path / "auth", a=TOKEN))
    with wire.connect(server.address) as service:
        assert ask(server.metrics_address, "/readyz") == (200, "ok\n")
        slow = service.Attend.future(wire.slow_request(8192), timeout=120)
        harness.wait_for("the lane to be busy", lambda: "attend_lanes_busy{device=\"cpu\"} 1" in
                         ask(server.metrics_address, "/metrics", f"Bearer {TOKEN}")[1])
        server.signal(signal.SIGTERM)
        harness.wait_for("a drain", lambda: ask(server.metrics_address, "/readyz")[0] == 503)
        assert ask(server.metrics_address, "/readyz") == (503, "not ready\n")
        assert ask(server.metrics_address, "/healthz") == (200, "ok\n")
        assert not slow.done()
        slow.result()
    assert server.wait() == 0


def test_beyond_loopback_metrics_need_tls_and_authentication(start_server, ca, tmp_path):
    """With the server's own certificate and tokens unless it has others, or without any if so
    configured."""
    with pytest.raises(harness.ServerEnded, match="0.0.0.0:0 is beyond loopback"):
        start_server(metrics="0.0.0.0:0")
    pair = ca.issue("scraped", usage="serverAuth")
    tls = "--tls-cert", pair[0], "--tls-key", pair[1]
    with pytest.raises(harness.ServerEnded, match="must authenticate readers: give --metrics-auth"):
        start_server(*tls, metrics="0.0.0.0:0")
    tokens = scrapers(tmp_path / "tokens", prometheus=TOKEN)
    server = start_server(*tls, "--tokens", tokens, metrics="0.0.0.0:0")
    port = server.metrics_address.rpartition(":")[2]
    assert ask(f"127.0.0.1:{port}", "/readyz", context=trust(ca)) == (200, "ok\n")
    for said, status in ((None, 401), (f"Bearer {OTHER}", 401), (f"Bearer {TOKEN}", 200)):
        assert ask(f"127.0.0.1:{port}", "/metrics", said, trust(ca))[0] == status
    server = start_server("--insecure", metrics="0.0.0.0:0")
    port = server.metrics_address.rpartition(":")[2]
    assert ask(f"127.0.0.1:{port}", "/readyz") == (200, "ok\n")


@pytest.mark.parametrize("args, said", [
    (["--metrics-tls-cert", "CERT"], "--metrics-tls-cert: needs --metrics-tls-key"),
    (["--metrics-tls-key", "KEY"], "--metrics-tls-key: needs --metrics-tls-cert"),
    (["--metrics-auth", "AUTH", "--metrics-listen", "off"],
     "--metrics-auth: needs --metrics-listen"),
    (["--metrics-tls-cert", "CERT", "--metrics-tls-key", "OTHER"], "key values mismatch"),
    (["--metrics-tls-cert", "NONE", "--metrics-tls-key", "KEY"],
     "NONE cannot be read: No such file or directory"),
    (["--metrics-tls-cert", "AUTH", "--metrics-tls-key", "KEY"],
     "metrics-tls-cert AUTH has no certificate in PEM"),
    (["--metrics-tls-cert", "ENDED", "--metrics-tls-key", "KEY"],
     "metrics-tls-cert ENDED expired at "),
    (["--metrics-auth", "NONE"], "NONE: it cannot be read: No such file or directory"),
    (["--metrics-auth", "KEY"], "metrics-auth: tokens KEY: "),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_unusable_settings_are_one_line(ca, tmp_path, args, said):
    certificate, key = ca.issue("scraped", usage="serverAuth")
    _, other = ca.issue("another", usage="serverAuth")
    ended, _ = ca.issue("ended", days=-1, usage="serverAuth")
    files = {"CERT": certificate, "KEY": key, "OTHER": other, "NONE": tmp_path / "none",
             "AUTH": scrapers(tmp_path / "auth", a=TOKEN), "ENDED": ended}
    for name, path in files.items():
        said = said.replace(name, str(path))
    done = subprocess.run(
        [harness.binary("attend-server"), "--device", "cpu", "--listen", "127.0.0.1:0",
         *([] if "--metrics-listen" in args else ["--metrics-listen", "127.0.0.1:0"]),
         *[str(files.get(a, a)) for a in args]],
        capture_output=True, text=True, timeout=60, env=harness.clean_env())
    assert done.returncode in (1, 2)
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def memory_of(server):
    """All memory that the process can write, as bytes."""
    with open(f"/proc/{server.process.pid}/mem", "rb") as memory:
        for line in server.proc("maps").splitlines():
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if " rw" not in line or "[v" in line:
                continue
            memory.seek(first)
            with contextlib.suppress(OSError):  # address space that was never memory
                yield memory.read(last - first)


def test_a_scrapers_token_does_not_outlive_its_request(start_server, tmp_path):
    """Neither as sent nor decoded, at whichever point it is refused."""
    path = scrapers(tmp_path / "auth", prometheus=TOKEN)
    server = start_server("--metrics-auth", path, "--receive-memory", "0")
    encoded = basic("prometheus", TOKEN)
    for authorization in (f"Bearer {TOKEN}", encoded, basic("grafana", TOKEN)):
        ask(server.metrics_address, "/metrics", authorization)
        ask(server.metrics_address, "/healthz", authorization)
    secrets = [TOKEN.encode(), encoded.removeprefix("Basic ").encode()[8:-4]]
    harness.wait_for("the connections to end", lambda: not [
        secret for part in memory_of(server) for secret in secrets if secret in part])
