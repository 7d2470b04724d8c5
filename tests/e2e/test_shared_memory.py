# SPDX-License-Identifier: Apache-2.0
"""Shared memory from plain Python: socket, mmap and generated messages; and clients that crash,
send false data or disconnect without harming others."""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap

import grpc
import pytest

import harness
import sessions
import wire
from regions import ALIGN, Client

CODE = grpc.StatusCode


@pytest.fixture
def shm_server(start_server, tmp_path):
    """shm_server(*flags): a server with shared memory, its socket in a new folder."""
    def start(*args, **options):
        return start_server("--shared-memory", "--shared-memory-socket",
                            tmp_path / "sockets" / "shm.sock", *args, **options)
    return start


def info(server):
    with wire.connect(server.address) as service:
        return service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS)


def socket_of(server):
    return info(server).shared_memory.socket


def assert_nothing_left(server):
    for name in ("attend_shared_memory_bytes", "attend_shared_memory_regions",
                 "attend_shared_memory_clients", "attend_inflight_requests",
                 "attend_host_memory_used_bytes"):
        harness.wait_for(f"{name} to be 0", lambda name=name: server.metric(name) == 0)


def attend(server, request, **options):
    with wire.connect(server.address) as service:
        return service.Attend(request, timeout=wire.SECONDS, **options)


def fail(server, request):
    with pytest.raises(grpc.RpcError) as error:
        attend(server, request)
    return error.value.code(), error.value.details()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_answer_is_the_same_without_sending_tensors(shm_server, dtype):
    server = shm_server()
    request = wire.small_request(seed=3, length=77, heads=3, dim=48, dtype=dtype, return_lse=True,
                                 check=True)
    expected = attend(server, request)
    sent = server.metric("attend_transport_bytes_total", transport="inline")
    tensors = sum(map(len, request.raw))
    client = Client(socket_of(server))
    region = client.create(1 << 20)
    answer = attend(server, region.take(request))
    assert answer.transport == "shm" and answer.check.ok and not answer.raw
    assert [region.bytes_of(answer.o), region.bytes_of(answer.lse)] == list(expected.raw)
    assert server.metric("attend_transport_bytes_total", transport="shm", direction="in") == tensors
    assert server.metric("attend_transport_bytes_total", transport="inline") - sent < 1000
    reply, _ = client.ask(release=wire.shm.ReleaseRegion(token=region.token))
    assert reply.HasField("released")
    assert fail(server, request)[0] == CODE.NOT_FOUND
    client.close()
    assert_nothing_left(server)
    assert server.stop() == 0


def test_the_prompt_of_a_session(shm_server, random):
    server = shm_server()
    with sessions.client(server.address) as tenant:
        sequence = sessions.Sequence(random, tenant.create())
        request, _ = sessions.step(random, [sequence], 40, 40)
        inline = wire.pb.AttendRequest()
        inline.CopyFrom(request)
        inline.sessions[0].session = tenant.create().id
        expected = tenant.attend(inline)
        client = Client(socket_of(server))
        region = client.create(1 << 20)
        answer = tenant.attend(region.take(request))
        assert answer.transport == "shm" and not answer.raw
        assert [region.bytes_of(answer.o), region.bytes_of(answer.lse)] == list(expected.raw)
        assert answer.session_lengths == [40]
        client.close()


def test_limits_of_shared_memory_and_modes_of_its_socket(shm_server):
    server = shm_server("--shared-memory-max", "3MiB", "--shared-memory-client-max", "2MiB",
                        "--shared-memory-client-regions", "2")
    about = info(server)
    assert list(about.transports) == ["inline", "chunked", "shm"]
    assert about.shared_memory.offset_alignment == ALIGN
    assert (about.shared_memory.bytes_max, about.shared_memory.client_bytes_max,
            about.shared_memory.client_regions_max) == (3 << 20, 2 << 20, 2)
    path = about.shared_memory.socket
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    first, second = Client(path), Client(path)
    region = first.create(2 << 20)
    create = wire.shm.CreateRegion
    for client, size, code in ((first, 1, CODE.RESOURCE_EXHAUSTED),
                               (second, 2 << 20, CODE.RESOURCE_EXHAUSTED),
                               (second, (2 << 20) + 1, CODE.INVALID_ARGUMENT),
                               (second, 0, CODE.INVALID_ARGUMENT)):
        reply, files = client.ask(create=create(bytes=size))
        assert reply.error.code == code.value[0] and not files, reply
    with pytest.raises(OSError):
        os.ftruncate(region.file, 0)
    with pytest.raises(OSError):
        os.ftruncate(region.file, 4 << 20)
    request = region.take(wire.small_request())
    request.v.shared_memory.offset = (1 << 64) - ALIGN
    code, details = fail(server, request)
    assert code == CODE.INVALID_ARGUMENT and "v.shared_memory.offset" in details
    first.close()
    second.close()
    assert_nothing_left(server)


