# SPDX-License-Identifier: Apache-2.0
"""Answers against NumPy float64, called from Python with freshly generated stubs."""

import dataclasses

import numpy as np
import pytest

import wire
from reference import Case, Mask, attention, judge, round_to

NAN = float("nan")


def make_case(random, dtype="float32", batch=1, heads=2, kv_heads=None, len_q=33, len_k=33, dim=64,
              dim_v=None, **fields):
    kv_heads = kv_heads or heads

    def values(*shape):
        return round_to(dtype, random.standard_normal(shape, np.float32))

    return Case(q=values(batch, heads, len_q, dim), k=values(batch, kv_heads, len_k, dim),
                v=values(batch, kv_heads, len_k, dim_v or dim), dtype=dtype, **fields)


def ask(server, case, layout="BHLD", bias_dtype="float32", **fields):
    request = wire.make_request(case, layout, bias_dtype, return_lse=True, **fields)
    with wire.connect(server.address) as service:
        answer = service.Attend(request, timeout=wire.SECONDS)
    assert answer.device == "cpu" and answer.transport == "inline" and answer.kernel
    assert answer.batch_requests >= 1 and answer.timings.total_ns > 0
    return wire.read_answer(case, layout, answer)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD", "LHD"])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_dtypes_layouts_groups(server, random, dtype, layout, heads, kv_heads):
    case = make_case(random, dtype, batch=2, heads=heads, kv_heads=kv_heads, len_q=37, len_k=53)
    if layout == "LHD":
        case.q_lengths, case.kv_lengths = [37, 5], [12, 53]
    judge(case, *ask(server, case, layout))


@pytest.mark.parametrize("kernel", ["cpu_reference", "cpu_flash"])
def test_all_score_terms_and_lengths_together(server, random, kernel):
    """All score terms and lengths together, every kernel of this device by name."""
    case = make_case(random, "bfloat16", batch=3, heads=4, kv_heads=2, len_q=19, len_k=83, dim=72,
                     dim_v=40, mask=Mask("window", left=30, right=6), scale=0.21, softcap=8.0,
                     q_lengths=[19, 7, 0], kv_lengths=[60, 83, 11])
    case.bias = random.standard_normal((3, 1, 19, 83), np.float32)
    case.alibi = np.abs(random.standard_normal((3, 4), np.float32)) / 8
    case.sinks = random.standard_normal(4, np.float32)
    judge(case, *ask(server, case, kernel=kernel))


def test_padding_is_never_read(server, random):
    """Memory beyond the lengths may hold NaN; rows there are 0 with LSE -inf."""
    case = make_case(random, batch=2, heads=2, len_q=20, len_k=30, q_lengths=[13, 20],
                     kv_lengths=[30, 8])
    poisoned = dataclasses.replace(case, q=case.q.copy(), k=case.k.copy(), v=case.v.copy())
    poisoned.q[0, :, 13:] = NAN
    poisoned.k[1, :, 8:] = NAN
    poisoned.v[1, :, 8:] = np.inf
    o, lse = ask(server, poisoned)
    judge(case, o, lse)
    assert not o[0, :, 13:].any() and np.isneginf(lse[0, :, 13:]).all()


def test_empty_tensors(server, random):
    """No keys give 0 and -inf; no queries and no sequences give empty tensors."""
    o, lse = ask(server, make_case(random, len_k=0))
    assert o.shape == (1, 2, 33, 64) and not o.any() and np.isneginf(lse).all()
    assert ask(server, make_case(random, len_q=0))[0].shape == (1, 2, 0, 64)
    assert ask(server, make_case(random, batch=0))[0].shape == (0, 2, 33, 64)


def test_nan_and_inf_stay_where_they_belong(server, random):
    """A NaN in one query row or an Inf in one value column affects only what IEEE prescribes."""
    case = make_case(random, len_q=8, len_k=8)
    clean, _ = ask(server, case)
    case.q[0, 0, 3, 5] = NAN
    case.v[0, 1, 2, 9] = np.inf
    o, lse = ask(server, case)
    assert np.isnan(o[0, 0, 3]).all() and np.isnan(lse[0, 0, 3])
    assert np.isposinf(o[0, 1, :, 9]).all()
    touched = np.zeros(o.shape, bool)
    touched[0, 0, 3] = touched[0, 1, :, 9] = True
    assert np.array_equal(o[~touched], clean[~touched])


def test_the_bits_do_not_depend_on_other_requests(server, random):
    """A request's answer does not depend on other work."""
    case = make_case(random, "float16", heads=4, kv_heads=2, len_q=65, len_k=130)
    request = wire.make_request(case, return_lse=True)
    with wire.connect(server.address) as service:
        alone = service.Attend(request, timeout=wire.SECONDS)
        others = [service.Attend.future(wire.small_request(seed=i, length=1 + 17 * i),
                                        timeout=wire.SECONDS) for i in range(12)]
        again = [service.Attend.future(request, timeout=wire.SECONDS) for _ in range(8)]
        for call in others:
            call.result()
        for call in again:
            assert list(call.result().raw) == list(alone.raw)


def test_check_report(server, random):
    case = make_case(random, "float16", len_q=50, len_k=70)
    with wire.connect(server.address) as service:
        answer = service.Attend(wire.make_request(case, check=True), timeout=wire.SECONDS)
        without = service.Attend(wire.make_request(case), timeout=wire.SECONDS)
    report = answer.check
    assert report.ok and not report.detail
    assert report.rows_checked == report.rows_total == 100  # small: every row
    assert 0 <= report.mean_abs_error <= report.max_abs_error <= report.bound
    assert 0 < report.bound < 0.1
    want, _, _ = attention(case)
    measured = np.max(np.abs(wire.read_answer(case, "BHLD", answer)[0] - want))
    assert report.max_abs_error == pytest.approx(measured, rel=1e-6)
    assert not without.HasField("check") and list(without.raw) == list(answer.raw)
