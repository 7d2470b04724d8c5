# SPDX-License-Identifier: Apache-2.0
"""Repeated calls whose arguments are containers of every kind and change in between: each call uses
its own values, and no memory that an earlier call has freed."""

import array

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch")

import attend  # noqa: E402
import attend_kernels  # noqa: E402
from attend_kernels import _library  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU is visible"))]
HEADS, KEYS = 4, 9
SHAPES = ((2, HEADS, 6, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 5))
# Two values for each argument that may be a container.
VALUES = {
    "sinks": ([1.0, 2.0, -1.0, 0.5], [-3.0, 4.0, 0.25, 2.0]),
    "alibi_slopes": ([0.5, 0.25, 0.125, 1.0], [0.0, 2.0, 0.5, 0.0625]),
    "alibi_slopes of each sequence": ([[0.5, 0.25, 0.125, 1.0], [0.0, 1.0, 2.0, 3.0]],
                                      [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]),
    "q_lengths": ([6, 3], [2, 6]),
    "kv_lengths": ([KEYS, 4], [3, KEYS]),
    "page_table": ([[0, 1], [2, 1]], [[2, 0], [1, 1]]),
    "cu_seqlens_q": ([0, 2, 6], [0, 5, 6]),
    "cu_seqlens_k": ([0, 4, KEYS], [0, 8, KEYS]),
}
DTYPES = {"sinks": "float32", "alibi_slopes": "float32", "page_table": "int32"}


def copied(numbers):
    return [copied(one) for one in numbers] if isinstance(numbers, list) else numbers


def as_tuple(numbers):
    return tuple(map(as_tuple, numbers)) if isinstance(numbers, list) else numbers


def as_tuple_of_tensors(numbers):
    return tuple(map(as_tuple_of_tensors, numbers)) if isinstance(numbers, list) else \
        torch.tensor(numbers)


# Functions that make a container of numbers, by name.
FORMS = {
    "list": lambda numbers, dtype, device: copied(numbers),
    "tuple": lambda numbers, dtype, device: as_tuple(numbers),
    "tuple of lists": lambda numbers, dtype, device: tuple(copied(numbers)),
    "list of tuples": lambda numbers, dtype, device: list(as_tuple(numbers)),
    "array": lambda numbers, dtype, device: np.array(numbers, dtype),
    "tensor on the host": lambda numbers, dtype, device: torch.tensor(
        numbers, dtype=getattr(torch, dtype)),
    "tensor": lambda numbers, dtype, device: torch.tensor(
        numbers, dtype=getattr(torch, dtype), device=device),
    "tuple of 0-d tensors": lambda numbers, dtype, device: as_tuple_of_tensors(numbers),
}


def poison(device):
    """Overwrites freed small blocks of memory, and holds them as long as the result lives."""
    held = [bytearray(b"\xfe" * size) for size in range(8, 520, 8) for _ in range(8)]
    if device == "cuda":
        torch.cuda.synchronize()
        for _ in range(64):
            held.append(_library.Memory(0, 512))
            _library.check(_library.library().attend_memset(0, held[-1].address, 0xFE, 512, None))
    return held


def inputs(device, shapes=SHAPES):
    return [torch.randn(shape, device=device) for shape in shapes]


def operands(name, device):
    """(tensors, options) of a call whose argument `name` is set."""
    if name.startswith("cu_seqlens"):
        tensors = [x[0].transpose(0, 1).contiguous() for x in inputs(device)]
        options = dict(layout="LHD", cu_seqlens_q=[0, 1, 6], cu_seqlens_k=[0, 5, KEYS],
                       max_seqlen_q=6, max_seqlen_k=KEYS)
        return tensors, options
    if name == "page_table":
        return inputs(device, (SHAPES[0], (3, 2, 16, 8), (3, 2, 16, 5))), {}
    return inputs(device), {}


def same(ours, plain):
    return all(torch.allclose(x, y, atol=1e-5, rtol=1e-5) for x, y in zip(ours, plain))


def array_of(numbers, dtype):
    """The numbers in a form without plans, as NumPy arrays cannot be hashed."""
    return np.array(numbers, dtype)


def repeated(name, device, call, expected):
    """Compares call(n, argument) with expected[n] in each form, with values that alternate and
    repeat."""
    dtype = DTYPES.get(name.partition(" ")[0], "int64")
    assert not same(*expected)
    for form, made in FORMS.items():
        if " of lists" in form or " of tuples" in form:
            if not isinstance(VALUES[name][0][0], list):
                continue
        for n in (0, 0, 1, 0, 1, 1):
            got = call(n, made(VALUES[name][n], dtype, device))
            held = poison(device)
            assert same(got, expected[n]), f"{form}, value {n}"
            del held


def forward(call, tensors, **options):
    return call(*tensors, return_lse=True, **options)


