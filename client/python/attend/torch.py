# SPDX-License-Identifier: Apache-2.0
"""Exact attention for PyTorch, with gradients: in process, on the CPU and on CUDA GPUs; or, within
`with attend.connect(...)`, on a server.

    import attend.torch
    o = attend.torch.scaled_dot_product_attention(q, k, v, is_causal=True)  # as PyTorch's own
    o, lse = attend.torch.attention(q, k, v, causal=True, window=(127, 0), return_lse=True)

Works with autograd and torch.compile. Requests for gradients that do not exist raise.
"""

import math
import operator

import torch
from attend_kernels._tensors import check_nested, check_tangent
from torch import nn

from . import _block_mask, _operators

__all__ = ["FlashAttention", "StandardAttention", "attention", "mask_of_blocks", "run_flash",
           "scaled_dot_product_attention"]


_DIM_MAX = 256  # largest head dim of the kernels


def _check_dropout(name, p):
    """ValueError unless p is in the kernels' range, or 1 (all weights are dropped)."""
    if not (0.0 <= p < 1.0 - 2.0**-17 or p == 1.0):
        raise ValueError(f"{name} is {p}, must be in [0, 1 - 2^-17), or 1")


def _seed_tensor(given):
    """The seed in the operators' form: 64 bits in an int64 tensor on the CPU."""
    if isinstance(given, torch.Tensor):
        if given.dtype != torch.int64:
            raise TypeError(f"dropout_seed has dtype {given.dtype}, must have torch.int64")
        if given.numel() != 1:
            raise ValueError(f"dropout_seed has {given.numel()} elements, must have 1")
        return given
    try:
        seed = operator.index(given)
    except TypeError:
        raise TypeError(f"dropout_seed is {given!r}, must be an integer in [0, 2^64)") from None
    if not 0 <= seed < 2**64:
        raise ValueError(f"dropout_seed is {seed}, must be in [0, 2^64)")
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device="cpu")


def _seed(dropout_p, given):
    """The seed in the operators' form; None without dropout."""
    seed = None if given is None else _seed_tensor(given)
    if dropout_p == 0:
        return None
    return torch.randint(2**63 - 1, (), device="cpu") if seed is None else seed


def _zeros(tensor):
    """Zeros in place of the tensor, even if it has NaN; its gradient through them is 0."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0)


def mask_of_blocks(block_mask):
    """A BlockMask of torch.nn.attention.flex_attention as [B|1, H|1, Lq, Lk] of bool, for `bias` or
    attn_mask. Those accept the BlockMask itself too, but then convert it in every call."""
    return _block_mask.as_tensor("block_mask", block_mask)


def attention(q, k, v, *, causal=False, alignment="bottom_right", window=None, scale=None,
              softcap=0.0, bias=None, alibi_slopes=None, sinks=None, q_lengths=None,
              kv_lengths=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
              max_seqlen_k=None, layout="BHLD", return_lse=False, dropout_p=0.0, dropout_seed=None,
              kernel="auto", tree=None, tree_lengths=None):
    """attend_kernels.attention for tensors, with gradients with respect to q, k, v, bias and sinks,
    through O and LSE. Arguments as there; those that may be lists there must be tensors here.
    float64 is computed by "cpu_reference" if kernel is "auto": slowly, for gradcheck; its LSE is
    float32.
    bias: also a BlockMask.
    dropout_p: also 1, which drops all weights: O is 0, and so is every gradient through it.
    dropout_seed: an integer, or its 64 bits as an int64 tensor of one element on the CPU; None:
    drawn from PyTorch's default CPU generator, which torch.manual_seed sets.
    tree: without gradients only; torch.compile breaks its graph there."""
    bias = _block_mask.as_tensor("bias", bias)
    if not torch.compiler.is_compiling():
        for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias), ("sinks", sinks),
                             ("alibi_slopes", alibi_slopes)):
            check_tangent(name, tensor)
    if q.is_nested or k.is_nested or v.is_nested:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_nested(name, tensor)
    left, right = (-1, -1) if window is None else window
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    if q.dtype == torch.float64 and kernel == "auto":
        kernel = "cpu_reference"
    all_dropped = dropout_p == 1.0
    dropout_p = 0.0 if all_dropped else float(dropout_p)
    if all_dropped:  # zero V too, so that its NaN reaches no gradient
        v = _zeros(v)
    values = (q, k, v, bias, sinks, alibi_slopes, q_lengths, kv_lengths, cu_seqlens_q, cu_seqlens_k,
              max_seqlen_q, max_seqlen_k, layout, alignment, left, 0 if causal else right,
              float(scale), float(softcap), dropout_p, _seed(dropout_p, dropout_seed), kernel)
    if tree is None and tree_lengths is None:
        o, lse = _operators.call(*values)
    else:
        o, lse = _operators.call_with_tree(tree, tree_lengths, *values)
    if all_dropped:
        o = _zeros(o)
    return (o, lse) if return_lse else o


def as_autocast(*tensors):
    """The arguments cast as autocast casts those of PyTorch's attention."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, must have at least 2")
    for name, dim in (("query", query.shape[-1]), ("value", value.shape[-1])):
        if not 1 <= dim <= _DIM_MAX:
            raise ValueError(f"{name} has head dim {dim}, must be in [1, {_DIM_MAX}]: PyTorch's "
                             f"own scaled_dot_product_attention takes others")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p is {dropout_p}, must be in [0, 1]")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given, must be None if is_causal")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value has {value.shape[-2]} rows, must have key's {key.shape[-2]}")
    if enable_gqa and min(x.dim() for x in (query, key, value)) < 3:
        raise ValueError("enable_gqa needs query, key and value with heads, 3 dimensions or more")


