# SPDX-License-Identifier: Apache-2.0
"""The N-th call of a kind to the system fails, while a server starts and while it serves."""

import collections
import os
import re
import signal

import grpc

import caller
import harness
import trial
from live import kinds
from system_calls import KINDS, SystemCalls, library

# What a call may end with when the system fails its server; one that has no answer is a fault.
REFUSALS = (caller.CODE.RESOURCE_EXHAUSTED, caller.CODE.UNAVAILABLE, caller.CODE.CANCELLED,
            caller.CODE.INTERNAL)
# One of each way in, and a connection and a region client that are new every time.
STEPS = ("reconnect", "unary", "stream", "in_chunks", "shared", "session", "session", "session",
         "oip", "scrape", "broken", "given_up")
# Whose code asserts that a call to the system succeeds, and ends the process if it does not.
ASSERTS = re.compile(r"\((libgrpc|libgpr|libabsl|libupb)")


def numbers(most):
    """1, 2, 3, ... and later wider apart, up to `most`."""
    n = 1
    while n <= most:
        yield n
        n += max(1, n // 24)


def caller_of(frames):
    """The first of the calls behind a failure that is not an allocator's."""
    names = (frame for frame in frames if not re.match(
        r"(operator new|malloc|calloc|realloc|reallocarray|memalign|attend::\(anonymous|"
        r"__gnu_cxx::|std::)|.*\((failing_calls|libstdc\+\+|libc\.so)", frame))
    return next(names, "nowhere")


class Ends(collections.Counter):
    """How often each end was met, and where those were that ended the process."""

    def __init__(self):
        super().__init__()
        self.places = collections.Counter()

    def died(self, code, frames, log):
        """Of a call that gRPC or absl made, and of which they assert that it succeeds: theirs."""
        where = caller_of(frames)
        theirs = code == -signal.SIGABRT and ASSERTS.search(where)
        self["gRPC ended the process" if theirs else "DIED"] += 1
        if theirs:
            self.places[f"gRPC: {where}"] += 1
        else:
            self.places[f"DIED with {code}: {' < '.join(frames)}\n{log[-700:]}"] += 1


def serves(server):
    """The second time at the latest: the first may meet the fault."""
    try:
        trial.assert_serves(server)
    except grpc.RpcError as error:
        assert error.code() in REFUSALS, error
        # Channels of one process share connections, and what a failed one waits before the next.
        trial.assert_serves(server, wait_for_ready=True)


def fail_at_start(folder, kind, most):
    """A server starts and serves, or says in its last line why not, with exit code 1."""
    ends = Ends()
    for n in numbers(most):
        calls = SystemCalls(os.path.join(folder, "calls"))
        calls.fail(kind, n)
        try:
            server = trial.start(os.path.join(folder, "server"), env=calls.env)
        except harness.ServerEnded as end:
            if end.code == -signal.SIGABRT and end.log.endswith("what():  std::bad_alloc\n"):
                # Libraries' static objects and the settings, before there is a reserve of memory.
                ends["refused to start with std::bad_alloc"] += 1
            elif end.code in (1, 2) and end.log.strip():
                ends["refused to start, with the reason"] += 1
                ends.places[end.log.strip().splitlines()[-1][:150]] += 1
            else:
                ends.died(end.code, calls.where(kind), end.log)
            calls.close()
            continue
        met = calls.failed(kind) > 0
        serves(server)
        code = server.stop()
        if code != 0:
            ends.died(code, calls.where(kind), server.log())
        calls.close()
        if not met:
            break
        ends["started and served"] += 1
    return ends


class Serving:
    """A server, a caller of every kind, and what failed on the way."""

    def __init__(self, folder, problems, seed, steps=STEPS):
        self._folder, self._problems, self._seed, self._steps = folder, problems, seed, steps
        self._count = 0
        self._kinds = kinds()
        self.server = self.calls = None
        self.outcomes = collections.Counter()
        self.begin()

    def begin(self):
        """A server in place of the one before."""
        self.end()
        self._count += 1
        folder = os.path.join(self._folder, f"server{self._count}")
        os.makedirs(folder)
        self.calls = SystemCalls(os.path.join(folder, "calls"))
        self.server = trial.start(folder, "--handshake-timeout", "20", env=self.calls.env)
        self.work(self._seed)
        trial.await_rest(self.server)

    def end(self):
        if self.server is not None:
            self.server.kill()
            self.calls.close()
        self.server = None

    def work(self, seed):
        """Each step once, on connections of its own."""
        target = caller.Target(self.server.address, self.server.metrics_address,
                               self.server.regions, refusals=REFUSALS)
        one = caller.Caller(target, self._problems, seed)
        try:
            for step in self._steps:
                self._kinds[step](one)
        except OSError:  # the metrics, or the region socket
            one.outcomes["socket", "closed"] += 1
        finally:
            from stateful_calls import free_all
            free_all(one)
            one.close()
            self.outcomes.update(one.outcomes)


def fail_while_serving(folder, problems, kind, most, seed=1):
    """Calls end as they may, and the server serves on; or it ended where gRPC ends it."""
    serving, ends = Serving(folder, problems, seed), Ends()
    try:
        for n in numbers(most):
            before = serving.calls.failed(kind)
            serving.calls.fail(kind, n)
            serving.work(seed + n)
            met = serving.calls.failed(kind) > before
            serving.calls.heal(kind)
            if serving.server.ended():
                ends.died(serving.server.process.returncode, serving.calls.where(kind),
                          serving.server.log())
                serving.begin()
                continue
            trial.await_rest(serving.server)
            serves(serving.server)
            if not met:
                break
            ends["served on"] += 1
        code = serving.server.stop()
        assert code == 0, f"exit code {code}:\n{serving.server.log()[-3000:]}"
    finally:
        serving.end()
    return ends, serving.outcomes


def missing():
    """Why these trials cannot be made, or None."""
    return None if library().exists() else f"there is no {library()}"


__all__ = ["KINDS", "Serving", "fail_at_start", "fail_while_serving", "missing", "numbers"]
