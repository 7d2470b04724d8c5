# SPDX-License-Identifier: Apache-2.0
"""attend-client admin against a real server: accepted over its Unix socket, refused elsewhere."""

import concurrent.futures
import contextlib
import hashlib
import json
import re
import subprocess

import grpc
import numpy as np
import pytest

import harness
import namespaces
import strangers
import wire


def admin(address, *args, check=True):
    return harness.run_client("--server", address, "admin", *args, check=check)


@pytest.fixture
def server(start_server, tmp_path):
    return start_server("--listen", f"unix:{tmp_path}/own.sock", "--tenant", "team=2",
                        "--log-level", "info", "--log-rate", "0",
                        "--access-log", tmp_path / "access.log")


def test_admin_calls_are_logged_at_every_level(server, tmp_path):
    own = f"unix:{tmp_path}/own.sock"
    admin(own, "log-level", "off")
    admin(own, "evict", "default")
    for method, asked in (("SetLogLevel", r'level: \"off\"'), ("EvictTenant", "default")):
        lines = [line for line in server.log().splitlines()
                 if "admin call" in line and method in line]
        assert lines and asked in lines[-1], server.log()


def test_an_operator_lists_and_frees_sessions_of_all_tenants(server, tmp_path):
    own = f"unix:{tmp_path}/own.sock"
    keys = tmp_path / "k.npy"
    np.save(keys, np.zeros((1, 1, 70, 8), np.float32))
    ids = {}
    for tenant in ("default", "team"):
        create = ("session", "create", "--dim", "8", "--heads-kv", "1")
        ids[tenant] = harness.run_client("--server", own, *create, "--tenant", tenant,
                                         "--lease-s", "600").stdout.strip()
        harness.run_client("--server", own, "session", "append", ids[tenant], "--k", keys, "--v",
                           keys, "--tenant", tenant)
    listed = admin(own, "sessions").stdout
    assert [line.split()[:2] for line in sorted(listed.splitlines())] == \
        sorted([session, tenant] for tenant, session in ids.items())
    assert listed.count("tokens 70 ") == 2
    assert admin(own, "sessions", "--tenant", "team").stdout.count("\n") == 1
    assert re.match(r"evicted the tokens of 1 session, freed [1-9].*\n",
                    admin(own, "evict", "team").stdout)
    assert "tokens 0 " in admin(own, "sessions", "--tenant", "team").stdout
    assert "tokens 70 " in admin(own, "sessions", "--tenant", "default").stdout
    assert server.metric("attend_sessions_evictions_total", cause="operator") == 1
    assert admin(own, "free", ids["default"]).stdout == \
        "freed 1 session, 0 not found\n"
    assert 'asked="1 session"' in server.log()
    assert admin(own, "free", "--tenant", "team").stdout.startswith("freed 1 ")
    assert admin(own, "sessions").stdout == ""
    assert "tenant team: 0 sessions" in admin(own, "status").stdout


def test_unauthenticated_callers_cannot_make_admin_calls(server, tmp_path):
    for command in (("status",), ("drain",), ("log-level", "off"), ("sessions",),
                    ("free", "--tenant", "team"), ("evict", "team"), ("undrain",)):
        done = admin(server.address, *command, check=False)
        assert done.returncode == 1 and "PERMISSION_DENIED" in done.stderr
    wire.assert_serves(server.address)
    assert server.metric("attend_rejected_requests_total", reason="no_scope") == 7
    assert server.log().count("caller refused") == 7 and server.stop() == 0
    said = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    refused = [line for line in said if line["code"] != "OK"]
    assert [line["method"].rpartition("/")[2] for line in refused] == [
        "GetStatus", "Drain", "SetLogLevel", "ListSessions", "FreeSessions", "EvictTenant",
        "Undrain"]
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in refused)


def test_admin_calls_need_a_token_with_the_scope(start_server, tmp_path):
    tokens = {"boss": "a" * 43, "user": "b" * 43}
    scopes = {"boss": "admin", "user": "compute,sessions,info"}
    path = tmp_path / "tokens"
    path.write_text("".join(
        f"name={name} sha256={hashlib.sha256(token.encode()).hexdigest()} scopes={scopes[name]}\n"
        for name, token in tokens.items()))
    path.chmod(0o600)
    server = start_server("--tokens", path, "--access-log", tmp_path / "access.log")

    def status(**metadata):
        with grpc.insecure_channel(server.address) as channel:
            call = channel.unary_unary("/attend.v1.AdminService/GetStatus")
            try:
                return len(call(b"", metadata=list(metadata.items()), timeout=wire.SECONDS))
            except grpc.RpcError as error:
                return error.code()

    assert status(authorization="Bearer " + tokens["boss"]) > 0
    assert status(authorization="Bearer " + tokens["user"]) == grpc.StatusCode.PERMISSION_DENIED
    assert status(authorization="Bearer " + "c" * 43) == grpc.StatusCode.UNAUTHENTICATED
    assert status() == grpc.StatusCode.UNAUTHENTICATED
    assert server.stop() == 0
    said = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert [(line.get("caller"), line["code"]) for line in said] == [
        ("boss", "OK"), ("user", "PERMISSION_DENIED"), (None, "UNAUTHENTICATED"),
        (None, "UNAUTHENTICATED")]
    assert said[0]["method"] == "/attend.v1.AdminService/GetStatus"
    assert 'admin call method="/attend.v1.AdminService/GetStatus" code="OK" caller="boss"' in \
        server.log()


