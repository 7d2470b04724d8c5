# SPDX-License-Identifier: Apache-2.0
"""attend.Client with GPU tensors and a server on this host that uses the same GPU and maps its
memory. $ATTEND_TEST_SERVER is the server's address (tests/gpu/run starts it)."""

import os

import attend
import attend_kernels
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("ATTEND_TEST_SERVER" not in os.environ,
                                                  reason="$ATTEND_TEST_SERVER names no server")]
DTYPES = ["float16", "bfloat16", "float32"]


@pytest.fixture(scope="module")
def client():
    with attend.Client(os.environ["ATTEND_TEST_SERVER"], timeout=60) as made:
        yield made


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def some(torch, rows, dtype="float16", batch=2):
    return [torch.randn(batch, 4, rows, 64, device="cuda", dtype=getattr(torch, dtype))
            for _ in range(3)]


@pytest.mark.parametrize("rows,transport", [(5, "inline"), (300, "cuda-ipc"), (4096, "cuda-ipc")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_equal_those_computed_in_process(client, torch, dtype, rows, transport):
    q, k, v = some(torch, rows, dtype)
    options = dict(causal=True, return_lse=True)
    answer = client.submit(q, k, v, **options).result()
    assert answer.transport == transport
    o, lse = attend_kernels.attention(q, k, v, kernel=answer.kernel, **options)
    assert answer.o.device == q.device and answer.o.dtype == q.dtype
    assert torch.equal(answer.o, o) and torch.equal(answer.lse, lse)


def test_every_transport_gives_the_same_bits(client, torch):
    q, k, v = some(torch, 512)
    answers = {way: client.submit(q, k, v, transport=way).result()
               for way in ("auto", "shared", "inline", "chunked")}
    assert [answer.transport for answer in answers.values()] == [
        "cuda-ipc", "cuda-ipc", "inline", "chunked"]
    assert all(torch.equal(answer.o, answers["auto"].o) for answer in answers.values())
    checked = client.submit(q, k, v, check=True).result()
    assert checked.transport == "shm" and checked.check.ok
    assert torch.equal(checked.o, answers["auto"].o)


def test_gradients(client, torch):
    q, k, v = some(torch, 384)
    bias = torch.rand(384, 384, device="cuda") < 0.8
    options = dict(bias=bias, kernel="auto")
    o, lse = client.attention(q, k, v, return_lse=True, **options)
    d_o = torch.randn_like(o)
    wanted = client.backward(d_o, q, k, v, o, lse, transport="inline", **options)
    answer = client.submit_backward(d_o, q, k, v, o, lse, **options).result()
    assert answer.transport == "cuda-ipc"
    for got, right in zip(answer.gradients.values(), wanted):
        assert got.device == q.device and torch.equal(got, right)
    for got, right in zip(client.backward(d_o, q, k, v, **options), wanted):
        assert torch.equal(got, right)  # here the server computes the forward pass


def test_calls_are_ordered_with_the_current_stream(client, torch):
    """Work on the current stream that writes q, k and v has finished when the server reads them,
    and the answer is complete for work that is enqueued later."""
    q, k, v = some(torch, 1024)
    wanted = client.attention(q, k, v)
    stream = torch.cuda.Stream()
    for _ in range(5):
        late = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # cycles
            for x, right in zip(late, (q, k, v)):
                x.copy_(right)
            o = client.attention(*late)
            twice = o + o
            for x in (*late, o):  # after the call
                x.fill_(float("nan"))
        stream.synchronize()
        assert torch.equal(twice, wanted + wanted)


def test_calls_in_flight_do_not_share_memory(client, torch):
    calls = [some(torch, 256 + 64 * n, batch=1) for n in range(12)]
    started = [client.submit(*call) for call in calls]
    results = [call.result().o for call in started]
    for call, o in zip(calls, results):
        assert torch.equal(o, attend_kernels.attention(*call))


def test_other_strides_and_layouts(client, torch):
    q, k, v = some(torch, 400)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    wanted = client.attention(q, k, v)
    assert torch.equal(client.attention(*turned, layout="BLHD"), wanted.transpose(1, 2))
    empty = q[:, :, :0]
    assert client.attention(empty, k, v).shape == empty.shape


class Exported:
    """A tensor with no interface but DLPack."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape

    def __dlpack__(self, stream=None, **_):
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Interface:
    """A tensor with no interface but __cuda_array_interface__."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__)


@pytest.mark.parametrize("kind", [Exported, Interface])
@pytest.mark.parametrize("rows", [5, 500])
def test_dlpack_and_cuda_array_interface(client, torch, kind, rows):
    q, k, v = some(torch, rows)
    answer = client.submit(*map(kind, (q, k, v))).result()
    assert answer.transport == ("inline" if rows == 5 else "cuda-ipc")
    o = torch.from_dlpack(answer.o)
    assert o.device == q.device and torch.equal(o, client.attention(q, k, v))
    turned = [kind(x.transpose(1, 2)) for x in (q, k, v)]
    o = torch.from_dlpack(client.attention(*turned, layout="BLHD"))
    assert o.device == q.device and torch.equal(o.transpose(1, 2), client.attention(q, k, v))


def shared(torch, client, *tensors):
    """Copies of the tensors in memory of client.empty."""
    made = [torch.from_dlpack(client.empty(x.shape, x.dtype, device=x.device)) for x in tensors]
    for to, x in zip(made, tensors):
        to.copy_(x)
    return made


@pytest.mark.parametrize("rows", [5, 300, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_client_empty_are_read_in_place(client, torch, dtype, rows):
    q, k, v = some(torch, rows, dtype)
    there = shared(torch, client, q, k, v)
    answer = client.submit(*there, causal=True, return_lse=True).result()
    assert answer.transport == "cuda-ipc" and answer.o.device == q.device
    o, lse = attend_kernels.attention(q, k, v, causal=True, return_lse=True, kernel=answer.kernel)
    assert torch.equal(answer.o, o) and torch.equal(answer.lse, lse)
    assert torch.equal(client.attention(there[0], k, v, causal=True), o)  # the others are copied
    for transport in ("inline", "chunked"):
        assert torch.equal(client.attention(*there, causal=True, transport=transport), o)
    d_o = torch.randn_like(o)
    wanted = client.backward(d_o, q, k, v, o, lse, causal=True)
    got = client.backward(d_o, *there, answer.o, answer.lse, causal=True)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted))


def test_client_empty_without_torch(client, torch):
    q, k, v = some(torch, 300)
    arrays = [client.empty(x.shape, "float16", device="cuda:0") for x in (q, k, v)]
    for array, x in zip(arrays, (q, k, v)):
        torch.as_tensor(array, device="cuda").copy_(x)  # by __cuda_array_interface__
    o = client.attention(*arrays)
    assert isinstance(o, attend_kernels.DeviceArray)
    assert torch.equal(torch.from_dlpack(o), client.attention(q, k, v))
    with pytest.raises(attend.Error, match="memory is 100"):
        client.empty(5, device="cuda:99")


@pytest.mark.parametrize("own", [True, False])
def test_tensors_of_client_empty_are_used_in_stream_order(client, torch, own):
    """The server waits for the work that writes q, k and v, and before it reuses the memory of an
    answer, for the work that reads it."""
    q, k, v = some(torch, 1024)
    wanted = client.attention(q, k, v)
    stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        late = shared(torch, client, *(torch.full_like(x, float("nan")) for x in (q, k, v)))
        for n in range(1, 6):
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # cycles
            for x, right in zip(late, (q, k, v * n)):
                x.copy_(right)
            o = client.attention(*late)
            torch.cuda._sleep(100_000_000)
            kept = o.clone()
            del o
            with torch.cuda.stream(torch.cuda.Stream()):
                client.attention(*late[:2], torch.zeros_like(v))
            stream.synchronize()
            assert torch.equal(kept, client.attention(q, k, v * n))
    assert torch.equal(client.attention(q, k, v), wanted)


def test_sessions_and_streams_go_through_host_memory(client, torch):
    q, k, v = some(torch, 300, batch=1)
    wanted = client.attention(q, k, v, causal=True)
    with client.session(4, 64, dtype="float16") as session:
        answer = session.submit(q, k, v, causal=True).result()
        assert answer.transport == "shm" and answer.o.device == q.device
        assert torch.equal(answer.o, wanted)
    with client.stream() as stream:
        assert torch.equal(stream.attention(q, k, v, causal=True), wanted)
