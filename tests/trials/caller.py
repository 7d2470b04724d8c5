# SPDX-License-Identifier: Apache-2.0
"""One client of a server on trial: random calls of every kind from one seed. Each call ends with
one outcome that is right, or CallFault is raised."""

import collections
import dataclasses
import random

import grpc

import wire

CODE = grpc.StatusCode
SECONDS = 120  # a call that has no answer then has none


UNANSWERED_MOST = 10_000


class CallFault(AssertionError):
    """What a server must never do."""


@dataclasses.dataclass
class Target:
    """Where the server is, and what it may answer beside what is right."""
    address: str
    metrics: str = ""
    region_socket: str = ""
    tenants: tuple = ("a", "b")
    # What full queues and limits say of good calls, and what faults on the way do.
    refusals: tuple = (CODE.RESOURCE_EXHAUSTED, CODE.UNAVAILABLE)
    locks: object = None  # of a server with tokens, and TLS perhaps: locks.Locks


def check(true, what):
    if not true:
        raise CallFault(what)


def open_channel(address, locks, options):
    """With a connection of its own: one that failed before makes others wait."""
    options = [*options, ("grpc.use_local_subchannel_pool", 1)]
    if locks is not None and locks.channel is not None:
        return grpc.secure_channel(address, locks.channel, options=options)
    return grpc.insecure_channel(address, options=options)


def code_of(call):
    """The code of a call that was begun by .future(), and its answer."""
    try:
        return CODE.OK, call.result(), ""
    except grpc.RpcError as error:
        return error.code(), None, error.details()
    except grpc.FutureCancelledError:
        return CODE.CANCELLED, None, ""


class Caller:
    """A connection, and counts of how its calls ended, by kind and outcome."""

    def __init__(self, target, problems, seed):
        self.target, self.problems = target, problems
        self.seed = seed
        self.random = random.Random(seed)
        self.outcomes = collections.Counter()
        # Ids of good requests that were not given up and have no good answer; the last of many.
        self.unanswered = collections.deque(maxlen=UNANSWERED_MOST)
        self.sequence = 0
        self.channel = None
        self.connect()

    def connect(self):
        """Anew, so that the connection is this caller's own."""
        self.close()
        options = [*wire.UNLIMITED, ("grpc.initial_reconnect_backoff_ms", 50),
                   ("grpc.max_reconnect_backoff_ms", 500), ("grpc.enable_retries", 0)]
        self.channel = open_channel(self.target.address, self.target.locks, options)
        self.attention = wire.stub.AttentionServiceStub(self.channel)
        self.sessions = wire.sessions_stub.SessionServiceStub(self.channel)
        self.oip = wire.oip_stub.GRPCInferenceServiceStub(self.channel)

    def close(self):
        if self.channel is not None:
            self.channel.close()
        self.channel = None

    def end(self, kind, code):
        self.outcomes[kind, code.name] += 1

    def note(self, request_id, code):
        """How a good request that was not given up ended."""
        if code is not CODE.OK:
            self.unanswered.append(request_id)

    def name(self, of):
        """A request_id that is used once."""
        self.sequence += 1
        return f"{of}-{self.seed}-{self.sequence}"

    def metadata(self, tenant=None):
        tenant = tenant or self.random.choice(self.target.tenants)
        locks = self.target.locks
        return [("x-attend-tenant", tenant), *(locks.metadata(tenant) if locks else ())]

    def take(self, kind, call, allowed=()):
        """The answer of a good call, or None if it was refused as it may be."""
        code, answer, details = code_of(call)
        self.end(kind, code)
        check(code is CODE.OK or code in self.target.refusals or code in allowed,
              f"{kind}: {code.name}: {details}")
        return answer

    def expect(self, kind, problem, answer):
        check(list(answer.raw) == problem.answer, f"{kind}: the answer has other bits")
        check(not answer.HasField("check") or answer.check.ok,
              f"{kind}: the check failed: {answer.check.detail}")
