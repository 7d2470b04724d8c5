# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference: it accepts an ordinary same-precision computation and rejects small
faults."""

import numpy as np
import pytest

import reference
from reference import Case, Mask, judge, round_to


def computed(random, dtype):
    def values(*shape):
        return round_to(dtype, random.standard_normal(shape, np.float32))

    case = Case(values(2, 4, 24, 32), values(2, 2, 40, 32), values(2, 2, 40, 48), dtype,
                Mask("causal", left=20), softcap=5.0, q_lengths=[24, 9], kv_lengths=[31, 40])
    o, lse, _ = reference.attention(case, np.float32)
    return case, round_to(dtype, o), lse.astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_accepts_the_right_answer(random, dtype):
    judge(*computed(random, dtype))


FAULTS = {
    "NaN": lambda o, lse: o.__setitem__((1, 2, 3, 4), np.nan),
    "lost row": lambda o, lse: o.__setitem__((0, 1, 23), 0),
    "wrong head": lambda o, lse: o.__setitem__((0, 1), o[0, 0].copy()),
    "scaled": lambda o, lse: o.__imul__(1.05),
    "LSE off": lambda o, lse: lse.__iadd__(0.01),
    "LSE of an empty row": lambda o, lse: lse.__setitem__((1, 0, 20), 0.0),
    "value in padding": lambda o, lse: o.__setitem__((1, 0, 20, 0), 1.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_rejects_faults(random, dtype, fault):
    case, o, lse = computed(random, dtype)
    FAULTS[fault](o, lse)
    with pytest.raises(AssertionError):
        judge(case, o, lse)


def test_agrees_with_plain_loops(random):
    """One element computed term by term, in the contract's order."""
    case = Case(*(random.standard_normal((1, 1, n, 4)) for n in (3, 5, 5)), scale=0.7, softcap=2.0,
                mask=Mask("window", left=2, right=1), alibi=np.array([0.3]),
                bias=random.standard_normal((1, 1, 3, 5)), sinks=np.array([0.4]))
    i, total, weighted = 1, np.exp(0.4), 0.0
    for j in range(5):
        distance = j - i - (5 - 3)
        if not -2 <= distance <= 1:
            continue
        s = float(np.float32(0.7)) * float(case.q[0, 0, i] @ case.k[0, 0, j])
        s = 2.0 * np.tanh(s / 2.0) + case.bias[0, 0, i, j] - 0.3 * abs(distance)
        total += np.exp(s)
        weighted += np.exp(s) * case.v[0, 0, j, 2]
    o, lse, _ = reference.attention(case)
    assert o[0, 0, i, 2] == pytest.approx(weighted / total, rel=1e-12)
    assert lse[0, 0, i] == pytest.approx(np.log(total), rel=1e-12)