def test_a_mapping_kept_after_release_holds_no_memory(shm_server):
    server = shm_server("--shared-memory-max", "1MiB")
    client = Client(info(server).shared_memory.socket)
    kept = []
    for _ in range(3):
        kept.append(client.create(1 << 20))
        kept[-1].memory[:5] = b"bytes"
        if len(kept) < 3:
            reply, _ = client.ask(release=wire.shm.ReleaseRegion(token=kept[-1].token))
            assert reply.HasField("released"), reply
    client.close()
    assert_nothing_left(server)
    assert [os.fstat(region.file).st_blocks for region in kept] == [0, 0, 0]
    assert kept[0].memory[:5] == bytes(5)


def test_shared_memory_is_disabled_by_default(server):
    request = wire.small_request()
    request.q.shared_memory.region = b"x" * 16
    del request.raw[0]
    code, details = fail(server, request)
    assert code == CODE.UNIMPLEMENTED and "--shared-memory" in details
    assert not info(server).HasField("shared_memory")


# A process that puts a request into its region, starts the call and waits to be killed.
VICTIM = """
import sys
sys.path[:0] = sys.argv[1:3]
import regions
import wire, importlib
wire.pb = importlib.import_module("attend.v1.attention_pb2")
wire.shm = importlib.import_module("attend.v1.shared_memory_pb2")
wire.stub = importlib.import_module("attend.v1.attention_pb2_grpc")
client = regions.Client(sys.argv[4])
region = client.create(32 << 20)
request = region.take(wire.slow_request(length=4096))
with wire.connect(sys.argv[3]) as service:
    call = service.Attend.future(request, timeout=wire.SECONDS)
    print("sent", flush=True)
    sys.stdin.read()
"""


def test_a_client_killed_with_a_region_in_flight(shm_server):
    server = shm_server("--lanes", "1")
    path = socket_of(server)
    other = Client(path)
    kept = other.create(1 << 20)
    expected = attend(server, wire.small_request(seed=5))
    stubs = os.path.dirname(os.path.dirname(os.path.dirname(wire.pb.__file__)))
    victim = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VICTIM), str(harness.ROOT / "tests/e2e"), stubs,
         server.address, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert victim.stdout.readline() == b"sent\n"
    harness.wait_for("its batch to run", lambda: server.metric("attend_lanes_busy") == 1)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdin.close()
    victim.stdout.close()
    harness.wait_for("its connection to go",
                     lambda: server.metric("attend_shared_memory_clients") == 1)
    answer = attend(server, kept.take(wire.small_request(seed=5)))
    assert kept.bytes_of(answer.o) == expected.raw[0]
    harness.wait_for("its memory to come back",
                     lambda: server.metric("attend_shared_memory_bytes") == 1 << 20, seconds=60)
    other.close()
    assert_nothing_left(server)
    assert server.stop() == 0, server.log()


def test_a_killed_server_leaves_a_socket_that_the_next_one_replaces(shm_server, start_server):
    first = shm_server()
    path = socket_of(first)
    second = subprocess.run(
        [harness.binary("attend-server"), "--listen", "127.0.0.1:0", "--metrics-listen", "off",
         "--device", "cpu", "--shared-memory", "--shared-memory-socket", path],
        capture_output=True, text=True, timeout=60, env=harness.clean_env())
    assert second.returncode == 1 and "another server is using it" in second.stderr
    client = Client(path)
    first.kill()
    with contextlib.suppress(ConnectionResetError):
        assert client.socket.recv(1) == b""
    assert os.path.exists(path)
    third = start_server("--shared-memory", "--shared-memory-socket", path)
    Client(path).create(4096)
    assert third.stop() == 0
    assert not os.path.exists(path)


def test_load_over_shared_memory(shm_server):
    server = shm_server()
    inline = []
    for way in ([], ["--stream"], ["--backward"], ["--backward", "--stream"]):
        done = harness.run_client(
            "--server", server.address, "load", "--transport", "shm", "--shape",
            "B2,H2,L60,D32,causal,lse", "--concurrency", "4", "--count", "40", "--warmup", "0",
            "--verify", "1", "--quiet", *way)
        assert "passed 40, FAILED 0" in done.stdout, done.stdout
        inline.append(server.metric("attend_transport_bytes_total", transport="inline",
                                    direction="out"))
    assert inline[1] == 0  # later: O and LSE for the gradients, before the load
    assert_nothing_left(server)
    done = harness.run_client("--server", server.address, "load", "--transport", "shm",
                              "--deadline-ms", "5", check=False)
    assert done.returncode == 2 and "--transport shm and cuda-ipc exclude" in done.stderr


def test_check_over_shared_memory(shm_server):
    server = shm_server()
    done = harness.run_client("--server", server.address, "check", "--quick", "--transport", "shm",
                              timeout=120)
    passed, total = re.search(r"(\d+) of (\d+) passed", done.stdout).groups()
    assert passed == total and int(total) >= 15
    assert server.metric("attend_reference_checks_total", transport="shm") == int(total)
    assert server.metric("attend_transport_bytes_total", transport="inline", direction="out") == 0
    assert_nothing_left(server)


@pytest.mark.parametrize("command", ["load", "check"])
def test_clients_of_a_server_without_shared_memory(server, command):
    done = harness.run_client("--server", server.address, command, "--transport", "shm",
                              check=False)
    assert done.returncode == 1 and "--shared-memory" in done.stderr
