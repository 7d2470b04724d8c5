# SPDX-License-Identifier: Apache-2.0
"""How close two answers must be: derived from what PyTorch's own arithmetic does in the same
precision."""

import torch


def run(function, tensors, d_o, dtype):
    """function(*tensors) in `dtype` and the gradients by the tensors, all in double."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    o = function(*inputs)
    gradients = torch.autograd.grad(o, inputs, d_o.to(dtype))
    return [x.detach().double() for x in (o, *gradients)]


def check(ours, theirs, tensors, d_o):
    """ours(*tensors) and its gradients against theirs in double: at most twice as far off as theirs
    in the tensors' dtype, and a few roundings of the largest number."""
    dtype = tensors[0].dtype
    exact, plain, got = (run(f, tensors, d_o, precision) for f, precision in
                         ((theirs, torch.float64), (theirs, dtype), (ours, dtype)))
    names = ["o", *(f"gradient {n}" for n in range(len(tensors)))]
    for name, truth, single, answer in zip(names, exact, plain, got):
        assert answer.shape == truth.shape, name
        largest = truth.abs().max() if truth.numel() else torch.tensor(0.0)
        off = (single - truth).abs().max() if truth.numel() else torch.tensor(0.0)
        bound = 2 * off + 4 * torch.finfo(dtype).eps * largest
        error = (answer - truth).abs().max() if truth.numel() else torch.tensor(0.0)
        assert error <= bound, f"{name} is off by {error:.2e}, at most {bound:.2e}"
