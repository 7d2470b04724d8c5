# SPDX-License-Identifier: Apache-2.0
"""Repeated calls with NumPy arrays use a cached plan, with the same bits and the same errors."""

import numpy
import pytest

import attend_kernels
from attend_kernels import _attention, _gradients

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    """Empty plan caches: (forward, backward)."""
    both = []
    for module in (_attention, _gradients):
        both.append(type(module._plans)(module._plans._tensors))
        monkeypatch.setattr(module, "_plans", both[-1])
    return both


def attend(q, k, v, **options):
    return attend_kernels.attention(q, k, v, device="cpu", **options)


def arrays(count=3, dtype=numpy.float32, rows=6):
    make = numpy.random.default_rng().standard_normal
    return [make((2, 4, rows, 8)).astype(dtype) for _ in range(count)]


def step(q, k, v, d_o, **options):
    o, lse = attend(q, k, v, return_lse=True, **options)
    gradients = attend_kernels.attention_backward(d_o, q, k, v, o, lse, device="cpu", **options)
    return o, lse, *gradients


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float16])
@pytest.mark.parametrize("options", [dict(), dict(causal=True, window=(3, 0)),
                                     dict(dropout_p=0.4, dropout_seed=3)])
def test_a_planned_call_has_the_bits_of_a_first_call(plans, dtype, options):
    for seed in (3, 2**64 - 1):
        if "dropout_seed" in options:
            options = dict(options, dropout_seed=seed)
        given = arrays(4, dtype)
        got = step(*given, **options)
        assert [len(one._by_key) for one in plans] == [1, 1]
        kept = [dict(one._by_key) for one in plans]
        for one in plans:
            one._by_key.clear()
        for x, y in zip(got, step(*given, **options)):
            assert x.dtype == y.dtype and x.flags.c_contiguous and numpy.array_equal(x, y)
        for one, by_key in zip(plans, kept):
            one._by_key.update(by_key)


def test_results_do_not_share_memory():
    q, k, v = arrays()
    results = [attend(q, k, v) for _ in range(3)]
    assert not numpy.shares_memory(results[1], results[2])
    assert all(numpy.array_equal(results[0], other) for other in results)


def test_read_only_and_strided_inputs():
    q, k, v = arrays()
    wanted = attend(q, k, v)
    gaps = numpy.zeros((2, 4, 9, 8), numpy.float32)[:, :, :6]
    gaps[...] = k
    for x in (q, v):
        x.flags.writeable = False
    for _ in range(3):
        assert numpy.array_equal(attend(q, gaps, v), wanted)


def test_arrays_that_are_copied_have_no_plan(plans):
    """Unaligned arrays, and those whose rows are not contiguous."""
    q, k, v = arrays()
    wanted = attend(q, k, v)
    odd = numpy.frombuffer(b"." + k.tobytes(), numpy.float32, offset=1).reshape(k.shape)
    steps = numpy.repeat(k, 2, axis=-1)[..., ::2]
    for other in (odd, steps):
        for _ in range(3):
            assert numpy.array_equal(attend(q, other, v), wanted)
    assert len(plans[0]._by_key) == 1


def test_arrays_without_rows():
    for _ in range(3):
        assert attend(*arrays(rows=0)).shape == (2, 4, 0, 8)


@pytest.mark.parametrize("good, bad", [
    (dict(window=(1, 2)), dict(window=(1.0, 2))),
    (dict(key_offset=1), dict(key_offset=1.0)),
    (dict(keys_after=1), dict(keys_after=numpy.float64(1))),
])
def test_a_plan_does_not_accept_arguments_of_another_type(good, bad):
    q, k, v = arrays()
    with pytest.raises(attend_kernels.Error) as first:
        attend(q, k, v, **bad)
    for _ in range(2):
        attend(q, k, v, **good)
    with pytest.raises(attend_kernels.Error) as later:
        attend(q, k, v, **bad)
    assert str(later.value) == str(first.value)


def test_a_plan_does_not_accept_arrays_of_another_dtype_or_type():
    q, k, v = arrays()
    for _ in range(2):
        attend(q, k, v)
    with pytest.raises(attend_kernels.Error, match="byte order"):
        attend(q, k.astype(">f4"), v)
    with pytest.raises(attend_kernels.Error, match="masked array"):
        attend(q, numpy.ma.masked_array(k), v)
    with pytest.raises(attend_kernels.Error, match="k has dtype float16, must be q's, float32"):
        attend(q, k.astype(numpy.float16), v)
