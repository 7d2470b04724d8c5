# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the keys, compared with the whole where a mask hides the other keys."""

import attend_kernels
import dropout
import numpy as np
import pytest

from reference import MASKED, bounds, gradients
from test_kernels_cpu import close, inputs, random, run

pytestmark = pytest.mark.cpu

PARTS = [dict(causal=True, alibi_slopes=[0.5, 0.25, 0.1, 0.0]), dict(window=(20, 3), softcap=3.0),
         dict(window=(9, 30), alignment="top_left", sinks=[0.1, -1.0, 2.0, 0.0]),
         dict(dropout_p=0.5, dropout_seed=11)]


@pytest.mark.parametrize("kernel", ["auto", "cpu_reference"])
@pytest.mark.parametrize("options", PARTS)
@pytest.mark.parametrize("begin,end", [(0, 20), (13, 40), (31, 50), (50, 50)])
def test_a_part_equals_the_whole_with_the_other_keys_hidden(options, kernel, begin, end):
    q, k, v = inputs()
    part = slice(begin, end)
    keep = np.zeros(50, bool)
    keep[part] = True
    whole, some = dict(options, bias=keep), dict(options, key_offset=begin, keys_after=50 - end)
    answers = [run(*arrays, kernel=kernel, return_lse=True, **one) for arrays, one in
               (((q, k, v), whole), ((q, k[:, :, part], v[:, :, part]), some))]
    terms = {name: value for name, value in options.items() if not name.startswith("dropout")}
    d_o = np.zeros(answers[0][0].shape)
    within = bounds(q, k, v, d_o, bias=np.where(keep, 0, MASKED),
                    kept=2.0 if "dropout_p" in options else 1.0, **terms)
    for name, here, there in zip(("o", "lse"), *answers):
        close(there, here.astype(float), 2 * within[name])  # both have errors


@pytest.mark.parametrize("kernel", ["auto", "cpu_reference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("size", [0, 1e3, -1e3])
@pytest.mark.parametrize("options", PARTS)
def test_gradients_of_parts_add_up_to_those_of_the_whole(options, size, dtype, kernel):
    """O and LSE are the whole's. The sinks are passed with the first part only."""
    q, k, v = inputs(dtype=dtype)
    d_o, bias = random(2, 4, 37, 16, dtype=dtype), np.full(50, size, np.float32)
    o, lse = run(q, k, v, bias=bias, return_lse=True, kernel=kernel, **options)
    d_q = np.zeros(q.shape)
    d_k, d_v = [], []
    for begin, end in ((0, 20), (20, 43), (43, 50)):
        part = slice(begin, end)
        one = dict(options, bias=bias[part], key_offset=begin, keys_after=50 - end)
        got = attend_kernels.attention_backward(
            d_o, q, k[:, :, part], v[:, :, part], o, lse, kernel=kernel, device="cpu",
            **{name: value for name, value in one.items() if begin == 0 or name != "sinks"})
        d_q += got[0]
        d_k.append(got[1])
        d_v.append(got[2])
    terms = {name: value for name, value in options.items() if not name.startswith("dropout")}
    kept = 1.0
    if "dropout_p" in options:
        kept = dropout.kept(options["dropout_p"], options["dropout_seed"], 2, 4, 37, 50)
    unit = np.finfo(dtype).eps / 2
    truth = gradients(q, k, v, d_o, bias=bias, kept=kept, **terms)
    within = bounds(q, k, v, d_o, bias=bias, kept=kept, unit=unit, **terms)
    # Each part of dQ is rounded, and so is the LSE that they share.
    parts = sum(abs(x) for x in (d_q, truth["q"])) * 3 * unit + 3 * unit * abs(d_q).max()
    close(d_q, truth["q"], 2 * within["q"] + parts)
    for name, found in (("k", d_k), ("v", d_v)):
        close(np.concatenate(found, 2), truth[name], 2 * within[name])


@pytest.mark.parametrize("options,words", [
    (dict(key_offset=-1), "key_offset is -1, must be in .0, 1073741824."),
    (dict(keys_after=2**31), "keys_after is 2147483648, must be in .0, 1073741824."),
    (dict(key_offset=0.5), "key_offset is 0.5, must be an integer"),
    (dict(key_offset=2**30), "keys of the whole is 1073741874, must be in .0, 1073741824.")])
def test_invalid_parts_are_refused(options, words):
    with pytest.raises(attend_kernels.Error, match=words):
        run(*inputs(), **options)
