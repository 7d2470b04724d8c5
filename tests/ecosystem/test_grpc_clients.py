# SPDX-License-Identifier: Apache-2.0
"""gRPC's interop cases that apply, with third-party clients: grpcio with threads and with asyncio,
gRPC for Go and for Java, and the HTTP/2 clients nghttp, h2load and curl; directly, and through
nginx, HAProxy and nghttpx. deploy/install-deps interop installs those that Debian has; tests of
missing ones are skipped."""

import asyncio
import os
import pathlib
import queue
import re
import shutil
import socket
import struct
import subprocess

import pytest

import harness

grpc = pytest.importorskip("grpc")
import grpc.aio  # noqa: E402

SERVICE = "/attend.v1.AttentionService/"
SECONDS = 30
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CODE = grpc.StatusCode
CASES = ("empty_unary", "large_unary", "ping_pong", "streaming", "empty_stream",
         "cancel_after_begin", "cancel_after_first_response", "timeout_on_sleeping_server",
         "status_code_and_message", "special_status_message", "unimplemented_method",
         "unimplemented_service", "custom_metadata", "many_calls")
GO_SOURCES = pathlib.Path("/usr/share/gocode/src/google.golang.org/grpc")
JARS = [f"/usr/share/java/{name}.jar" for name in (
    "grpc-api", "grpc-context", "grpc-core", "grpc-netty", "grpc-stub", "guava", "netty-buffer",
    "netty-codec", "netty-codec-http", "netty-codec-http2", "netty-common", "netty-handler",
    "netty-resolver", "netty-transport", "perfmark-api")]
# Runs in the system's Python, which has Protobuf's classes for protoc's output.
MAKE_MESSAGES = """
import pathlib, sys, tempfile
sys.path.insert(0, sys.argv[1])
import wire
wire.generate(tempfile.mkdtemp(dir=sys.argv[2]))
for name, request in (("small", wire.small_request()),
                      ("large", wire.small_request(length=3000, heads=4, dim=16)),
                      ("refused", wire.small_request(softcap=-1)),
                      ("special", wire.small_request(kernel="ä%20 b"))):
    pathlib.Path(sys.argv[2], name).write_bytes(request.SerializeToString())
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """A folder of requests."""
    folder = tmp_path_factory.mktemp("messages")
    made = subprocess.run(["/usr/bin/python3", "-c", MAKE_MESSAGES, harness.ROOT / "tests/e2e",
                           folder], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no messages can be made: {made.stderr[-500:]}")
    # The text that the server's error quotes.
    (folder / "special-text").write_text("ä%20 b")
    message = (folder / "small").read_bytes()
    (folder / "small.framed").write_bytes(b"\0" + struct.pack(">I", len(message)) + message)
    return folder


NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; user root;
events {{}}
http {{
  access_log off; client_max_body_size 0;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen {listen} http2;
    location / {{ grpc_pass grpc://{server}; grpc_read_timeout 300s; }}
  }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend clients
  bind {listen} proto h2
  default_backend servers
backend servers
  server attend {server} proto h2
"""
NGHTTPX = """
frontend={listen_comma};no-tls
backend={server_comma};/;proto=h2
errorlog-file={folder}/error.log
"""
# Settings, and the command that takes a file of them.
PROXIES = {"nginx": (NGINX, ("nginx", "-e", "stderr", "-c")),
           "haproxy": (HAPROXY, ("haproxy", "-q", "-db", "-f")),
           "nghttpx": (NGHTTPX, ("nghttpx", "--conf"))}


class Behind:
    """A server behind a proxy."""

    def __init__(self, name, server, folder):
        self.name, self.metric = name, server.metric
        self.address = f"127.0.0.1:{harness.free_port()}"
        settings, command = PROXIES[name]
        (folder / "settings").write_text(settings.format(
            folder=folder, listen=self.address, server=server.address,
            listen_comma=self.address.replace(":", ","),
            server_comma=server.address.replace(":", ",")))
        self.process = subprocess.Popen([*command, folder / "settings"],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        harness.wait_for(f"{name} to listen", lambda: answers(self.address))

    def stop(self):
        self.process.terminate()
        self.process.wait(SECONDS)


def answers(address):
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module", params=("direct", *PROXIES))
def server(request, tmp_path_factory):
    if not os.path.exists(harness.binary("attend-server")):
        pytest.skip("there is no attend-server")
    if request.param != "direct" and shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    folder = tmp_path_factory.mktemp("server")
    running = harness.Server(folder, "--access-log", folder / "access.log")
    if request.param == "direct":
        yield running
    else:
        behind = Behind(request.param, running, folder)
        yield behind
        behind.stop()
    assert running.stop() == 0, running.log()


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.address,
                               options=[("grpc.max_receive_message_length", -1)]) as opened:
        yield opened


