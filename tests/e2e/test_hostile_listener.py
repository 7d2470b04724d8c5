# SPDX-License-Identifier: Apache-2.0
"""Clients that occupy connections, threads and sockets: their bounds, and that others are served
meanwhile and afterwards."""

import contextlib
import itertools
import os
import pathlib
import resource
import signal
import socket
import stat
import subprocess
import threading

import grpc
import pytest

import harness
import hostile
import strangers
import wire

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/"


@contextlib.contextmanager
def many(address, count, say=b""):
    """This many connections, including those that the server closes at once."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(hostile.open_socket(address))
            with contextlib.suppress(OSError):
                connection.sendall(say)
            connections.append(connection)
        yield connections


def test_idle_sockets_do_not_stop_new_connections(start_server):
    """Twice as many as the process has descriptors; a new one takes the oldest one's place."""
    server = start_server(limits=hostile.descriptors_max(200))
    with many(server.address, 400):
        wire.assert_serves(server.address)
        assert server.metric("attend_connections_limit") == 136
        assert server.metric("attend_connections") <= 136
        assert server.metric("attend_connections_refused_total", reason="silent") > 0
    wire.assert_serves(server.address)
    harness.wait_for("closed ones to go", lambda: server.metric("attend_connections") <= 2)
    assert server.metric("attend_accept_errors_total") == 0
    assert server.stop() == 0


def test_connections_to_shared_memory_leave_descriptors_for_calls(start_server, tmp_path):
    """As many as its socket accepts, and more call connections than the process has descriptors."""
    path = tmp_path / "regions" / "sock"
    server = start_server("--shared-memory", "--shared-memory-socket", path,
                          "--max-connections-per-peer", "500", limits=hostile.descriptors_max(500))
    with contextlib.ExitStack() as stack:
        for _ in range(256):
            regions = strangers.Regions(path)
            stack.callback(regions.close)
        with many(server.address, 500):
            wire.assert_serves(server.address)
            assert regions.ask(create=wire.shm.CreateRegion(bytes=4096)).HasField("created")
            assert server.metric("attend_accept_errors_total") == 0


def test_active_connections_are_bounded_for_each_peer(start_server, tmp_path):
    """Connections above the bound are closed at once; other peers and the metrics are served."""
    path = tmp_path / "a.sock"
    server = start_server("--max-connections-per-peer", "5", listen=f"127.0.0.1:0,unix:{path}")
    with many(server.address, 5, hostile.HELLO) as held:
        for connection in held:
            assert hostile.admitted(connection)
        with hostile.open_socket(server.address) as refused:
            assert hostile.ended(refused)
        assert server.metric("attend_connections_refused_total", reason="peer_limit") >= 1
        wire.assert_serves(f"unix:{path}")
    harness.wait_for("places to be free", lambda: server.metric("attend_connections") < 5)
    wire.assert_serves(server.address)


def test_connections_are_bounded_in_total(start_server, tmp_path):
    path = tmp_path / "a.sock"
    server = start_server("--max-connections", "4", "--max-connections-per-peer", "4",
                          listen=f"127.0.0.1:0,unix:{path}")
    with many(server.address, 4, hostile.HELLO) as held:
        for connection in held:
            assert hostile.admitted(connection)
        with socket.socket(socket.AF_UNIX) as refused:
            refused.connect(str(path))
            assert hostile.ended(refused)
        assert server.metric("attend_connections_refused_total", reason="limit") == 1
    harness.wait_for("places to be free", lambda: server.metric("attend_connections") == 0)
    wire.assert_serves(f"unix:{path}")


def test_half_open_and_idle_connections_end(start_server):
    """One is silent, one sends half of the preface, one stops after its settings, one goes idle."""
    server = start_server("--handshake-timeout", "0.5", "--connection-idle-timeout", "1")
    with many(server.address, 4) as (silent, half, mute, idle):
        half.sendall(hostile.HELLO[:10])
        mute.sendall(hostile.HELLO)
        idle.sendall(hostile.HELLO)
        for connection in (silent, half, mute, idle):
            assert hostile.ended(connection)
    harness.wait_for("none to be left", lambda: server.metric("attend_connections") == 0)
    wire.assert_serves(server.address)


