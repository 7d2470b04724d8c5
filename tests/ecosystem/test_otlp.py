# SPDX-License-Identifier: Apache-2.0
"""A server's spans, parsed with OpenTelemetry's own classes (opentelemetry-proto)."""

from concurrent import futures

import pytest

pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
import grpc  # noqa: E402
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb  # noqa: E402
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc  # noqa: E402
from opentelemetry.proto.trace.v1 import trace_pb2  # noqa: E402

import harness  # noqa: E402

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(rpc.TraceServiceServicer):
    def __init__(self):
        self.requests = []

    def Export(self, request, context):
        self.requests.append(request)
        return pb.ExportTraceServiceResponse()


def unknown_fields(message):
    """Whether the message or a nested one has fields that its class does not know."""
    again = type(message)()
    again.ParseFromString(message.SerializeToString())
    again.DiscardUnknownFields()
    return again.SerializeToString() != message.SerializeToString()


def test_opentelemetry_reads_what_the_server_sends(tmp_path):
    if not harness.binary("attend-server").exists():
        pytest.skip(f"there is no {harness.binary('attend-server')}")
    collector = Collector()
    service = grpc.server(futures.ThreadPoolExecutor(1))
    rpc.add_TraceServiceServicer_to_server(collector, service)
    port = service.add_insecure_port("127.0.0.1:0")
    service.start()
    server = harness.Server(tmp_path, "--otlp-endpoint", f"127.0.0.1:{port}")
    harness.run_client("--server", server.address, "check", "--shape", "B1,H2,L64,D32",
                       env={"TRACEPARENT": f"00-{TRACE}-{PARENT}-01"})
    assert server.stop() == 0
    service.stop(None).wait()
    assert collector.requests and not any(map(unknown_fields, collector.requests))
    spans = []
    for request in collector.requests:
        whole, = request.resource_spans
        resource = {each.key: each.value.string_value for each in whole.resource.attributes}
        assert resource["service.name"] == "attend-server" and resource["service.version"]
        scope, = whole.scope_spans
        assert scope.scope.name == "attend"
        spans += scope.spans
    whole = [span for span in spans if span.kind == trace_pb2.Span.SPAN_KIND_SERVER]
    assert whole and all(span.trace_id.hex() == TRACE for span in spans)
    for span in whole:
        assert span.parent_span_id.hex() == PARENT and span.flags == 1
        assert span.name.startswith("attend.v1.")
        assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        attributes = {each.key: each.value for each in span.attributes}
        assert attributes["rpc.system"].string_value == "grpc"
        assert attributes["rpc.grpc.status_code"].WhichOneof("value") == "int_value"
    phases = {span.name for span in spans if span.kind == trace_pb2.Span.SPAN_KIND_INTERNAL}
    assert {"receive", "queue", "copy_in", "kernel", "copy_out", "check", "reply"} <= phases
