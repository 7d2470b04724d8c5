# SPDX-License-Identifier: Apache-2.0
"""Open calls and connections whose caller loses its rights end at their next request, or without
one if none comes."""

import datetime
import shutil
import ssl

import grpc

import certificates
import chunked
import harness
import strangers
import wire
from strangers import TENANTS

CODE = grpc.StatusCode


def test_removed_callers_are_refused(start_server, tmp_path):
    """Open streams and connections end at their next request at the latest."""
    file = tmp_path / "tokens"
    kept, gone, lesser = strangers.token(), strangers.token(), strangers.token()

    def write(text):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    always = strangers.line("kept", kept, "tenant=blue", "scopes=compute")
    write(always + strangers.line("gone", gone, "tenant=blue", "scopes=compute") +
          strangers.line("lesser", lesser, "tenant=blue", "scopes=compute,sessions"))
    server = start_server(TENANTS, "--tokens", file, "--oip", "--shared-memory",
                          "--shared-memory-socket", tmp_path / "regions" / "sock")

    def open_regions(token):
        regions = strangers.Regions(tmp_path / "regions" / "sock")
        assert regions.identify(token).HasField("identified")
        assert regions.ask(create=wire.shm.CreateRegion(bytes=4096)).HasField("created")
        return regions

    with wire.connect(server.address) as service, \
            grpc.insecure_channel(server.address) as triton_channel:
        streams = {token: strangers.Stream(service.AttendStream, token)
                   for token in (kept, gone, lesser)}
        triton = strangers.Stream(
            wire.oip_stub.GRPCInferenceServiceStub(triton_channel).ModelStreamInfer, gone)
        for stream in streams.values():
            assert stream.ask(wire.small_request()).raw
        assert triton.ask(wire.oip_pb.ModelInferRequest(id="bad")).error_message
        regions = {token: open_regions(token) for token in (kept, gone)}
        write(always + strangers.line("lesser", lesser, "tenant=blue", "scopes=compute"))
        harness.wait_for("the new file to be read", lambda: server.metric(
            "attend_tokens_reloads_total", result="ok") == 1)
        assert streams[kept].ask(wire.small_request()).raw
        for stream, request in ((streams[gone], wire.small_request()),
                                (triton, wire.oip_pb.ModelInferRequest(id="bad"))):
            assert stream.refusal(request) == (CODE.UNAUTHENTICATED, "the token is unknown", [])
        assert streams[lesser].refusal(wire.small_request()) == (
            CODE.PERMISSION_DENIED,
            "the caller's tenant or scopes have changed: open another stream", [])
        create = {"create": wire.shm.CreateRegion(bytes=4096)}
        assert regions[kept].ask(**create).HasField("created")
        told = wire.shm.RegionReply.FromString(regions[gone].socket.recv(4096)).error
        assert told.message == "the token is unknown"
        assert regions[gone].socket.recv(1) == b""
        harness.wait_for("its connection to end",
                         lambda: server.metric("attend_shared_memory_clients") == 1)
        for each in (*streams.values(), *regions.values()):
            each.close()
    assert server.metric("attend_rejected_requests_total", reason="unknown_caller") == 3


def test_idle_streams_end_when_their_caller_is_removed(start_server, tmp_path):
    """Streams and connections to the regions' socket that send nothing more."""
    file = tmp_path / "tokens"
    kept, gone = strangers.token(), strangers.token()

    def write(*lines):
        (tmp_path / "new").write_text("".join(lines))
        (tmp_path / "new").rename(file)

    always = strangers.line("kept", kept, "scopes=compute,info")
    write(always, strangers.line("gone", gone, "scopes=compute,info"))
    path = tmp_path / "regions" / "sock"
    server = start_server("--tokens", file, "--shared-memory", "--shared-memory-socket", path)
    known = (CODE.UNAUTHENTICATED, "the token is unknown", [])
    with wire.connect(server.address) as service, \
            grpc.insecure_channel(server.address) as channel:
        reflection = channel.stream_stream(strangers.REFLECTION)
        began = wire.pb.AttendChunkedRequest(header=chunked.header_of(wire.small_request()))
        open_streams = {
            token: (strangers.Stream(service.AttendStream, token),
                    strangers.Stream(service.AttendChunked, token),  # without a first message
                    strangers.Stream(service.AttendChunked, token),
                    strangers.Stream(reflection, token))
            for token in (kept, gone)}
        regions = {}
        for token, streams in open_streams.items():
            assert streams[0].ask(wire.small_request()).raw
            assert streams[2].ask(began).grant.token
            assert b"AttentionService" in streams[3].ask(strangers.LIST_SERVICES)
            regions[token] = strangers.Regions(path)
            assert regions[token].identify(token).HasField("identified")
            create = {"create": wire.shm.CreateRegion(bytes=4096)}
            assert regions[token].ask(**create).HasField("created")
        harness.wait_for("all to be open", lambda: server.metric(
            "attend_tenant_used", tenant="default", limit="streams") == 8)
        write(always)
        for stream in open_streams[gone]:
            assert strangers.refusal(lambda: next(stream.call)) == known
        told = wire.shm.RegionReply.FromString(regions[gone].socket.recv(4096)).error
        assert told.message == "the token is unknown"
        assert regions[gone].socket.recv(1) == b""
        harness.wait_for("its connection to end",
                         lambda: server.metric("attend_shared_memory_clients") == 1)
        assert server.metric("attend_tenant_used", tenant="default", limit="streams") == 4
        assert open_streams[kept][0].ask(wire.small_request()).raw
        assert open_streams[kept][3].ask(strangers.LIST_SERVICES)
        assert regions[kept].ask(**create).HasField("created")
        for stream in (*open_streams[kept], *open_streams[gone], *regions.values()):
            stream.close()


