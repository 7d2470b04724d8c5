# SPDX-License-Identifier: Apache-2.0
"""The real library on the CPU, forward and backward."""

import attend_kernels
import dropout
import numpy as np
import pytest

from attend_kernels import _tensors
from cuda_tensor import Device, DlpackTensor, PtrTensor
from reference import MASKED, UNIT, attention, bounds, gradients

pytestmark = pytest.mark.cpu
RANDOM = np.random.default_rng()
CPU = Device("cpu")
TURNED = {"BHLD": (0, 1, 2, 3), "BLHD": (0, 2, 1, 3)}


def random(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def inputs(b=2, hq=4, hkv=2, lq=37, lk=50, d=24, dv=16, dtype=np.float32):
    return [random(*shape, dtype=dtype)
            for shape in ((b, hq, lq, d), (b, hkv, lk, d), (b, hkv, lk, dv))]


def run(*arguments, **options):
    return attend_kernels.attention(*arguments, device="cpu", **options)


def close(got, wanted, within):
    """Asserts that finite values are within the bound of the truth, and others equal."""
    assert got.shape == wanted.shape
    got, finite = got.astype(float), np.isfinite(wanted)
    assert (got[~finite] == wanted[~finite]).all()
    off = np.abs(got - np.where(finite, wanted, 0))
    assert (off <= within)[finite].all()


def answer_bounds(arrays, unit=UNIT, **options):
    """Error bounds of O and LSE."""
    found = bounds(*arrays, np.zeros((*arrays[0].shape[:-1], arrays[2].shape[-1])), unit=unit,
                   **options)
    return found["o"], found["lse"]


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("kernel", ["auto", "cpu_reference"])
def test_numpy_arrays(layout, dtype, kernel):
    arrays = inputs(dtype=dtype)
    turned = [x.transpose(TURNED[layout]) for x in arrays]
    o, lse = run(*turned, layout=layout, causal=True, return_lse=True, kernel=kernel)
    assert o.dtype == dtype and lse.dtype == np.float32
    wanted, wanted_lse = attention(*arrays, causal=True)
    within, lse_within = answer_bounds(arrays, np.finfo(dtype).eps / 2, causal=True)
    close(o.transpose(TURNED[layout]), wanted, within)
    close(lse, wanted_lse, lse_within)


def test_bfloat16():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    arrays = inputs(dtype=bfloat16)
    o = run(*arrays)
    assert o.dtype == bfloat16
    close(o, attention(*arrays)[0], answer_bounds(arrays, 2.0**-8)[0])


def test_any_strides_give_the_same_bits():
    q, k, v = inputs()
    wanted = run(q, k, v)
    wide = random(2, 4, 37, 60)
    wide[..., 5:29] = q
    gaps = np.zeros((2, 2, 100, 24), np.float32)[:, :, ::2]
    gaps[:] = k
    turned = np.ascontiguousarray(v.swapaxes(-1, -2)).swapaxes(-1, -2)  # gets copied
    unaligned = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(q.shape)
    unaligned[:] = q
    for queries in (wide[..., 5:29], unaligned):
        assert (run(queries, gaps, turned) == wanted).all()


@pytest.mark.parametrize("make", [
    lambda shape: np.zeros(shape, np.float32),
    lambda shape: np.zeros((*shape[:2], 2 * shape[2], shape[3]), np.float32)[:, :, ::2],
    lambda shape: np.zeros((*shape[:3], 2 * shape[3]), np.float32)[..., ::2]])
def test_out_may_be_strided(make):
    arrays = inputs()
    out = make((2, 4, 37, 16))
    assert run(*arrays, out=out) is out
    assert (out == run(*arrays)).all()


def strided(base, shape, *strides):
    """A view of `base` that may overlap itself; strides are in elements."""
    return np.lib.stride_tricks.as_strided(base, shape, [4 * stride for stride in strides])


@pytest.mark.parametrize("strides", [
    (0, 592, 16, 1), (2368, 0, 16, 1), (2368, 592, 0, 1), (2368, 592, 15, 1), (2368, 16, 32, 1),
    (2367, 592, 16, 1), (592, 592, 16, 1), (0, 0, 0, 0), (2368, 592, 16, 0)])
@pytest.mark.parametrize("kind", [lambda x: x, lambda x: PtrTensor(x, CPU),
                                  lambda x: DlpackTensor(x, device_type=1)])
def test_out_that_overlaps_itself_is_refused(kind, strides):
    """Before anything is written."""
    base = np.full(2 * 4 * 37 * 16, 5, np.float32)
    out = strided(base, (2, 4, 37, 16), *strides)
    words = "out has strides .*, by which it may overlap itself|out has stride 0 in its last"
    with pytest.raises(attend_kernels.Error, match=words):
        attend_kernels.attention(*map(kind, inputs()), out=kind(out))
    assert (base == 5).all()


@pytest.mark.parametrize("strides", [(592, 1184, 16, 1), (2368, 16, 64, 1), (-2368, 592, 16, 1),
                                     (2400, 597, 16, 1)])
def test_out_may_have_its_dimensions_in_any_order(strides):
    base, begin = np.zeros(6000, np.float32), 2368 if strides[0] < 0 else 0
    out = strided(base[begin:], (2, 4, 37, 16), *strides)
    arrays = inputs()
    attend_kernels.attention(*(PtrTensor(x, CPU) for x in arrays), out=PtrTensor(out, CPU))
    assert (out == run(*arrays)).all()


def test_tensors_with_data_ptr_are_used_in_place():
    arrays = inputs()
    tensors = [PtrTensor(x, CPU) for x in arrays]
    o = attend_kernels.attention(*tensors)
    assert isinstance(o, PtrTensor) and o.device is CPU
    assert (o.values == run(*arrays)).all()
    assert attend_kernels.select(*tensors)[0] == "cpu_flash"
    mixed = attend_kernels.attention(tensors[0], arrays[1], tensors[2])
    assert (mixed.values == o.values).all()


def test_dlpack_tensors_of_the_host():
    arrays = inputs()
    tensors = [DlpackTensor(x, device_type=1) for x in arrays]
    o = attend_kernels.attention(*tensors)
    assert [t.asked for t in tensors] == [[None]] * 3 and [t.deleted for t in tensors] == [1] * 3
    assert isinstance(o, attend_kernels.DeviceArray) and o.__dlpack_device__() == (1, 0)
    assert (np.from_dlpack(o) == run(*arrays)).all()


def test_packed_sequences_and_lengths():
    q, k, v = random(9, 4, 8), random(12, 2, 8), random(12, 2, 8)
    o = run(q, k, v, layout="LHD", cu_seqlens_q=[0, 4, 4, 9], cu_seqlens_k=[0, 5, 6, 12])
    for rows, keys in ((slice(0, 4), slice(0, 5)), (slice(4, 9), slice(6, 12))):
        alone = [x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        close(o[rows].swapaxes(0, 1)[None], attention(*alone)[0], answer_bounds(alone)[0])
    q, k, v = inputs(lk=9)
    k[0, :, 5:], v[0, :, 5:] = np.nan, np.nan
    o = run(q, k, v, kv_lengths=np.array([5, 9]))
    short = [q[:1], k[:1, :, :5], v[:1, :, :5]]
    close(o[:1], attention(*short)[0], answer_bounds(short)[0])


def test_errors_of_the_library_are_raised():
    arrays = inputs()
    for options, words in ((dict(kernel="cuda_naive"), "kernel cuda_naive does not run on cpu"),
                           (dict(stream=7), "stream is not NULL, but the CPU has none")):
        with pytest.raises(attend_kernels.Error, match=words):
            run(*arrays, **options)


def test_float64_is_computed_by_the_reference_only():
    arrays = inputs(dtype=np.float64)
    unit = 2 * 2.0**-53 / UNIT  # NumPy's answer is in float64 too
    # Scales and softcaps that float32 cannot represent, the default scale first.
    for one in (dict(causal=True), dict(scale=0.1, softcap=3.3)):
        o, lse = run(*arrays, kernel="cpu_reference", return_lse=True, **one)
        assert o.dtype == np.float64
        close(o, attention(*arrays, **one)[0], unit * answer_bounds(arrays, **one)[0])
        d_o = random(*o.shape, dtype=np.float64)
        got = attend_kernels.attention_backward(d_o, *arrays, o, lse, kernel="cpu_reference",
                                                device="cpu", **one)
        wanted, within = gradients(*arrays, d_o, **one), bounds(*arrays, d_o, **one)
        for name, gradient in zip("qkv", got):
            close(gradient, wanted[name], unit * within[name])
    for options in (dict(), dict(kernel="cpu_flash")):
        with pytest.raises(attend_kernels.Error, match="UNIMPLEMENTED.*float64 is computed only"):
            run(*arrays, **options)
    with pytest.raises(attend_kernels.Error, match="bias has dtype float64, must be float16"):
        run(*inputs(), bias=random(50, dtype=np.float64))


OPTIONS = [dict(), dict(causal=True), dict(window=(7, 3), softcap=3.0, scale=0.3),
           dict(bias=random(4, 1, 50), sinks=random(4)), dict(bias=random(2, 1, 37, 50)),
           dict(alibi_slopes=[0.5, 0.25, 0.1, 0.0], causal=True, alignment="top_left")]


@pytest.mark.parametrize("kernel", ["auto", "cpu_reference"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options, kernel):
    arrays = inputs()
    o, lse = run(*arrays, return_lse=True, **options)
    d_o, d_lse = random(*o.shape), random(*lse.shape)
    wanted = tuple(x for x in ("sinks", "v", "k", "q", "bias") if x in "qkv" or x in options)
    got = attend_kernels.attention_backward(d_o, *arrays, o, lse, d_lse=d_lse, wanted=wanted,
                                            kernel=kernel, device="cpu", **options)
    backward = dict(options, d_o=d_o, d_lse=d_lse)
    truth, within = gradients(*arrays, **backward), bounds(*arrays, **backward)
    for name, gradient in zip(wanted, got):
        assert gradient.dtype == np.float32
        close(gradient, truth[name], within[name])


def test_gradients_in_float16():
    arrays = inputs(dtype=np.float16)
    o, lse = run(*arrays, return_lse=True, causal=True)
    d_o = random(*o.shape, dtype=np.float16)
    backward = dict(d_o=d_o, causal=True)
    truth, within = gradients(*arrays, **backward), bounds(*arrays, unit=2.0**-11, **backward)
    got = attend_kernels.attention_backward(d_o, *arrays, o, lse, causal=True, device="cpu")
    for name, gradient in zip("qkv", got):
        assert gradient.dtype == np.float16
        close(gradient, truth[name], within[name])


@pytest.mark.parametrize("layout", ["BHLD", "BLHD", "LHD"])
def test_layouts_of_gradients(layout):
    arrays = inputs(b=1)
    o, lse = run(*arrays, return_lse=True)
    d_o = random(*o.shape)
    turn = (lambda x: x[0].swapaxes(0, 1)) if layout == "LHD" else \
        (lambda x: x.transpose(TURNED[layout]))
    packed = dict(cu_seqlens_q=[0, 37], cu_seqlens_k=[0, 50]) if layout == "LHD" else {}
    got = attend_kernels.attention_backward(*map(turn, (d_o, *arrays, o)),
                                            lse[0] if packed else lse, layout=layout,
                                            device="cpu", **packed)
    plain = attend_kernels.attention_backward(d_o, *arrays, o, lse, device="cpu")
    for one, other in zip(got, plain):
        assert one.flags.c_contiguous and (one == turn(other)).all()


def test_gradients_of_tensors_equal_those_of_arrays():
    arrays = inputs()
    o, lse = run(*arrays, return_lse=True)
    d_o = random(*o.shape)
    plain = attend_kernels.attention_backward(d_o, *arrays, o, lse, device="cpu")
    tensors = [PtrTensor(x, CPU) for x in (d_o, *arrays, o, lse)]
    for one, other in zip(attend_kernels.attention_backward(*tensors), plain):
        assert isinstance(one, PtrTensor) and (one.values == other).all()


def test_hidden_keys_and_rows_have_gradient_0():
    arrays = inputs(lq=50, lk=20)  # bottom right: the first 30 rows see no key
    o, lse = run(*arrays, causal=True, return_lse=True)
    d_o = random(*o.shape)
    d_q, _, d_v = attend_kernels.attention_backward(d_o, *arrays, o, lse, causal=True,
                                                    device="cpu")
    assert (d_q[:, :, :30] == 0).all() and (d_q[:, :, 31:] != 0).any() and np.isfinite(d_v).all()
    lengths = dict(kv_lengths=[7, 20])
    o, lse = run(*arrays, return_lse=True, **lengths)
    _, d_k, d_v = attend_kernels.attention_backward(d_o, *arrays, o, lse, device="cpu", **lengths)
    assert (d_k[0, :, 7:] == 0).all() and (d_v[0, :, 7:] == 0).all()


@pytest.mark.parametrize("kernel", ["cpu_flash", "cpu_reference"])
@pytest.mark.parametrize("options", [dict(), dict(causal=True, sinks=random(4)),
                                     dict(bias=random(4, 1, 50), softcap=3.0)])
def test_dropout(options, kernel):
    arrays, seed = inputs(), int(RANDOM.integers(2**64, dtype=np.uint64))
    truth_options = dict(options, kept=dropout.kept(0.3, seed, 2, 4, 37, 50))
    given = dict(options, dropout_p=0.3, dropout_seed=seed, kernel=kernel)
    o, lse = run(*arrays, return_lse=True, **given)
    close(o, attention(*arrays, **truth_options)[0], answer_bounds(arrays, **truth_options)[0])
    assert (lse == run(*arrays, return_lse=True, kernel=kernel, **options)[1]).all()
    d_o, d_lse = random(*o.shape), random(*lse.shape)
    wanted = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in options))
    got = attend_kernels.attention_backward(d_o, *arrays, o, lse, d_lse=d_lse, wanted=wanted,
                                            device="cpu", **given)
    backward = dict(truth_options, d_o=d_o, d_lse=d_lse)
    truth, within = gradients(*arrays, **backward), bounds(*arrays, **backward)
    for name, gradient in zip(wanted, got):
        close(gradient, truth[name], within[name])


def test_dropout_of_packed_sequences():
    """The mask depends on the index of the sequence and on positions within it."""
    lengths, seed = [(4, 5), (5, 6)], 3
    q, k, v = random(9, 4, 8), random(11, 2, 8), random(11, 2, 8)
    o = run(q, k, v, layout="LHD", cu_seqlens_q=[0, 4, 9], cu_seqlens_k=[0, 5, 11], dropout_p=0.5,
            dropout_seed=seed)
    rows = keys = 0
    for n, (lq, lk) in enumerate(lengths):
        alone = [x.swapaxes(0, 1)[None] for x in (q[rows:rows + lq], k[keys:keys + lk],
                                                  v[keys:keys + lk])]
        options = dict(kept=dropout.kept(0.5, seed, 2, 4, lq, lk)[n:n + 1])
        close(o[rows:rows + lq].swapaxes(0, 1)[None], attention(*alone, **options)[0],
              answer_bounds(alone, **options)[0])
        rows, keys = rows + lq, keys + lk


@pytest.mark.parametrize("shape", [(50,), (37, 50), (4, 1, 50), (2, 4, 37, 50)])
def test_bool_masks_give_the_bits_of_an_equal_bias(shape):
    arrays, mask = inputs(), RANDOM.random(shape) < 0.7
    numbers = np.where(mask, 0, MASKED).astype(np.float32)
    turned = np.asfortranarray(mask)
    o, lse = run(*arrays, bias=numbers, return_lse=True)
    for bias in (mask, turned):
        same_o, same_lse = run(*arrays, bias=bias, return_lse=True)
        assert (same_o == o).all() and (same_lse == lse).all()
    d_o = random(*o.shape)
    found = [attend_kernels.attention_backward(d_o, *arrays, o, lse, device="cpu", bias=bias)
             for bias in (numbers, mask)]
    for one, other in zip(*found):
        assert (one == other).all()
    with pytest.raises(attend_kernels.Error, match="wanted has 'bias', but it is of bool"):
        attend_kernels.attention_backward(d_o, *arrays, o, lse, device="cpu", bias=mask,
                                          wanted=("bias",))


@pytest.mark.parametrize("shape", [(8,), (3, 64), (2, 1, 5, 1024), (2, 1, 5, 13), (0, 16), (2, 0)])
def test_torch_masks_are_packed_as_by_numpy(shape):
    torch = pytest.importorskip("torch")
    mask = RANDOM.random(shape) < 0.5
    wanted = np.packbits(mask, axis=-1, bitorder="little")
    turned = np.asfortranarray(mask)
    shifted = torch.zeros(mask.size + 1, dtype=torch.bool)[1:].view(shape)  # unaligned
    shifted[...] = torch.from_numpy(mask)
    other_bytes = torch.from_numpy(mask * np.uint8(255)).view(torch.bool)
    for tensor in (torch.from_numpy(mask), torch.from_numpy(turned), shifted, other_bytes):
        packed = _tensors.packed_mask(tensor)
        assert packed.dtype == torch.uint8 and (packed.numpy() == wanted).all()


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan"), 0.999995])
def test_invalid_dropout_probabilities_are_refused(p):
    with pytest.raises(attend_kernels.Error, match="dropout_p is .*, must be in .0, 1 - 2.-17."):
        run(*inputs(), dropout_p=p, dropout_seed=1)


def test_select_backward():
    arrays = inputs()
    o, lse = run(*arrays, return_lse=True)
    given = (o, *arrays, o, lse)
    kernel, why = attend_kernels.select_backward(*given, device="cpu", wanted=("v",), causal=True)
    assert kernel == "cpu_flash" and why
    assert attend_kernels.select_backward(*given, device="cpu",
                                          kernel="cpu_reference")[0] == "cpu_reference"
    for change, words in ((dict(kernel="cuda_naive"), "does not run on cpu"),
                          (dict(out=o), "select_backward has no argument out"),
                          (dict(wanted=("sinks",)),
                           "wanted has 'sinks', which the call does not have")):
        with pytest.raises(attend_kernels.Error, match=words):
            attend_kernels.select_backward(*given, **{"device": "cpu", **change})


REFUSED = [
    (dict(d_o=np.zeros((2, 4, 37, 15), np.float32)), "d_o has shape .*15.*, must be .*16"),
    (dict(d_o=np.zeros((2, 4, 37, 16), np.float16)), "d_o has dtype float16, must be o's, float32"),
    (dict(o=np.zeros((2, 4, 36, 16), np.float32)), "o has shape .*36.*, must be .*37"),
    (dict(lse=np.zeros((2, 4, 36), np.float32)), r"lse has shape \(2, 4, 36\), must be \(2, 4, 37"),
    (dict(lse=np.zeros((2, 4, 37))), "lse has dtype float64, must be float32"),
    (dict(d_lse=np.zeros((4, 37), np.float32)), r"d_lse has shape \(4, 37\), must be \(2, 4, 37"),
    (dict(d_lse=np.zeros((2, 4, 74), np.float32)[..., :37]), "d_lse has strides .*74"),
    (dict(wanted=("q", "o")), "wanted has 'o', must be some of q, k, v, bias, sinks"),
    (dict(wanted=("bias",)), "wanted has 'bias', which the call does not have"),
    (dict(kernel="none"), 'kernel is "none", must be one of'),
    (dict(kernel="cuda_naive"), "kernel cuda_naive does not run on cpu"),
]


@pytest.mark.parametrize("change,words", REFUSED)
def test_invalid_arguments_of_the_backward_pass_are_refused(change, words):
    arrays = inputs()
    o, lse = run(*arrays, return_lse=True)
    arguments = dict(d_o=o, q=arrays[0], k=arrays[1], v=arrays[2], o=o, lse=lse, device="cpu")
    with pytest.raises(attend_kernels.Error, match=words):
        attend_kernels.attention_backward(**{**arguments, **change})


def test_gradients_of_pages_are_unimplemented():
    q, pages = random(2, 4, 5, 8), random(7, 2, 16, 8)
    table = dict(page_table=[[4, 1], [2, 0]])
    o, lse = run(q, pages, pages, return_lse=True, **table)
    with pytest.raises(attend_kernels.Error, match="UNIMPLEMENTED.*pages"):
        attend_kernels.attention_backward(o, q, pages, pages, o, lse, device="cpu", **table)


def test_empty_tensors():
    q, k, v = inputs()
    for lq, lk in ((0, 50), (37, 0), (0, 0)):
        arrays = [q[:, :, :lq], k[:, :, :lk], v[:, :, :lk]]
        o, lse = run(*arrays, return_lse=True)
        got = attend_kernels.attention_backward(o, *arrays, o, lse, device="cpu")
        assert [x.shape for x in got] == [x.shape for x in arrays]
        assert all((x == 0).all() for x in got)


def test_a_bias_of_minus_infinity_hides_a_key():
    arrays = inputs(lq=3, lk=5)
    hidden = np.zeros((3, 5), np.float32)
    hidden[:, 2] = MASKED
    seen = [arrays[0], *(np.delete(x, 2, 2) for x in arrays[1:])]
    close(run(*arrays, bias=hidden), attention(*seen)[0], answer_bounds(seen)[0])
