# SPDX-License-Identifier: Apache-2.0
"""Attention over parts of the keys: the keys are cut anywhere, and the parts' answers are
merged."""

from __future__ import annotations

import sys
from typing import Any, Iterable, Sequence

from attend_kernels._library import invalid

from ._options import Array, Wanted

# Positions of LSE's dimensions in O, and of the key dimension in dK and dV.
_ROWS = {"BHLD": (0, 1, 2), "BLHD": (0, 2, 1), "LHD": (1, 0)}
_KEYS = {"BHLD": 2, "BLHD": 1}


def _library_of(array: Array) -> tuple[Any, bool]:
    """The module that computes with the array, and whether it is torch."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch, True
    import numpy
    return numpy, False


def _wide(array: Array) -> Any:
    library, torch = _library_of(array)
    return array.to(library.float64) if torch else library.asarray(array, library.float64)


def _narrow(array: Any) -> Any:
    library, torch = _library_of(array)
    return array.to(library.float32) if torch else array.astype(library.float32)


def _largest(parts: Sequence[Any]) -> Any:
    library, _ = _library_of(parts[0])
    largest = parts[0]
    for part in parts[1:]:
        largest = library.maximum(largest, part)  # propagates NaN
    return library.where(largest == -library.inf, library.zeros_like(largest), largest)


def merge_partial(parts: Iterable[tuple[Array, Array]], *,
                  layout: str = "BHLD") -> tuple[Any, Any]:
    """O and LSE, float32, of an attention over cut keys. `parts` are the results of attention(q, k,
    v, key_offset=..., keys_after=..., o_dtype="float32", return_lse=True, ...) for each part of the
    keys, with the same q and options but each part's own rows of k, v and bias, and with sinks in
    one part only. All NumPy arrays or all torch tensors. Parts may be cut anywhere and may be
    empty; the result is that of the whole, up to rounding in float32. `layout` is that of the
    calls."""
    pairs = list(parts)
    if not pairs:
        raise invalid("parts has 0 entries, must have at least 1")
    if layout not in _ROWS:
        raise invalid(f"layout is {layout!r}, must be one of {', '.join(_ROWS)}")
    for number, (o, lse) in enumerate(pairs):
        rows = tuple(lse.shape[axis] for axis in _ROWS[layout][:len(lse.shape)])
        if tuple(o.shape[:-1]) != rows or tuple(lse.shape) != tuple(pairs[0][1].shape):
            raise invalid(f"parts[{number}] has an o of {tuple(o.shape)} and an lse of "
                          f"{tuple(lse.shape)}, parts[0] of {tuple(pairs[0][0].shape)} and "
                          f"{tuple(pairs[0][1].shape)}")
    library, torch = _library_of(pairs[0][0])
    logs = [_wide(lse) for _, lse in pairs]
    largest = _largest(logs)
    weights = [library.exp(each - largest) for each in logs]
    total = sum(weights[1:], weights[0])
    share = library.where(total == 0, library.ones_like(total), total)

    def in_rows(array: Any) -> Any:
        ordered = array.permute(_ROWS[layout]) if torch else array.transpose(_ROWS[layout])
        return ordered[..., None]

    merged = sum(in_rows(weight / share) * _wide(o) for weight, (o, _) in zip(weights, pairs))
    empty = library.full_like(total, -library.inf)
    lse = library.where(total == 0, empty, largest + library.log(share))
    return _narrow(merged), _narrow(lse)


def merge_partial_gradients(parts: Iterable[Sequence[Array]], *, wanted: Wanted = ("q", "k", "v"),
                            layout: str = "BHLD") -> tuple[Any, ...]:
    """Gradients of an attention over cut keys. `parts` are the results of backward(d_o, q, k, v, o,
    lse, key_offset=..., keys_after=..., o_dtype="float32", wanted=wanted, ...) for each part, in
    key order, with the o and lse from merge_partial. dq and dsinks are summed, in float32; dk, dv
    and dbias are concatenated along the keys. A part without sinks has None in their place. Not for
    layout "LHD", where each sequence has keys in every part."""
    given = [list(part) for part in parts]
    if not given:
        raise invalid("parts has 0 entries, must have at least 1")
    if layout not in _KEYS:
        raise invalid(f"layout is {layout!r}, must be one of {', '.join(_KEYS)}")
    axes = {"k": _KEYS[layout], "v": _KEYS[layout], "bias": -1}
    merged = []
    for place, name in enumerate(wanted):
        each = [part[place] for part in given if part[place] is not None]
        if not each:
            raise invalid(f"no part has d{name}")
        library, torch = _library_of(each[0])
        if name not in axes:
            merged.append(_narrow(sum(map(_wide, each))))
        elif torch:
            merged.append(library.cat(each, dim=axes[name]))
        else:
            merged.append(library.concatenate(each, axis=axes[name]))
    return tuple(merged)
