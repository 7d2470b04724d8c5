# SPDX-License-Identifier: Apache-2.0
"""The gradients of a reference.Case in NumPy float64, from the formulas of attention.proto, and the
error bound they are judged by. Arrays are BHLD, as there."""

import numpy as np

from reference import UNIT_ROUNDOFF, _visible, attention, factors_of, round_to

NAMES = ("d_q", "d_k", "d_v", "d_bias", "d_sinks")


def _one_head(case, b, h, d_o, d_lse, real, round_to_dtype):
    """dQ, dK, dV and dBias of one sequence and query head at full length, and its dSink."""
    q_len = case.q.shape[2] if case.q_lengths is None else case.q_lengths[b]
    k_len = case.k.shape[2] if case.kv_lengths is None else case.kv_lengths[b]
    kv = h // (case.q.shape[1] // case.k.shape[1])
    q, k, v = (array.astype(real) for array in
               (case.q[b, h, :q_len], case.k[b, kv, :k_len], case.v[b, kv, :k_len]))
    d_o = d_o[b, h, :q_len].astype(real)
    scale = real(np.float32(case.scale or 1.0 / np.sqrt(case.q.shape[3])))
    s = (q @ k.T) * scale
    slope = np.ones_like(s)
    if case.softcap:
        tanh = np.tanh(s / real(case.softcap))
        s, slope = real(case.softcap) * tanh, 1 - tanh * tanh
    seen, distance = _visible(case.mask, q_len, k_len)
    if case.bias is not None:
        bias = np.broadcast_to(case.bias, (*case.q.shape[:3], case.k.shape[2]))
        s = s + bias[b, h, :q_len, :k_len].astype(real)
    if case.alibi is not None:
        factor = case.alibi[b, h] if case.alibi.ndim == 2 else case.alibi[h]
        s = s - real(factor) * distance.astype(real)
    s = np.where(seen, s, real(-np.inf))
    top = np.max(s, axis=1, initial=-np.inf)
    if case.sinks is not None:
        top = np.maximum(top, real(case.sinks[h]))
    peak = np.where(np.isneginf(top), real(0), top)[:, None]
    weight = np.exp(s - peak)
    total = weight.sum(axis=1, keepdims=True)
    sink = 0 if case.sinks is None else np.exp(real(case.sinks[h]) - peak)
    total = np.where(total + sink == 0, real(1), total + sink)
    p = weight / total
    kept = 1 if case.kept is None else factors_of(case, b, h, p)
    d_p = (d_o @ v.T) * kept
    delta = (p * d_p).sum(axis=1, keepdims=True) - d_lse[b, h, :q_len, None].astype(real)
    d_s = p * (d_p - delta)
    d_t = round_to_dtype(d_s * slope)
    d_sink = -np.sum(sink / total * delta) if case.sinks is not None else 0
    return scale * (d_t @ k), scale * (d_t.T @ q), round_to_dtype(p * kept).T @ d_o, d_s, d_sink


def gradients(case, d_o, d_lse, real=np.float64, round_to_dtype=lambda x: x):
    batch, heads = case.q.shape[:2]
    group = heads // case.k.shape[1]
    out = {"d_q": np.zeros(case.q.shape, real), "d_k": np.zeros(case.k.shape, real),
           "d_v": np.zeros(case.v.shape, real)}
    d_bias = np.zeros((*case.q.shape[:3], case.k.shape[2]), real)
    d_sinks = np.zeros(heads, real)
    for b in range(batch):
        for h in range(heads):
            d_q, d_k, d_v, d_s, d_sink = _one_head(case, b, h, d_o, d_lse, real, round_to_dtype)
            out["d_q"][b, h, : len(d_q)] = d_q
            out["d_k"][b, h // group, : len(d_k)] += d_k
            out["d_v"][b, h // group, : len(d_v)] += d_v
            d_bias[b, h, : d_s.shape[0], : d_s.shape[1]] = d_s
            d_sinks[h] += d_sink
    if case.bias is not None:
        summed = tuple(i for i in range(3) if case.bias.shape[i] == 1)
        out["d_bias"] = d_bias.sum(axis=summed, keepdims=True)
    if case.sinks is not None:
        out["d_sinks"] = d_sinks
    return out


def make_backward(case, random):
    """dO, dLSE, and O and LSE as the forward pass rounds them; rows beyond the lengths are 0."""
    o, lse, _ = attention(case)
    d_o = round_to(case.dtype, random.standard_normal(o.shape, np.float32))
    d_lse = random.standard_normal(lse.shape, np.float32)
    return d_o, d_lse, round_to(case.dtype, o), lse.astype(np.float32)


def judge_gradients(case, d_o, d_lse, got):
    """Raises unless every gradient is within twice the error of a plain fp32 computation that
    rounds its weights to the dtype, plus what rounding alone may cost."""
    want = gradients(case, d_o, d_lse)
    plain = gradients(case, d_o, d_lse, np.float32, lambda x: round_to(case.dtype, x))
    unit, fp32 = UNIT_ROUNDOFF[case.dtype], UNIT_ROUNDOFF["float32"]
    assert got.keys() <= want.keys(), got.keys()
    for name, array in got.items():
        assert array.shape == want[name].shape, (name, array.shape, want[name].shape)
        largest = float(np.max(np.abs(want[name]), initial=0.0))
        # O is rounded to its dtype, which changes delta, and so every score's gradient.
        floor = (2 * unit + 64 * fp32) * (largest + float(np.max(np.abs(d_o), initial=0.0)))
        bound = 2 * float(np.max(np.abs(plain[name] - want[name]), initial=0.0)) + floor
        error = float(np.max(np.abs(array.astype(np.float64) - want[name]), initial=0.0))
        assert error <= bound, f"{name}: error {error:.3e}, bound {bound:.3e}"  # NaN fails
