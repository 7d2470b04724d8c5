# SPDX-License-Identifier: Apache-2.0
"""The Python client against a server that sends what no server should: texts that a terminal would
obey or that look like lines of the program's own, in all that Python prints by itself."""

import concurrent.futures
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

# Sets a terminal's title, clears it, begins a line of its own, and writes from right to left.
EVIL = "\x1b]0;title\a\x1b[2J\r\nforged line\u202e\u009b2J\ufeff"
SHOWN = r"\u001b]0;title\u0007\u001b[2J\u000d\nforged line\u202e\u009b2J\ufeff"
X = np.ones((1, 2, 3, 8), np.float32)


class Service:
    """Answers with O as q, unless `code` says how to fail. check: whether the answer's passed, None
    for none. GetServerInfo is counted, waits for `told`, and fails with `no_info`."""

    def __init__(self):
        self.check, self.code, self.no_info, self.asked = None, None, None, 0
        self.told = threading.Event()
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
        self.told.wait()
        if self.no_info is not None:
            context.abort(self.no_info, EVIL)
        return wire.pb.GetServerInfoResponse(version=EVIL, tenants=[EVIL])

    def __getattr__(self, name):  # the other methods
        if not name[0].isupper():
            raise AttributeError(name)
        return lambda request, context: context.abort(self.code, EVIL)


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


def test_tenants_of_a_warning_are_shown_as_text(service):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with attend.Client(service.address, tenant="nosuch", timeout=60) as client:
            client.attention(X, X, X)
            harness.wait_for("the warning", lambda: seen)
    text = str(seen[0].message)
    assert "no tenant 'nosuch'" in text and SHOWN in text and text.isprintable()
