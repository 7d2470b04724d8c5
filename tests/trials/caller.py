# SPDX-License-Identifier: Apache-2.0
"""One client of a server under trial: random calls of every kind from one seed. CallFault is raised
unless each call ends with an outcome that is allowed."""

import collections
import dataclasses
import random

import grpc

import wire

CODE = grpc.StatusCode
SECONDS = 120  # timeout of a call


UNANSWERED_MOST = 10_000


class CallFault(AssertionError):
    """The server did something that it must never do."""


@dataclasses.dataclass
class Target:
    """Where the server is, and how it may refuse valid calls."""
    address: str
    metrics: str = ""
    region_socket: str = ""
    tenants: tuple = ("a", "b")
    # Codes of valid calls that meet full queues, limits, or faults of the network.
    refusals: tuple = (CODE.RESOURCE_EXHAUSTED, CODE.UNAVAILABLE)
    locks: object = None  # locks.Locks if the server needs tokens


def check(true, what):
    if not true:
        raise CallFault(what)


def open_channel(address, locks, options):
    """A channel with its own connection: shared ones would wait for each other's reconnect
    backoff."""
    options = [*options, ("grpc.use_local_subchannel_pool", 1)]
    if locks is not None and locks.channel is not None:
        return grpc.secure_channel(address, locks.channel, options=options)
    return grpc.insecure_channel(address, options=options)


def code_of(call):
    """The code, answer and details of a call that was started by .future()."""
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
        # Ids of the last valid requests that were not cancelled and yet not answered with OK.
        self.unanswered = collections.deque(maxlen=UNANSWERED_MOST)
        self.sequence = 0
        self.channel = None
        self.connect()

    def connect(self):
        """Opens a new connection, which no other caller uses."""
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
        """Records how a valid request that was not cancelled ended."""
        if code is not CODE.OK:
            self.unanswered.append(request_id)

    def name(self, of):
        """A unique request_id."""
        self.sequence += 1
        return f"{of}-{self.seed}-{self.sequence}"

    def metadata(self, tenant=None):
        tenant = tenant or self.random.choice(self.target.tenants)
        locks = self.target.locks
        return [("x-attend-tenant", tenant), *(locks.metadata(tenant) if locks else ())]

    def take(self, kind, call, allowed=()):
        """The answer of a valid call, or None if it was refused with an allowed code."""
        code, answer, details = code_of(call)
        self.end(kind, code)
        check(code is CODE.OK or code in self.target.refusals or code in allowed,
              f"{kind}: {code.name}: {details}")
        return answer

    def expect(self, kind, problem, answer):
        check(list(answer.raw) == problem.answer, f"{kind}: the answer has other bits")
        check(not answer.HasField("check") or answer.check.ok,
              f"{kind}: the check failed: {answer.check.detail}")
