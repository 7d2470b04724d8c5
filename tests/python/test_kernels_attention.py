# SPDX-License-Identifier: Apache-2.0
"""attention() passes layouts, strides, score terms and lengths to the library correctly."""

import array
import dataclasses
import threading

import attend_kernels
import numpy as np
import pytest
from attend_kernels import _attention, _library, _staging, _tensors

from cuda_tensor import DlpackTensor, PtrTensor

RANDOM = np.random.default_rng()
SWAP = {"BHLD": (0, 1, 2, 3), "BLHD": (0, 2, 1, 3)}


def random(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def inputs(b=2, hq=4, hkv=2, lq=5, lk=7, d=8, dv=6, dtype=np.float32):
    return random(b, hq, lq, d, dtype=dtype), random(b, hkv, lk, d, dtype=dtype), \
        random(b, hkv, lk, dv, dtype=dtype)


def expected(q, k, v, bias=0.0, visible=True, cap=0.0, sinks=None):
    """O and LSE in double precision, for inputs in BHLD; `visible` broadcasts to the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(float), group, axis=1) for x in (k, v))
    scores = q.astype(float) @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if cap:
        scores = cap * np.tanh(scores / cap)
    scores = np.where(visible, scores + bias, -np.inf)
    logits = scores
    if sinks is not None:
        column = np.broadcast_to(np.reshape(sinks, (1, -1, 1, 1)), (*scores.shape[:-1], 1))
        logits = np.concatenate([scores, column], -1)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(logits).sum(-1))
    weights = np.where(np.isneginf(scores), 0, np.exp(scores - np.where(
        np.isneginf(lse), 0, lse)[..., None]))
    return weights @ v, lse


def close(got, wanted, tolerance=1e-5):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_numpy_arrays(fake, layout, dtype):
    q, k, v = inputs(dtype=dtype)
    swapped = [x.transpose(SWAP[layout]) for x in (q, k, v)]
    o, lse = attend_kernels.attention(*swapped, layout=layout, return_lse=True)
    wanted_o, wanted_lse = expected(q, k, v)
    assert o.dtype == dtype and lse.dtype == np.float32 and lse.shape == (2, 4, 5)
    close(o.transpose(SWAP[layout]), wanted_o, 1e-5 if dtype == np.float32 else 4e-3)
    close(lse, wanted_lse)
    attend_kernels.release_workspaces()
    assert not fake.blocks  # everything is freed


def test_alibi_slopes_and_sinks(fake):
    q, k, v = inputs()
    distance = abs(np.arange(7)[None, :] - np.arange(5)[:, None] - 2)
    slopes = RANDOM.random((2, 4), dtype=np.float32)
    for given in (slopes, slopes[0], slopes[0].tolist()):
        per_head = -np.asarray(given).reshape(-1, 4, 1, 1) * distance
        close(attend_kernels.attention(q, k, v, alibi_slopes=given),
              expected(q, k, v, bias=per_head)[0])
    sinks = [0.5, -1.0, 2.0, 0.0]
    o, lse = attend_kernels.attention(q, k, v, sinks=sinks, softcap=2.0, return_lse=True)
    wanted = expected(q, k, v, cap=2.0, sinks=sinks)
    close(o, wanted[0])
    close(lse, wanted[1])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_packed_sequences(fake, on_gpu):
    q, k, v = random(6, 4, 8), random(9, 2, 8), random(9, 2, 6)
    begins_q, begins_k = [0, 2, 2, 6], [0, 4, 5, 9]
    arguments = dict(cu_seqlens_q=begins_q, cu_seqlens_k=begins_k, layout="LHD", causal=True,
                     return_lse=True)
    if on_gpu:
        q, k, v = (PtrTensor(x) for x in (q, k, v))
        arguments.update(cu_seqlens_q=PtrTensor(np.array(begins_q, np.int32)),
                         cu_seqlens_k=PtrTensor(np.array(begins_k)), max_seqlen_q=4,
                         max_seqlen_k=4)
    o, lse = attend_kernels.attention(q, k, v, **arguments)
    if on_gpu:
        q, k, v, o, lse = (x.values for x in (q, k, v, o, lse))
    assert o.shape == (6, 4, 6) and lse.shape == (4, 6)
    for rows, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 6), slice(5, 9))):
        one = [x.transpose(1, 0, 2)[None] for x in (q[rows], k[keys], v[keys])]
        lq, lk = one[0].shape[2], one[1].shape[2]
        visible = np.arange(lk)[None, :] <= np.arange(lq)[:, None] + lk - lq
        wanted = expected(*one, visible=visible)
        close(o[rows].transpose(1, 0, 2), wanted[0][0])
        close(lse[:, rows], wanted[1][0])


def test_gpu_tensors_are_used_in_place(fake):
    q, k, v = inputs()
    blhd = [PtrTensor(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v)]
    o = attend_kernels.attention(*blhd, layout="BLHD")
    close(o.values.transpose(0, 2, 1, 3), expected(q, k, v)[0])
    # Views with the strides of another layout, and with gaps.
    views = [PtrTensor(x.values.transpose(0, 2, 1, 3)) for x in blhd]
    out = PtrTensor(np.zeros((2, 4, 10, 12), np.float32)[:, :, ::2, :6])
    assert attend_kernels.attention(*views, out=out, stream=77) is out
    close(out.values, expected(q, k, v)[0])
    assert 77 in fake.streams
    wide = random(2, 4, 5, 16)
    sliced = PtrTensor(wide[..., 3:11])
    close(attend_kernels.attention(sliced, PtrTensor(k), PtrTensor(v)).values,
          expected(wide[..., 3:11], k, v)[0])
    attend_kernels.release_workspaces()
    assert not fake.blocks  # no copies


def test_dlpack_tensors(fake):
    arrays = inputs()
    tensors = [DlpackTensor(x) for x in arrays]
    o = attend_kernels.attention(*tensors, return_lse=False, stream=5)
    assert isinstance(o, attend_kernels.DeviceArray) and o.__dlpack_device__() == (2, 0)
    assert [t.asked for t in tensors] == [[5]] * 3 and [t.deleted for t in tensors] == [1] * 3
    # A result is a valid input.
    again = attend_kernels.attention(o, *(DlpackTensor(x) for x in (arrays[1][..., :6],
                                                                    arrays[2])), stream=5)
    first = expected(*arrays)[0]
    out = np.zeros((2, 4, 5, 6), np.float32)
    attend_kernels.attention(again, *(DlpackTensor(x) for x in (arrays[1][..., :6], arrays[2])),
                             out=DlpackTensor(out))
    second = expected(first, arrays[1][..., :6], arrays[2])[0]
    close(out, expected(second, arrays[1][..., :6], arrays[2])[0])
    del o, again
    attend_kernels.release_workspaces()
    assert not fake.blocks


def test_batch_is_one_call(fake):
    problems = [inputs(b=n, lq=n + 1) for n in (1, 2, 3)]
    results = attend_kernels.attention_batch(
        [dict(q=q, k=k, v=v, causal=n == 1) for n, (q, k, v) in enumerate(problems)])
    assert fake.launches == [3] and attend_kernels.attention_batch([]) == []
    for n, (problem, o) in enumerate(zip(problems, results)):
        lq = problem[0].shape[2]
        visible = np.arange(7)[None, :] <= np.arange(lq)[:, None] + 7 - lq if n == 1 else True
        close(o, expected(*problem, visible=visible)[0])


def test_empty_tensors(fake):
    q, k, v = inputs()
    assert attend_kernels.attention(q[:, :, :0], k, v).shape == (2, 4, 0, 6)
    o, lse = attend_kernels.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (o == 0).all() and np.isneginf(lse).all()


def in_pages(x, order, rows):
    """[pages, H, rows, D] that hold sequence b's rows [n * rows, ...) in page order[b][n]."""
    batch, heads, length, dim = x.shape
    pages = np.full((1 + max(max(line) for line in order), heads, rows, dim), np.nan, x.dtype)
    for b in range(batch):
        for n, page in enumerate(order[b]):
            part = x[b, :, n * rows:(n + 1) * rows]
            pages[page, :, :part.shape[1]] = part
    return pages


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_pages(fake, layout):
    q, k, v = inputs(lk=37)
    order = [[4, 1, 6], [2, 5, 0]]
    paged = [in_pages(x, order, 16) for x in (k, v)]
    o = attend_kernels.attention(*(x.transpose(SWAP[layout]) for x in (q, *paged)), layout=layout,
                                 page_table=order, kv_lengths=[37, 37])
    close(o.transpose(SWAP[layout]), expected(q, k, v)[0])


def test_o_of_another_dtype(fake):
    q, k, v = inputs(dtype=np.float16)
    o = attend_kernels.attention(q, k, v, o_dtype="float32")
    assert o.dtype == np.float32
    close(o, expected(q, k, v)[0])
    out = np.empty_like(o)
    assert attend_kernels.attention(q, k, v, o_dtype="float32", out=out) is out
    assert np.array_equal(out, o)
    assert attend_kernels.attention(q, k, v).dtype == np.float16


@pytest.mark.parametrize("table,text", [
    ([[0, 1], [2, 7]], r"page_table has 7, must be in \[0, 6\]"),
    ([[0, -1], [2, 3]], r"page_table has -1, must be in \[0, 6\]"),
    ([[0, 1]], r"page_table has shape \(1, 2\), must be \(2, n\)"),
    ([0, 1], r"page_table has shape \(2,\), must be \(2, n\)"),
])
def test_invalid_page_tables_are_refused(fake, table, text):
    q = inputs()[0]
    pages = random(7, 2, 16, 8)
    with pytest.raises(attend_kernels.Error, match=text):
        attend_kernels.attention(q, pages, pages, page_table=table)


def test_lengths_beyond_the_page_table_are_refused(fake):
    pages = random(7, 2, 16, 8)
    with pytest.raises(attend_kernels.Error, match=r"kv_lengths.*33.*32"):
        attend_kernels.attention(inputs()[0], pages, pages, page_table=[[0, 1], [2, 3]],
                                 kv_lengths=[32, 33])
    assert not fake.launches


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_sequences_may_share_pages(fake, layout):
    q, k, v = inputs(lk=37)
    k[1, :, :16], v[1, :, :16] = k[0, :, :16], v[0, :, :16]
    order = [[4, 3, 2], [4, 1, 0]]
    paged = [in_pages(x, order, 16) for x in (k, v)]
    o = attend_kernels.attention(*(x.transpose(SWAP[layout]) for x in (q, *paged)), layout=layout,
                                 page_table=order, kv_lengths=[37, 37])
    close(o.transpose(SWAP[layout]), expected(q, k, v)[0])


@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7)])
def test_bool_masks_are_passed_as_bits(fake, shape):
    q, k, v = inputs()
    mask = RANDOM.random(shape) < 0.6
    close(attend_kernels.attention(q, k, v, bias=mask),
          expected(q, k, v, visible=mask)[0])
    assert attend_kernels.select(q, k, v, bias=mask)[0] == "fake"
    assert fake.selected.bias_dtype == 4 and fake.selected.bias_stride_q in (0, 8)


