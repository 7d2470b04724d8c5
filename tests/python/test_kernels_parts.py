# SPDX-License-Identifier: Apache-2.0
"""A part of the keys, in process, beside the whole in which a mask hides the other keys."""

import attend_kernels
import numpy as np
import pytest

from reference import MASKED, bounds
from test_kernels_cpu import close, inputs, random, run

pytestmark = pytest.mark.cpu

PARTS = [dict(causal=True, alibi_slopes=[0.5, 0.25, 0.1, 0.0]), dict(window=(20, 3), softcap=3.0),
         dict(window=(9, 30), alignment="top_left", sinks=[0.1, -1.0, 2.0, 0.0]),
         dict(dropout_p=0.5, dropout_seed=11)]


@pytest.mark.parametrize("kernel", ["auto", "cpu_reference"])
@pytest.mark.parametrize("options", PARTS)
@pytest.mark.parametrize("begin,end", [(0, 20), (13, 40), (31, 50), (50, 50)])
def test_a_part_of_the_keys(options, kernel, begin, end):
    q, k, v = inputs()
    part = slice(begin, end)
    keep = np.zeros(50, bool)
    keep[part] = True
    whole, some = dict(options, bias=keep), dict(options, key_offset=begin, keys_after=50 - end)
    answers = [run(*arrays, kernel=kernel, return_lse=True, **one) for arrays, one in
               (((q, k, v), whole), ((q, k[:, :, part], v[:, :, part]), some))]
    d_o = random(*answers[0][0].shape)
    terms = {name: value for name, value in options.items() if not name.startswith("dropout")}
    within = bounds(q, k, v, d_o, bias=np.where(keep, 0, MASKED),
                    kept=2.0 if "dropout_p" in options else 1.0, **terms)
    for name, here, there in zip(("o", "lse"), *answers):
        close(there, here.astype(float), 2 * within[name])  # both are off
    (d_q, d_k, d_v), parts = (
        attend_kernels.attention_backward(d_o, *arrays, *answer, kernel=kernel, device="cpu", **one)
        for arrays, one, answer in (((q, k, v), whole, answers[0]),
                                    ((q, k[:, :, part], v[:, :, part]), some, answers[1])))
    for name, here, there in zip("qkv", (d_q, d_k[:, :, part], d_v[:, :, part]), parts):
        close(there, here.astype(float), 2 * (within[name] if name == "q" else
                                              within[name][:, :, part]))


@pytest.mark.parametrize("options,words", [
    (dict(key_offset=-1), "key_offset is -1, must be in .0, 1073741824."),
    (dict(keys_after=2**31), "keys_after is 2147483648, must be in .0, 1073741824."),
    (dict(key_offset=0.5), "key_offset is 0.5, must be an integer"),
    (dict(key_offset=2**30), "keys of the whole is 1073741874, must be in .0, 1073741824.")])
def test_parts_that_cannot_be(options, words):
    with pytest.raises(attend_kernels.Error, match=words):
        run(*inputs(), **options)
