# SPDX-License-Identifier: Apache-2.0
"""AttendChunked from plain grpcio: generated stubs, one or several streams, and bad uploads."""

import concurrent.futures
import contextlib

import grpc
import numpy as np
import pytest

import harness
import wire
from chunked import Stream, assemble, chunks_of, header_of

CODE = grpc.StatusCode


def same(answer, expected):
    assert list(answer.raw) == list(expected.raw)
    assert list(answer.o.shape) == list(expected.o.shape)
    assert answer.transport == "chunked" and expected.transport == "inline"


def test_one_stream_that_does_not_wait_for_the_grant(server):
    """A generator of messages in, an iterator of messages out, as with any generated client."""
    request = wire.small_request(seed=1, length=700, heads=3, return_lse=True)

    def upload():
        yield wire.pb.AttendChunkedRequest(header=header_of(request))
        yield from chunks_of(request, 100_000)

    with wire.connect(server.address) as service:
        expected = service.Attend(request, timeout=wire.SECONDS)
        messages = list(service.AttendChunked(upload(), timeout=wire.SECONDS))
    assert messages[0].grant.chunk_bytes_max == 4 << 20
    same(assemble(messages), expected)


def test_the_readme_example(server):
    """The lines of the page, verbatim."""
    text = (harness.ROOT / "proto/README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    example = {}
    exec(next(block for block in blocks if "def attend_chunked" in block), example)  # noqa: S102
    request = wire.small_request(seed=8, length=300, heads=2, return_lse=True)
    with wire.connect(server.address) as service:
        expected = service.Attend(request, timeout=wire.SECONDS)
    header = wire.pb.AttendRequest()
    header.CopyFrom(request)
    header.ClearField("raw")
    answer, o, lse = example["attend_chunked"](server.address, header, request.raw)
    assert [bytes(o), bytes(lse)] == list(expected.raw)
    assert list(answer.o.shape) == list(expected.o.shape)


def test_with_default_channel_options(server):
    """Tensors above gRPC's 4 MiB limit, while each message of the stream is far below it."""
    row = np.arange(64, dtype=np.float16)
    request = wire.pb.AttendRequest()
    for name, shape in (("q", (1, 4, 16384, 64)), ("k", (1, 1, 1, 64)), ("v", (1, 1, 1, 64))):
        getattr(request, name).CopyFrom(wire.tensor("float16", shape))
    request.raw.extend([bytes(8 << 20), row.tobytes(), row.tobytes()])

    def upload():
        yield wire.pb.AttendChunkedRequest(header=header_of(request))
        yield from chunks_of(request, 1 << 20)

    with grpc.insecure_channel(server.address) as channel:
        service = wire.stub.AttentionServiceStub(channel)
        messages = list(service.AttendChunked(upload(), timeout=wire.SECONDS))
    answer = assemble(messages)
    assert len(answer.raw[0]) == 8 << 20
    # One key: every row of O is V's only row.
    assert (np.frombuffer(answer.raw[0], np.float16).reshape(-1, 64) == row).all()


@pytest.mark.parametrize("count", [2, 5])
def test_several_streams(server, random, count):
    """Each on its own connection, with chunks in random order over all of them."""
    request = wire.small_request(seed=3, length=900, heads=2, return_lse=True)
    chunks = list(chunks_of(request, 30_000))
    random.shuffle(chunks)
    with contextlib.ExitStack() as stack:
        services = [stack.enter_context(wire.connect(server.address)) for _ in range(count)]
        expected = services[0].Attend(request, timeout=wire.SECONDS)
        first = Stream(services[0], wire.pb.AttendChunkedRequest(header=header_of(request)))
        token = next(first.call).grant.token
        assert len(token) == 16
        others = [Stream(s, wire.pb.AttendChunkedRequest(token=token)) for s in services[1:]]
        for other in others:
            assert next(other.call).HasField("grant")
        streams = [first, *others]
        for i, chunk in enumerate(chunks):
            streams[i % count].send(chunk)
        for stream in reversed(streams):
            stream.half_close()
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            messages = [m for part in pool.map(list, [s.call for s in streams]) for m in part]
    same(assemble(messages), expected)


def test_bad_uploads(start_server):
    server = start_server("--chunked-idle-timeout", "0.3", "--memory-budget", "1MiB")
    request = wire.small_request(seed=4, length=64)  # 16 KiB a tensor
    first = wire.pb.AttendChunkedRequest(header=header_of(request))
    chunk = next(chunks_of(request, 1000))
    with wire.connect(server.address) as service:
        assert Stream(service, chunk).fail() == (
            CODE.INVALID_ARGUMENT, "the stream's first message has neither header nor token")
        code, details = Stream(service, first, chunk, chunk).fail()
        assert code is CODE.INVALID_ARGUMENT and "overlaps" in details
        assert Stream(service, wire.pb.AttendChunkedRequest(token=bytes(16))).fail()[0] is \
            CODE.NOT_FOUND
        missing = Stream(service, first, chunk)
        missing.half_close()
        code, details = missing.fail()
        assert code is CODE.INVALID_ARGUMENT and "15384 of q's 16384 bytes" in details
        code, details = Stream(service, first, chunk).fail()
        assert code is CODE.DEADLINE_EXCEEDED and "chunked-idle-timeout" in details
        large = wire.small_request(seed=4, length=1536)  # 1.5 MiB with its answer: can never fit
        code, details = Stream(
            service, wire.pb.AttendChunkedRequest(header=header_of(large))).fail()
        assert code is CODE.INVALID_ARGUMENT and "memory budget" in details
    harness.wait_for("the memory to be back",
                     lambda: server.metric("attend_host_memory_used_bytes") == 0)
    wire.assert_serves(server.address)