def test_expired_callers_are_refused(start_server, tmp_path):
    token = strangers.token()
    (tmp_path / "tokens").write_text(strangers.line("short", token, "scopes=compute"))
    server = start_server("--tokens", tmp_path / "tokens")
    with wire.connect(server.address) as service:
        stream = strangers.Stream(service.AttendStream, token)
        assert stream.ask(wire.small_request()).raw
        ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=2)
        (tmp_path / "new").write_text(strangers.line(
            "short", token, "scopes=compute", ends.strftime("expires=%Y-%m-%dT%H:%M:%SZ")))
        (tmp_path / "new").rename(tmp_path / "tokens")

        def expired():
            try:
                return not stream.ask(wire.small_request()).raw
            except grpc.RpcError as error:
                return (error.code(), error.details()) == (CODE.UNAUTHENTICATED,
                                                           "the token has expired")
        harness.wait_for("the token to expire", expired)
        stream.close()


def test_revoked_callers_are_refused(start_server, tmp_path):
    """On connections opened before, too; those of other callers stay."""
    own = certificates.Authority(tmp_path / "own", clients="client other")
    shutil.copy(own.crl, tmp_path / "crl.pem")
    server = start_server(*own.serve_mtls("--tls-crl", tmp_path / "crl.pem"))
    with own.channel(server.address, "client") as gone, \
            own.channel(server.address, "other") as stays:
        stream = strangers.Stream(wire.stub.AttentionServiceStub(gone).AttendStream)
        assert stream.ask(wire.small_request()).raw
        service = wire.stub.AttentionServiceStub(stays)
        service.Attend(wire.small_request(), timeout=wire.SECONDS)
        before = server.metric("attend_connections_refused_total", reason="tls")
        own.revoke("client", tmp_path / "crl.pem")
        harness.wait_for("the new list", lambda: server.metric(
            "attend_tls_reloads_total", result="ok") == 1)
        assert stream.refusal(wire.small_request()).code == CODE.UNAVAILABLE
        stream.close()
        service.Attend(wire.small_request(), timeout=wire.SECONDS)
        assert server.metric("attend_connections_refused_total", reason="tls") > before
        harness.wait_for("its line", lambda: 'error="certificate revoked"' in server.log())
        assert 'reason="tls"' in server.log()
        assert server.metric("attend_connections") >= 1


def test_revoked_callers_connections_end(start_server, tmp_path):
    """Although nothing more is sent on it: both a connection with earlier calls and one without."""
    own = certificates.Authority(tmp_path / "own", clients="client other")
    shutil.copy(own.crl, tmp_path / "crl.pem")
    server = start_server(*own.serve_mtls("--tls-crl", tmp_path / "crl.pem"))
    with own.channel(server.address, "client") as gone, \
            own.channel(server.address, "other") as stays, \
            certificates.open_tls(server.address, own.context("client")) as silent:
        streams = [strangers.Stream(wire.stub.AttentionServiceStub(channel).AttendStream)
                   for channel in (gone, stays)]
        for stream in streams:
            assert stream.ask(wire.small_request()).raw
        silent.sendall(certificates.PREFACE)
        assert silent.recv(9)[3] == 4  # the server's settings: it serves
        harness.wait_for("all to be open", lambda: server.metric("attend_connections") == 3)
        refused = server.metric("attend_connections_refused_total", reason="tls")
        own.revoke("client", tmp_path / "crl.pem")
        harness.wait_for("both to be ended", lambda: server.metric("attend_connections") == 1)
        assert strangers.refusal(lambda: next(streams[0].call)).code == CODE.UNAVAILABLE
        try:
            while silent.recv(4096):
                pass
        except (ConnectionError, ssl.SSLError):
            pass
        assert server.metric("attend_connections_refused_total", reason="tls") >= refused + 2
        assert 'error="certificate revoked"' in server.log()
        assert streams[1].ask(wire.small_request()).raw
        # The same for an authority that is no longer trusted.
        another = certificates.Authority(tmp_path / "another")
        certificates.replace(own.ca, another.ca)
        harness.wait_for("the last to be ended", lambda: server.metric("attend_connections") == 0)
        assert strangers.refusal(lambda: next(streams[1].call)).code == CODE.UNAVAILABLE
        for stream in streams:
            stream.close()