def test_incomplete_requests_do_not_block_scrapes(start_server):
    server = start_server()
    with many(server.metrics_address, 100, b"GET /metrics HTTP/1.1\r\n"):
        assert server.metric("attend_accepting") == 1


def test_a_lack_of_descriptors_is_reported_and_survived(start_server):
    """gRPC's own listener never accepts again after this. Health reports the lack, and its end."""
    server = start_server()
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream(HEALTH + "Watch")(b"", timeout=60)
        serving, not_serving = b"\x08\x01", b"\x08\x02"
        assert next(watch) == serving
        pid = server.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard  # raised at startup
        taken = {int(fd.name) for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
        free = next(fd for fd in range(len(taken) + 1) if fd not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
        with hostile.open_socket(server.address) as refused:
            assert hostile.ended(refused)  # reported at once, using a reserved descriptor
            assert next(watch) == not_serving
            assert server.metric("attend_accepting") == 0  # the metrics endpoint reserves one too
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            assert next(watch) == serving
        watch.cancel()
    wire.assert_serves(server.address)
    assert server.metric("attend_accept_errors_total") > 0
    assert server.metric("attend_accepting") == 1
    assert 'no connection can be accepted error="Too many open files"' in server.log()


def test_reflection_streams_cost_no_threads(start_server):
    server = start_server()
    with grpc.insecure_channel(server.address) as channel:
        method = channel.stream_stream(REFLECTION)
        release = []

        def requests():
            yield b"\x3a\x00"  # list_services
            harness.wait_for("the test's end", lambda: release, 120)

        first = method(requests(), timeout=120)
        assert b"attend.v1.AttentionService" in next(first)
        before = hostile.threads(server)
        calls = [method(requests(), timeout=120) for _ in range(60)]
        for call in calls:
            assert next(call)
        assert hostile.threads(server) <= before + 4  # gRPC's own pool; not one for each stream
        release.append(True)
        for call in (first, *calls):
            assert list(call) == []
    wire.assert_serves(server.address)


def test_reflection_can_be_disabled(start_server):
    server = start_server("--no-reflection")
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(REFLECTION)(iter([b"\x3a\x00"]), timeout=wire.SECONDS)
        assert call.code() is grpc.StatusCode.UNIMPLEMENTED


@contextlib.contextmanager
def server_of(user, threads_max):
    """A server whose user may have this many threads in all; yields its process and, once it
    serves, its address, or its error if it has ended."""
    command = ["prlimit", f"--nproc={threads_max}", "setpriv", f"--reuid={user}", "--clear-groups",
               harness.binary("attend-server"), "--listen", "127.0.0.1:0", "--metrics-listen",
               "off", "--device", "cpu", "--cpu-threads", "4"]
    with subprocess.Popen([str(c) for c in command], stderr=subprocess.PIPE, text=True,
                          env=harness.clean_env()) as process:
        watchdog = threading.Timer(60, process.kill)  # tells a hanging server from a starting one
        watchdog.start()
        try:
            said, line = "", "..."
            while line and "serving gRPC on " not in said:
                line = process.stderr.readline()
                said += line
            yield process, said.partition("serving gRPC on ")[2].split(";")[0], said
        finally:
            watchdog.cancel()
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user of its own, whose threads are limited")
def test_without_threads_a_server_does_not_start_but_a_started_one_serves():
    """Every thread is created at the start: no call needs a new one."""
    users = itertools.count(1_000_000 + 1000 * os.getpid())  # without limits of their own

    def serve(process, address):
        with wire.connect(address) as service:
            calls = [service.Attend.future(wire.small_request(seed=i, heads=8, length=512),
                                           timeout=wire.SECONDS) for i in range(6)]
            for call in calls:
                assert call.exception() is None
        assert process.poll() is None
        return len(os.listdir(f"/proc/{process.pid}/task"))

    with server_of(next(users), 10_000) as (process, address, _):
        most = serve(process, address)
    started = 0
    for threads_max in range(most - 5, most + 5):
        with server_of(next(users), threads_max) as (process, address, said):
            if address:
                started += 1
                serve(process, address)
            else:
                assert process.wait(60) == 1
                assert said.splitlines()[-1].startswith("attend-server: ")
    assert 0 < started < 10


def failed_start(folder, *args, descriptors=1024):
    """The exit code and the error of a server that cannot start."""
    command = ["prlimit", f"--nofile={descriptors}", harness.binary("attend-server"),
               "--device", "cpu", "--log-file", folder / "log", *args]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60,
                          env=harness.clean_env())
    return done.returncode, done.stderr


def test_bind_errors_are_one_line_with_the_reason(start_server, tmp_path):
    server = start_server()
    for setting, address, other in (("listen", server.address, ("--metrics-listen", "off")),
                                    ("metrics-listen", server.metrics_address,
                                     ("--listen", "127.0.0.1:0"))):
        code, said = failed_start(tmp_path, f"--{setting}", address, *other)
        assert code == 1
        assert said == (f"attend-server: {setting} {address} cannot be bound: "
                        "Address already in use\n")


def test_more_connections_than_descriptors_are_refused(tmp_path):
    code, said = failed_start(tmp_path, "--listen", "127.0.0.1:0", "--max-connections", "137",
                              descriptors=200)
    assert code == 1
    assert said == ("attend-server: max-connections is 137, must be at most 136: the process "
                    "may open 200 descriptors (ulimit -n)\n")
    code, said = failed_start(tmp_path, "--listen", "127.0.0.1:0", "--max-connections", "181",
                              "--shared-memory", "--shared-memory-socket", tmp_path / "a" / "sock",
                              descriptors=500)
    assert code == 1
    assert said == ("attend-server: max-connections is 181, must be at most 180: the process "
                    "may open 500 descriptors (ulimit -n), 256 of them reserved for connections to "
                    "shared memory\n")


def test_a_unix_socket_has_one_server_at_a_time(start_server, tmp_path):
    """A new server starts, then the old one stops: the new one reports at once that it cannot
    start."""
    path = tmp_path / "a.sock"
    listen = f"unix:{path}"
    first = start_server(listen=listen)
    code, said = failed_start(tmp_path, "--listen", listen, "--metrics-listen", "off")
    assert code == 1
    assert said == (f"attend-server: listen {listen} cannot be bound: another server is using it "
                    f"(it holds {path}.lock)\n")
    wire.assert_serves(listen)
    assert first.stop() == 0
    assert not path.exists() and not pathlib.Path(f"{path}.lock").exists()

    second = start_server(listen=listen)
    second.signal(signal.SIGKILL)
    second.wait()
    assert path.exists()
    third = start_server(listen=listen)  # an unused socket is replaced
    wire.assert_serves(listen)
    os.unlink(path)
    path.write_text("another's")
    assert third.stop() == 0
    assert path.read_text() == "another's"
    code, said = failed_start(tmp_path, "--listen", listen, "--metrics-listen", "off")
    assert code == 1 and "the path exists and is not a socket" in said
    assert path.read_text() == "another's"


def test_modes_of_unix_sockets(start_server, tmp_path):
    def about(*flags):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.sock"
        start_server(*flags, listen=f"unix:{path}")
        found = path.stat()
        return stat.S_IMODE(found.st_mode), found.st_gid

    group = os.getgroups()[0] if os.getgroups() else os.getgid()
    assert about() == (0o600, os.getgid())
    assert about("--socket-mode", "0666") == (0o666, os.getgid())
    assert about("--socket-group", str(group)) == (0o660, group)
    code, said = failed_start(tmp_path, "--listen", f"unix:{tmp_path}/x", "--socket-group",
                              "no such group", "--metrics-listen", "off")
    assert code == 1 and said == "attend-server: socket-group no such group: no such group\n"