def refusal(call):
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value.code(), failed.value.details()


def stream_of(channel, requests, timeout=SECONDS):
    return channel.stream_stream(SERVICE + "AttendStream")(requests, timeout=timeout)


class Asked:
    """An iterator over a stream's requests, which are sent as they are put into `waiting`."""

    def __init__(self):
        self.waiting = queue.SimpleQueue()

    def __iter__(self):
        return iter(self.waiting.get, None)


def unary(channel, method, request=b"", **options):
    return channel.unary_unary(SERVICE + method)(request, timeout=SECONDS, **options)


@pytest.mark.parametrize("case", CASES)
def test_grpcio(channel, messages, case):
    small = (messages / "small").read_bytes()
    if case in ("empty_unary", "many_calls"):
        for _ in range(3000 if case == "many_calls" else 1):
            assert unary(channel, "GetServerInfo")
    elif case == "large_unary":
        assert len(unary(channel, "Attend", (messages / "large").read_bytes())) > 300_000
    elif case in ("ping_pong", "cancel_after_first_response"):
        asked = Asked()
        stream = stream_of(channel, iter(asked))
        for _ in range(4 if case == "ping_pong" else 1):
            asked.waiting.put(small)
            assert len(next(stream)) > 10
        if case == "ping_pong":
            asked.waiting.put(None)
            assert not list(stream)
        else:
            stream.cancel()
            assert refusal(lambda: next(stream))[0] is CODE.CANCELLED
            asked.waiting.put(None)
    elif case == "streaming":
        assert len(list(stream_of(channel, iter([small] * 50)))) == 50
    elif case == "empty_stream":
        assert not list(stream_of(channel, iter([])))
    elif case in ("cancel_after_begin", "timeout_on_sleeping_server"):
        asked = Asked()
        stream = stream_of(channel, iter(asked), timeout=0.05 if "timeout" in case else SECONDS)
        if case == "cancel_after_begin":
            stream.cancel()
        code = refusal(lambda: next(stream))[0]
        assert code is (CODE.DEADLINE_EXCEEDED if "timeout" in case else CODE.CANCELLED)
        asked.waiting.put(None)
    else:
        ask_for_words(lambda method, request, metadata: channel.unary_unary(method).with_call(
            request, timeout=SECONDS, metadata=metadata), messages, case)


def ask_for_words(call, messages, case):
    """The cases about statuses and metadata. `call` returns the message and the call."""
    if case == "custom_metadata":
        _, call = call(SERVICE + "Attend", (messages / "small").read_bytes(),
                       [("traceparent", TRACE), ("x-grpc-test-echo-trailing-bin", b"\xab\xab")])
        assert dict(call.initial_metadata())["traceparent"].startswith(TRACE[:35])
        return
    method, request, code, text = {
        "status_code_and_message": ("Attend", "refused", CODE.INVALID_ARGUMENT, "softcap is -1"),
        "special_status_message": ("Attend", "special", CODE.INVALID_ARGUMENT,
                                   (messages / "special-text").read_text()),
        "unimplemented_method": ("NoSuchMethod", "small", CODE.UNIMPLEMENTED, "NoSuchMethod"),
        "unimplemented_service": ("", "small", CODE.UNIMPLEMENTED, "no.such.Service"),
    }[case]
    path = SERVICE + method if method else "/no.such.Service/Method"
    # Unknown methods accept small messages only.
    body = b"" if code is CODE.UNIMPLEMENTED else (messages / request).read_bytes()
    found, details = refusal(lambda: call(path, body, ()))
    assert found is code and text in details


@pytest.mark.parametrize("case", ("empty_unary", "large_unary", "ping_pong", "streaming",
                                  "cancel_after_begin", "cancel_after_first_response",
                                  "timeout_on_sleeping_server", "status_code_and_message"))
def test_grpcio_aio(server, messages, case):
    asyncio.run(asyncio.wait_for(run_aio(server, messages, case), 2 * SECONDS))


