# SPDX-License-Identifier: Apache-2.0
"""A traceparent sent with a call is returned in metadata, logged, and exported by OTLP."""

import json
import re
import signal

import grpc
import pytest

import certificates
import harness
import otlp
import wire

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
NOT_SAMPLED = f"00-{TRACE}-{PARENT}-00"
BAD = ["", "00", SAMPLED.upper(), SAMPLED + "-x", "ff" + SAMPLED[2:],
       SAMPLED.replace(TRACE, "0" * 32),
       SAMPLED.replace(PARENT, "0" * 16), SAMPLED[:-1] + "g", "a" * 2000]


@pytest.fixture
def collector():
    started = otlp.Collector()
    yield started
    started.stop()


def attend(address, metadata=(), **fields):
    """Makes one call; returns the traceparents in its initial metadata."""
    with grpc.insecure_channel(address) as channel:
        method = wire.stub.AttentionServiceStub(channel).Attend
        _, call = method.with_call(wire.small_request(**fields), metadata=metadata,
                                   timeout=wire.SECONDS)
        return [value for key, value in call.initial_metadata() if key == "traceparent"]


def test_without_a_collector_a_trace_is_logged_and_returned(start_server, tmp_path):
    path = tmp_path / "access.log"
    server = start_server("--access-log", path, "--log-format", "json")
    assert attend(server.address, [("traceparent", SAMPLED)], request_id="yes") == [SAMPLED]
    assert attend(server.address, request_id="no") == []
    for n, bad in enumerate(BAD):
        assert attend(server.address, [("traceparent", bad)], request_id=f"bad-{n}") == [], bad
    twice = [("traceparent", SAMPLED), ("traceparent", NOT_SAMPLED)]
    assert attend(server.address, twice, request_id="twice") == []
    with pytest.raises(grpc.RpcError) as failed:
        attend(server.address, [("traceparent", NOT_SAMPLED)], request_id="failed", softcap=-1)
    assert ("traceparent", NOT_SAMPLED) in failed.value.initial_metadata()
    assert server.stop() == 0
    said = {line["request_id"]: line
            for line in map(json.loads, path.read_text().splitlines())}
    assert len(said) == 4 + len(BAD)
    for name in ("yes", "failed"):
        assert said[name]["trace_id"] == TRACE and said[name]["parent_span_id"] == PARENT
        assert "span_id" not in said[name]
    assert not any("trace_id" in line for name, line in said.items()
                   if name not in ("yes", "failed"))
    event, = [line for line in map(json.loads, server.log().splitlines())
              if line["message"] == "request failed"]
    assert event["trace_id"] == TRACE and event["parent_span_id"] == PARENT


def test_spans_by_phase_reach_a_collector(start_server, collector, tmp_path):
    path = tmp_path / "access.log"
    server = start_server("--otlp-endpoint", collector.address, "--access-log", path,
                          "--tenant", "team=2")
    tenant = ("x-attend-tenant", "team")
    own, = attend(server.address, [("traceparent", SAMPLED), tenant], request_id="one", check=True)
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", own) and PARENT not in own
    assert attend(server.address, [("traceparent", NOT_SAMPLED)]) == [NOT_SAMPLED]
    assert attend(server.address) == []
    with pytest.raises(grpc.RpcError):
        attend(server.address, [("traceparent", SAMPLED)], request_id="bad", softcap=-1)
    with grpc.insecure_channel(server.address) as channel:
        info = wire.stub.AttentionServiceStub(channel).GetServerInfo
        info(wire.pb.GetServerInfoRequest(), metadata=[("traceparent", SAMPLED)])
    assert server.stop() == 0  # which exports the rest
    spans = collector.spans()
    whole = {span.attributes.get("attend.request_id", span.name): span
             for span in spans if span.kind == 2}
    assert set(whole) == {"one", "bad", "attend.v1.AttentionService/GetServerInfo"}
    assert all(span.trace == TRACE for span in spans)
    assert all(span.parent == PARENT for span in whole.values())
    assert len({span.span for span in spans}) == len(spans)
    one, bad = whole["one"], whole["bad"]
    assert own.split("-")[2] == one.span and one.name == "attend.v1.AttentionService/Attend"
    assert one.resource["service.name"] == "attend-server" and one.scope == "attend"
    assert one.attributes["rpc.service"] == "attend.v1.AttentionService"
    assert one.attributes["rpc.method"] == "Attend" and one.attributes["rpc.system"] == "grpc"
    assert one.attributes["rpc.grpc.status_code"] == 0 and one.code == 0
    assert one.attributes["attend.tenant"] == "team"
    assert one.attributes["attend.dtype"] == "float32"
    assert one.attributes["attend.kernel"].startswith("cpu_")
    children = [span for span in spans if span.parent == one.span]
    assert [span.name for span in children] == ["receive", "queue", "copy_in", "kernel", "copy_out",
                                                "check", "reply"]
    at = one.begin
    for span in children:
        assert span.kind == 1 and at <= span.begin <= span.end <= one.end, span
        at = span.end
    assert bad.code == 2 and "softcap" in bad.message
    assert bad.attributes["rpc.grpc.status_code"] == 3
    line = next(line for line in map(json.loads, path.read_text().splitlines())
                if line.get("request_id") == "one")
    assert (line["trace_id"], line["span_id"], line["parent_span_id"]) == (TRACE, one.span, PARENT)


