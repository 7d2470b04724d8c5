# SPDX-License-Identifier: Apache-2.0
"""Bad requests: each gets its status and a message that names field and bound; the next good one is
answered."""

import math
import time

import grpc
import pytest

import harness
import wire

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture(autouse=True)
def still_serves(server):
    yield
    assert not server.ended(), server.log()
    wire.assert_serves(server.address)


def refused(server, request, seconds=wire.SECONDS):
    """Code and message of a call that must fail."""
    with wire.connect(server.address) as service:
        with pytest.raises(grpc.RpcError) as error:
            service.Attend(request, timeout=seconds)
    return error.value.code(), error.value.details()


def reshape(request, **shapes):
    """Sets shapes and makes raw fit them, so that the shape itself is what is wrong."""
    for n, name in enumerate(("q", "k", "v")):
        if name in shapes:
            tensor = getattr(request, name)
            tensor.shape[:] = shapes[name]
            size = math.prod(shapes[name])
            request.raw[n] = bytes(4 * max(0, min(size, 1 << 16)))


def bad(name, words, code=INVALID):
    """Registers a change that makes a good request bad, and words its refusal must contain."""
    def register(change):
        CASES.append(pytest.param(change, words, code, id=name))
        return change
    return register


CASES = []
SHAPES = [
    ("rank 3", {"q": (1, 16, 64)}, ["q"]),
    ("rank 5", {"k": (1, 1, 1, 16, 64)}, ["k"]),
    ("no shape", {"q": ()}, ["q"]),
    ("negative", {"q": (1, 1, -16, 64)}, ["q", "-16"]),
    ("heads not a multiple", {"q": (1, 3, 16, 64), "k": (1, 2, 16, 64), "v": (1, 2, 16, 64)},
     ["3", "2"]),
    ("no kv heads", {"k": (1, 0, 16, 64), "v": (1, 0, 16, 64)}, ["0"]),
    ("D differs", {"k": (1, 1, 16, 63)}, ["64", "63"]),
    ("Lk differs", {"v": (1, 1, 15, 64)}, ["16", "15"]),
    ("batch differs", {"k": (2, 1, 16, 64)}, ["2"]),
    ("D of 0", {"q": (1, 1, 16, 0), "k": (1, 1, 16, 0)}, ["0", "256"]),
    ("D of 257", {"q": (1, 1, 16, 257), "k": (1, 1, 16, 257)}, ["257", "256"]),
    ("Dv of 0", {"v": (1, 1, 16, 0)}, ["0", "256"]),
    ("Dv of 257", {"v": (1, 1, 16, 257)}, ["257", "256"]),
    ("product overflows", {"q": (1 << 19, 1 << 15, 1 << 29, 64)}, []),
    ("largest numbers", {"q": (2**63 - 1, 2**63 - 1, 2**63 - 1, 64)}, []),
]
for _name, _shapes, _words in SHAPES:
    bad(f"shape: {_name}", _words)(lambda r, shapes=_shapes: reshape(r, **shapes))


@bad("dtype missing", ["q", "dtype"])
def _(request):
    request.q.dtype = 0


@bad("dtype unknown", ["dtype", "77"])
def _(request):
    request.q.dtype = 77


