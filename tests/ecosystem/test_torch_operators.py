# SPDX-License-Identifier: Apache-2.0
"""The operators under autograd and torch.compile, the modules, and attend_kernels, which has no
autograd."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attend.torch  # noqa: E402
import attend_kernels  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from closeness import check  # noqa: E402
from attend import _operators  # noqa: E402


def inputs(b=2, hq=4, hkv=2, lq=6, lk=9, d=8, dv=5):
    return [torch.randn(shape) for shape in ((b, hq, lq, d), (b, hkv, lk, d), (b, hkv, lk, dv))]


def leaves(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


OPTIONS = [dict(), dict(causal=True), dict(window=(3, 1), softcap=2.0, scale=0.4),
           dict(causal=True, alignment="top_left", alibi_slopes=torch.tensor([.5, .2, .1, 0.])),
           dict(q_lengths=torch.tensor([6, 2]), kv_lengths=torch.tensor([4, 9])),
           dict(causal=True, dropout_p=0.3, dropout_seed=torch.tensor(-5)),
           dict(dropout_p=0.5, dropout_seed=2**64 - 1)]


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck_in_float32(options):
    """With sinks and LSE, which are float32. The error of a finite difference is the rounding of
    the answers, some 1e-6 for values around 1, over the step of 2^-5, plus the third derivative,
    below 8, times the step squared over 6."""
    q, k, v = leaves(*inputs(lq=4, lk=5, d=3, dv=2, b=2))
    options = {name: x.clamp(max=4) if "lengths" in name else x for name, x in options.items()}
    bias, sinks = leaves(torch.randn(2, 1, 1, 5), torch.randn(4))

    def function(q, k, v, bias, sinks):
        return attend.torch.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True,
                                      kernel="cpu_reference", **options)

    def finite(*tensors):  # differences of -inf are NaN
        o, lse = function(*tensors)
        return o, lse.masked_fill(lse.isinf(), 0.0)

    step = 2.0**-5
    assert torch.autograd.gradcheck(finite, (q, k, v, bias, sinks), eps=step, rtol=0.0,
                                    atol=1e-6 * 4 / step + 8 * step**2 / 6)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kernel", ["cpu_flash", "cpu_reference"])
def test_the_operator_has_the_bits_of_attend_kernels(options, kernel):
    tensors, d_o, d_lse = inputs(), torch.randn(2, 4, 6, 5), torch.randn(2, 4, 6)
    given = leaves(*tensors)
    got = attend.torch.attention(*given, kernel=kernel, return_lse=True, **options)
    torch.autograd.backward(got, [d_o, d_lse])
    if "dropout_seed" in options:
        options = dict(options, dropout_seed=int(options["dropout_seed"]) % 2**64)
    o, lse = attend_kernels.attention(*tensors, kernel=kernel, return_lse=True, **options)
    gradients = attend_kernels.attention_backward(d_o, *tensors, o, lse, d_lse=d_lse,
                                                  kernel=kernel, **options)
    assert torch.equal(got[0], o) and torch.equal(got[1], lse)
    for x, gradient in zip(given, gradients):
        assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("dropped", [(0.0, None), (0.3, torch.tensor(7))])
def test_opcheck(dropped):
    q, k, v = leaves(*inputs())
    bias, sinks = leaves(torch.randn(1, 4, 1, 9), torch.randn(4))
    arguments = (q, k, v, bias, sinks, None, None, None, None, None, None, None, "BHLD",
                 "bottom_right", -1, 0, 0.3, 0.0, *dropped, "auto")
    torch.library.opcheck(_operators.attention, arguments)
    o, lse = (x.detach() for x in _operators.attention(*arguments))
    plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    torch.library.opcheck(_operators.attention_backward, (
        torch.randn_like(o), torch.randn_like(lse), *plain[:3], o, lse, *plain[3:], "k bias q"))


@pytest.mark.parametrize("layout", ["BHLD", "BLHD", "LHD"])
def test_compiled_equals_eager(layout):
    def loss(q, k, v, sinks, lengths):
        packed = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=q.shape[0],
                      max_seqlen_k=k.shape[0]) if layout == "LHD" else {}
        o, lse = attend.torch.attention(q, k, v, sinks=sinks, causal=True, layout=layout,
                                        return_lse=True, **packed)
        return (o * o).sum() + (lse * lse).sum()

    shapes = {"BHLD": [(2, 4, 7, 8), (2, 2, 7, 8)], "BLHD": [(2, 7, 4, 8), (2, 7, 2, 8)],
              "LHD": [(7, 4, 8), (7, 2, 8)]}[layout]
    tensors = [torch.randn(shape) for shape in (*shapes, shapes[1])]
    lengths = torch.tensor([0, 3, 7])
    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    got = []
    for function in (loss, compiled):
        given = leaves(*tensors, torch.arange(4.0))
        value = function(*given, lengths)
        value.backward()
        got.append([x.grad for x in given])
        assert torch.isfinite(value)
    for eager, other in zip(*got):
        assert torch.equal(eager, other)


def test_compiled_dropout():
    """A compiled function draws a seed in every call, and its backward pass uses the same one."""
    q, k, v = inputs(lq=9, lk=9, dv=9)
    v = torch.eye(9).expand(2, 2, 9, 9).contiguous()  # O is the weights
    compiled = torch.compile(functools.partial(attend.torch.attention, dropout_p=0.4),
                             fullgraph=True)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        given = leaves(q, k, v)
        o = compiled(*given)
        again = compiled(*given)
        assert not torch.equal(o, again)
        o.sum().backward()
        # dV_j is the sum over the kept weights of column j.
        columns = o.detach().unflatten(1, (2, 2)).sum((2, 3))
        assert (given[2].grad.sum(-1) / 9 - columns).abs().max() < 1e-5
        drawn.append(o)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_compiled_dropout_equals_eager():
    q, k, v = inputs()
    seed = torch.tensor(12)
    function = functools.partial(attend.torch.attention, dropout_p=0.4, dropout_seed=seed)
    assert torch.equal(function(q, k, v), torch.compile(function, fullgraph=True)(q, k, v))


def test_compiled_dropout_takes_seeds_as_integers():
    q, k, v = inputs()

    def function(q, k, v, seed):
        return attend.torch.attention(q, k, v, dropout_p=0.4, dropout_seed=seed)

    compiled = torch.compile(function, fullgraph=True)
    for seed in (3, 4, 5, 2**63 - 1):
        assert torch.equal(compiled(q, k, v, seed), function(q, k, v, seed))


@pytest.mark.parametrize("seed,failure,words", [
    (1.7, TypeError, r"dropout_seed is 1.7, must be an integer in \[0, 2\^64\)"),
    ("3", TypeError, r"dropout_seed is '3', must be an integer in \[0, 2\^64\)"),
    (-1, ValueError, r"dropout_seed is -1, must be in \[0, 2\^64\)"),
    (2**64, ValueError, r"dropout_seed is 18446744073709551616, must be in \[0, 2\^64\)"),
    (torch.tensor(1.7), TypeError, "dropout_seed has dtype torch.float32, must have torch.int64"),
    (torch.tensor(3, dtype=torch.int32), TypeError, "has dtype torch.int32, must have torch.int64"),
    (torch.tensor([1, 2]), ValueError, "dropout_seed has 2 elements, must have 1"),
])
def test_invalid_seeds_are_refused(seed, failure, words):
    for p in (0.0, 0.5, 1.0):
        with pytest.raises(failure, match=words):
            attend.torch.attention(*inputs(), dropout_p=p, dropout_seed=seed)


def test_seeds_of_other_integer_types():
    wanted = attend.torch.attention(*(tensors := inputs()), dropout_p=0.5, dropout_seed=2**64 - 5)
    for seed in (np.uint64(2**64 - 5), torch.tensor(-5), torch.tensor([-5])):
        assert torch.equal(
            attend.torch.attention(*tensors, dropout_p=0.5, dropout_seed=seed), wanted)


def test_compiled_attention_for_several_lengths():
    attention = torch.compile(attend.torch.scaled_dot_product_attention, fullgraph=True,
                              dynamic=True)
    for length in (5, 8, 33):
        tensors = [torch.randn(2, 3, length, 8) for _ in range(3)]
        got = attention(*tensors, is_causal=True)
        assert torch.equal(got, attend.torch.scaled_dot_product_attention(*tensors,
                                                                          is_causal=True))


def test_unsupported_gradients_raise():
    q, k, v = leaves(*inputs())
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(attend_kernels.Error, match="alibi_slopes requires grad"):
        attend.torch.attention(q, k, v, alibi_slopes=slopes)
    o = attend.torch.attention(q, k, v)
    first, = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(attend_kernels.Error, match="attention has no second derivative: .*MATH"):
        first.sum().backward()


@pytest.mark.parametrize("function", [attend.torch.attention, attend_kernels.attention,
                                      attend.torch.scaled_dot_product_attention])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_forward_mode_raises(function, place):
    tensors = inputs(hq=2)
    with torch.autograd.forward_ad.dual_level():
        tensors[place] = torch.autograd.forward_ad.make_dual(tensors[place], tensors[place] + 1)
        with pytest.raises(attend_kernels.Error, match=f"{'qkv'[place]} has a tangent"):
            function(*tensors)


def test_the_plain_module_drops_no_gradient():
    q, k, v = leaves(*inputs())
    for tensors in ((q, k, v), (q.detach(), k, v)):
        with pytest.raises(attend_kernels.Error, match="requires grad.*attend.torch"):
            attend_kernels.attention(*tensors)
    with torch.no_grad():
        o = attend_kernels.attention(q, k, v)
    assert torch.equal(o, attend_kernels.attention(q.detach(), k.detach(), v.detach()))
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(attend_kernels.Error, match="sinks requires grad"):
        attend_kernels.attention(q.detach(), k.detach(), v.detach(), sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cpu_tensors_in_attend_kernels(dtype):
    q, k, v = (x.to(dtype) for x in inputs())
    o, lse = attend_kernels.attention(q, k, v, causal=True, return_lse=True)
    assert o.dtype == dtype and o.device.type == "cpu" and lse.dtype == torch.float32
    assert attend_kernels.select(q, k, v)[0] == "cpu_flash"
    d_q, d_k, d_v = attend_kernels.attention_backward(torch.ones_like(o), q, k, v, o, lse,
                                                      causal=True)
    given = leaves(q, k, v)
    attend.torch.attention(*given, causal=True).sum().backward()
    for plain, x in zip((d_q, d_k, d_v), given):
        assert torch.equal(plain, x.grad)


@pytest.mark.parametrize("options", [dict(), dict(causal=True),
                                     dict(causal=True, alignment="top_left"), dict(scale=0.7)])
def test_modules(options):
    tensors = inputs(lq=9, lk=7)  # bottom right: two rows that see no key
    flash = attend.torch.FlashAttention(**options)
    standard = attend.torch.StandardAttention(**options)
    check(flash, standard, tensors, gqa=True, **options)
    bias = torch.randn(1, 4, 9, 7)
    check(lambda q, k, v, bias: flash(q, k, v, bias=bias), standard, [*tensors, bias], gqa=True,
          **options)
    assert "causal" in repr(flash) and "causal" in repr(standard)
    assert not list(flash.parameters()) and not flash.state_dict()


MODULES = [attend.torch.FlashAttention, attend.torch.StandardAttention]


def test_modules_apply_dropout_only_in_training():
    tensors = inputs(lq=60, lk=50)
    for module in MODULES:
        drops, keeps = module(dropout=0.5, causal=True), module(causal=True)
        assert not torch.equal(drops(*tensors), drops(*tensors))
        torch.manual_seed(3)
        first = drops(*tensors)
        torch.manual_seed(3)
        assert torch.equal(drops(*tensors), first)
        assert "dropout=0.5" in repr(drops)
        assert torch.equal(drops.eval()(*tensors), keeps(*tensors))


@pytest.mark.parametrize("module", MODULES)
def test_modules_with_dropout_1(module):
    tensors = inputs(lq=9, lk=7)
    drops, keeps = module(dropout=1.0), module()
    given = leaves(*tensors)
    o = drops(*given)
    assert o.shape == (2, 4, 9, 5) and (o == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(o.sum(), given))
    assert torch.equal(drops.eval()(*tensors), keeps(*tensors))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("p", [-0.1, 1.5, 0.999999, float("nan")])
def test_modules_refuse_invalid_dropout(module, p):
    with pytest.raises(ValueError, match=rf"dropout is {p}, must be in \[0, 1 - 2\^-17\), or 1"):
        module(dropout=p)


def test_dropout_1_ignores_values():
    """Even NaN; LSE and its gradients are as without dropout."""
    given, nan = leaves(*inputs()), leaves(*inputs())
    with torch.no_grad():
        nan[0][0, 0, 0, 0] = nan[2][0, 0, 0, 0] = float("nan")
        given[2][0, 0, 0, 0] = float("nan")
    assert (attend.torch.attention(*nan, dropout_p=1.0) == 0).all()
    o, lse = attend.torch.attention(*given, dropout_p=1.0, return_lse=True)
    plain = leaves(*given[:2], torch.zeros_like(given[2]))
    _, wanted = attend.torch.attention(*plain, return_lse=True)
    assert (o == 0).all() and torch.equal(lse, wanted)
    got = torch.autograd.grad(o.sum() + lse.sum(), given)
    assert all(map(torch.equal, got, torch.autograd.grad(wanted.sum(), plain)))


def test_modules_accept_bool_masks():
    tensors = inputs(lq=9, lk=7)
    mask = torch.rand(2, 1, 9, 7) < 0.6
    flash, standard = attend.torch.FlashAttention(), attend.torch.StandardAttention()
    check(lambda q, k, v: flash(q, k, v, bias=mask), lambda q, k, v: standard(q, k, v, bias=mask),
          tensors, mask=mask, gqa=True)


def test_checkpointing_repeats_the_dropout_mask():
    q, k, v = leaves(*inputs())
    function = functools.partial(attend.torch.attention, dropout_p=0.5)
    torch.manual_seed(5)
    torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=False).sum().backward()
    got = [x.grad.clone() for x in (q, k, v)]
    plain = leaves(q, k, v)
    torch.manual_seed(5)
    function(*plain).sum().backward()
    assert all(torch.equal(one, x.grad) for one, x in zip(got, plain))


def test_plain_matrices():
    q, k, v = torch.randn(70, 16), torch.randn(50, 16), torch.randn(50, 24)
    check(attend.torch.run_flash,
          lambda q, k, v: (q @ k.T / 4).softmax(-1) @ v, [q, k, v])
    with pytest.raises(ValueError, match="K has 3 dimensions, must have 2"):
        attend.torch.run_flash(q, k[None], v)
