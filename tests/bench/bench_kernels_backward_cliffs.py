# SPDX-License-Identifier: Apache-2.0
"""Variants of the backward pass compared with the plain one, as in bench_kernels_cliffs.py for the
forward pass: dropout, ALiBi, softcap, bool masks that are packed in the call, biases without their
gradient, and few keys. Windows are in bench_kernels_backward.py."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import bench_kernels_cliffs as forward
import bench_kernels_contenders as entries
import bench_kernels_fa4 as fa4
import bench_kernels_gradients as gradients

import attend_kernels

NAMES = ("dQ", "dK", "dV")
KEYS = 256


class Case(forward.Case):
    """A case whose FLOPs are five products per pair."""

    def work(self):
        return 2.5 * super().work()


def cases(dim, **sizes):
    """Yields the cases, the plain ones first, so that inputs are only made when needed."""
    tensors = forward.inputs(dim, **sizes)
    q = tensors[0]
    heads, length = q.shape[1:3]
    random = torch.randn(1, heads, length, length, device=q.device, dtype=q.dtype)
    terms = {forward.PLAIN: {}, "dropout of 0.1": {"dropout_p": 0.1, "dropout_seed": 7},
             "ALiBi": {"alibi_slopes": torch.rand(heads, device=q.device) * 0.1},
             "softcap": {"softcap": forward.SOFTCAP},
             "random mask [1, 1, L, L]": {"bias": random[:, :1] < 0},
             "bias of 16 bits [1, H, L, L]": {"bias": random}}
    for name, options in terms.items():
        yield Case(name, tensors, options)
        yield Case(f"{name}, causal", tensors, {**options, "causal": True}, causal=True)
    few = (x[:, :, :KEYS].contiguous() for x in tensors[1:])
    yield Case(f"{KEYS} keys", (q, *few))


def kept(case):
    """{(b, h): dropout's factors of the weights}, from calls with equal weights and columns of the
    identity matrix as V."""
    if "dropout_p" not in case.options:
        return {place: 1.0 for place in forward.places(case)}
    q, k, v = case.tensors
    options = {name: case.options[name] for name in ("dropout_p", "dropout_seed")}
    found = {place: [] for place in forward.places(case)}
    for columns in torch.eye(k.shape[2], device=q.device, dtype=q.dtype).split(v.shape[3], dim=1):
        unit = columns.contiguous().expand(*k.shape[:2], -1, -1)
        weights = attend_kernels.attention(torch.zeros_like(q), k, unit, **options)
        for place, parts in found.items():
            parts.append(weights[place] != 0)
    return {place: torch.cat(parts, 1) / (1 - options["dropout_p"])
            for place, parts in found.items()}


def truths(case, d_o):
    """{(b, h): dQ, dK and dV in float64}."""
    found, multiplied = {}, kept(case)
    for place in forward.places(case):
        head = [x.requires_grad_() for x in forward.heads_of(case, *place)]
        o = forward.truth(case, *place, head, multiplied[place])
        found[place] = torch.autograd.grad(o, head, d_o[place].double())
    return found


class Ours(entries.Contender):
    """attention_backward() with the options of the case."""
    is_attend = True

    def __init__(self, case, d_o):
        super().__init__(forward.OURS)
        self.case, self.d_o = case, d_o

    def prepare(self, sets):
        super().prepare(sets)
        case = self.case
        self.answer = attend_kernels.attention(*case.tensors, return_lse=True, **case.options)

    def kernel(self):
        self.prepare([])
        return attend_kernels.select_backward(self.d_o, *self.case.tensors, *self.answer,
                                              **self.case.options)[0]

    def run(self, n):
        return attend_kernels.attention_backward(self.d_o, *self.case.tensors, *self.answer,
                                                 **self.case.options)

    def release(self):
        super().release()
        self.answer = None


def through_cudnn(case, *tensors):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(*tensors, attn_mask=forward.sdpa_mask(case), is_causal=case.causal)


def cliffs(options, in_time):
    """Lines as in bench_kernels_cliffs."""
    lines = []
    for dim in (64, 128):
        plain = {}
        for name, case in forward.wanted_cases(cases(dim), dim, options, in_time):
            d_os = gradients.by_o([[(case, case.tensors)]])
            ours = Ours(case, d_os[0])
            contenders = [ours, gradients.TorchGradients(forward.CUDNN, through_cudnn, d_os),
                          *fa4.backward(forward.fa4_options, d_os)]
            judge = forward.judge_of(case, truths(case, d_os[0]), NAMES)
            lines += forward.lines_of(name, case, contenders, judge, ours.kernel(), plain, options)
            torch.cuda.empty_cache()
    return lines
