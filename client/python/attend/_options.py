# SPDX-License-Identifier: Apache-2.0
"""The types of a call's options, for type checkers: `def f(**options: Unpack[CallOptions])`."""

from __future__ import annotations

from typing import Any, Literal, Sequence, TypedDict

Array = Any  # NumPy's, torch's, or what has DLPack or data_ptr()
Numbers = Any  # a list, NumPy array or tensor of numbers


class CallOptions(TypedDict, total=False):
    """As `Client.attention` documents them."""
    causal: bool
    alignment: Literal["bottom_right", "top_left"]
    window: tuple[int, int] | None
    key_offset: int
    keys_after: int
    scale: float | None
    softcap: float
    bias: Array
    alibi_slopes: Numbers
    sinks: Numbers
    q_lengths: Numbers
    kv_lengths: Numbers
    cu_seqlens_q: Numbers
    cu_seqlens_k: Numbers
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    layout: Literal["BHLD", "BLHD", "LHD"]
    return_lse: bool
    o_dtype: str | None
    dropout_p: float
    dropout_seed: int | None
    kernel: str
    check: bool
    priority: int
    request_id: str
    timeout: float | None
    tenant: str | None
    traceparent: str | None
    transport: Literal["auto", "inline", "chunked", "shared"]


Wanted = Sequence[Literal["q", "k", "v", "bias", "sinks"]]
