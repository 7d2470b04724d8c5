# SPDX-License-Identifier: Apache-2.0
"""The wire besides plain calls: streams, field order, health, reflection, server information."""

import collections
import time

import grpc
import numpy as np
import pytest

import harness
import hostile
import wire
from hostile import varint

STREAM = "/attend.v1.AttentionService/AttendStream"


def call_bytes(address, message, path=wire.ATTEND, seconds=wire.SECONDS):
    """One unary call with exactly these bytes as its message."""
    with grpc.insecure_channel(address, options=wire.UNLIMITED) as channel:
        call = channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        return call(message, timeout=seconds)


def test_stream_answers_every_request(server):
    """All requests are sent before the first answer is read; each answer belongs to its request."""
    requests = [wire.small_request(seed=i, length=1 + 11 * (i % 7), request_id=f"r{i}")
                for i in range(60)]
    with wire.connect(server.address) as service:
        alone = {r.request_id: service.Attend(r, timeout=wire.SECONDS) for r in requests[:7]}
        answers = list(service.AttendStream(iter(requests), timeout=wire.SECONDS))
    assert sorted(a.request_id for a in answers) == sorted(r.request_id for r in requests)
    for answer in answers:
        assert answer.status.code == 0, answer.status
        if answer.request_id in alone:
            assert list(answer.raw) == list(alone[answer.request_id].raw)


def test_a_garbage_message_on_a_stream(server):
    """Invalid bytes end in one INVALID_ARGUMENT; the stream's other requests are answered."""
    good = wire.small_request(seed=1, request_id="good").SerializeToString()
    with grpc.insecure_channel(server.address, options=wire.UNLIMITED) as channel:
        call = channel.stream_stream("/attend.v1.AttentionService/AttendStream",
                                     response_deserializer=wire.pb.AttendResponse.FromString)
        answers = list(call(iter([good, b"\xff" * 40, good]), timeout=wire.SECONDS))
    codes = sorted(a.status.code for a in answers)
    assert codes == [0, 0, 3], answers


@pytest.mark.parametrize("service", [b"", b"attend.v1.AttentionService"])
def test_health_check_and_watch(server, service):
    request = b"\x0a" + varint(len(service)) + service
    serving = b"\x08\x01"
    assert call_bytes(server.address, request, "/grpc.health.v1.Health/Check") == serving
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(request, timeout=wire.SECONDS)
        assert next(watch) == serving
        watch.cancel()


def test_health_of_an_unknown_service(server):
    with pytest.raises(grpc.RpcError) as error:
        call_bytes(server.address, b"\x0a\x07nothing", "/grpc.health.v1.Health/Check")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_and_describes(server, version):
    """Raw ServerReflectionRequests: list_services (7), file_containing_symbol (4)."""
    symbol = b"attend.v1.AttentionService"
    requests = [b"\x3a\x00", b"\x22" + varint(len(symbol)) + symbol]
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        listed, described = list(call(iter(requests), timeout=wire.SECONDS))
    for name in (symbol, b"grpc.health.v1.Health", b"attend.v1.AdminService",
                 b"grpc.reflection.v1.ServerReflection",
                 b"grpc.reflection.v1alpha.ServerReflection"):
        assert name in listed
    for name in (b"AttendStream", b"GetServerInfo", b"kv_lengths", b"alibi_slopes"):
        assert name in described


def test_server_info(server):
    with wire.connect(server.address) as service:
        info = service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS)
    assert info.version and info.build and info.uptime_seconds > 0
    assert [d.name for d in info.devices] == ["cpu"]
    assert info.devices[0].healthy and info.devices[0].lanes > 0 and info.devices[0].units > 0
    kernels = {k.name: k for k in info.kernels}
    assert {"cpu_reference", "cpu_flash", "cuda_naive", "cuda_flash_fp32"} <= kernels.keys()
    assert kernels["cpu_flash"].available and not kernels["cuda_naive"].available
    for kernel in kernels.values():
        tensor_cores = kernel.name.endswith(("_sm80", "_sm90"))
        assert sorted(kernel.dtypes) == ([2] if kernel.name.endswith("_amx") else
                                         [1, 2] if tensor_cores else [1, 2, 3])
        assert kernel.head_dim_max == 256
        assert kernel.summary and kernel.device_kind in ("cpu", "cuda")
    assert info.limits.head_dim_max == 256 and info.limits.request_bytes_max == 1 << 30
    assert info.limits.memory_budget_bytes == 4 << 30 and info.limits.queue_requests_max == 1024
    assert list(info.transports) == ["inline", "chunked"] and info.reference_check == "off"


def test_the_readme_example(server):
    """The lines of the page, verbatim except for the address."""
    code = (harness.ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert code.count("127.0.0.1:8001") == 1
    names = {}
    exec(code.replace("127.0.0.1:8001", server.address), names)  # pylint: disable=exec-used
    assert names["o"].shape == (1, 8, 1024, 64) and np.isfinite(names["o"]).all()
    first = names["v"][:, :, 0]  # all keys that a causal mask shows the first query
    np.testing.assert_allclose(names["o"][:, :, 0], first, rtol=1e-5, atol=1e-6)


def test_request_id_is_echoed_or_made(server):
    with wire.connect(server.address) as service:
        named = service.Attend(wire.small_request(request_id="me-1"), timeout=wire.SECONDS)
        made = [service.Attend(wire.small_request(), timeout=wire.SECONDS).request_id
                for _ in range(2)]
    assert named.request_id == "me-1"
    assert all(made) and made[0] != made[1]


def test_unix_socket_beside_tcp(start_server, tmp_path):
    path = tmp_path / "attend.sock"
    server = start_server(listen=f"127.0.0.1:0,unix:{path}")
    assert len(server.addresses) == 2
    for address in server.addresses:
        wire.assert_serves(address)
    assert server.stop() == 0