async def run_aio(server, messages, case):
    small = (messages / "small").read_bytes()
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        def ask(method, name=None):
            request = (messages / name).read_bytes() if name else b""
            return channel.unary_unary(SERVICE + method)(request, timeout=SECONDS)
        stream = channel.stream_stream(SERVICE + "AttendStream")
        if case == "empty_unary":
            assert await ask("GetServerInfo")
        elif case == "large_unary":
            assert len(await ask("Attend", "large")) > 300_000
        elif case == "ping_pong":
            call = stream(timeout=SECONDS)
            for _ in range(4):
                await call.write(small)
                assert len(await call.read()) > 10
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF and await call.code() is CODE.OK
        elif case == "streaming":
            assert len([each async for each in stream(iter([small] * 50), timeout=SECONDS)]) == 50
        elif case.startswith("cancel"):
            call = stream(timeout=SECONDS)
            if case == "cancel_after_first_response":
                await call.write(small)
                assert len(await call.read()) > 10
            call.cancel()
            assert await call.code() is CODE.CANCELLED
        else:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                if case == "timeout_on_sleeping_server":
                    await stream(timeout=0.05).read()
                else:
                    await ask("Attend", "refused")
            code = failed.value.code()
            assert code is (CODE.DEADLINE_EXCEEDED if "timeout" in case else CODE.INVALID_ARGUMENT)


@pytest.fixture(scope="module")
def go_client(tmp_path_factory):
    if shutil.which("go") is None or not GO_SOURCES.exists():
        pytest.skip("there is no Go or no golang-google-grpc-dev")
    folder = tmp_path_factory.mktemp("go")
    shutil.copy(pathlib.Path(__file__).with_name("interop.go"), folder)
    env = os.environ | {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": "",
                        "GOCACHE": str(folder / "cache")}
    subprocess.run(["go", "build", "-o", folder / "interop", "interop.go"], cwd=folder, env=env,
                   check=True)
    return [folder / "interop"]


@pytest.fixture(scope="module")
def java_client(tmp_path_factory):
    """Its command line. Debian's gRPC for Java has Netty's transport, not OkHttp's."""
    if shutil.which("javac") is None or not all(map(os.path.exists, JARS)):
        pytest.skip("there is no javac, or no libgrpc-java and what it needs")
    folder = tmp_path_factory.mktemp("java")
    subprocess.run(["javac", "-encoding", "UTF-8", "-d", folder, "-cp", ":".join(JARS),
                    pathlib.Path(__file__).with_name("Interop.java")], check=True)
    return ["java", "-cp", ":".join([*JARS, str(folder)]), "Interop"]


@pytest.mark.parametrize("language", ("go", "java"))
def test_go_and_java(server, messages, language, request):
    """The program prints a line for each case."""
    command = request.getfixturevalue(f"{language}_client")
    said = subprocess.run([*command, server.address, messages], capture_output=True, text=True,
                          timeout=20 * SECONDS, check=False)
    assert sorted(said.stdout.splitlines()) == sorted(f"ok {case}" for case in CASES), said.stderr
    # For example for PINGs, which clients may send after each answer.
    assert server.metric("attend_connections_refused_total", reason="frames") == 0


def run_tool(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    return subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          timeout=4 * SECONDS, check=True).stdout


GRPC_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")


@pytest.mark.parametrize("padding", (0, 200))
def test_nghttp(server, messages, padding):
    if padding and getattr(server, "name", "") == "haproxy":
        pytest.skip("HAProxy 2.6 does not accept padded frames")
    said = run_tool("nghttp", "-nv", *GRPC_HEADERS, f"--padding={padding}", "-d",
                    messages / "small.framed", f"http://{server.address}{SERVICE}Attend")
    assert re.search(r":status: 200\b.*grpc-status: 0\b", said, re.DOTALL), said


def test_h2load(server, messages):
    """Thousands of calls, 64 in flight, all without stream errors."""
    said = run_tool("h2load", "-n", "4000", "-c", "8", "-m", "8", *GRPC_HEADERS, "-d",
                    messages / "small.framed", f"http://{server.address}{SERVICE}Attend")
    assert "4000 succeeded, 0 failed, 0 errored, 0 timeout" in said and "4000 2xx" in said
    assert server.metric("attend_requests_total", code="OK") >= 4000


def test_curl(server, messages, tmp_path):
    run_tool("curl", "-sS", "--http2-prior-knowledge", *GRPC_HEADERS, "--data-binary",
             f"@{messages / 'small.framed'}", "-D", tmp_path / "headers", "-o", tmp_path / "answer",
             f"http://{server.address}{SERVICE}Attend")
    headers = (tmp_path / "headers").read_text()
    assert headers.startswith("HTTP/2 200") and "grpc-status: 0" in headers
    answer = (tmp_path / "answer").read_bytes()
    assert answer[0] == 0 and struct.unpack(">I", answer[1:5])[0] == len(answer) - 5
