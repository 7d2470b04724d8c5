# SPDX-License-Identifier: Apache-2.0
"""attend-client admin against a real server: over its Unix socket, and refused elsewhere."""

import hashlib
import json
import re

import grpc
import numpy as np
import pytest

import harness
import wire


def admin(address, *args, check=True):
    return harness.run_client("--server", address, "admin", *args, check=check)


@pytest.fixture
def server(start_server, tmp_path):
    return start_server("--listen", f"unix:{tmp_path}/own.sock", "--tenant", "team=2",
                        "--log-level", "info")


def test_drain_and_undrain(server, tmp_path):
    own = f"unix:{tmp_path}/own.sock"
    assert "takes new work" in admin(own, "status").stdout
    assert admin(own, "drain", "--wait-s", "10").stdout == "draining, 0 requests to finish\n"
    assert "draining" in admin(own, "status").stdout
    assert server.metric("attend_draining") == 1
    with wire.connect(server.address) as service, pytest.raises(grpc.RpcError) as refused:
        service.Attend(wire.small_request(), timeout=wire.SECONDS)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert harness.run_client("--server", own, "info", "--health", check=False).returncode == 1
    admin(own, "undrain")
    wire.assert_serves(server.address)
    assert server.metric("attend_draining") == 0
    assert harness.run_client("--server", own, "info", "--health").stdout == "SERVING\n"
    assert server.stop() == 0  # nor does a drain keep the process from its end
    assert server.log().count("admin call") >= 4


def test_log_level(server, tmp_path):
    own = f"unix:{tmp_path}/own.sock"
    wire.assert_serves(server.address)
    assert "request done" not in server.log()
    assert admin(own, "log-level", "debug").stdout == "log level debug, was info\n"
    wire.assert_serves(server.address)
    harness.wait_for("a line", lambda: "request done" in server.log())
    assert admin(own, "log-level", "loud", check=False).returncode == 2


def test_sessions_of_all_tenants(server, tmp_path):
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
    assert re.match(r"1 sessions lost their tokens, [1-9].* are free\n",
                    admin(own, "evict", "team").stdout)
    assert "tokens 0 " in admin(own, "sessions", "--tenant", "team").stdout
    assert "tokens 70 " in admin(own, "sessions", "--tenant", "default").stdout
    assert server.metric("attend_sessions_evictions_total", cause="operator") == 1
    assert admin(own, "free", ids["default"]).stdout == \
        "freed 1 sessions, 0 were not there\n"
    assert admin(own, "free", "--tenant", "team").stdout.startswith("freed 1 ")
    assert admin(own, "sessions").stdout == ""
    assert "tenant team: 0 sessions" in admin(own, "status").stdout


def test_strangers_operate_nothing(server):
    for command in (("status",), ("drain",), ("log-level", "off"), ("sessions",),
                    ("free", "--tenant", "team"), ("evict", "team"), ("undrain",)):
        done = admin(server.address, *command, check=False)
        assert done.returncode == 1 and "PERMISSION_DENIED" in done.stderr
    wire.assert_serves(server.address)
    assert server.metric("attend_rejected_requests_total", reason="no_scope") == 7


def test_tokens_say_who_operates(start_server, tmp_path):
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
