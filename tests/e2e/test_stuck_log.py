# SPDX-License-Identifier: Apache-2.0
"""A log loses lines, and nothing else happens, if its reader is stuck or gone or its disk is full;
lines logged before a crash are written."""

import contextlib
import os
import resource
import select
import signal
import subprocess
import urllib.request

import grpc
import pytest

import certificates
import harness
import strangers
import wire

BAD_CALLS = 40


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(end)


def fill(writer):
    """Writes to the pipe until it is full."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)


def send_bad_calls(address, count=BAD_CALLS):
    """On separate connections, so that every answering thread has some."""
    for _ in range(count):
        with wire.connect(address) as service, pytest.raises(grpc.RpcError) as refused:
            service.Attend(wire.small_request(softcap=-1), timeout=wire.SECONDS)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def assert_alive(server):
    wire.assert_serves(server.address)
    with urllib.request.urlopen(f"http://{server.metrics_address}/healthz", timeout=10) as answer:
        assert answer.status == 200


def test_a_full_stderr_pipe_stops_no_call_and_no_drain(start_server, pipe):
    reader, writer = pipe
    server = start_server("--log-rate", "0", stderr=writer)
    assert select.select([reader], [], [], wire.SECONDS)[0]  # its first line
    fill(writer)
    send_bad_calls(server.address)
    assert_alive(server)
    server.signal(signal.SIGHUP)
    assert server.stop() == 0
    # The reader resumes: it receives the lines written before.
    os.close(writer)
    with open(reader, "rb", closefd=False) as log:
        assert b"attend-server" in log.read()


def test_lines_delayed_by_a_slow_reader_are_written(start_server, pipe):
    reader, writer = pipe
    server = start_server("--log-rate", "0", stderr=writer)
    fill(writer)
    send_bad_calls(server.address)
    os.close(writer)
    text = b""
    while text.count(b"request failed") < BAD_CALLS:
        got = os.read(reader, 1 << 16)
        assert got, text[-2000:]
        text += got
    assert server.metric("attend_log_write_errors_total") == 0
    with harness.at_once(1, lambda: os.read(reader, 1 << 16)):
        assert server.stop() == 0


def test_refused_calls_with_a_full_log_stop_nothing(start_server, tmp_path, pipe):
    _, writer = pipe
    ca = certificates.Authority(tmp_path / "ca")
    token = strangers.token()
    (tmp_path / "tokens").write_text(strangers.line("me", token, "scopes=compute"))
    server = start_server("--tokens", tmp_path / "tokens", *ca.serve(), stderr=writer)
    fill(writer)
    for _ in range(8):
        with ca.channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
            wire.stub.AttentionServiceStub(channel).Attend(wire.small_request(),
                                                           timeout=wire.SECONDS)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    with ca.channel(server.address) as channel:
        wire.stub.AttentionServiceStub(channel).Attend(
            wire.small_request(), metadata=strangers.bearer(token), timeout=wire.SECONDS)
    assert server.stop() == 0


def test_an_unwritable_log_file_stops_nothing(start_server, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    server = start_server("--log-rate", "0", "--log-file", pipe)
    writer = os.open(pipe, os.O_WRONLY)
    fill(writer)
    send_bad_calls(server.address)
    assert_alive(server)
    assert server.stop() == 0
    os.close(writer)
    os.close(reader)

    full = start_server("--log-file", "/dev/full")
    send_bad_calls(full.address, 3)
    assert_alive(full)
    assert full.metric("attend_log_write_errors_total") > 0
    assert "log lines are lost, log-file /dev/full: No space left on device" in full.log()
    assert full.stop() == 0


def test_a_reader_that_has_gone_ends_no_server(start_server, pipe):
    reader, writer = pipe
    server = start_server("--log-rate", "0", stderr=writer,
                          enter=lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL))
    os.close(reader)
    os.close(writer)
    send_bad_calls(server.address, 3)
    assert_alive(server)
    harness.wait_for("lost lines", lambda: server.metric("attend_log_write_errors_total"))
    assert server.stop() == 0


def test_a_limit_on_file_sizes_ends_no_server(start_server, tmp_path):
    server = start_server("--log-file", tmp_path / "log", "--log-rate", "0",
                          limits={resource.RLIMIT_FSIZE: (8192, 8192)},
                          enter=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_DFL))
    send_bad_calls(server.address)
    assert_alive(server)
    assert server.metric("attend_log_write_errors_total") > 0
    assert server.stop() == 0


@pytest.mark.parametrize("number", (signal.SIGABRT, signal.SIGSEGV))
def test_lines_logged_before_a_crash_are_written(start_server, number):
    server = start_server("--log-rate", "0")
    send_bad_calls(server.address)
    server.signal(number)
    assert server.wait() == -number
    assert server.log().count("request failed") == BAD_CALLS


def test_closed_standard_streams_do_no_harm(start_server, tmp_path):
    def close():
        for stream in (0, 1, 2):
            os.close(stream)
    server = start_server("--log-file", tmp_path / "log", enter=close)
    assert_alive(server)
    assert server.stop() == 0
    assert "drained" in (tmp_path / "log").read_text()


def test_a_client_whose_reader_has_gone_ends_silently(start_server, pipe):
    server = start_server()
    reader, writer = pipe
    os.close(reader)
    for command in (["info"], ["check", "--quick"], ["--help"]):
        done = subprocess.run([harness.binary("attend-client"), "--server", server.address,
                               *command], stdout=writer, stderr=subprocess.PIPE, timeout=60,
                              env=harness.clean_env())
        assert (done.returncode, done.stderr) == (1, b""), command
    with open("/dev/full", "wb") as full:
        done = subprocess.run([harness.binary("attend-client"), "--server", server.address, "info"],
                              stdout=full, stderr=subprocess.PIPE, timeout=60,
                              env=harness.clean_env())
    assert done.returncode == 1 and b"stdout did not accept all of the output" in done.stderr


@pytest.mark.parametrize("gone", (False, True), ids=("stuck", "gone"))
def test_a_load_whose_stderr_has_no_reader_ends_and_reports(start_server, tmp_path, pipe, gone):
    server = start_server()
    reader, writer = pipe
    if gone:
        os.close(reader)
    else:
        fill(writer)
    done = subprocess.run([harness.binary("attend-client"), "--server", server.address, "load",
                           "--duration", "2", "--warmup", "0", "--json", tmp_path / "load.json"],
                          stdout=subprocess.PIPE, stderr=writer, timeout=60,
                          env=harness.clean_env())
    assert done.returncode == 0 and done.stdout and (tmp_path / "load.json").stat().st_size > 0
