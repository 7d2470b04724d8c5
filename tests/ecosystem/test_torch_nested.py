# SPDX-License-Identifier: Apache-2.0
"""NestedTensors, PyTorch's sequences of different lengths, compared with dense attention of each
sequence."""

import attend
import attend_kernels
import pytest

torch = pytest.importorskip("torch")

import attend.torch  # noqa: E402

ours = attend.torch.scaled_dot_product_attention
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU is visible"))]


def rows(lengths, heads, dim, dtype=torch.float32, device="cpu"):
    return [torch.randn(n, heads, dim, device=device).to(dtype) for n in lengths]


def nested(parts):
    """A NestedTensor [B, heads, rows, D], as nn.MultiheadAttention and models make them."""
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def qkv(dtype=torch.float32, device="cpu", keys=(3, 6, 1), heads=(4, 4, 4)):
    """NestedTensors q, k and v, their leaves (the rows of all sequences), and the offsets."""
    leaves = [x.requires_grad_() for x in (
        torch.cat(rows(lengths, n, dim, dtype, device))
        for lengths, n, dim in zip(((3, 6, 1), keys, keys), heads, (8, 8, 5)))]
    starts = [torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)
              for lengths in ((3, 6, 1), keys)]
    q, k, v = leaves
    return [torch.nested.nested_tensor_from_jagged(x, at).transpose(1, 2)
            for x, at in ((q, starts[0]), (k, starts[1]), (v, starts[1]))], leaves, starts


def one_by_one(leaves, starts, **options):
    """PyTorch's answer for each sequence alone in double precision, packed."""
    parts = [[x[begin:end].double().transpose(0, 1) for begin, end in zip(at, at[1:])]
             for x, at in zip(leaves, (starts[0], starts[1], starts[1]))]
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(*each, **options)
                      .transpose(0, 1) for each in zip(*parts)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(scale=0.3)])
@pytest.mark.parametrize("keys", [None, (4, 2, 5)])
def test_answers_and_gradients(device, dtype, bound, options, keys):
    """keys: lengths of the keys; None: the queries' offsets, as the same tensor."""
    tensors, leaves, starts = qkv(dtype, device, keys or (3, 6, 1))
    if keys is None:
        starts[1] = starts[0]
    o = ours(*tensors, **options)
    assert o.shape[1] == 4 and o.shape[2] == tensors[0].shape[2] and o.shape[3] == 5
    got = o.transpose(1, 2).values()
    wanted = one_by_one(leaves, starts, **options)
    assert got.dtype == dtype and torch.allclose(got.double(), wanted, atol=bound)
    d_o = torch.randn_like(got)
    for x, y in zip(torch.autograd.grad(got, leaves, d_o),
                    torch.autograd.grad(wanted, leaves, d_o.double())):
        assert torch.allclose(x, y, atol=8 * bound)


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 2, 1)])
def test_grouped_heads(heads):
    tensors, leaves, starts = qkv(heads=heads)
    got = ours(*tensors, enable_gqa=True).transpose(1, 2).values()
    many = [x.repeat_interleave(4 // x.shape[1], 1) for x in leaves]
    assert torch.allclose(got.double(), one_by_one(many, starts), atol=1e-5)
    with pytest.raises(ValueError, match="have 4, 2 and . heads, must have as many"):
        ours(*tensors)


def test_sequences_without_rows():
    q = nested(rows((3, 0, 2), 2, 8))
    o = ours(q, q, q)
    assert torch.equal(o.offsets(), q.offsets()) and o.values().isfinite().all()


def test_autocast_and_dropout():
    tensors, leaves, _ = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(*tensors).dtype == torch.bfloat16
    torch.manual_seed(3)
    first = ours(*tensors, dropout_p=0.5).values()
    torch.manual_seed(3)
    assert torch.equal(ours(*tensors, dropout_p=0.5).values(), first)
    assert not torch.equal(ours(*tensors).values(), first)


def test_served(client):
    tensors, leaves, _ = qkv()
    found = []
    for way in (None, client):
        with attend.connect(way):
            o = ours(*tensors, is_causal=True).values()
            found.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    assert all(torch.equal(x, y) for x, y in zip(*found))


def refusals():
    """(arguments, options, message)"""
    q = nested(rows((3, 5), 2, 8))
    other = nested(rows((5, 3), 2, 8))
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)],
                                         layout=torch.strided)
    holes = torch.nested.narrow(torch.randn(2, 6, 2, 8), 1, torch.tensor([0, 1]),
                                torch.tensor([3, 4]), layout=torch.jagged).transpose(1, 2)
    dense = torch.randn(2, 2, 5, 8)
    form = "must be a NestedTensor of layout torch.jagged"
    return [((strided,) * 3, {}, "query " + form), ((q, dense, dense), {}, "key " + form),
            ((dense, q, q), {}, "query " + form), ((q, q, dense), {}, "value " + form),
            ((holes,) * 3, {}, "query " + form), ((q.transpose(1, 2),) * 3, {}, "query " + form),
            ((torch.nested.nested_tensor(rows((3, 5), 1, 8), layout=torch.jagged).squeeze(2),) * 3,
             {}, "query " + form),
            ((q, q, q), dict(attn_mask=torch.zeros(5, 5)), "attn_mask is given, must be None"),
            ((q, q, other), {}, "must have the same offsets")]


@pytest.mark.parametrize("case", range(9))
def test_unsupported_arguments_are_refused(case):
    tensors, options, words = refusals()[case]
    with pytest.raises(ValueError, match=words):
        ours(*tensors, **options)


@pytest.mark.parametrize("function", [attend_kernels.attention, attend.attention,
                                      attend.torch.attention])
@pytest.mark.parametrize("case", [0, 5])
def test_other_functions_refuse_nested_tensors_with_advice(function, case):
    """The advice: pass values and offsets as packed sequences."""
    bad, plain = refusals()[case][0], refusals()[1][0][1]
    for place, name in enumerate("qkv"):
        tensors = [plain] * 3
        tensors[place] = bad[0]
        with pytest.raises(attend_kernels.Error, match=f"{name} is a NestedTensor.*cu_seqlens_q"):
            function(*tensors)