def _broadcast(*shapes):
    """torch.broadcast_shapes, which is slow, only if the shapes differ."""
    first = shapes[0]
    return first if all(shape == first for shape in shapes) else torch.broadcast_shapes(*shapes)


def _four(tensor, lead):
    """[*lead, rows, columns] as [B, H, rows, columns]; `lead` broadcasts."""
    if len(lead) == 2 and tensor.shape[:-2] == lead:
        return tensor
    rows_and_columns = tensor.shape[-2:]
    return tensor.expand(*lead, *rows_and_columns).reshape(
        math.prod(lead[:-1]), lead[-1] if lead else 1, *rows_and_columns)


def _as_many_heads(query, key, value, dim):
    """K and V unchanged, or, if their heads differ in number, repeated to query's heads as PyTorch
    does. Heads are dimension `dim`."""
    if key.shape[dim] == value.shape[dim]:
        return key, value
    heads = query.shape[dim]
    for name, x in (("key", key), ("value", value)):
        if x.shape[dim] == 0 or heads % x.shape[dim] != 0:
            raise ValueError(f"{name} has {x.shape[dim]} heads, must divide query's {heads}")
    return (x.repeat_interleave(heads // x.shape[dim], dim) for x in (key, value))


def _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """scaled_dot_product_attention of NestedTensors [B, heads, rows, D] of layout torch.jagged:
    their values are packed sequences, and their offsets are cu_seqlens."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested or x.layout != torch.jagged or x.dim() != 4 or \
                not isinstance(x.size(2), torch.SymInt) or x.lengths() is not None:
            raise ValueError(f"{name} must be a NestedTensor of layout torch.jagged, [B, heads, "
                             f"rows, D] with rows of any number and no holes, as the others are")
    if attn_mask is not None:
        raise ValueError("attn_mask is given, must be None for NestedTensors")
    if key.size(2) != value.size(2):
        raise ValueError("value has other rows than key, must have the same offsets")
    q, k, v = (x.values().transpose(0, 1) for x in as_autocast(query, key, value))
    if enable_gqa:
        k, v = _as_many_heads(q, k, v, 1)
    elif not q.shape[1] == k.shape[1] == v.shape[1]:
        raise ValueError(f"query, key and value have {q.shape[1]}, {k.shape[1]} and {v.shape[1]} "
                         f"heads, must have as many without enable_gqa")
    longest = [int(x.offsets().diff().max()) if x.size(0) > 0 else 0 for x in (query, key)]
    o = attention(q, k, v, layout="LHD", cu_seqlens_q=query.offsets(), cu_seqlens_k=key.offsets(),
                  max_seqlen_q=longest[0], max_seqlen_k=longest[1], causal=is_causal,
                  alignment="top_left", scale=scale, dropout_p=dropout_p)
    return torch.nested.nested_tensor_from_jagged(o, query.offsets()).transpose(1, 2)


def _bias(attn_mask, query, keys, lead):
    """attn_mask in attend's form of a bias, numeric or bool: [B|1, H|1, Lq|1, Lk]."""
    mask = attn_mask.reshape((1,) * (2 - attn_mask.dim()) + tuple(attn_mask.shape))
    if mask.shape[-1] != keys:
        mask = mask.expand(*mask.shape[:-1], keys)
    if mask.shape[-2] not in (1, query.shape[-2]):
        raise ValueError(f"attn_mask has {mask.shape[-2]} rows, must have 1 or query's "
                         f"{query.shape[-2]}")
    if len(lead) <= 2:
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return _four(mask, lead)


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                                 scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention by attend's kernels: the same arguments and
    answer, for head dims of 1 to 256. A numeric attn_mask has a gradient too; a bool one is read as
    bits, and so is a BlockMask. Rows whose keys are all hidden by attn_mask are 0. dropout_p drops
    different weights than PyTorch does; torch.manual_seed makes them reproducible. NestedTensors
    must have layout torch.jagged and no attn_mask. There is no second derivative."""
    if query.is_nested or key.is_nested or value.is_nested:
        return _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    attn_mask = _block_mask.as_tensor("attn_mask", attn_mask)
    _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    query, key, value = as_autocast(query, key, value)
    if enable_gqa:
        key, value = _as_many_heads(query, key, value, -3)
        batch = _broadcast(*(x.shape[:-3] for x in (query, key, value)))
        leads = [torch.Size((*batch, x.shape[-3])) for x in (query, key, value)]
    else:
        leads = [_broadcast(*(x.shape[:-2] for x in (query, key, value)))] * 3
    bias = None if attn_mask is None else _bias(attn_mask, query, key.shape[-2], leads[0])
    q, k, v = (_four(x, lead) for x, lead in zip((query, key, value), leads))
    if q.shape[1] == 0:  # without heads O is empty; the kernels refuse that
        o = q @ k[:, :0].mT @ v[:, :0]
    else:
        o = attention(q, k, v, bias=bias, causal=is_causal, alignment="top_left", scale=scale,
                      dropout_p=dropout_p)
    return o if len(leads[0]) == 2 else o.reshape(*leads[0], *o.shape[-2:])


def run_flash(Q, K, V):
    """softmax(Q K^T / sqrt(d)) V of plain matrices: Q [N, d], K [M, d], V [M, e]; returns [N,
    e]."""
    for name, matrix in (("Q", Q), ("K", K), ("V", V)):
        if matrix.dim() != 2:
            raise ValueError(f"{name} has {matrix.dim()} dimensions, must have 2")
    return scaled_dot_product_attention(Q, K, V)


class FlashAttention(nn.Module):
    """attention() with stored options: FlashAttention(causal=True)(q, k, v). Has no parameters.
    Tensor options (bias, sinks, lengths) are given per call. `dropout` is a probability, used in
    training only."""

    def __init__(self, *, causal=False, alignment="bottom_right", window=None, scale=None,
                 softcap=0.0, layout="BHLD", dropout=0.0, kernel="auto"):
        super().__init__()
        _check_dropout("dropout", dropout)
        self.dropout = dropout
        self.options = dict(causal=causal, alignment=alignment, window=window, scale=scale,
                            softcap=softcap, layout=layout, kernel=kernel)

    def forward(self, q, k, v, **tensors):
        return attention(q, k, v, dropout_p=self.dropout if self.training else 0.0,
                         **self.options, **tensors)

    def extra_repr(self):
        options = dict(self.options, dropout=self.dropout)
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


class StandardAttention(nn.Module):
    """The baseline for FlashAttention: the same answer from PyTorch's own operators, one after the
    other, with all scores in memory at once. [B, H, L, D]; KV heads may be fewer."""

    def __init__(self, *, causal=False, alignment="bottom_right", scale=None, dropout=0.0):
        super().__init__()
        if alignment not in ("bottom_right", "top_left"):
            raise ValueError(f"alignment is {alignment!r}, must be bottom_right or top_left")
        _check_dropout("dropout", dropout)
        self.causal, self.alignment, self.scale = causal, alignment, scale
        self.dropout = dropout

    def forward(self, q, k, v, bias=None):
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if self.scale is None else
                                            self.scale)
        if bias is not None and bias.dtype == torch.bool:
            scores = scores.masked_fill(bias.logical_not(), float("-inf"))
        elif bias is not None:
            scores = scores + bias
        if self.causal:
            lq, lk = scores.shape[-2:]
            first = 1 + (lk - lq if self.alignment == "bottom_right" else 0)
            hidden = torch.ones(lq, lk, dtype=torch.bool, device=q.device).triu(first)
            scores = scores.masked_fill(hidden, float("-inf"))
        # A row that sees no key is 0, as everywhere in attend, and so are its gradients.
        blind = scores.isneginf().all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        return nn.functional.dropout(weights, self.dropout, self.training) @ v

    def extra_repr(self):
        return (f"causal={self.causal}, alignment={self.alignment!r}, scale={self.scale}, "
                f"dropout={self.dropout}")