def test_traces_are_sampled_and_each_stream_has_a_span(start_server, collector):
    server = start_server("--otlp-endpoint", collector.address, "--otlp-sample", "1")
    returned = {attend(server.address)[0] for _ in range(3)}
    with wire.connect(server.address) as service:
        requests = [wire.small_request(request_id=name) for name in ("a", "b")]
        stream = service.AttendStream(iter(requests), metadata=[("traceparent", SAMPLED)])
        assert len(list(stream)) == 2
        assert ("traceparent", SAMPLED) in stream.initial_metadata()
    assert server.stop() == 0
    whole = [span for span in collector.spans() if span.kind == 2]
    own = {f"00-{span.trace}-{span.span}-01" for span in whole if not span.parent}
    assert own == returned and len(returned) == 3
    of_stream = [span for span in whole if span.name.endswith("/AttendStream")]
    assert sorted(span.attributes["attend.request_id"] for span in of_stream) == ["a", "b"]
    assert {(span.trace, span.parent) for span in of_stream} == {(TRACE, PARENT)}


def test_a_missing_or_refusing_collector_loses_spans_but_no_call(start_server):
    gone = f"127.0.0.1:{harness.free_port()}"
    server = start_server("--otlp-endpoint", gone, "--otlp-sample", "1")
    wire.assert_serves(server.address)
    assert server.stop() == 0, server.log()

    def refuse(request, context):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not these")

    collector = otlp.Collector(refuse)
    server = start_server("--otlp-endpoint", collector.address, "--otlp-sample", "1")
    wire.assert_serves(server.address)
    failed = harness.wait_for("failed spans",
                              lambda: server.metric("attend_spans_total", outcome="failed"))
    assert failed == 1 + 7  # the call and its phases, including the check
    assert server.metric("attend_spans_total", outcome="exported") == 0
    harness.wait_for("the log to say so", lambda: "spans are lost" in server.log())
    assert "not these" in server.log() and server.stop() == 0
    collector.stop()


def test_spans_that_a_collector_refuses_are_counted(start_server):
    partial_success = b"\x0a\x07\x08\x02\x12\x03old"  # two spans, with the error "old"
    collector = otlp.Collector(lambda request, context: partial_success)
    server = start_server("--otlp-endpoint", collector.address, "--otlp-sample", "1")
    wire.assert_serves(server.address)
    refused = harness.wait_for("refused spans",
                               lambda: server.metric("attend_spans_total", outcome="failed"))
    assert refused == 2 and server.metric("attend_spans_total", outcome="exported") == 6
    harness.wait_for("the log to say so", lambda: "spans are lost" in server.log())
    assert 'spans=2 error="old"' in server.log() and server.stop() == 0
    collector.stop()


def test_the_tool_and_the_library_propagate_a_trace(start_server, collector, libraries, random):
    import attend
    server = start_server("--otlp-endpoint", collector.address)
    env = {"TRACEPARENT": SAMPLED}
    harness.run_client("--server", server.address, "check", "--shape", "B1,H1,L16,D16", env=env)
    harness.run_client("--server", server.address, "session", "list", env=env)
    harness.run_client("--server", server.address, "info", env={"TRACEPARENT": "none of this"})
    q = random.standard_normal((1, 2, 16, 16)).astype("float32")
    with attend.Client(server.address) as client:
        client.attention(q, q, q, traceparent=SAMPLED, request_id="call")
        client.attention(q, q, q, request_id="not traced")
        with client.stream(traceparent=SAMPLED) as stream:
            stream.attention(q, q, q, request_id="on a stream")
        with client.session(2, 16, dtype="float32", traceparent=SAMPLED) as session:
            session.attend(q, q, q, request_id="on a session")
            session.keep_alive()
        with pytest.raises(attend.Error, match="traceparent is \"00-x\", must be 00-TRACE-SPAN-"):
            client.attention(q, q, q, traceparent="00-x")
        with pytest.raises(attend.Error, match="traceparent is \"00-x\""):
            client.session(2, 16, traceparent="00-x")
        with pytest.raises(attend.Error, match="traceparent is \"00-x\""):
            client.stream(traceparent="00-x").attention(q, q, q)
    with pytest.raises(attend.Error, match="traceparent is \"00-x\""):
        attend.Client(server.address, traceparent="00-x")
    assert server.stop() == 0
    whole = [span for span in collector.spans() if span.kind == 2]
    assert {(span.trace, span.parent) for span in whole} == {(TRACE, PARENT)}
    ids = {span.attributes.get("attend.request_id") for span in whole}
    assert {"call", "on a stream", "on a session"} < ids and "not traced" not in ids
    methods = [span.attributes["rpc.method"] for span in whole]
    for method in ("AttendStream", "CreateSession", "KeepAlive", "FreeSession", "ListSessions"):
        assert method in methods


