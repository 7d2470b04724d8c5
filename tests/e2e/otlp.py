# SPDX-License-Identifier: Apache-2.0
"""A collector of OTLP for the tests: a gRPC service that reads spans from their bytes by the field
numbers of opentelemetry.proto, without generated classes."""

import collections
import struct
from concurrent import futures

import grpc

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

Span = collections.namedtuple(
    "Span", "trace span parent name kind begin end attributes code message resource scope")


def fields(data):
    """(number, value) of a message: integers for varints and fixed sizes, bytes otherwise."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7f) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 1:
            yield tag >> 3, struct.unpack_from("<Q", data, at)[0]
            at += 8
        elif tag & 7 == 5:
            yield tag >> 3, struct.unpack_from("<I", data, at)[0]
            at += 4
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            size = varint()
            assert at + size <= len(data)
            yield tag >> 3, data[at:at + size]
            at += size


def attribute(data):
    """(key, value) of a KeyValue."""
    pair = dict(fields(data))
    (kind, value), = fields(pair[2])
    return pair[1].decode(), value.decode() if kind == 1 else value


def read_span(data, resource, scope):
    one = {"attributes": {}}
    for number, value in fields(data):
        if number == 9:
            key, value = attribute(value)
            assert key not in one["attributes"]
            one["attributes"][key] = value
        else:
            assert number not in one, f"field {number} twice"
            one[number] = value
    status = dict(fields(one.get(15, b"")))
    assert len(one[1]) == 16 and len(one[2]) == 8
    return Span(one[1].hex(), one[2].hex(), one.get(4, b"").hex(), one[5].decode(), one[6], one[7],
                one[8], one["attributes"], status.get(3, 0), status.get(2, b"").decode(), resource,
                scope)


def read_request(data):
    """The spans of an ExportTraceServiceRequest."""
    spans = []
    for number, resource_spans in fields(data):
        assert number == 1
        resource, scopes = {}, []
        for part, value in fields(resource_spans):
            if part == 1:
                resource = dict(attribute(each) for _, each in fields(value))
            else:
                scopes.append(value)
        for scope_spans in scopes:
            scope = ""
            for part, value in fields(scope_spans):
                if part == 1:
                    scope = dict(fields(value))[1].decode()
                else:
                    spans.append(read_span(value, resource, scope))
    return spans


class Collector:
    """Serves on 127.0.0.1 until stop(). `answer(request bytes, context)` returns the response's
    bytes."""

    def __init__(self, answer=lambda request, context: b"", credentials=None):
        self.requests = []
        self._answer = answer
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        service, method = EXPORT[1:].split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.port = (self._server.add_insecure_port("127.0.0.1:0") if credentials is None else
                     self._server.add_secure_port("127.0.0.1:0", credentials))
        self._server.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def _export(self, request, context):
        answer = self._answer(request, context)
        self.requests.append(request)
        return answer

    def spans(self):
        return [span for request in list(self.requests) for span in read_request(request)]

    def stop(self):
        self._server.stop(None).wait()
