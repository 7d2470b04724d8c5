# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators attend::attention and attend::attention_backward: attend_kernels with shapes
for torch.compile and gradients for autograd."""

from typing import List, Optional, Tuple

import attend_kernels
import torch
from attend_kernels._library import unimplemented
from torch import Tensor

# Which of the operator's arguments have gradients.
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def _plain(tensor):
    """As the library takes it: autograd is above these operators, not in them."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    whole = tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    return tensor if whole else tensor.contiguous()


def _options(bias, sinks, alibi_slopes, q_lengths, kv_lengths, cu_seqlens_q, cu_seqlens_k,
             max_seqlen_q, max_seqlen_k, layout, alignment, window_left, window_right, scale,
             softcap, dropout_p, dropout_seed, kernel):
    """The keywords that both directions share."""
    seed = None if dropout_seed is None else int(dropout_seed) % 2**64
    return dict(bias=_plain(bias), sinks=_plain(sinks), alibi_slopes=_plain(alibi_slopes),
                q_lengths=q_lengths, kv_lengths=kv_lengths, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                layout=layout, alignment=alignment, window=(window_left, window_right),
                scale=scale, softcap=softcap, dropout_p=dropout_p, dropout_seed=seed,
                kernel=kernel)


@torch.library.custom_op("attend::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor],
              alibi_slopes: Optional[Tensor], q_lengths: Optional[Tensor],
              kv_lengths: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
              cu_seqlens_k: Optional[Tensor], max_seqlen_q: Optional[int],
              max_seqlen_k: Optional[int], layout: str, alignment: str, window_left: int,
              window_right: int, scale: float, softcap: float, dropout_p: float,
              dropout_seed: Optional[Tensor], kernel: str) -> Tuple[Tensor, Tensor]:
    """O and LSE. The seed is an integer on the CPU: a tensor, so that a compiled function may draw
    it anew in every call."""
    o, lse = attend_kernels.attention(
        _plain(q), _plain(k), _plain(v), return_lse=True,
        **_options(bias, sinks, alibi_slopes, q_lengths, kv_lengths, cu_seqlens_q, cu_seqlens_k,
                   max_seqlen_q, max_seqlen_k, layout, alignment, window_left, window_right, scale,
                   softcap, dropout_p, dropout_seed, kernel))
    return o, lse


def _lse_shape(q, layout):
    if layout == "LHD":
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[1], q.shape[2]) if layout == "BHLD" else \
        (q.shape[0], q.shape[2], q.shape[1])


@attention.register_fake
def _(q, k, v, bias, sinks, alibi_slopes, q_lengths, kv_lengths, cu_seqlens_q, cu_seqlens_k,
      max_seqlen_q, max_seqlen_k, layout, *_):
    return q.new_empty((*q.shape[:-1], v.shape[-1])), \
        q.new_empty(_lse_shape(q, layout), dtype=torch.float32)


@torch.library.custom_op("attend::attention_backward", mutates_args=())
def attention_backward(d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor,
                       lse: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor],
                       alibi_slopes: Optional[Tensor], q_lengths: Optional[Tensor],
                       kv_lengths: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
                       cu_seqlens_k: Optional[Tensor], max_seqlen_q: Optional[int],
                       max_seqlen_k: Optional[int], layout: str, alignment: str, window_left: int,
                       window_right: int, scale: float, softcap: float, dropout_p: float,
                       dropout_seed: Optional[Tensor], kernel: str, wanted: str) -> List[Tensor]:
    """The gradients that `wanted` names, "q k v", in its order and the arguments' dtypes."""
    names = wanted.split()
    found = attend_kernels.attention_backward(
        _plain(d_o), _plain(q), _plain(k), _plain(v), _plain(o), lse.detach().contiguous(),
        d_lse=d_lse.detach().contiguous(), wanted=names,
        **_options(bias, sinks, alibi_slopes, q_lengths, kv_lengths, cu_seqlens_q, cu_seqlens_k,
                   max_seqlen_q, max_seqlen_k, layout, alignment, window_left, window_right, scale,
                   softcap, dropout_p, dropout_seed, kernel))
    inputs = dict(q=q, k=k, v=v, bias=bias, sinks=sinks)
    return [gradient.to(inputs[name].dtype) for name, gradient in zip(names, found)]


@attention_backward.register_fake
def _(d_o, d_lse, q, k, v, o, lse, bias, sinks, *rest):
    inputs = dict(q=q, k=k, v=v, bias=bias, sinks=sinks)
    return [inputs[name].new_empty(inputs[name].shape) for name in rest[-1].split()]


_NAMES = tuple(argument.name for argument in torch.ops.attend.attention.default._schema.arguments)


def _setup_context(ctx, inputs, output):
    arguments = dict(zip(_NAMES, inputs))
    needed = [name for name, needs in zip(_NAMES, ctx.needs_input_grad) if needs]
    for name in needed:
        if name not in _DIFFERENTIABLE:
            raise unimplemented(f"{name} requires grad, but attention has no gradient by it: pass "
                                f"{name}.detach()")
    ctx.wanted = [name for name in _DIFFERENTIABLE if name in needed]
    tensors = [name for name in _NAMES if isinstance(arguments[name], Tensor)]
    ctx.save_for_backward(*output, *(arguments[name] for name in tensors))
    ctx.tensors = tensors
    ctx.others = {name: value for name, value in arguments.items() if name not in tensors}


def _backward(ctx, d_o, d_lse):
    o, lse, *saved = ctx.saved_tensors
    given = {**ctx.others, **dict(zip(ctx.tensors, saved))}
    values = [given[name] for name in _NAMES]
    found = attention_backward(d_o, d_lse, *values[:3], o, lse, *values[3:], " ".join(ctx.wanted))
    gradients = dict(zip(ctx.wanted, found))
    return tuple(gradients.get(name) for name in _NAMES)


attention.register_autograd(_backward, setup_context=_setup_context)
