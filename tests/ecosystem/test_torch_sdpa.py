# SPDX-License-Identifier: Apache-2.0
"""attend.torch.scaled_dot_product_attention as a replacement of PyTorch's."""

import functools

import pytest

torch = pytest.importorskip("torch")

import attend.torch  # noqa: E402
import attend_kernels  # noqa: E402
from closeness import check  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as theirs  # noqa: E402

ours = attend.torch.scaled_dot_product_attention


def inputs(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def both(tensors, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Compares both functions. An additive mask whose gradient is checked is the fourth tensor."""
    def call(function, q, k, v, mask=attn_mask):
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        return function(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale,
                        enable_gqa=enable_gqa)

    check(functools.partial(call, ours), functools.partial(call, theirs), tensors, mask=attn_mask,
          gqa=enable_gqa, causal=is_causal, alignment="top_left", scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(scale=0.3),
                                     dict(is_causal=True, scale=1.0)])
def test_dtypes(dtype, options):
    both(inputs((2, 4, 65, 32), (2, 4, 65, 32), (2, 4, 65, 32), dtype=dtype), **options)


@pytest.mark.parametrize("q,k,v", [
    ((7, 16), (9, 16), (9, 24)),
    ((3, 7, 16), (3, 9, 16), (3, 9, 16)),
    ((2, 3, 7, 5), (2, 3, 9, 5), (2, 3, 9, 1)),
    ((2, 2, 3, 7, 16), (2, 2, 3, 9, 16), (2, 2, 3, 9, 16)),
    ((2, 3, 7, 16), (1, 3, 9, 16), (3, 9, 16)),
    ((2, 3, 1, 16), (2, 3, 300, 16), (2, 3, 300, 16)),
    ((2, 3, 9, 16), (2, 3, 7, 16), (2, 3, 7, 16)),
])
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes(q, k, v, is_causal):
    both(inputs(q, k, v), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(is_causal):
    tensors = inputs((2, 6, 17, 16), (2, 2, 20, 16), (2, 2, 20, 16))
    both(tensors, is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("heads", [(4, 2, 1), (8, 2, 4), (6, 3, 2), (4, 1, 4)])
def test_k_and_v_with_other_numbers_of_heads(heads):
    """PyTorch repeats each to the number of query's heads."""
    tensors = inputs(*((2, n, 9, 16) for n in heads))
    many = [x.repeat_interleave(heads[0] // x.shape[1], 1) for x in tensors]
    got, wanted = (ours(*tensors, enable_gqa=True), ours(*many))
    assert torch.equal(got, wanted)
    assert torch.allclose(got, theirs(*tensors, enable_gqa=True), atol=1e-5)
    leaves = [x.requires_grad_() for x in tensors]
    for x, y in zip(torch.autograd.grad(ours(*leaves, enable_gqa=True).square().sum(), leaves),
                    torch.autograd.grad(theirs(*leaves, enable_gqa=True).square().sum(), leaves)):
        assert torch.allclose(x, y, atol=1e-4)
    with pytest.raises(ValueError, match=f"value has 5 heads, must divide query's {heads[0]}"):
        ours(*tensors[:2], torch.randn(2, 5, 9, 16), enable_gqa=True)


@pytest.mark.parametrize("shape", [(17, 20), (1, 20), (17, 1), (3, 17, 20), (2, 1, 17, 20),
                                   (1, 3, 1, 20), (2, 3, 17, 20), (2, 3, 1, 1)])
@pytest.mark.parametrize("kind", [bool, float])
def test_masks(shape, kind):
    tensors = inputs((2, 3, 17, 16), (2, 3, 20, 16), (2, 3, 20, 16))
    mask = torch.rand(shape) < 0.7 if kind is bool else torch.randn(shape)
    if kind is bool:
        both(tensors, attn_mask=mask)
    else:
        both([*tensors, mask])


def test_masks_of_more_dimensions():
    tensors = inputs((2, 2, 3, 7, 16), (2, 2, 3, 9, 16), (2, 2, 3, 9, 16))
    for shape in ((7, 9), (3, 1, 9), (2, 1, 7, 9), (2, 1, 3, 7, 9)):
        both([*tensors, torch.randn(shape)])


def test_rows_without_a_key_and_their_gradients_are_0():
    q, k, v = (x.requires_grad_() for x in inputs(*[(1, 2, 5, 8)] * 3))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    o = ours(q, k, v, attn_mask=mask)
    assert (o[:, :, 2] == 0).all() and o[:, :, 1].abs().min() > 0
    o.square().sum().backward()
    assert (q.grad[:, :, 2] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


def test_strided_tensors_and_gradients():
    q, k, v = (x.transpose(1, 2) for x in inputs(*[(2, 17, 3, 16)] * 3))
    both([q, k, v], is_causal=True)
    turned = inputs(*[(2, 3, 16, 17)] * 3)
    both([x.transpose(-1, -2) for x in turned])
    # The gradient of a sum has stride 0 in every dimension.
    leaf = q.detach().contiguous().requires_grad_()
    ours(leaf, k, v).sum().backward()
    again = q.detach().contiguous().requires_grad_()
    ours(again, k, v).backward(torch.ones_like(q))
    assert torch.equal(leaf.grad, again.grad)


@pytest.mark.parametrize("batch,lq,lk", [(1, 0, 5), (1, 5, 0), (0, 5, 5)])
def test_empty_tensors(batch, lq, lk):
    q, k, v = (x.requires_grad_() for x in inputs(
        (batch, 2, lq, 8), (batch, 2, lk, 8), (batch, 2, lk, 8)))
    o = ours(q, k, v)
    assert o.shape == q.shape and (o == 0).all()
    o.sum().backward()
    assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("kv,options", [(0, dict()), (0, dict(attn_mask=torch.zeros(5, 7))),
                                        (2, dict(enable_gqa=True)), (0, dict(is_causal=True))])
@pytest.mark.parametrize("lead", [(2,), (3, 2)])
def test_no_heads(lead, kv, options):
    q, k, v = (x.requires_grad_() for x in inputs(
        (*lead, 0, 5, 8), (*lead, kv, 7, 8), (*lead, kv, 7, 6)))
    o = ours(q, k, v, **options)
    assert o.shape == theirs(q, k, v, **options).shape == (*lead, 0, 5, 6)
    o.sum().backward()
    assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("options", [dict(), dict(is_causal=True, dropout_p=0.5), dict(scale=2.0),
                                     dict(attn_mask=torch.ones(5, 7, dtype=torch.bool).to("meta"))])
def test_meta_tensors(options):
    tensors = [torch.empty(2, 3, rows, 8, device="meta", requires_grad=True) for rows in (5, 7, 7)]
    o = ours(*tensors, **options)
    assert o.is_meta and o.shape == theirs(*tensors, **options).shape
    o.sum().backward()
    assert all(x.grad.is_meta and x.grad.shape == x.shape for x in tensors)


@pytest.mark.parametrize("options", [dict(), dict(attn_mask=True), dict(key_padding_mask=True)])
def test_modules_use_the_replacement(monkeypatch, options):
    """Modules look the function up when they run."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    masks = dict(attn_mask=torch.ones(9, 9, dtype=torch.bool).triu(1),
                 key_padding_mask=torch.arange(9) >= torch.tensor([[9], [5]]))
    options = {name: masks[name] for name in options}
    seen = []

    def noted(*arguments, **given):
        seen.append(len(arguments))
        return ours(*arguments, **given)

    def step():
        leaf = x.clone().requires_grad_()
        o, _ = module(leaf, leaf, leaf, need_weights=False, **options)
        return o, *torch.autograd.grad(o.square().sum(), [leaf, *module.parameters()])

    wanted = step()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for got, one in zip(step(), wanted):
        assert torch.allclose(got, one, atol=1e-4, rtol=1e-4)
    assert seen


def test_autocast():
    tensors = inputs(*[(1, 2, 9, 16)] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, wanted = ours(*tensors), theirs(*tensors)
    assert o.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(o, ours(*(x.bfloat16() for x in tensors)))


@pytest.mark.parametrize("options,failure,words", [
    (dict(dropout_p=-0.1), ValueError, "dropout_p is -0.1, must be in .0, 1."),
    (dict(dropout_p=1.5), ValueError, "dropout_p is 1.5, must be in .0, 1."),
    (dict(dropout_p=0.999999), attend_kernels.Error, "must be in .0, 1 - 2.-17."),
    (dict(is_causal=True, attn_mask=torch.zeros(7, 9)), ValueError, "must be None if is_causal"),
    (dict(attn_mask=torch.zeros(6, 9)), ValueError, "attn_mask has 6 rows, must have 1 or query's"),
    (dict(attn_mask=torch.zeros(7, 9, dtype=torch.int32)), attend_kernels.Error, "bias has dtype"),
    (dict(scale=float("nan")), attend_kernels.Error, "scale"),
])
def test_invalid_options_are_refused(options, failure, words):
    with pytest.raises(failure, match=words):
        ours(*inputs((1, 2, 7, 16), (1, 2, 9, 16), (1, 2, 9, 16)), **options)


@pytest.mark.parametrize("q,k,v,failure,words", [
    ((16,), (9, 16), (9, 16), ValueError, "query has 1 dimensions, must have at least 2"),
    ((7, 16), (9, 16), (8, 16), ValueError, "value has 8 rows, must have key's 9"),
    ((7, 16), (9, 15), (9, 16), attend_kernels.Error, "k has head dim 15, must be 16"),
    ((7, 300), (9, 300), (9, 16), ValueError, "query has head dim 300, .*PyTorch's own"),
    ((7, 16), (9, 16), (9, 257), ValueError, "value has head dim 257, must be in .1, 256."),
    ((7, 0), (9, 0), (9, 8), ValueError, "query has head dim 0, must be in .1, 256."),
    ((7, 8), (9, 8), (9, 0), ValueError, "value has head dim 0, must be in .1, 256."),
])
def test_invalid_shapes_are_refused(q, k, v, failure, words):
    with pytest.raises(failure, match=words):
        ours(*inputs(q, k, v))


@pytest.mark.parametrize("dim", [16, 24])  # float32 can represent 1 / 4, not 1 / sqrt(24)
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(attn_mask=True)])
def test_double(options, dim):
    tensors = inputs((2, 4, 9, dim), (2, 2, 9, dim), (2, 2, 9, 8), dtype=torch.float64)
    if "attn_mask" in options:
        options = dict(attn_mask=torch.randn(2, 1, 9, 9, dtype=torch.float64))
    got, wanted = (f(*tensors, enable_gqa=True, **options) for f in (ours, theirs))
    assert got.dtype == torch.float64 and (got - wanted).abs().max() < 1e-14


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck(is_causal):
    q, k, v = (x.requires_grad_() for x in inputs(
        (1, 4, 5, 4), (1, 2, 6, 4), (1, 2, 6, 3), dtype=torch.float64))
    mask = None if is_causal else torch.randn(4, 1, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: ours(*x[:3], attn_mask=x[3], is_causal=is_causal, enable_gqa=True),
        (q, k, v, mask))


def seeded(function, seed, *arguments, **options):
    torch.manual_seed(seed)
    return function(*arguments, **options)


def factors(q, k, p, seed, **options):
    """The factors that dropout applies to the weights: if V is the identity, O is the weights."""
    identity = torch.eye(k.shape[-2], dtype=torch.float64).expand(*k.shape[:-1], k.shape[-2])
    q, k = q.double(), k.double()
    return torch.nan_to_num(seeded(ours, seed, q, k, identity, dropout_p=p, **options) /
                            ours(q, k, identity, **options))


@pytest.mark.parametrize("options", [dict(), dict(is_causal=True)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(options, p, dtype):
    tensors = inputs((2, 3, 17, 16), (2, 3, 20, 16), (2, 3, 20, 8), dtype=dtype)
    kept = factors(*tensors[:2], p, 7, **options)
    step = round(p * 65536) / 65536
    seen = torch.ones(17, 20).tril() if options else torch.ones(17, 20)
    close = (kept * (1 - step) - 1).abs() < 1e-12
    assert ((kept == 0) | close)[..., seen.bool()].all() and close.any()

    def theirs(q, k, v):
        scores = q @ k.transpose(-2, -1) / 4
        scores = scores.masked_fill(seen == 0, float("-inf"))
        return (scores.softmax(-1) * kept.to(q.dtype)) @ v

    check(lambda q, k, v: seeded(ours, 7, q, k, v, dropout_p=p, **options), theirs, tensors,
          causal=bool(options), alignment="top_left", kept=kept.numpy())


def test_dropout_rate():
    """The share of dropped weights is within six standard deviations."""
    zero = torch.zeros(8, 256, 1)
    o = ours(zero, zero, torch.ones(8, 256, 1), dropout_p=0.25)
    dropped = 1 - 0.75 * o.double().mean()
    assert abs(dropped - 0.25) < 6 * (0.25 * 0.75 / (8 * 256 * 256)) ** 0.5


def test_manual_seed_repeats_dropout():
    tensors = inputs(*[(2, 3, 17, 16)] * 3)
    first, again = (seeded(ours, 1, *tensors, dropout_p=0.5) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, ours(*tensors, dropout_p=0.5))


def test_dropout_of_1():
    tensors = [x.requires_grad_() for x in inputs(*[(1, 2, 5, 8)] * 3)]
    for function in (ours, theirs):
        o = function(*tensors, dropout_p=1.0)
        assert (o == 0).all()
        for gradient in torch.autograd.grad(o.sum(), tensors):
            assert (gradient == 0).all()


def test_bool_masks_give_the_bits_of_additive_masks():
    tensors = inputs((2, 3, 17, 16), (2, 3, 21, 16), (2, 3, 21, 16))
    for shape in ((17, 21), (1, 21), (17, 1), (2, 1, 17, 21), (2, 3, 17, 21)):
        mask = torch.rand(shape) < 0.7
        numbers = torch.zeros(shape).masked_fill(~mask, float("-inf"))
        assert torch.equal(ours(*tensors, attn_mask=mask), ours(*tensors, attn_mask=numbers))


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck_of_dropout(is_causal):
    tensors = [x.requires_grad_() for x in inputs(
        (1, 4, 5, 4), (1, 2, 6, 4), (1, 2, 6, 3), dtype=torch.float64)]
    assert torch.autograd.gradcheck(
        lambda *x: seeded(ours, 3, *x, dropout_p=0.4, is_causal=is_causal, enable_gqa=True),
        tensors)
