# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients as formulas in NumPy, in any precision."""

import numpy as np

MASKED = -np.inf
UNIT = 2.0**-24  # float32's unit roundoff


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
    """Weights, LSE, and the weights of the sinks if there are any."""
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


def attention(q, k, v, dtype=np.float64, kept=1.0, **options):
    """O and LSE. `kept` is the factor that dropout applies to the weights (dropout.py)."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    weights, lse, _ = weights_of(scores_of(q, k, **options)[0], options.get("sinks"))
    return (weights * kept).astype(dtype) @ np.repeat(v, q.shape[1] // v.shape[1], axis=1), lse


def gradients(q, k, v, d_o, d_lse=None, dtype=np.float64, kept=1.0, part=slice(None), **options):
    """A dict with "q", "k", "v" and, if they are given, "bias" and "sinks". The gradient of q is
    summed over the keys in `part` only."""
    q, k, v, d_o = (x.astype(dtype) for x in (q, k, v, d_o))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores, slope = scores_of(q, k, **options)
    weights, _, sink_weights = weights_of(scores, options.get("sinks"))
    d_weights = d_o @ wide_v.swapaxes(-1, -2) * kept
    less = (weights * d_weights).sum(-1, keepdims=True)
    if d_lse is not None:
        less = less - d_lse.astype(dtype)[..., None]
    d_scores = weights * (d_weights - less)
    d_dots = d_scores * slope

    def shared(x):  # sums over the heads of a group
        return x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:]).sum(2)

    answer = {"q": d_dots[..., part] @ wide_k[:, :, part], "k": shared(d_dots.swapaxes(-1, -2) @ q),
              "v": shared((weights * kept).swapaxes(-1, -2) @ d_o)}
    if options.get("bias") is not None:
        answer["bias"] = summed_to(d_scores, options["bias"].shape)
    if options.get("sinks") is not None:
        answer["sinks"] = -(sink_weights * less).sum((0, 2, 3))
    return answer


def norms(rows):
    return np.linalg.norm(rows, axis=-1, keepdims=True)


def summed_to(x, shape):
    """`x` summed over the dimensions that `shape` broadcasts."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(n for n, size in enumerate(shape) if size == 1), keepdims=True)


def spoil(truth, q, k, v, terms, masks):
    """Adds the NaN that K and V spread to the truth of one sequence, which gradients() and
    attention() compute without them. A boolean mask (`masks`) hides such a key entirely; a bias of
    -inf hides only its V."""
    if not np.isnan(k).any() and not np.isnan(v).any():
        return
    options = {name: x for name, x in terms.items() if name not in ("kept", "d_lse")}
    group = q.shape[1] // k.shape[1]

    def special(x):
        return np.repeat(np.isnan(x).any(-1), group, axis=1)[:, :, None]

    def shared(x):
        return x.any(2).reshape(*k.shape[:2], group, -1).any(2)

    seen = scores_of(q, np.nan_to_num(k), **options)[0] > MASKED
    options["bias"] = options.get("bias") if masks else None
    kept = np.broadcast_to(terms["kept"], seen.shape) != 0
    of_scores = (scores_of(q, np.nan_to_num(k), **options)[0] > MASKED) & special(k)
    rows = (of_scores | (seen & kept & special(v))).any(-1)
    lost = (seen | of_scores) & rows[..., None]
    truth["o"][rows] = truth["q"][rows] = truth["k"][shared(lost)] = np.nan
    if np.isnan(k).any():
        truth["lse"][rows] = truth["v"][shared(lost & kept)] = np.nan
    if "bias" in truth:
        truth["bias"][lost] = np.nan
    if "sinks" in truth:
        truth["sinks"][rows.any((0, 2))] = np.nan


def weight_errors(weights, scores, sizes, c, bias):
    """Errors of the weights and of each row's LSE, in units of u. `sizes`: the magnitudes of the
    sums q k."""
    score_error = np.where(weights > 0, c * (sizes + np.abs(np.where(weights > 0, scores, 0)) + 1),
                           0)
    if bias is not None:
        score_error = score_error + np.where(weights > 0, c * np.abs(bias.astype(np.float64)), 0)
    row_error = (weights * score_error).sum(-1, keepdims=True)
    logs = np.minimum(UNIT * (score_error + row_error + c), 700)
    return np.minimum(weights * np.expm1(logs), 1) / UNIT, row_error  # a weight is at most 1