@bad("dtypes differ", ["dtype"])
def _(request):
    request.k.dtype = 1
    request.raw[1] = request.raw[1][: len(request.raw[1]) // 2]


@bad("layout unknown", ["layout", "9"])
def _(request):
    request.layout = 9


@bad("mask unknown", ["mask", "9"])
def _(request):
    request.mask.kind = 9


@bad("window below -1", ["window_left", "-2"])
def _(request):
    request.mask.kind = 4
    request.mask.window_left = -2


@bad("window without a window", ["window"])
def _(request):
    request.mask.kind = 1
    request.mask.window_left = 3


@bad("q is missing", ["q"])
def _(request):
    request.ClearField("q")


@bad("raw entry too short", ["k", "4096", "4092"])
def _(request):
    request.raw[1] = request.raw[1][:-4]


@bad("raw entry too long", ["v", "4096", "4100"])
def _(request):
    request.raw[2] += b"abcd"


@bad("raw entry is missing", ["raw"])
def _(request):
    del request.raw[2]


@bad("raw entry too many", ["raw"])
def _(request):
    request.raw.append(b"abcd")


@bad("byte_length differs", ["byte_length", "4095", "4096"])
def _(request):
    request.q.byte_length = 4095


@bad("4 GiB declared, 4 bytes sent", [])
def _(request):
    request.q.shape[:] = (1, 1, 1 << 24, 64)
    request.q.byte_length = 1 << 32
    request.raw[0] = b"abcd"


@bad("q length beyond Lq", ["q_lengths", "17", "16"])
def _(request):
    request.q_lengths.append(17)


@bad("kv length negative", ["kv_lengths", "-1"])
def _(request):
    request.kv_lengths.append(-1)


@bad("too many lengths", ["kv_lengths"])
def _(request):
    request.kv_lengths.extend([1, 1])


def packed(request, cu_q, cu_kv):
    request.layout = 3
    for tensor in (request.q, request.k, request.v):
        tensor.shape[:] = (16, 1, 64)
    request.cu_q.extend(cu_q)
    request.cu_kv.extend(cu_kv)


for _name, _cu_q, _cu_kv, _words in (
        ("missing", [], [], ["cu_q"]), ("falls", [0, 9, 5, 16], [0, 5, 9, 16], ["cu_q", "5"]),
        ("overshoots", [0, 8, 16], [0, 8, 17], ["cu_kv", "17"]),
        ("ends early", [0, 8, 15], [0, 8, 16], ["cu_q", "15"]),
        ("starts late", [0, 8, 16], [1, 8, 16], ["cu_kv", "1"]),
        ("counts differ", [0, 8, 16], [0, 16], ["cu_kv"])):
    bad(f"packed: {_name}", _words)(lambda r, q=_cu_q, kv=_cu_kv: packed(r, q, kv))


@bad("cu_q in a dense layout", ["cu_q"])
def _(request):
    request.cu_q.extend([0, 16])


@bad("lengths in the packed layout", ["q_lengths"])
def _(request):
    packed(request, [0, 16], [0, 16])
    request.q_lengths.append(16)


for _value in (float("nan"), float("inf")):
    @bad(f"scale {_value}", ["scale"])
    def _(request, value=_value):
        request.scale = value


for _value in (-1.0, 2e6, float("nan")):
    @bad(f"softcap {_value}", ["softcap"])
    def _(request, value=_value):
        request.softcap = value


for _value in (1, 2, 4, -1):
    @bad(f"o_dtype {_value}", ["o_dtype", str(_value), "float32"])
    def _(request, value=_value):
        request.o_dtype = value


@bad("slopes of another head count", ["alibi_slopes", "3"])
def _(request):
    request.alibi_slopes.extend([1, 2, 3])


@bad("sinks of another head count", ["sinks", "2"])
def _(request):
    request.sinks.extend([1, 2])


@bad("bias of another length", ["bias"])
def _(request):
    request.bias.CopyFrom(wire.tensor("float32", (1, 1, 16, 17)))
    request.raw.append(bytes(4 * 16 * 17))


@bad("bias not broadcastable", ["bias"])
def _(request):
    request.bias.CopyFrom(wire.tensor("float32", (1, 1, 5, 16)))
    request.raw.append(bytes(4 * 5 * 16))


@bad("priority out of range", ["priority", "101", "100"])
def _(request):
    request.priority = 101


@bad("request_id too long", ["request_id", "129", "128"])
def _(request):
    request.request_id = "x" * 129


@bad("kernel unknown", ["kernel", "cpu_flahs"], (INVALID, UNIMPLEMENTED))
def _(request):
    request.kernel = "cpu_flahs"


@bad("kernel of another device", ["cuda_naive"], UNIMPLEMENTED)
def _(request):
    request.kernel = "cuda_naive"


@pytest.mark.parametrize("change,words,code", CASES)
def test_refused(server, change, words, code):
    request = wire.small_request(seed=1)
    change(request)
    before = server.metric("attend_host_memory_used_bytes")
    got, message = refused(server, request)
    assert got in (code if isinstance(code, tuple) else (code,)), (got, message)
    assert all(word in message for word in words), message
    assert 0 < len(message) <= 1024
    assert server.metric("attend_host_memory_used_bytes") == before


def test_random_and_truncated_bytes(server, random):
    """No message crashes the server or is answered with anything but an ordinary status."""
    good = wire.small_request(seed=2, length=5, return_lse=True).SerializeToString()
    allowed = {grpc.StatusCode.OK, INVALID, UNIMPLEMENTED, EXHAUSTED}
    messages = [random.bytes(int(n)) for n in random.integers(0, 4000, 60)]
    messages += [good[:int(n)] for n in random.integers(0, len(good), 60)]
    for _ in range(120):  # a few bytes of the metadata changed: close to good, so deeper inside
        broken = bytearray(good)
        for at in random.integers(0, 80, int(random.integers(1, 4))):
            broken[at] = int(random.integers(256))
        messages.append(bytes(broken))
    codes = set()
    with grpc.insecure_channel(server.address, options=wire.UNLIMITED) as channel:
        call = channel.unary_unary(wire.ATTEND)
        for message in messages:
            try:
                call(message, timeout=wire.SECONDS)
                codes.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    assert codes <= allowed, codes
    assert INVALID in codes


def test_empty_message(server):
    code, message = refused(server, wire.pb.AttendRequest())
    assert code == INVALID and "q" in message


def test_too_large_a_message(start_server):
    """It can never fit, so no client shall try again; whoever runs the server sees it."""
    small = start_server("--max-request-bytes", "1MiB")
    code, message = refused(small, wire.small_request(length=2048))
    assert code == INVALID and "must have at most 1048576" in message
    assert small.metric("attend_rejected_requests_total", reason="too_large") == 1
    assert small.metric("attend_requests_total", code="INVALID_ARGUMENT") == 1
    wire.assert_serves(small.address)


def test_more_memory_than_there_is(start_server):
    """A request that could never fit is wrong; one that does not fit now is to be tried again."""
    small = start_server("--memory-budget", "1MiB")
    code, message = refused(small, wire.small_request(length=2048))
    assert code == INVALID and "1048576" in message
    assert small.metric("attend_rejected_requests_total", reason="too_large") == 1
    wire.assert_serves(small.address)


def test_memory_taken_by_others(start_server):
    small = start_server("--memory-budget", "5MiB", "--lanes", "1")
    with wire.connect(small.address) as service:
        slow = service.Attend.future(wire.slow_request(), timeout=60)  # 2 MiB in all
        harness.wait_for("the lane to be busy", lambda: small.metric("attend_lanes_busy") == 1)
        with pytest.raises(grpc.RpcError) as error:
            service.Attend(wire.small_request(length=4096), timeout=wire.SECONDS)  # 4 MiB
        assert not slow.done()
        assert error.value.code() == EXHAUSTED and "memory" in error.value.details()
        assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        slow.result()
        assert small.metric("attend_rejected_requests_total", reason="memory") == 1
        service.Attend(wire.small_request(length=4096), timeout=wire.SECONDS)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages(server, compression):
    """Not taken: what they inflate to is only bounded once it has been inflated."""
    with wire.connect(server.address, compression=compression) as service:
        with pytest.raises(grpc.RpcError) as error:
            service.Attend(wire.small_request(), timeout=wire.SECONDS)
    assert error.value.code() == UNIMPLEMENTED and compression.name.lower() in error.value.details()


def test_deadline_already_past(server):
    """One that reaches the server with a microsecond left ends as DEADLINE_EXCEEDED."""
    started = time.monotonic()
    code, _ = refused(server, wire.slow_request(length=4096), seconds=1e-6)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < wire.SECONDS
