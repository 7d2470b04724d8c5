# SPDX-License-Identifier: Apache-2.0
"""The Python client against a server whose texts contain terminal commands, or lines that look like
the program's own, in everything that Python prints."""

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
import traceback
import warnings

import attend
import grpc
import numpy as np
import pytest

import harness
import wire

pytestmark = pytest.mark.usefixtures("libraries")

# Sets a terminal's title, clears the screen, begins a new line, and writes from right to left.
EVIL = "\x1b]0;title\a\x1b[2J\r\nforged line\u202e\u009b2J\ufeff"
SHOWN = r"\u001b]0;title\u0007\u001b[2J\u000d\nforged line\u202e\u009b2J\ufeff"
X = np.ones((1, 2, 3, 8), np.float32)


class Service:
    """Answers with O as q, unless `code` is an error to fail with. check: whether the answer's
    check passed, None for no check. GetServerInfo is counted, waits for `told`, and fails with
    `no_info`; given_up: one of its calls has ended."""

    def __init__(self):
        self.check, self.code, self.no_info, self.asked = None, None, None, 0
        self.told, self.given_up = threading.Event(), threading.Event()
        self.told.set()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        wire.stub.add_AttentionServiceServicer_to_server(self, self.server)
        wire.sessions_stub.add_SessionServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Attend(self, request, context):
        if self.code is not None:
            context.abort(self.code, EVIL)
        response = wire.pb.AttendResponse(
            request_id=request.request_id, o=request.q, kernel=EVIL, kernel_reason=EVIL,
            device=EVIL, transport=EVIL, raw=request.raw[:1])
        if self.check is not None:
            response.check.ok, response.check.detail = self.check, EVIL
        return response

    def GetServerInfo(self, request, context):
        self.asked += 1
        context.add_callback(self.given_up.set)
        self.told.wait()
        if self.no_info is not None:
            context.abort(self.no_info, EVIL)
        return wire.pb.GetServerInfoResponse(version=EVIL, tenants=[EVIL])

    def CreateSession(self, request, context):
        if self.code is not None:
            context.abort(self.code, EVIL)
        return wire.sessions_pb.Session(id=bytes(16), device=EVIL, layer_lengths=[0])

    def __getattr__(self, name):  # the other methods
        if not name[0].isupper():
            raise AttributeError(name)
        return lambda request, context: context.abort(
            self.code or grpc.StatusCode.UNIMPLEMENTED, EVIL)


@pytest.fixture
def service():
    made = Service()
    yield made
    made.told.set()
    made.server.stop(None).wait()


@pytest.fixture
def client(service):
    with attend.Client(service.address, attempts=1, timeout=60) as made:
        yield made


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE,
                                  grpc.StatusCode.NOT_FOUND], ids=lambda code: code.name)
def test_a_failure_is_shown_as_text(service, client, code):
    service.code = code
    for use in (lambda: client.attention(X, X, X), lambda: client.session(2, 8),
                lambda: client.stream().attention(X, X, X)):
        with pytest.raises(attend.Error) as caught:
            use()
        assert EVIL in caught.value.message or SHOWN in caught.value.message
        assert SHOWN in str(caught.value)
        last = traceback.format_exception_only(caught.value)
        assert len(last) == 1 and last[0].rstrip("\n").isprintable() and last[0].count("\n") == 1


def test_an_answer_and_its_check_are_shown_as_text(service, client):
    service.check = True
    answer = client.submit(X, X, X).result()
    assert answer.kernel == answer.check.detail == EVIL
    for shown in (repr(answer), repr(answer.check)):
        assert shown.isprintable() and "forged line" in shown
    service.check = False
    with pytest.raises(attend.Error, match="reference check failed") as caught:
        client.attention(X, X, X)
    assert SHOWN in str(caught.value) and str(caught.value).isprintable()


@pytest.fixture
def seen():
    with warnings.catch_warnings(record=True) as list_of_them:
        warnings.simplefilter("always")
        yield list_of_them


def is_asking():
    return any(thread.name == "attend-tenants" for thread in threading.enumerate())


def test_tenants_of_a_warning_are_shown_as_text(service, seen):
    with attend.Client(service.address, tenant="nosuch", timeout=60) as client:
        client.attention(X, X, X)
    text = str(seen[0].message)
    assert "no tenant 'nosuch'" in text and SHOWN in text and text.isprintable()


@pytest.mark.parametrize("way", ["call", "asyncio", "session"])
def test_answers_do_not_wait_for_the_query_for_tenants(service, seen, way):
    service.told.clear()
    with attend.Client(service.address, tenant="nosuch", attempts=1, timeout=60) as client:
        if way == "call":
            client.submit(X, X, X).result(timeout=60)
        elif way == "asyncio":
            asyncio.run(attend.aio._answer(client._attention_plan(X, X, X, {})))
        else:
            client.session(2, 8)
        assert not seen and is_asking() and not service.given_up.is_set()
        service.told.set()
        harness.wait_for("the warning", lambda: len(seen) == 1)
        harness.wait_for("the thread's end", lambda: not is_asking())
        for number in 2, 3:  # from now on it comes with the answer
            client.attention(X, X, X)
            assert len(seen) == number and service.asked == 1


@pytest.mark.parametrize("code,again", [("UNAVAILABLE", True), ("DEADLINE_EXCEEDED", True),
                                        ("RESOURCE_EXHAUSTED", True), ("UNIMPLEMENTED", False),
                                        ("PERMISSION_DENIED", False)])
def test_a_failed_query_for_tenants_is_repeated_unless_it_is_refused(service, seen, code, again):
    service.no_info = grpc.StatusCode[code]
    with attend.Client(service.address, tenant="nosuch", attempts=1, timeout=60) as client:
        client.attention(X, X, X)
        harness.wait_for("the thread's end", lambda: not is_asking())
        assert service.asked == 1 and not seen
        service.no_info = None
        client.attention(X, X, X)
        harness.wait_for("the thread's end", lambda: not is_asking())
        client.attention(X, X, X, tenant="another")
        assert service.asked == 1 + again and len(seen) == 2 * again


def test_a_query_for_tenants_ends_with_its_client(service, seen):
    service.told.clear()
    with attend.Client(service.address, tenant="nosuch", attempts=1, timeout=60) as client:
        client.attention(X, X, X)
        harness.wait_for("the question", lambda: service.asked == 1)
    harness.wait_for("the thread's end", lambda: not is_asking())
    harness.wait_for("the question's end", service.given_up.is_set)
    assert not seen


@pytest.mark.parametrize("answered", [True, False])
def test_a_program_may_end_during_a_query_for_tenants(service, answered):
    if not answered:
        service.told.clear()
    script = f"""
import sys
sys.path[:0] = {harness.PACKAGES!r}
import attend, numpy as np
x = np.ones((1, 2, 3, 8), np.float32)
client = attend.Client({service.address!r}, tenant="nosuch")
client.attention(x, x, x)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          timeout=90)
    assert done.returncode == 0 and ("no tenant 'nosuch'" in done.stderr) == answered, done
