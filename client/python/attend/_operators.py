# SPDX-License-Identifier: Apache-2.0
"""Attention in PyTorch, by attend_kernels or on the connected server, in two forms over the same
functions: as the operators attend::attention and attend::attention_backward, with fake
implementations for torch.compile, and as an autograd function, which has a fraction of their host
overhead."""

import functools
import inspect
import typing
from typing import List, Optional, Tuple

import attend_kernels
import torch
from attend_kernels._library import unimplemented
from torch import Tensor

from . import _connection

# The operators' arguments with their types: those of both, and the forward operator's.
_OPTIONS = dict(
    bias=Optional[Tensor], sinks=Optional[Tensor], alibi_slopes=Optional[Tensor],
    q_lengths=Optional[Tensor], kv_lengths=Optional[Tensor], cu_seqlens_q=Optional[Tensor],
    cu_seqlens_k=Optional[Tensor], max_seqlen_q=Optional[int], max_seqlen_k=Optional[int],
    layout=str, alignment=str, window_left=int, window_right=int, scale=float, softcap=float,
    dropout_p=float, dropout_seed=Optional[Tensor], kernel=str)
_ARGUMENTS = dict(q=Tensor, k=Tensor, v=Tensor, **_OPTIONS)
_NAMES = tuple(_ARGUMENTS)
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def _computing():
    """The forward and backward functions of the connected server, or attend_kernels'."""
    client = _connection.connected()
    if client is not None:
        return client.attention, client.backward
    return attend_kernels.attention, attend_kernels.attention_backward


def _plain(tensor):
    """A tensor in the form that the library takes: autograd is above these operators, not in
    them."""
    if tensor is None:
        return None
    if tensor.requires_grad and torch.is_grad_enabled():
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_contiguous() or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def _rows(tensor):
    """LSE or its gradient, C-contiguous."""
    return None if tensor is None else _plain(tensor).contiguous()


def _options(values):
    """The keyword arguments common to both directions."""
    options = dict(zip(_OPTIONS, values))
    for name in ("bias", "sinks", "alibi_slopes"):
        options[name] = _plain(options[name])
    options["window"] = options.pop("window_left"), options.pop("window_right")
    if options["dropout_seed"] is not None:
        options["dropout_seed"] = int(options["dropout_seed"]) % 2**64
    return options


def _signed(result, arguments):
    """Gives a function the signature from which PyTorch makes the operator's schema."""
    def sign(function):
        function.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hint)
             for name, hint in arguments.items()], return_annotation=result)
        return function
    return sign


@_signed(Tuple[Tensor, Tensor], _ARGUMENTS)
def _forward(q, k, v, *options):
    """O and LSE. The seed is an integer tensor on the CPU, so that a compiled function can draw a
    new one in every call."""
    o, lse = _computing()[0](_plain(q), _plain(k), _plain(v), return_lse=True, **_options(options))
    return o, lse


attention = torch.library.custom_op("attend::attention", _forward, mutates_args=())


def _lse_shape(q, layout):
    if layout == "LHD":
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[1], q.shape[2]) if layout == "BHLD" else \
        (q.shape[0], q.shape[2], q.shape[1])


@attention.register_fake
def _(q, k, v, *options):
    layout = dict(zip(_OPTIONS, options))["layout"]
    return q.new_empty((*q.shape[:-1], v.shape[-1])), \
        q.new_empty(_lse_shape(q, layout), dtype=torch.float32)


@_signed(List[Tensor], dict(
    d_o=Tensor, d_lse=Optional[Tensor], q=Tensor, k=Tensor, v=Tensor, o=Tensor, lse=Tensor,
    **_OPTIONS, wanted=str))
def _backward(d_o, d_lse, q, k, v, o, lse, *options):
    """The gradients named in `wanted` ("q k v"), in that order and in the arguments' dtypes."""
    *options, wanted = options
    names = tuple(wanted.split())
    found = _computing()[1](
        _plain(d_o), _plain(q), _plain(k), _plain(v), _plain(o), _rows(lse), d_lse=_rows(d_lse),
        wanted=names, **_options(options))
    inputs = dict(zip(_NAMES, (q, k, v, *options)))
    dtypes = {name: inputs[name].dtype for name in names}
    return [gradient if gradient.dtype == dtypes[name] else gradient.to(dtypes[name])
            for name, gradient in zip(names, found)]


