# SPDX-License-Identifier: Apache-2.0
"""attend.Client with arrays of other libraries: torch on the CPU, DLPack, ml_dtypes' bfloat16.
Answers must equal those of the kernels in process bit for bit."""

import ctypes

import attend
import attend_kernels
import numpy as np
import pytest


@pytest.fixture(scope="module")
def client(shared_server):
    with attend.Client(shared_server.address, timeout=60) as made:
        yield made


@pytest.mark.parametrize("rows", [5, 300])  # inline, and in shared memory
def test_numpy_bfloat16(client, rows):
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, 4, rows, 64)).astype(bfloat16) for _ in range(3))
    o, lse = client.attention(q, k, v, causal=True, return_lse=True, kernel="cpu_flash")
    wanted = attend_kernels.attention(q, k, v, causal=True, device="cpu", kernel="cpu_flash")
    assert o.dtype == bfloat16 and lse.dtype == np.float32 and lse.shape == (2, 4, rows)
    assert o.tobytes() == wanted.tobytes()
    gradients = client.backward(o, q, k, v, o, lse, causal=True)
    assert [x.dtype for x in gradients] == [bfloat16] * 3
    with client.session(4, 64, dtype="bfloat16") as session:
        one = session.decode(q[:1], k[:1], v[:1], kernel="cpu_flash")
        assert one.tobytes() == wanted[:1].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [5, 300])
def test_torch_tensors_give_torch_tensors(client, dtype, rows):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, 4, 64, dtype=getattr(torch, dtype)) for _ in range(3))
    options = dict(layout="BLHD", kernel="cpu_flash", sinks=torch.randn(4),
                   bias=torch.rand(rows, rows) < 0.8, kv_lengths=torch.tensor([rows, 3]))
    o, lse = client.attention(q, k, v, return_lse=True, **options)
    wanted, wanted_lse = attend_kernels.attention(q, k, v, return_lse=True, **options)
    assert torch.equal(o, wanted) and torch.equal(lse, wanted_lse) and o.dtype == q.dtype
    d_o = torch.randn_like(o)
    for got, right in zip(client.backward(d_o, q, k, v, o, lse, **options),
                          attend_kernels.attention_backward(d_o, q, k, v, o, lse, **options)):
        assert torch.equal(got, right)
    turned = q.transpose(1, 2)  # not contiguous: copied
    assert torch.equal(client.attention(turned, turned, turned),
                       client.attention(*[turned.contiguous()] * 3))


def test_torch_tensors_that_require_grad_are_refused(client):
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(attend.Error, match="q requires grad"):
        client.attention(q, q, q)
    with torch.no_grad():
        assert client.attention(q, q, q).shape == q.shape
    with client.session(1, 8, dtype="float32") as session, torch.no_grad():
        session.append(q, q)
        assert torch.equal(session.attend(q), client.attention(q, q, q))


def test_torch_tensors_in_shared_memory(client):
    """torch.from_numpy of client.empty is used in place."""
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(client.empty((1, 4, 300, 64)))
    q.copy_(torch.randn(q.shape))
    answer = client.submit(q, q, q).result()
    assert answer.transport == "shm" and isinstance(answer.o, torch.Tensor)


class Exported:
    """An array with no interface but DLPack."""

    def __init__(self, array):
        self.array, self.shape, self.ndim = array, array.shape, array.ndim

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(client):
    random = np.random.default_rng(2)
    for rows in (4, 300):
        plain = [random.standard_normal((1, 2, rows, 64), np.float32) for _ in range(3)]
        o = client.attention(*map(Exported, plain), kernel="cpu_flash")
        assert isinstance(o, attend_kernels.DeviceArray) and o.shape == plain[0].shape
        wanted = attend_kernels.attention(*plain, kernel="cpu_flash", device="cpu")
        assert np.from_dlpack(o).tobytes() == wanted.tobytes()
        assert ctypes.string_at(o.data_ptr(), o.nbytes) == wanted.tobytes()
    turned = plain[0].swapaxes(1, 2)  # not contiguous: copied
    assert np.from_dlpack(client.attention(*[Exported(turned)] * 3)).tobytes() == \
        client.attention(*[np.ascontiguousarray(turned)] * 3).tobytes()


def test_torch_tensors_without_plain_memory_are_refused(client):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    dense = attend_kernels.attention(-q, k, v)
    nested = torch.nested.nested_tensor([torch.randn(2, 5, 8)] * 2)
    for bad, words in ((torch._neg_view(q), "q is a torch tensor with the negative bit"),
                       (q.to_sparse(), "q has no plain memory"), (nested, "q is a NestedTensor")):
        for attention in (attend_kernels.attention, client.attention):
            attention(q, k, v)  # makes a plan, which must not skip the check
            with pytest.raises(attend.Error, match=words):
                attention(bad, k, v)
    for attention in (attend_kernels.attention, client.attention):
        assert torch.equal(attention(torch._neg_view(q).resolve_neg(), k, v), dense)
        sinks = torch._neg_view(torch.ones(2))
        assert torch.equal(attention(q, k, v, sinks=sinks), attention(q, k, v, sinks=[-1.0, -1.0]))


def test_attend_torch_takes_negative_views(client):
    torch = pytest.importorskip("torch")
    import attend.torch
    plain, k, v, d_o = (torch.randn(2, 2, 5, 8) for _ in range(4))
    wanted = attend.torch.attention(-plain, k, v)
    for way in (None, client):
        q = plain.clone().requires_grad_()
        with attend.connect(way):
            o = attend.torch.attention(torch._neg_view(q), k, v)
            assert torch.equal(o, wanted)
            o.backward(torch._neg_view(d_o))
        other = (-plain).requires_grad_()
        attend.torch.attention(other, k, v).backward(-d_o)
        assert torch.equal(q.grad, -other.grad)
