# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients as formulas in NumPy, in any precision."""

import numpy as np

MASKED = -np.inf


def scores_of(q, k, causal=False, alignment="bottom_right", window=None, scale=None, softcap=0.0,
              bias=None, alibi_slopes=None, sinks=None):
    """Scores [B, Hq, Lq, Lk] in q's dtype, and the slope of the softcap."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scale = q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    scores, slope = scale * (q @ k.swapaxes(-1, -2)), np.ones(1, q.dtype)
    if softcap:
        share = np.tanh(scores / q.dtype.type(softcap))
        scores, slope = q.dtype.type(softcap) * share, 1 - share**2
    lq, lk = scores.shape[-2:]
    offset = lk - lq if alignment == "bottom_right" else 0
    distance = np.arange(lk)[None, :] - np.arange(lq)[:, None] - offset
    if bias is not None:
        scores = scores + bias.astype(q.dtype)
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes, q.dtype)[:, None, None]
        scores = scores - slopes * np.abs(distance).astype(q.dtype)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    hidden = (distance < -left if left >= 0 else False) | (distance > right if right >= 0 else
                                                           False)
    return np.where(hidden, MASKED, scores), scale * slope


def weights_of(scores, sinks):
    """Weights, LSE and, with sinks, theirs."""
    logits = scores
    if sinks is not None:
        column = np.broadcast_to(np.reshape(sinks, (-1, 1, 1)), (*scores.shape[:-1], 1))
        logits = np.concatenate([scores, column.astype(scores.dtype)], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = logits.max(-1, keepdims=True, initial=MASKED)
        top = np.where(np.isneginf(top), 0, top)
        powers = np.exp(logits - top)
        total = powers.sum(-1, keepdims=True)
        weights = np.where(total > 0, powers / total, 0).astype(scores.dtype)
        lse = (top + np.log(total))[..., 0]
    return weights[..., :scores.shape[-1]], lse, weights[..., scores.shape[-1]:]


def attention(q, k, v, dtype=np.float64, **options):
    """O and LSE."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    weights, lse, _ = weights_of(scores_of(q, k, **options)[0], options.get("sinks"))
    return weights @ np.repeat(v, q.shape[1] // v.shape[1], axis=1), lse


def gradients(q, k, v, d_o, d_lse=None, dtype=np.float64, **options):
    """By "q", "k", "v" and, where they are, "bias" and "sinks"."""
    q, k, v, d_o = (x.astype(dtype) for x in (q, k, v, d_o))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores, slope = scores_of(q, k, **options)
    weights, _, sink_weights = weights_of(scores, options.get("sinks"))
    d_weights = d_o @ wide_v.swapaxes(-1, -2)
    less = (weights * d_weights).sum(-1, keepdims=True)
    if d_lse is not None:
        less = less - d_lse.astype(dtype)[..., None]
    d_scores = weights * (d_weights - less)
    d_dots = d_scores * slope

    def shared(x):  # summed over a group's heads
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    answer = {"q": d_dots @ wide_k, "k": shared(d_dots.swapaxes(-1, -2) @ q),
              "v": shared(weights.swapaxes(-1, -2) @ d_o)}
    if options.get("bias") is not None:
        answer["bias"] = summed_to(d_scores, options["bias"].shape)
    if options.get("sinks") is not None:
        answer["sinks"] = -(sink_weights * less).sum((0, 2, 3))
    return answer


def summed_to(x, shape):
    """Summed over the dimensions that `shape` broadcasts."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(n for n, size in enumerate(shape) if size == 1), keepdims=True)


def bound(function, arrays, rounded_to=np.float32, **options):
    """How far from the truth in double an answer may be: twice what the plain formula in float32 is
    off, and a few roundings of the largest number to `rounded_to`. Like the function's answer."""
    truth, plain = function(*arrays, **options), function(*arrays, dtype=np.float32, **options)
    epsilon = np.finfo(rounded_to).eps

    def one(exact, single):
        finite = np.isfinite(exact)
        error = np.abs(single - exact)[finite].max(initial=0)
        return 2 * error + 4 * epsilon * np.abs(exact[finite]).max(initial=0)

    if isinstance(truth, dict):
        return {name: one(truth[name], plain[name]) for name in truth}
    return [one(*pair) for pair in zip(truth, plain)]