attention_backward = torch.library.custom_op("attend::attention_backward", _backward,
                                             mutates_args=())


@attention_backward.register_fake
def _(d_o, d_lse, q, k, v, o, lse, *rest):
    inputs = dict(zip(_NAMES, (q, k, v, *rest)))
    return [inputs[name].new_empty(inputs[name].shape) for name in rest[-1].split()]


def _no_second_derivative(ctx, *_):
    raise unimplemented("attention has no second derivative: PyTorch's own has one, under "
                        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


attention_backward.register_autograd(_no_second_derivative)


def _setup_context(ctx, inputs, output):
    """Saves what the backward pass of either form needs."""
    needed = [name for name, needs in zip(_NAMES, ctx.needs_input_grad) if needs]
    for name in needed:
        if name not in _DIFFERENTIABLE:
            raise unimplemented(f"{name} requires grad, but attention has no gradient by it: pass "
                                f"{name}.detach()")
    ctx.wanted = needed
    ctx.connection = _connection.connected()
    ctx.set_materialize_grads(False)  # d_lse is None if LSE is not used
    ctx.places = [n for n, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.save_for_backward(*output, *(inputs[n] for n in ctx.places))
    ctx.others = list(inputs)
    for n in ctx.places:
        ctx.others[n] = None


def _gradients(compute, ctx, d_o, d_lse):
    """The backward pass of both forms; `compute` is the function or the operator."""
    o, lse, *tensors = ctx.saved_tensors
    values = list(ctx.others)
    for n, tensor in zip(ctx.places, tensors):
        values[n] = tensor
    if d_o is None:
        d_o = torch.zeros_like(o)
    # backward() may run on another thread, and after the block while the client is still open.
    with _connection.use(ctx.connection):
        found = compute(d_o, d_lse, *values[:3], o, lse, *values[3:], " ".join(ctx.wanted))
    gradients = [None] * len(values)
    for name, gradient in zip(ctx.wanted, found):
        gradients[_NAMES.index(name)] = gradient
    return tuple(gradients)


attention.register_autograd(functools.partial(_gradients, attention_backward),
                            setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """Differentiable attention by the same two functions, without the operators."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, d_o, d_lse):
        # With create_graph, use the operator, which refuses a second derivative.
        compute = attention_backward if torch.is_grad_enabled() else _backward
        return _gradients(compute, ctx, d_o, d_lse)


def _types(hint):
    """The exact types, without subclasses, that an argument of the operator may have."""
    kinds = typing.get_args(hint) or (hint,)
    return (*kinds, torch.nn.Parameter) if Tensor in kinds else kinds


_TYPES = [_types(hint) for hint in _ARGUMENTS.values()]


@functools.lru_cache
def _are_arguments(*types):
    return all(one in wanted for one, wanted in zip(types, _TYPES))


def _needs_operator(values):
    """Whether the call must be visible to something other than autograd: a compiler, a tracer, a
    functorch transform, a mode, a Tensor subclass, meta tensors. Also for invalid argument types,
    which the operator refuses by name."""
    return (torch.compiler.is_compiling() or torch.jit.is_tracing()
            or torch._C._are_functorch_transforms_active()
            or torch._C._len_torch_dispatch_stack() > 0
            or not _are_arguments(*map(type, values)) or values[0].is_meta)


def call(*values):
    """O and LSE, differentiable, from the operator's arguments."""
    if _needs_operator(values):
        return attention(*values)
    return _Attention.apply(*values) if torch.is_grad_enabled() else _forward(*values)


@torch.compiler.disable
def call_with_tree(tree, tree_lengths, *values):
    """As `call`, under a tree, which no operator has and through which there are no gradients."""
    for name, x in zip(_NAMES, values):
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise unimplemented(f"tree is given and {name} requires grad, but attention has no "
                                f"gradients under a tree: pass it as a bias of bool, or use "
                                f"torch.no_grad()")
    q, k, v, *options = values
    return _computing()[0](_plain(q), _plain(k), _plain(v), return_lse=True, tree=tree,
                           tree_lengths=tree_lengths, **_options(options))