def one_by_one(tensors, options):
    """O and LSE of a call without a plan: `options` have an array."""
    return forward(attend_kernels.attention, [x.clone() for x in tensors], **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("call", [attend_kernels.attention, attend.attention])
def test_attention(device, name, call):
    argument = name.partition(" ")[0]
    if argument == "page_table" and call is attend.attention:
        pytest.skip("attend.attention has no page_table")
    tensors, options = operands(name, device)
    dtype = DTYPES.get(argument, "int64")
    expected = [one_by_one(tensors, {**options, argument: array_of(numbers, dtype)})
                for numbers in VALUES[name]]
    repeated(name, device, lambda n, given: forward(call, tensors, **{**options, argument: given}),
             expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["list", "array", "tensor on the host", "tensor",
                                  "tuple of 0-d tensors"])
def test_an_argument_changed_in_place_is_noticed(device, form):
    """The second call gets the same container with other values."""
    tensors, sinks = inputs(device), FORMS[form]([1.0, 2.0, -1.0, 0.5], "float32", device)
    before = forward(attend_kernels.attention, tensors, sinks=sinks)
    for n in range(HEADS):
        if form.startswith("tuple"):
            sinks[n].fill_(5.0)
        else:
            sinks[n] = 5.0
    held = poison(device)
    after = forward(attend_kernels.attention, tensors, sinks=sinks)
    assert same(after, one_by_one(tensors, dict(sinks=[5.0] * HEADS))) and not same(after, before)
    del held


WINDOWS = {"list": list, "tuple": tuple, "array": np.array, "tensor": torch.tensor,
           "tuple of 0-d tensors": lambda sides: tuple(map(torch.tensor, sides)),
           "array.array": lambda sides: array.array("q", sides)}


@pytest.mark.parametrize("form", WINDOWS)
def test_windows(form):
    """Also if the same container has other values in a later call."""
    tensors = inputs("cpu")
    expected = [forward(attend_kernels.attention, tensors, window=sides)
                for sides in ((2, 0), (1, 3))]
    for n in (0, 0, 1, 0):
        given = WINDOWS[form](((2, 0), (1, 3))[n])
        assert same(forward(attend_kernels.attention, tensors, window=given), expected[n])
    if form == "tuple of 0-d tensors":
        given[0].fill_(1), given[1].fill_(3)
        assert same(forward(attend_kernels.attention, tensors, window=given), expected[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in VALUES if name != "page_table"])
@pytest.mark.parametrize("call", [attend_kernels.attention_backward, attend.backward])
def test_gradients(device, name, call):
    argument = name.partition(" ")[0]
    tensors, options = operands(name, device)
    dtype, d_o = DTYPES.get(argument, "int64"), torch.randn(
        (*tensors[0].shape[:-1], 5), device=device)
    wanted = ("q", "k", "v", "sinks") if argument == "sinks" else ("q", "k", "v")
    answers, expected = [], []
    for numbers in VALUES[name]:
        own = {**options, argument: array_of(numbers, dtype)}
        answers.append(one_by_one(tensors, own))
        expected.append(attend_kernels.attention_backward(
            d_o, *tensors, *answers[-1], wanted=list(wanted), **own))
    repeated(name, device, lambda n, given: call(
        d_o, *tensors, *answers[n], wanted=wanted, **{**options, argument: given}), expected)


def test_sinks_and_slopes_in_tuples():
    """Compared with the formulas in double precision."""
    q, k, v = inputs("cpu")
    options = dict(sinks=(1.0, 2.0, -1.0, 0.5), alibi_slopes=(0.5, 0.25, 0.125, 1.0))
    d_o, plain = torch.randn(2, HEADS, 6, 5), [x.double().numpy() for x in (q, k, v)]
    o, lse = reference.attention(*plain, **options)
    gradients = reference.gradients(*plain, d_o.double().numpy(), **options)
    for _ in range(3):
        got = attend_kernels.attention(q, k, v, return_lse=True, **options)
        assert np.allclose(got[0], o, atol=1e-5) and np.allclose(got[1], lse, atol=1e-5)
        found = attend_kernels.attention_backward(d_o, q, k, v, *got, wanted=(*gradients,),
                                                  **options)
        for name, gradient in zip(gradients, found):
            assert np.allclose(gradient, gradients[name], atol=1e-4), name


@pytest.mark.parametrize("form", [tuple, list, iter, lambda names: dict.fromkeys(names).keys()])
def test_wanted_may_be_any_iterable(form):
    """Gradients come in the order of `wanted`, which may be any iterable without duplicates."""
    tensors, d_o = inputs("cpu"), torch.randn(2, HEADS, 6, 5)
    answer = forward(attend_kernels.attention, tensors)
    expected = attend_kernels.attention_backward(d_o, *tensors, *answer)
    for _ in range(2):
        got = attend_kernels.attention_backward(d_o, *tensors, *answer, wanted=form(["v", "q"]))
        assert len(got) == 2 and same(got, (expected[2], expected[0]))
    for _ in range(2):
        with pytest.raises(attend_kernels.Error, match="wanted has 'q' twice"):
            attend_kernels.attention_backward(d_o, *tensors, *answer, wanted=("q", "k", "q"))


def test_wanted_with_a_server(client):
    tensors, d_o = inputs("cpu"), torch.randn(2, HEADS, 6, 5)
    answer = forward(client.attention, tensors)
    expected = client.backward(d_o, *tensors, *answer)
    got = client.backward(d_o, *tensors, *answer, wanted=iter(["v", "q"]))
    assert len(got) == 2 and same(got, (expected[2], expected[0]))
    with pytest.raises(attend_kernels.Error, match="wanted has 'k' twice"):
        client.backward(d_o, *tensors, *answer, wanted=["k", "k"])