def test_dropout_reaches_the_library(fake):
    q, k, v = inputs()
    attend_kernels.select(q, k, v, dropout_p=0.25, dropout_seed=2**64 - 1)
    p = fake.selected
    assert (p.dropout_p, p.dropout_seed, p.dropout_head, p.dropout_row) == (0.25, 2**64 - 1, 0, 0)
    attend_kernels.select(q, k, v)
    assert fake.selected.dropout_p == 0


def test_select_copies_nothing(fake):
    q, k, v = inputs()
    assert attend_kernels.select(q, k, v, causal=True, sinks=[0.0] * 4,
                                 bias=random(5, 7)) == ("fake", "it is here")
    assert not fake.blocks and not fake.launches
    p = fake.selected
    assert p.sinks and p.bias and not p.alibi_slopes and (p.window_left, p.window_right) == (-1, 0)
    assert p.o.stride_l == 6


def test_workspace_grows_and_is_kept(fake):
    q, k, v = inputs()
    attend_kernels.attention(q, k, v)
    before = set(fake.blocks)
    attend_kernels.attention(q, k, v)
    assert set(fake.blocks) == before and len(before) == 1
    fake.workspace_bytes = 65536
    attend_kernels.attention(q, k, v, stream=3)  # another stream has its own workspace
    attend_kernels.attention(q, k, v)
    assert sorted(len(block) for block in fake.blocks.values()) == [65536, 65536]


def test_concurrent_threads(fake):
    problems = [inputs(lq=n + 1) for n in range(8)]
    got = [None] * 8

    def work(n):
        got[n] = attend_kernels.attention(*problems[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem, o in zip(problems, got):
        close(o, expected(*problem)[0])


def test_defaults_match_the_signature():
    assert _attention._DEFAULTS["alignment"] == "bottom_right"
    assert _attention._DEFAULTS["q"] is None


@pytest.mark.parametrize("device", [0, _library.CPU])
def test_staging_reports_whether_all_memory_is_the_callers(fake, device):
    """Copies and converted lists are freed when the call ends, so that no plan may refer to
    them."""
    tensor = _tensors.read("q", PtrTensor(random(2, 3)), 0)
    for place, alone in ((lambda s: s.place(tensor), True),
                         (lambda s: s.place_numbers(array.array("f", [1.0])), False),
                         (lambda s: s.place(dataclasses.replace(tensor, name="sinks")), False),
                         (lambda s: s.place(_tensors.read("q", random(3, 2).T, 0)), False)):
        staging = _staging.staging_for(device, 0)
        assert staging.holds_only({"q"})
        place(staging)
        assert staging.holds_only({"q"}) == alone
        staging.finish()
