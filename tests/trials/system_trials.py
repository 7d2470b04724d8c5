# SPDX-License-Identifier: Apache-2.0
"""The N-th system call of a kind fails, while a server starts and while it serves."""

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

# Codes with which a call may end when a system call of the server fails.
REFUSALS = (caller.CODE.RESOURCE_EXHAUSTED, caller.CODE.UNAVAILABLE, caller.CODE.CANCELLED,
            caller.CODE.INTERNAL)
# Covers each kind of request, on a new connection and a new region client every time.
STEPS = ("reconnect", "unary", "stream", "in_chunks", "shared", "session", "session", "session",
         "oip", "scrape", "broken", "given_up")
# Libraries that abort the process when one of their system calls fails.
ASSERTS = re.compile(r"\((libgrpc|libgpr|libabsl|libupb)")


def numbers(most):
    """1, 2, 3, ..., up to `most`, in growing steps from 48."""
    n = 1
    while n <= most:
        yield n
        n += max(1, n // 24)


def caller_of(frames):
    """The innermost frame of a failure's stack that is not an allocator's."""
    names = (frame for frame in frames if not re.match(
        r"(operator new|malloc|calloc|realloc|reallocarray|memalign|attend::\(anonymous|"
        r"__gnu_cxx::|std::)|.*\((failing_calls|libstdc\+\+|libc\.so)", frame))
    return next(names, "nowhere")


class Ends(collections.Counter):
    """Counts each outcome, and the code locations at which the process ended."""

    def __init__(self):
        super().__init__()
        self.places = collections.Counter()

    def died(self, code, frames, log):
        """Counts an abort by gRPC or absl apart from one by the server's own code."""
        where = caller_of(frames)
        theirs = code == -signal.SIGABRT and ASSERTS.search(where)
        self["gRPC ended the process" if theirs else "DIED"] += 1
        if theirs:
            self.places[f"gRPC: {where}"] += 1
        else:
            self.places[f"DIED with {code}: {' < '.join(frames)}\n{log[-700:]}"] += 1


def serves(server):
    """Asserts that the server serves. Tries twice, as the first attempt may meet the fault."""
    try:
        trial.assert_serves(server)
    except grpc.RpcError as error:
        assert error.code() in REFUSALS, error
        # Channels of one process share connections and their reconnect backoff.
        trial.assert_serves(server, wait_for_ready=True)


def fail_at_start(folder, kind, most):
    """A server starts and serves, or exits with code 1 or 2 and the reason in its last line."""
    ends = Ends()
    for n in numbers(most):
        calls = SystemCalls(os.path.join(folder, "calls"))
        calls.fail(kind, n)
        try:
            server = trial.start(os.path.join(folder, "server"), env=calls.env)
        except harness.ServerEnded as end:
            if end.code == -signal.SIGABRT and end.log.endswith("what():  std::bad_alloc\n"):
                # In libraries' static objects or while settings are read: before the server has
                # its reserve of memory.
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
    """A server whose system calls can fail, and the outcomes of calls of every kind."""

    def __init__(self, folder, problems, seed, steps=STEPS):
        self._folder, self._problems, self._seed, self._steps = folder, problems, seed, steps
        self._count = 0
        self._kinds = kinds()
        self.server = self.calls = None
        self.outcomes = collections.Counter()
        self.begin()

    def begin(self):
        """Starts a server in place of the previous one."""
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
        """Makes each step once, on new connections."""
        target = caller.Target(self.server.address, self.server.metrics_address,
                               self.server.regions, refusals=REFUSALS)
        one = caller.Caller(target, self._problems, seed)
        try:
            for step in self._steps:
                self._kinds[step](one)
        except OSError:  # of the metrics' port or the region socket
            one.outcomes["socket", "closed"] += 1
        finally:
            from stateful_calls import free_all
            free_all(one)
            one.close()
            self.outcomes.update(one.outcomes)


def fail_while_serving(folder, problems, kind, most, seed=1):
    """Calls end with an allowed code and the server keeps serving, or gRPC aborts it."""
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
    """Why these trials cannot run, or None."""
    return None if library().exists() else f"there is no {library()}"


__all__ = ["KINDS", "Serving", "fail_at_start", "fail_while_serving", "missing", "numbers"]