def test_a_client_with_a_span_sends_it_on_every_call(start_server, collector, libraries, random):
    import attend
    server = start_server("--otlp-endpoint", collector.address)
    q = random.standard_normal((1, 2, 16, 16)).astype("float32")
    with attend.Client(server.address, traceparent=SAMPLED) as client:
        client.attention(q, q, q, transport="chunked")
        with client.stream() as stream:
            stream.attention(q, q, q)
        with client.session(2, 16, dtype="float32") as session:
            session.attend(q, q, q)
            session.info()
        client.sessions()
        client.server_info()
    harness.run_client("--server", server.address, "info", env={"TRACEPARENT": SAMPLED})
    assert server.stop() == 0
    whole = [span for span in collector.spans() if span.kind == 2]
    assert {(span.trace, span.parent) for span in whole} == {(TRACE, PARENT)}
    methods = [span.attributes["rpc.method"] for span in whole]
    assert set(methods) == {"Attend", "AttendChunked", "AttendStream", "CreateSession",
                            "GetSession", "FreeSession", "ListSessions", "GetServerInfo"}
    assert methods.count("AttendChunked") == 1  # whatever the number of its connections


def test_spans_contain_no_names_invented_by_clients(start_server, collector):
    server = start_server("--otlp-endpoint", collector.address)
    with grpc.insecure_channel(server.address) as channel:
        for n in range(3):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/attend.v1.AttentionService/Made{n}")(
                    b"", metadata=[("traceparent", SAMPLED)])
    assert server.stop() == 0
    assert [span.name for span in collector.spans()] == ["unknown method"] * 3


def test_without_sampling_only_failures_return_a_trace(start_server):
    server = start_server("--log-format", "json")
    assert attend(server.address, [("traceparent", SAMPLED)]) == []
    with pytest.raises(grpc.RpcError):
        attend(server.address, [("traceparent", SAMPLED)], softcap=-1)
    assert server.stop() == 0
    event, = [line for line in map(json.loads, server.log().splitlines())
              if line["message"] == "request failed"]
    assert event["trace_id"] == TRACE and event["parent_span_id"] == PARENT


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("ca"))


def test_spans_are_sent_only_to_a_trusted_collector(start_server, ca, tmp_path):
    """A collector that requires a certificate; the first one is issued by an untrusted
    authority."""
    foreign = certificates.Authority(tmp_path / "foreign")
    shown = [(ca.server_key.read_bytes(), ca.server.read_bytes())]
    collector = otlp.Collector(credentials=grpc.ssl_server_credentials(
        shown, ca.ca.read_bytes(), require_client_auth=True))
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(foreign.ca.read_bytes())
    server = start_server("--otlp-endpoint", f"https://{collector.address}", "--otlp-sample", "1",
                          "--otlp-tls-ca", trusted, "--otlp-tls-cert", ca.client,
                          "--otlp-tls-key", ca.client_key)
    attend(server.address, request_id="early")
    harness.wait_for("lost spans", lambda: "spans are lost" in server.log())
    assert collector.spans() == []
    trusted.write_text("none of this")
    server.signal(signal.SIGHUP)
    harness.wait_for("a refusal", lambda: server.metric("attend_reloads_total", what="otlp-tls-ca",
                                                        result="failed") == 1)
    assert f"otlp-tls-ca {trusted} has no certificate in PEM" in server.log()
    trusted.write_bytes(ca.ca.read_bytes())
    server.signal(signal.SIGHUP)
    harness.wait_for("a reload", lambda: server.metric("attend_reloads_total", what="otlp-tls-ca",
                                                       result="ok") == 1)
    attend(server.address, request_id="late")
    assert server.stop() == 0
    ids = [span.attributes["attend.request_id"] for span in collector.spans() if span.kind == 2]
    assert ids == ["late"]
    collector.stop()


def test_a_plaintext_collector_gets_no_spans_meant_for_tls(start_server, collector,
                                                                        ca):
    server = start_server("--otlp-endpoint", f"https://{collector.address}", "--otlp-sample", "1",
                          "--otlp-tls-ca", ca.ca)
    attend(server.address)
    harness.wait_for("lost spans", lambda: "spans are lost" in server.log())
    assert collector.spans() == [] and server.stop() == 0


def test_bad_certificate_files_for_a_collector_fail_the_start(tmp_path, ca):
    def error(*flags):
        with pytest.raises(AssertionError) as failed:
            harness.Server(tmp_path / "server", "--otlp-endpoint", "https://127.0.0.1:1", *flags)
        return str(failed.value)

    assert "otlp-tls-ca " in error("--otlp-tls-ca", tmp_path / "none")
    assert f"otlp-tls-ca {ca.ca_key} has no certificate in PEM" in \
        error("--otlp-tls-ca", ca.ca_key)
    assert f"otlp-tls-key {ca.server_key} is not the key of otlp-tls-cert {ca.client}" in \
        error("--otlp-tls-cert", ca.client, "--otlp-tls-key", ca.server_key)
