# SPDX-License-Identifier: Apache-2.0
"""Callers with and without tokens, and the server's exact responses to them."""

import collections
import hashlib
import os
import queue
import secrets
import socket

import grpc

import wire

# The scope that each method requires: "any" is satisfied by any token.
SCOPES = {
    "attend.v1.AttentionService": {"GetServerInfo": "any", None: "compute"},
    "attend.v1.SessionService": {None: "sessions"},
    "attend.v1.AdminService": {None: "admin"},
    "inference.GRPCInferenceService": {
        "ServerLive": "any", "ServerReady": "any", "ModelReady": "any",
        "ModelInfer": "compute", "ModelStreamInfer": "compute",
        "SystemSharedMemoryStatus": "compute", "SystemSharedMemoryRegister": "compute",
        "SystemSharedMemoryUnregister": "compute", "CudaSharedMemoryStatus": "compute",
        "CudaSharedMemoryRegister": "compute", "CudaSharedMemoryUnregister": "compute",
        None: "info"},
    "grpc.reflection.v1.ServerReflection": {None: "info"},
    "grpc.reflection.v1alpha.ServerReflection": {None: "info"},
    "no.such.Service": {None: "any"},
}

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x00"  # a request on its streams

Method = collections.namedtuple("Method", "path scope")
Answer = collections.namedtuple("Answer", "code message trailers")


def token():
    return "attend_" + secrets.token_urlsafe(32)


def line(name, of, *fields):
    """A caller's line in the file of --tokens."""
    return " ".join([f"name={name}", "sha256=" + hashlib.sha256(of.encode()).hexdigest(),
                     *fields]) + "\n"


def rejected(server, reason):
    return server.metric("attend_rejected_requests_total", reason=reason)


def methods():
    """Every method of the server, and some that do not exist."""
    services = [*wire.pb.DESCRIPTOR.services_by_name.values(),
                *wire.sessions_pb.DESCRIPTOR.services_by_name.values(),
                *wire.admin_pb.DESCRIPTOR.services_by_name.values(),
                *wire.oip_pb.DESCRIPTOR.services_by_name.values()]
    names = [(service.full_name, method.name) for service in services for method in service.methods]
    names += [("grpc.reflection.v1.ServerReflection", "ServerReflectionInfo"),
              ("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
              ("no.such.Service", "Attend"), ("attend.v1.AttentionService", "NoSuchMethod")]
    found = []
    for service, name in names:
        scopes = SCOPES[service]
        scope = "any" if name == "NoSuchMethod" else scopes.get(name, scopes[None])
        found.append(Method(f"/{service}/{name}", scope))
    return found


def bearer(of, *more):
    return [("authorization", f"Bearer {of}"), *more]


def ask(channel, path, metadata=(), message=b""):
    """The response to a call of any method, made as a stream of one message; on the wire there is
    no difference."""
    call = channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=wire.SECONDS)
    try:
        for _ in call:
            call.cancel()  # for a stream that stays open
    except grpc.RpcError:
        pass
    trailers = sorted((key, value) for key, value in call.trailing_metadata() or ()
                      if key != "grpc-retry-pushback-ms")
    return Answer(call.code(), call.details(), trailers)


def refusal(call):
    """The status of a call of a stub, which must fail."""
    try:
        call()
    except grpc.RpcError as error:
        return Answer(error.code(), error.details(), sorted(error.trailing_metadata() or ()))
    raise AssertionError("the call was answered")


class Stream:
    """One caller's stream of requests, sent one at a time."""

    def __init__(self, method, of=None):
        self.requests = queue.Queue()
        self.call = method(iter(self.requests.get, None), metadata=bearer(of) if of else (),
                           timeout=wire.SECONDS)

    def ask(self, request):
        self.requests.put(request)
        return next(self.call)

    def refusal(self, request):
        return refusal(lambda: self.ask(request))

    def close(self):
        self.requests.put(None)
        self.call.cancel()


TENANTS = "--tenant=blue=1,green=1"
TOKENS = {name: token() for name in (
    "blue", "green", "computes", "sessions", "informed", "operator", "gate", "expired")}
NO_TOKEN = ('no token: the call must have the metadata authorization, "Bearer TOKEN"')
ALL = "scopes=compute,sessions,info"
TOKENS_FILE = "".join((
    line("blue", TOKENS["blue"], "tenant=blue", ALL),
    line("green", TOKENS["green"], "tenant=green", ALL),
    line("computes", TOKENS["computes"], "tenant=blue", "scopes=compute"),
    line("sessions", TOKENS["sessions"], "tenant=blue", "scopes=sessions"),
    line("informed", TOKENS["informed"], "tenant=blue", "scopes=info"),
    line("operator", TOKENS["operator"], "scopes=admin"),
    line("gate", TOKENS["gate"], ALL, "any-tenant"),
    line("expired", TOKENS["expired"], ALL, "expires=2020-01-01"),
))


class Regions:
    """A connection to the socket of shared memory."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(wire.SECONDS)
        self.socket.connect(str(path))

    def ask(self, **request):
        self.socket.send(wire.shm.RegionRequest(**request).SerializeToString())
        packet, files, _, _ = socket.recv_fds(self.socket, 4096, 1)
        for file in files:
            os.close(file)
        return wire.shm.RegionReply.FromString(packet)

    def identify(self, of, tenant=""):
        return self.ask(identify=wire.shm.Identify(token=of, tenant=tenant))

    def close(self):
        self.socket.close()
