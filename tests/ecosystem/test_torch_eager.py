# SPDX-License-Identifier: Apache-2.0
"""Eager mode: the autograd function without operators, the cases that use operators even so, and
repeated calls with a cached plan."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

import attend.torch  # noqa: E402
import attend_kernels  # noqa: E402
from attend_kernels import _attention, _gradients  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

SHAPES = ((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 5))


def inputs(dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def gradients(function, *tensors, d_o, context=contextlib.nullcontext):
    given = leaves(*tensors)
    with context():
        o = function(*given)
    o.backward(d_o)
    return [o.detach(), *(x.grad for x in given)]


def test_a_dispatch_mode_gets_the_operator_and_the_same_bits():
    tensors, d_o, watch = inputs(), torch.randn(2, 4, 6, 5), Watch()
    eager = gradients(attend.torch.attention, *tensors, d_o=d_o)
    watched = gradients(attend.torch.attention, *tensors, d_o=d_o, context=lambda: watch)
    assert "attend.attention.default" in watch.seen
    assert all(torch.equal(one, other) for one, other in zip(eager, watched))


def test_a_tree_is_a_mask_without_gradients(server):
    q, k, v = inputs()
    tree = torch.stack([torch.from_numpy(attend.tree_from_parents(parents)[0])
                        for parents in ([-1, 0, 0, 2], [-1, -1, 1, 1])])
    bias = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    bias[0, 0, 2:, 5:] = tree[0]
    bias[1, 0, 3:, 6:] = tree[1, :3, :3]
    options = dict(tree=tree, tree_lengths=torch.tensor([4, 3]))
    for causal in (False, True):
        wanted = attend.torch.attention(q, k, v, bias=bias, causal=causal, return_lse=True)
        for function in (attend.torch.attention, torch.compile(attend.torch.attention)):
            found = function(q, k, v, causal=causal, return_lse=True, **options)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted))
    with attend.connect(server.address):
        assert torch.equal(attend.torch.attention(q, k, v, causal=True, **options), wanted[0])
    assert (attend.torch.attention(q, k, v, dropout_p=1.0, **options) == 0).all()
    for n, name in enumerate("qkv"):
        given = [q, k, v]
        given[n] = given[n].clone().requires_grad_()
        with pytest.raises(attend.Error, match=f"tree is given and {name} requires grad"):
            attend.torch.attention(*given, **options)
        with torch.no_grad():
            attend.torch.attention(*given, **options)
    for wrong, words in ((dict(tree=tree, bias=bias), "tree is given with a bias"),
                         (dict(tree_lengths=[1, 1]), "tree_lengths is given, but tree is None")):
        with pytest.raises(attend.Error, match=words):
            attend.torch.attention(q, k, v, **wrong)


def test_eager_mode_does_not_use_the_operator():
    with torch.profiler.profile() as profile:
        gradients(attend.torch.attention, *inputs(), d_o=torch.randn(2, 4, 6, 5))
    names = {event.key for event in profile.key_averages()}
    assert any("_Attention" in name for name in names)
    assert not any("attend::" in name for name in names)


def test_meta_tensors_give_shapes():
    o, lse = attend.torch.attention(*(x.to("meta") for x in inputs()), return_lse=True)
    assert o.is_meta and o.shape == (2, 4, 6, 5) and lse.shape == (2, 4, 6)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functorch_transforms_raise(transform):
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        transform(lambda q: attend.torch.attention(q, k, v).sum())(q)
    with pytest.raises(attend_kernels.Error, match="q has a tangent"):
        torch.func.jvp(lambda q: attend.torch.attention(q, k, v), (q,), (q,))


def test_vmap_is_a_loop():
    q, k, v = inputs()
    several = torch.randn(3, *q.shape)
    got = torch.func.vmap(lambda q: attend.torch.attention(q, k, v))(several)
    assert torch.equal(got, torch.stack([attend.torch.attention(q, k, v) for q in several]))


def test_a_second_derivative_raises_in_a_larger_graph():
    q, k, v = leaves(*inputs())
    first, = torch.autograd.grad(attend.torch.attention(q, k, v).square().sum(), q,
                                 create_graph=True)
    with pytest.raises(attend_kernels.Error, match="attention has no second derivative: .*MATH"):
        (first.sum() + q.sum()).backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_through_only_one_of_o_and_lse(compiled, monkeypatch):
    """The gradient of the other one is None, not a tensor of zeros."""
    given, seen = [], attend_kernels.attention_backward

    def noted(*arguments, **options):
        given.append(options["d_lse"])
        return seen(*arguments, **options)

    monkeypatch.setattr(attend_kernels, "attention_backward", noted)
    tensors = inputs()
    for one in (0, 1):
        def function(q, k, v, one=one):
            return attend.torch.attention(q, k, v, return_lse=True)[one]

        got, wanted = leaves(*tensors), leaves(*tensors)
        called = torch.compile(function, fullgraph=True) if compiled else function
        called(*got).square().sum().backward()
        o, lse = attend.torch.attention(*wanted, return_lse=True)
        (((o, lse)[one].square().sum()) + 0.0 * (o, lse)[1 - one].sum()).backward()
        for x, y in zip(got, wanted):
            assert torch.equal(torch.zeros_like(y) if x.grad is None else x.grad, y.grad)
    if not compiled:
        assert [x is None for x in given] == [True, False, False, False]


def test_slopes_may_require_grad_under_no_grad():
    slopes = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert attend.torch.attention(*inputs(), alibi_slopes=slopes).isfinite().all()


@pytest.mark.parametrize("options,name", [(dict(window=(1.5, 0)), "window_left"),
                                          (dict(kernel=None), "kernel"),
                                          (dict(sinks=[0.0] * 4), "sinks")])
def test_arguments_of_the_wrong_type_are_named(options, name):
    with pytest.raises(RuntimeError, match=f"argument '{name}'"):
        attend.torch.attention(*inputs(), **options)


@pytest.fixture
def plans(monkeypatch):
    """Empty plan caches: (forward, backward)."""
    both = []
    for module in (_attention, _gradients):
        both.append(type(module._plans)(module._plans._tensors))
        monkeypatch.setattr(module, "_plans", both[-1])
    return both


def step(tensors, d_o, d_lse=None, **options):
    o, lse = attend_kernels.attention(*tensors, return_lse=True, **options)
    return o, lse, *attend_kernels.attention_backward(d_o, *tensors, o, lse, d_lse=d_lse, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [dict(), dict(causal=True, window=(3, 1)),
                                     dict(dropout_p=0.4, dropout_seed=3)])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_planned_call_has_the_bits_of_a_first_call(plans, dtype, options, with_lse):
    """With other values at other addresses, and other seeds."""
    for seed in (3, 2**64 - 1, 3):
        if options.get("dropout_p"):
            options = dict(options, dropout_seed=seed)
        tensors, d_o = inputs(dtype), torch.randn(2, 4, 6, 5).to(dtype)
        d_lse = torch.randn(2, 4, 6) if with_lse else None
        got = step(tensors, d_o, d_lse, **options)
        assert [len(one._by_key) for one in plans] == [1, 1]
        kept = [dict(one._by_key) for one in plans]
        for one in plans:
            one._by_key.clear()
        for x, y in zip(got, step(tensors, d_o, d_lse, **options)):
            assert x.dtype == y.dtype and torch.equal(x, y) and x.is_contiguous()
        for one, by_key in zip(plans, kept):
            one._by_key.update(by_key)


def test_arguments_that_a_plan_does_not_cover_are_checked(plans):
    q, k, v = inputs()
    attention, dropped = attend_kernels.attention, dict(dropout_p=0.5, dropout_seed=1)
    attention(q, k, v)
    attention(q, k, v, **dropped)
    with pytest.raises(attend_kernels.Error, match="q requires grad"):
        attention(q.clone().requires_grad_(), k, v)
    with pytest.raises(attend_kernels.Error, match=r"dropout_seed is -1, must be in \[0, 2\^64\)"):
        attention(q, k, v, **dict(dropped, dropout_seed=-1))
    with pytest.raises(attend_kernels.Error, match="dropout_seed is not an integer"):
        attention(q, k, v, **dict(dropped, dropout_seed=0.5))
    with pytest.raises(attend_kernels.Error, match="k has dtype float16, must be q's"):
        attention(q, k.half(), v)
    with pytest.raises(attend_kernels.Error, match="q has stride 6 in its last dimension"):
        attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)
    out = torch.empty(5).expand(2, 4, 6, 5)
    with pytest.raises(attend_kernels.Error, match=r"out has strides .* may overlap itself"):
        attention(q, k, v, out=out)
    assert len(plans[0]._by_key) == 2


def test_calls_with_further_arrays_have_no_plan(plans):
    """Arrays whose content is read, or whose address is in the parameters."""
    q, k, v = inputs()
    for _ in range(2):
        for options in (dict(bias=torch.zeros(9)), dict(sinks=torch.zeros(4)),
                        dict(kv_lengths=[9, 3]), dict(kv_lengths=torch.tensor([9, 3])),
                        dict(out=torch.empty(2, 4, 6, 5)), dict(window=[2, 2])):
            attend_kernels.attention(q, k, v, **options)
    assert not plans[0]._by_key