def bounds(q, k, v, d_o, d_lse=None, unit=UNIT, work=UNIT, kept=1.0, part=slice(None),
           corrects_delta=False, **options):
    """Error bounds for a kernel that computes in float32 and rounds to a dtype of unit roundoff
    `unit`: arrays named "o", "lse" and as in gradients(). `work` is the unit roundoff of the
    weights and of dS as operands of the last products; in float16 they may be subnormal numbers,
    which are rounded by half a step.

    With u float32's unit roundoff, a sum of n products is off by c u times its magnitude, c = 4 +
    sqrt(n) / 2: roundings add up like a random walk. These errors propagate as in
    tests/kernels/support/check_gradients.h: from scores to weights, from weights to O and delta,
    and from all of them to dS. All errors are in units of u until the end.

    Delta = dO O has O's rounding error. With `corrects_delta`, only a part of it that is small
    beside the row reaches dQ and dK (kernels/cpu/README.md); all of it reaches dBias and dSinks."""
    q, k, v, d_o = (x.astype(np.float64) for x in (q, k, v, d_o))
    group = q.shape[1] // k.shape[1]
    c = 4 + np.sqrt(max(q.shape[-1], v.shape[-1], k.shape[2], group * q.shape[2])) / 2
    wide_k, wide_v = (np.abs(np.repeat(x, group, axis=1)) for x in (k, v))
    smallest = 2.0**-24 * (unit == 2.0**-11)  # float16's
    scores, slope = scores_of(q, k, **options)
    weights, lse, sink_weights = weights_of(scores, options.get("sinks"))
    o = (weights * kept) @ np.repeat(v, group, axis=1)
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    sizes = abs(scale) * np.abs(q) @ wide_k.swapaxes(-1, -2)
    weight_error, row_error = weight_errors(weights, scores, sizes, c, options.get("bias"))
    largest_weights = weights + UNIT * weight_error
    half_step = np.where(weights > 0, 2.0**-25 * (work == 2.0**-11), 0) / UNIT
    rounded_error = weight_error + (work / UNIT - 1) * largest_weights + half_step

    products = np.abs(d_o) @ wide_v.swapaxes(-1, -2) * kept
    less = (weights * products).sum(-1, keepdims=True)
    less_error = (rounded_error * products).sum(-1, keepdims=True)
    o_error = (np.abs(d_o) * (unit * np.abs(o) + smallest)).sum(-1, keepdims=True) / UNIT
    if d_lse is not None:
        less = less + np.abs(d_lse.astype(np.float64))[..., None]
    largest = products + less
    d_score_error = weight_error * largest + largest_weights * (c * largest + less_error)
    d_dot_error = d_score_error * np.abs(slope)
    if options.get("softcap"):
        slope_error = 2 * c * ((sizes + 1) / options["softcap"] + 1)
        d_dot_error = d_dot_error + largest_weights * largest * abs(scale) * slope_error
    d_dot_error = d_dot_error + (work / UNIT - 1) * largest_weights * largest * np.abs(slope) + \
        half_step * abs(scale)
    truth = {"o": o, **gradients(q, k, v, d_o, d_lse, kept=kept, part=part, **options)}
    of_o = o_error * largest_weights  # O's rounding error in dS
    of_o_in_q, of_o_in_k = of_o * np.abs(slope) @ wide_k, of_o * np.abs(slope)
    if corrects_delta:
        share = 1.5 * max(1.25 * unit, 2.0**-14) / UNIT
        d_scores = gradients(q, k, v, d_o, d_lse, kept=kept, **{
            **options, "bias": np.zeros(scores.shape) + options.get("bias", 0)})["bias"]
        of_o_in_q = np.minimum(of_o_in_q, share * norms(truth["q"]))
        of_o_in_k = np.minimum(of_o_in_k, share * np.abs(slope) * weights * norms(d_scores) /
                               np.maximum(norms(weights), 1e-300))

    def shared(x):
        return x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:]).sum(2)

    error = {"o": (rounded_error * kept) @ wide_v, "q": d_dot_error @ wide_k + of_o_in_q,
             "k": shared((d_dot_error + of_o_in_k).swapaxes(-1, -2) @ np.abs(q)),
             "v": shared((rounded_error * kept).swapaxes(-1, -2) @ np.abs(d_o))}
    if "bias" in truth:
        error["bias"] = summed_to(d_score_error + of_o, options["bias"].shape)
    if "sinks" in truth:
        error["sinks"] = (sink_weights * ((row_error + 2 * c) * less + less_error +
                                          o_error)).sum((0, 2, 3))
    rounded = {name: UNIT if name in ("bias", "sinks") else unit for name in error}
    answer = {name: UNIT * error[name] + 1.01 * rounded[name] * np.abs(truth[name]) + smallest +
              2.0**-110 for name in error}
    answer["lse"] = UNIT * (row_error[..., 0] + 2 * np.abs(np.where(np.isinf(lse), 0, lse)) + c)
    return answer
