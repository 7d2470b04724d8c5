# SPDX-License-Identifier: Apache-2.0
"""Compares our answers with PyTorch's in double precision, within the bounds that
tests/python/reference.py derives for each element."""

import math

import numpy as np
import reference
import torch


def run(function, tensors, d_o, dtype):
    """function(*tensors) and the gradients of the tensors, computed in `dtype`, as float64."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    o = function(*inputs)
    return [x.detach().double().numpy()
            for x in (o, *torch.autograd.grad(o, inputs, d_o.to(dtype)))]


def four(x, batch, heads=None):
    """x as [B, H, rows, columns], broadcast to `batch`, the dimensions before the heads."""
    heads = (x.shape[-3] if x.ndim > 2 else 1) if heads is None else heads
    whole = np.broadcast_to(x if x.ndim > 2 else x[None], (*batch, heads, *x.shape[-2:]))
    return whole.reshape(math.prod(batch), heads, *x.shape[-2:])


def bounds_of(tensors, d_o, mask, gqa, options):
    """Bounds of O and the gradients of q, k, v and, if it is one of `tensors`, the mask."""
    q, k, v, *masks = (x.detach().double().numpy() for x in tensors)
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    heads = None if gqa else max(x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    if mask is not None:
        mask = mask.detach().numpy()
        mask = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask.astype(float)
        scores = (q.shape[-2], k.shape[-2])
        mask = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, scores))
        options = dict(options, bias=four(mask, batch, heads or q.shape[-3]))
    found = reference.bounds(
        *(four(x, batch, heads) for x in (q, k, v)), four(d_o.double().numpy(), batch),
        unit=torch.finfo(tensors[0].dtype).eps / 2, **options)
    own = dict(o=d_o, q=q, k=k, v=v, **({"bias": tensors[3]} if masks else {}))
    return [spread(found[name], batch, tuple(x.shape)) for name, x in own.items()]


def spread(x, batch, shape):
    """[B, H, rows, columns] summed to the shape that was broadcast to it."""
    x = x.reshape(*batch, *x.shape[1:])
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(n for n, size in enumerate(shape) if size == 1 != x.shape[n]),
                 keepdims=True)


def check(ours, theirs, tensors, mask=None, gqa=False, **options):
    """Compares ours(*tensors) and its gradients with theirs. `tensors` are q, k, v and, if its
    gradient is checked too, an additive mask; any other mask is `mask`. `options` are the options
    of reference.py that describe what both functions compute."""
    d_o = torch.randn(theirs(*tensors).shape).to(tensors[0].dtype)
    exact = run(theirs, tensors, d_o, torch.float64)
    got = run(ours, tensors, d_o, tensors[0].dtype)
    within = bounds_of(tensors, d_o, tensors[3] if len(tensors) > 3 else mask, gqa, options)
    for n, (truth, answer, bound) in enumerate(zip(exact, got, within)):
        name = f"gradient {n - 1}" if n else "o"
        assert answer.shape == truth.shape == bound.shape, name
        off = np.abs(answer - truth)
        assert (off <= bound).all(), f"{name} is off by {(off / bound).max():.2f} of its bound"
