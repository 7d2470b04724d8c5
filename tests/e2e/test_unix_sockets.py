# SPDX-License-Identifier: Apache-2.0
"""Access to Unix sockets, and the tenants to which their calls are attributed."""

import os
import pwd
import re
import socket

import grpc
import pytest

import harness
import hostile
import wire


def fail(address, **options):
    """A call that is refused and logged, with its peer."""
    with wire.connect(address, **options) as service, pytest.raises(grpc.RpcError):
        service.Attend(wire.pb.AttendRequest(request_id="bad"), timeout=wire.SECONDS)


def test_only_socket_users_connect(start_server, tmp_path):
    path = f"unix:{tmp_path}/a.sock"
    server = start_server("--socket-users", str(os.getuid() + 1), listen=f"{path},127.0.0.1:0")
    with hostile.open_socket(path) as connection:
        assert hostile.ended(connection)
    assert server.metric("attend_connections_refused_total", reason="user") == 1
    assert f'connection closed reason="user" peer="user {os.getuid()}"' in server.log()
    wire.assert_serves(server.addresses[1])  # the flags are for Unix sockets only
    server.stop()
    me = pwd.getpwuid(os.getuid()).pw_name
    start_server("--socket-users", f"{os.getuid() + 1},{me}", listen=path)
    wire.assert_serves(path)


def test_each_tenants_socket_has_its_own_users(start_server, tmp_path):
    """A user of one tenant's socket cannot use the other's, whatever the files' modes."""
    me = os.getuid()
    blue, green = f"unix:{tmp_path}/blue.sock", f"unix:{tmp_path}/green.sock"
    with pytest.raises(harness.ServerEnded, match="with sockets of several tenants"):
        start_server("--tenant=blue=1,green=1", "--socket-users", f"{me},{me + 1}",
                     listen=f"{blue}?tenant=blue,{green}?tenant=green")
    server = start_server(
        "--tenant=blue=1,green=1", "--socket-mode=0666",
        listen=f"{blue}?tenant=blue&users={me},{green}?tenant=green&users={me + 1}&mode=0606")
    wire.assert_serves(blue)
    with hostile.open_socket(green) as connection:
        assert hostile.ended(connection)
    assert server.metric("attend_connections_refused_total", reason="user") == 1
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("blue.sock", "green.sock")] == [
        0o666, 0o606]


def test_an_unknown_user_fails_the_start(tmp_path):
    with pytest.raises(AssertionError, match="socket-users missing-user: no such user"):
        harness.Server(tmp_path, "--socket-users", "missing-user").kill()


def test_calls_are_known_by_the_socket_not_by_what_the_client_says(start_server, tmp_path):
    """gRPC would report the client's address, which a client can bind to any name."""
    mine, other = tmp_path / "mine ä.sock", tmp_path / "other.sock"
    server = start_server("--tenant=a=1", listen=f"unix:{mine}?tenant=a,unix:{other}")
    assert server.addresses == [f"unix:{mine}", f"unix:{other}"]

    def peers(path):
        """The logged calls, each with the number of its connection."""
        return re.findall(f'peer="unix:{re.escape(path)}:[0-9]+"', server.log())

    fail(f"unix:{other}")
    assert len(peers(str(other))) == 1
    with socket.socket(socket.AF_UNIX) as posing:
        posing.bind(str(tmp_path / "posing"))
        posing.connect(str(other))
        posing.sendall(hostile.HELLO + hostile.frame(
            hostile.HEADERS, hostile.END_HEADERS, 1, hostile.call_headers(wire.ATTEND)) +
            hostile.frame(hostile.DATA, hostile.END_STREAM, 1, hostile.grpc_message(b"\xff")))
        harness.wait_for("its line", lambda: len(set(peers(str(other)))) == 2)
    fail(f"unix:{mine}")
    assert len(peers(str(mine))) == 1
