# SPDX-License-Identifier: Apache-2.0
"""Attention in NumPy float64, written from the contract alone, and the error bound it is judged by.

Arrays are BHLD: q [B, Hq, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv]. bfloat16 values are held
as float32 that round_to() has rounded.
"""

import dataclasses

import numpy as np

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclasses.dataclass
class Mask:
    kind: str = "none"  # none, causal, window
    top_left: bool = False
    left: int = -1
    right: int = -1


@dataclasses.dataclass
class Case:
    """One attention, independent of its arrays' layout."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dtype: str = "float32"
    mask: Mask = dataclasses.field(default_factory=Mask)
    scale: float = None
    softcap: float = 0.0
    bias: np.ndarray = None
    alibi: np.ndarray = None  # [Hq] or [B, Hq]
    sinks: np.ndarray = None
    q_lengths: list = None
    kv_lengths: list = None
    kept: np.ndarray = None  # [B, Hq, Lq, Lk]: what dropout multiplies the weights by (dropout.py)


def round_to(dtype, array):
    """The nearest values of the dtype, ties to even, as float32 (float16, bfloat16) or itself."""
    array = np.asarray(array, np.float32)
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = array.view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(array), array, bits.view(np.float32))
    return array


def to_bytes(dtype, array):
    array = np.ascontiguousarray(array, np.float32)
    if dtype == "float16":
        return array.astype("<f2").tobytes()
    if dtype == "bfloat16":
        return (array.view(np.uint32) >> 16).astype("<u2").tobytes()
    return array.astype("<f4").tobytes()


def from_bytes(dtype, data, shape):
    if dtype == "bfloat16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    kind = {"float16": "<f2", "float32": "<f4"}[dtype]
    return np.frombuffer(data, kind).astype(np.float32).reshape(shape)


def _visible(mask, q_len, k_len):
    offset = 0 if mask.top_left else k_len - q_len
    distance = np.arange(k_len)[None, :] - np.arange(q_len)[:, None] - offset
    seen = np.ones((q_len, k_len), bool)
    right = 0 if mask.kind == "causal" else mask.right
    if mask.kind != "none" and right >= 0:
        seen &= distance <= right
    if mask.kind != "none" and mask.left >= 0:
        seen &= distance >= -mask.left
    return seen, np.abs(distance)


def factors_of(case, b, h, weights):
    """The factors by which dropout multiplies the weights of one sequence and head, in their
    type."""
    rows, keys = weights.shape
    return case.kept[b, h, :rows, :keys].astype(weights.dtype)


def _one_head(case, b, h, real, round_p):
    """O [Lq, Dv], LSE [Lq] and the largest |score| of one sequence and head, in `real`."""
    q_len = case.q.shape[2] if case.q_lengths is None else case.q_lengths[b]
    k_len = case.k.shape[2] if case.kv_lengths is None else case.kv_lengths[b]
    group = case.q.shape[1] // case.k.shape[1]
    q = case.q[b, h, :q_len].astype(real)
    k = case.k[b, h // group, :k_len].astype(real)
    v = case.v[b, h // group, :k_len].astype(real)
    scale = case.scale if case.scale is not None else 1.0 / np.sqrt(case.q.shape[3])
    s = (q @ k.T) * real(np.float32(scale))
    if case.softcap:
        s = real(case.softcap) * np.tanh(s / real(case.softcap))
    seen, distance = _visible(case.mask, q_len, k_len)
    if case.bias is not None:
        bias = np.broadcast_to(case.bias, (*case.q.shape[:3], case.k.shape[2]))
        s = s + bias[b, h, :q_len, :k_len].astype(real)
    if case.alibi is not None:
        slope = case.alibi[b, h] if case.alibi.ndim == 2 else case.alibi[h]
        s = s - real(slope) * distance.astype(real)
    s = np.where(seen, s, real(-np.inf))
    top = np.max(s, axis=1, initial=-np.inf)
    any_key = np.isfinite(top) | np.isnan(top) | (top == np.inf)
    sink = None if case.sinks is None else real(case.sinks[h])
    peak = top if sink is None else np.maximum(top, sink)
    peak = np.where(np.isneginf(peak), real(0), peak)
    p = np.where(np.isneginf(s), real(0), np.exp(s - peak[:, None]))
    total = p.sum(axis=1) + (0 if sink is None else np.exp(sink - peak))
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(total == 0, -np.inf, peak + np.log(total))
        kept = p if case.kept is None else p * factors_of(case, b, h, p)
        o = (round_p(kept) @ v) / np.where(total == 0, 1, total)[:, None]
    o = np.where(any_key[:, None], o, 0)
    finite = s[np.isfinite(s)]
    return o, lse, np.max(np.abs(finite), initial=0.0)


def attention(case, real=np.float64, round_p=lambda p: p):
    batch, heads, len_q, _ = case.q.shape
    o = np.zeros((batch, heads, len_q, case.v.shape[3]), real)
    lse = np.full((batch, heads, len_q), -np.inf, real)
    largest = 0.0
    for b in range(batch):
        for h in range(heads):
            head_o, head_lse, peak = _one_head(case, b, h, real, round_p)
            o[b, h, : len(head_o)] = head_o
            lse[b, h, : len(head_lse)] = head_lse
            largest = max(largest, float(peak))
    return o, lse, largest


def judge(case, o, lse=None):
    """Raises unless every element of O (and LSE) is within the bound: twice the error of a plain
    same-precision computation, plus what rounding alone may cost."""
    want, want_lse, largest = attention(case)
    plain, plain_lse, _ = attention(case, np.float32, lambda p: round_to(case.dtype, p))
    plain = round_to(case.dtype, plain)
    fp32 = UNIT_ROUNDOFF["float32"]
    v_max = float(np.max(np.abs(case.v), initial=0.0))
    if case.kept is not None:
        v_max *= float(np.max(case.kept, initial=1.0))
    score_error = fp32 * (case.q.shape[3] + 8 + 2 * largest)
    floor = UNIT_ROUNDOFF[case.dtype] * float(np.max(np.abs(want), initial=0.0)) + \
        2 * score_error * v_max
    bound = 2 * float(np.max(np.abs(plain - want), initial=0.0)) + floor
    assert o.shape == want.shape, (o.shape, want.shape)
    error = float(np.max(np.abs(o.astype(np.float64) - want), initial=0.0))
    assert error <= bound, f"O: error {error:.3e}, bound {bound:.3e}"  # NaN fails
    if lse is not None:
        assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse)), "LSE: -inf elsewhere"
        finite = np.isfinite(want_lse)
        lse_error = np.abs(lse[finite].astype(np.float64) - want_lse[finite])
        plain_error = np.abs(plain_lse[finite] - want_lse[finite])
        lse_bound = 2 * float(np.max(plain_error, initial=0.0)) + 2 * score_error + fp32 * largest
        assert float(np.max(lse_error, initial=0.0)) <= lse_bound, \
            f"LSE: error {np.max(lse_error):.3e}, bound {lse_bound:.3e}"
    return error, bound