def test_an_operator_from_another_host_needs_a_certificate(start_server, ca, tmp_path):
    """A token alone, which may have leaked, is not enough from another host."""
    token, path = tmp_path / "token", tmp_path / "tokens"
    token.write_text("a" * 43 + "\n")
    path.write_text(f"name=boss sha256={hashlib.sha256(b'a' * 43).hexdigest()} scopes=admin\n")

    def on_two_hosts():
        with contextlib.closing(namespaces.Hosts(1)) as hosts:
            server = start_server(*ca.serve_mtls("--tls-client-cert=allow"), "--tokens", path,
                                  listen="10.9.1.1:0,127.0.0.1:0")

            def drain(*flags, address=server.addresses[0], enter=hosts.enter):
                return subprocess.run(
                    [harness.binary("attend-client"), "--server", address, "--tls-ca", ca.ca,
                     "--tls-server-name", "localhost", "--token-file", token, *flags, "admin",
                     "drain"], preexec_fn=enter, env=harness.clean_env(), timeout=60,
                    capture_output=True, text=True, check=False)

            refused = drain()
            assert refused.returncode == 1 and "PERMISSION_DENIED" in refused.stderr
            assert "admin calls need loopback, a Unix socket or a client certificate" in \
                refused.stderr
            assert server.metric("attend_draining") == 0
            assert server.metric("attend_rejected_requests_total", reason="no_scope") == 1
            for allowed in (drain("--tls-cert", ca.client, "--tls-key", ca.client_key),
                            drain(address=server.addresses[1], enter=None)):
                assert allowed.returncode == 0, allowed.stderr
            assert server.metric("attend_draining") == 1
            codes = re.findall(r'admin call method="\S+/Drain" code="(\w+)"', server.log())
            assert codes == ["PERMISSION_DENIED", "OK", "OK"]

    if missing := namespaces.missing():
        pytest.skip(missing)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(on_two_hosts).result()


def test_a_drain_refuses_no_idle_reflection_stream(start_server, tmp_path):
    path = f"unix:{tmp_path}/admin.sock"
    server = start_server("--listen", path)
    release = []

    def requests():
        yield strangers.LIST_SERVICES
        harness.wait_for("the test's end", lambda: release, 120)

    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(strangers.REFLECTION)(requests(), timeout=wire.SECONDS)
        assert next(call)
        admin(path, "drain")
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        release.append(True)
        after = channel.stream_stream(strangers.REFLECTION)(iter([]), timeout=wire.SECONDS)
        assert after.code() is grpc.StatusCode.UNAVAILABLE
    assert server.metric("attend_rejected_requests_total", reason="draining") == 1
    # The client may notice it first.
    harness.wait_for("its line", lambda: "reflection refused" in server.log())
    assert server.log().count("reflection refused") == 1


def test_the_commands_of_the_operators_page_run(start_server, tmp_path):
    """The commands of deploy/operate.md, verbatim except for the socket's path."""
    page = (harness.ROOT / "deploy/operate.md").read_text()
    block, = re.findall(r"(?ms)^```sh\n(export ATTEND_SERVER=.*?)^```", page)
    path = "/run/attend/admin.sock"
    assert block.count(path) == 1 and f"--listen unix:{path}" in page
    server = start_server("--listen", f"unix:{tmp_path}/admin.sock", "--session-memory", "16MiB")
    client = harness.binary("attend-client").absolute()
    harness.run_client("--server", server.address, "session", "create", "--dim", "8",
                       "--heads-kv", "1", "--lease-s", "600")
    script = block.replace(path, f"{tmp_path}/admin.sock").replace("attend-client ", f"{client} ")
    done = subprocess.run(["bash", "-euxc", script], capture_output=True, text=True, timeout=60,
                          env=harness.clean_env())
    assert done.returncode == 0, done.stderr
    for part in ("takes new work, log level info", "log level debug, was info",
                 "log level warn, was debug", "freed 1 session,", "draining, 0 requests"):
        assert part in done.stdout, done.stdout
    assert done.stdout.endswith("takes new work\n")
    wire.assert_serves(server.address)
    commands = set(re.findall(r"attend-client admin ([a-z-]+)", block))
    usage = harness.run_client("admin", "--help").stdout
    assert commands == set(re.findall(r"(?m)^  ([a-z-]+) +[A-Z]", usage.split("ubcommands:")[1]))
