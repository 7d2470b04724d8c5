# SPDX-License-Identifier: Apache-2.0
"""Sessions at their limits: a refusal does not affect other work; leases, eviction."""

import time

import grpc
import pytest

import chunked
import wire
from sessions import DIM, DIM_V, KV_HEADS, Sequence, client, refused, step


@pytest.mark.parametrize("change,words", [
    (lambda r: r.sessions[0].__setattr__("layer", 1), "sessions[0].layer is 1, must be in [0, 0]"),
    (lambda r: r.sessions[0].__setattr__("layer", -1), "sessions[0].layer is -1"),
    (lambda r: r.sessions.append(r.sessions[0]),
     "sessions[1] names the same session as an earlier entry"),
    (lambda r: r.sessions[0].__setattr__("append_id", b"x" * 33), "append_id has 33 bytes"),
    (lambda r: r.kv_lengths.append(1), "kv_lengths must be empty"),
    (lambda r: r.__setattr__("layout", 3), "must have 3"),
    (lambda r: r.ClearField("v"), "v is not set"),
    (lambda r: r.q.__setattr__("dtype", 1), "must equal"),
    (lambda r: r.k.shape.__setitem__(1, 4), "must equal"),
    (lambda r: r.k.shape.__setitem__(2, -1), "k.shape[2] is -1"),
    (lambda r: r.k.shape.__setitem__(2, 1 << 40), "would exceed"),
    (lambda r: r.raw.__delitem__(2), "raw has 2 entries, must have 3"),
])
def test_malformed_calls_change_nothing(sessions_server, random, change, words):
    with client(sessions_server.address) as tenant:
        sequence = Sequence(random, tenant.create())
        request, _ = step(random, [sequence], 2, 1)
        change(request)
        assert words in refused(grpc.StatusCode.INVALID_ARGUMENT, tenant.attend, request)
        assert tenant.call("GetSession", session=sequence.session.id).length == 0


@pytest.mark.parametrize("fields,words", [
    ({"layers": 513}, "layers is 513"), ({"layers": -1}, "layers is -1"),
    ({"lease_seconds": -0.25}, "lease_seconds is -0.25"),
    ({"lease_seconds": float("nan")}, "lease_seconds is nan"),
    ({"lease_seconds": 86400.5}, "lease_seconds is 86400.5, must be in [0, 86400]"),
    ({"lease_seconds": 1e300}, ", must be in [0, 86400]"),
    ({"device": "cuda:9"}, 'device is "cuda:9"'),
])
def test_impossible_sessions_are_refused(sessions_server, fields, words):
    with client(sessions_server.address) as tenant:
        assert words in refused(grpc.StatusCode.INVALID_ARGUMENT, tenant.create, **fields)


def test_only_unused_sessions_expire(start_server, random):
    server = start_server("--session-lease=1")
    with client(server.address) as tenant:
        kept, left = tenant.create(), tenant.create()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            tenant.call("KeepAlive", session=kept.id)
            if [each.id for each in tenant.call("ListSessions").sessions] == [kept.id]:
                break
            time.sleep(0.1)
        refused(grpc.StatusCode.NOT_FOUND, tenant.call, "GetSession", session=left.id)
        tenant.call("GetSession", session=kept.id)


def test_evictions_are_reported_and_can_be_appended_again(start_server, random):
    server = start_server("--session-memory=16MiB")
    with client(server.address) as tenant:
        idle = Sequence(random, tenant.create())
        tenant.attend(step(random, [idle], 20000, 0)[0])
        busy = Sequence(random, tenant.create())
        tenant.attend(step(random, [busy], 20000, 0)[0])
        info = tenant.call("GetSession", session=idle.session.id)
        assert 0 <= info.length < 20000
        request, _ = step(random, [idle], 0, 1)
        details = refused(grpc.StatusCode.OUT_OF_RANGE, tenant.attend, request)
        assert f"the layer has {info.length} tokens: the others were evicted" in details
        pinned = tenant.create(pinned=True)
        full = Sequence(random, pinned)
        tenant.attend(step(random, [full], 20000, 0)[0])
        request, _ = step(random, [Sequence(random, tenant.create())], 30000, 0)
        details = refused(grpc.StatusCode.RESOURCE_EXHAUSTED, tenant.attend, request)
        assert "(session-memory)" in details
        assert tenant.call("GetSession", session=pinned.id).length == 20000


