# SPDX-License-Identifier: Apache-2.0
"""transformers' attention interface over attend.torch: "attend" and "attend-server"."""

import torch
from transformers.utils import TransformersKwargs

from .. import _connection
from .. import torch as attend_torch
from ._cache import ServedRows
from ._masks import Mask

# Options that models pass on and that do not change the attention.
_HARMLESS = {*TransformersKwargs.__annotations__, "cache_position", "use_cache", "layer_idx",
             "deterministic"} - {"output_attentions", "is_causal"}


def _refuse_unknown(options):
    if options.pop("output_attentions", None):
        raise ValueError("output_attentions is True, but attend never has the weights in memory: "
                         "use attn_implementation='eager'")
    for name, value in options.items():
        if value is not None and name not in _HARMLESS:
            raise ValueError(f"the model gives its attention {name}, which attend does not know")


def _sequence_ends(options):
    """The caller's cu_seqlens, in FlashAttention's argument names, as int64 on the host."""
    ends = [options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if ends[0] is None and ends[1] is None:
        return None
    if ends[0] is None or ends[1] is None or not torch.equal(*ends):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must both be given, and alike")
    return ends[0].long().cpu()


class _Call:
    """One layer's attention: tensors as [B, L, H, D], the models' memory layout, and the options
    that its mask amounts to."""

    def __init__(self, query, key, value, options):
        self.tensors = [x.transpose(1, 2) for x in (query, key, value)]
        self.options = dict(options, layout="BLHD")
        self.packed = None  # (rows, cu_seqlens)

    def take_columns(self, columns):
        q, k, v = self.tensors
        self.tensors = [q, k[:, :columns], v[:, :columns]]

    def mask(self, mask, position_bias):
        """Sets the options for a Mask. `position_bias` is numeric, [1|B, 1|H, Lq, Lk], or None."""
        q, k, _ = self.tensors
        if k.shape[1] != mask.shape[3] or q.shape[1] != mask.shape[2]:
            raise ValueError(f"the mask is for {mask.shape[2]} queries and {mask.shape[3]} keys, "
                             f"but there are {q.shape[1]} and {k.shape[1]}")
        if mask.is_dense or (position_bias is not None and not mask.is_plain):
            dense = mask.dense.to(q.device)
            self.options["bias"] = dense if position_bias is None else \
                position_bias.masked_fill(~dense, float("-inf"))
            return
        self.take_columns(mask.columns)
        if position_bias is not None:
            self.options["bias"] = position_bias[..., :mask.columns]
        self.options["window"] = (mask.left, mask.right)
        if mask.may_be_packed:
            self.packed = mask.packed
        elif mask.keys is not None:
            self._pad(mask)

    def _pad(self, mask):
        keeps_alignment = mask.offset == 0 or (mask.left, mask.right) == (-1, -1)
        if mask.lengths is None or not keeps_alignment:
            self.options["bias"] = mask.keys[:, None, None, :].to(self.tensors[0].device)
            return
        self.options.update(kv_lengths=mask.lengths, alignment="top_left")

    def pack(self, ends):
        """Applies the caller's own cu_seqlens, if any."""
        if ends is None:
            return
        batch, rows = self.tensors[0].shape[:2]
        if batch * rows != int(ends[-1]) or batch * self.tensors[1].shape[1] != int(ends[-1]):
            raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k end at {int(ends[-1])}, must end at "
                             f"the {batch * rows} rows of both")
        if self.packed is None and self.options.get("bias") is None and \
                "kv_lengths" not in self.options:
            self.packed = None, ends
        elif self.packed is None or not torch.equal(self.packed[1], ends):
            raise ValueError("cu_seq_lens_q and the mask disagree on where sequences begin")

    def run(self, compute):
        """O as [B, Lq, Hq, Dv]."""
        if self.packed is None:
            return compute(*self.tensors, **self.options)
        (rows, ends), q = self.packed, self.tensors[0]
        tensors = [x.flatten(0, 1) for x in self.tensors]
        if rows is not None:
            rows = rows.to(q.device)
            tensors = [x.index_select(0, rows) for x in tensors]
        longest = int(ends.diff().max()) if len(ends) > 1 else 0
        o = compute(*tensors, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest,
                    max_seqlen_k=longest, **dict(self.options, layout="LHD"))
        if rows is not None:
            o = o.new_zeros(q.shape[0] * q.shape[1], *o.shape[1:]).index_copy(0, rows, o)
        return o.unflatten(0, q.shape[:2])


def _without_mask(call, module, is_causal, sliding_window, position_bias):
    """A model without a mask tells by a flag whether it is causal."""
    q, k, _ = call.tensors
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if is_causal and q.shape[1] > 1:
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"a causal layer without a mask has {q.shape[1]} queries and "
                             f"{k.shape[1]} keys, must have as many")
        left = -1 if sliding_window is None else sliding_window - 1
        call.options["window"] = (left, 0)
    call.options["bias"] = position_bias


def _tensor_mask(call, mask, position_bias):
    """A mask made elsewhere: bool, or numbers to be added, [B|1, H|1, Lq|1, Lk]."""
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} dimensions, must have 4 where it does "
                         f"not come from transformers' create_causal_mask and its relatives")
    mask = mask[..., :call.tensors[1].shape[1]]
    if position_bias is not None:
        mask = position_bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else \
            position_bias + mask
    call.options["bias"] = mask


def attention(is_served, module, query, key, value, attention_mask, scaling=None, dropout=0.0,
              sliding_window=None, softcap=None, s_aux=None, is_causal=None, position_bias=None,
              **options):
    """The function that transformers calls for each layer. query: [B, Hq, Lq, D]. Returns O as [B,
    Lq, Hq, Dv], and None for the weights."""
    _refuse_unknown(options)
    ends = _sequence_ends(options)
    shared = dict(scale=scaling, softcap=softcap or 0.0, dropout_p=dropout,
                  sinks=None if s_aux is None else s_aux.float())
    if isinstance(key, ServedRows):
        if not is_served or position_bias is not None or ends is not None:
            raise ValueError(ServedRows.refusal if not is_served else
                             "a SessionCache takes neither position_bias nor cu_seq_lens")
        tensors = attend_torch.as_autocast(query, key.rows, value.rows)
        return key.layer.cache.attend(key.layer, *tensors, attention_mask, shared), None
    call = _Call(*attend_torch.as_autocast(query, key, value), shared)
    if isinstance(attention_mask, Mask):
        call.mask(attention_mask, position_bias)
    elif attention_mask is None:
        _without_mask(call, module, is_causal, sliding_window, position_bias)
    else:
        _tensor_mask(call, attention_mask, position_bias)
    call.pack(ends)
    with _connection.use(_connection.required() if is_served else None):
        return call.run(attend_torch.attention).contiguous(), None