def test_sessions_can_be_disabled(start_server):
    server = start_server("--session-memory=0")
    with client(server.address) as tenant:
        assert "--session-memory" in refused(grpc.StatusCode.UNIMPLEMENTED, tenant.create)


def test_refusals_for_memory_have_a_retry_hint_and_are_counted(start_server, random):
    server = start_server("--session-memory=8MiB")
    with client(server.address) as tenant:
        pinned = Sequence(random, tenant.create(pinned=True))
        rows = 8 * 2**20 // (64 * 4 * KV_HEADS * (DIM + DIM_V)) * 64  # whole pages in one slab
        request, _ = step(random, [pinned], rows, 0)
        tenant.attend(request)
        request, _ = step(random, [Sequence(random, tenant.create())], 2, 1)
        with pytest.raises(grpc.RpcError) as refusal:
            tenant.attend(request)
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "session-memory" in refusal.value.details()
        assert int(dict(refusal.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        assert server.metric("attend_rejected_requests_total", reason="sessions") == 1
        assert server.metric("attend_rejected_requests_total", reason="memory") == 0
        # Refused session calls are counted like all others.
        refused(grpc.StatusCode.INVALID_ARGUMENT, tenant.create, layers=513)
        assert server.metric("attend_rejected_requests_total", reason="invalid") == 1


def test_tokens_and_evictions_are_counted_by_tenant(start_server, random):
    server = start_server("--tenant=a=1,b=1", "--session-memory=16MiB", "--max-sessions=6")
    with client(server.address, "a") as a, client(server.address, "b") as b:
        for tenant, rows, len_q in ((a, 20000, 0), (a, 3, 2), (a, 20000, 0)):
            tenant.attend(step(random, [Sequence(random, tenant.create())], rows, len_q)[0])
        name = "attend_sessions_evicted_idle_seconds"
        assert server.metric(name + "_count") == server.metric(name + "_bucket", le="+Inf") == 1
        assert server.metric(name + "_bucket", le="21600") == 1
        assert 0 < server.metric(name + "_sum") < 21600
        b.attend(step(random, [Sequence(random, b.create())], 5, 4)[0])
        a.create()  # 3 places are common, and one is reserved for each tenant
        assert "the tenant has 4, its reserved share is 1" in refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED, a.create)
        assert server.metric("attend_sessions") == 5
    for tenant, appended, decoded in (("a", 40003, 2), ("b", 5, 4), ("default", 0, 0)):
        assert server.metric("attend_session_appended_tokens_total", tenant=tenant) == appended
        assert server.metric("attend_session_query_rows_total", tenant=tenant) == decoded


@pytest.mark.parametrize("appends", [False, True])
def test_a_slow_upload_blocks_no_other_tenants_part(
        start_server, random, appends):
    """With three tenants a sixth of the memory is reserved for each, and half is common."""
    server = start_server("--tenant=a=1,b=1", "--session-memory=16MiB")
    most = 24000
    with client(server.address, "a") as a, client(server.address, "b") as b:
        sequence = Sequence(random, a.create())
        if not appends:
            a.attend(step(random, [sequence], most, 0)[0])
        request, _ = step(random, [sequence], most if appends else 0, 1)
        stream = chunked.Stream(
            a.attention, wire.pb.AttendChunkedRequest(header=chunked.header_of(request)),
            metadata=a.metadata)
        assert next(stream.call).HasField("grant")
        b.attend(step(random, [Sequence(random, b.create(pinned=True))], 6000, 0)[0])
        request_of_b, _ = step(random, [Sequence(random, b.create())], 6000, 0)
        details = refused(grpc.StatusCode.RESOURCE_EXHAUSTED, b.attend, request_of_b)
        assert "are reserved for it" in details
        for chunk in chunked.chunks_of(request, 1 << 20):
            stream.send(chunk)
        stream.half_close()
        list(stream.call)
        assert stream.call.code() == grpc.StatusCode.OK
        assert a.call("GetSession", session=sequence.session.id).length == most
