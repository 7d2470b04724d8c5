# SPDX-License-Identifier: Apache-2.0
"""compare_standard.py on a GPU: times of forward and backward passes, kernels alone and through
attend.torch."""

import math

import torch
from torch.nn.attention import SDPBackend

import bench_kernels_backward as backward
import bench_kernels_cells as cells
import bench_kernels_contenders as entries
import bench_kernels_gradients as gradients
import compare_standard_cells as standard
from bench_kernels_truth import Truth
from bench_kernels_turns import compete

BACKENDS = {standard.MATH: SDPBackend.MATH, standard.FLASH: SDPBackend.FLASH_ATTENTION,
            standard.CUDNN: SDPBackend.CUDNN_ATTENTION}


def forward_lineup(attend):
    return [entries.AttendContender(attend, cells.AUTO, name=standard.OURS),
            *(entries.TorchContender(name, backend) for name, backend in BACKENDS.items()),
            entries.Unfused(standard.UNFUSED),
            entries.AttendContender(attend, cells.NAIVE, name=standard.NAIVE)]


def backward_lineup(attend, d_os):
    rivals = {name: gradients.through_sdpa(backend) for name, backend in BACKENDS.items()}
    rivals[standard.UNFUSED] = gradients.unfused
    return [gradients.AttendGradients(attend, d_os, name=standard.OURS),
            *(gradients.TorchGradients(name, attention, d_os)
              for name, attention in rivals.items())]


def times(attend, options, workloads, done):
    """Calls done(rows) with the rows of each shape and pass."""
    for workload in workloads:
        for shape in workload.shapes:
            cell = cells.cell(workload.key, shape)
            if options.filter not in cell.name:
                continue
            sets = backward.make_sets(cell)
            d_os = gradients.by_o(sets)
            truth = Truth(*sets[0][0][1], d_os[0], shape.left, shape.right)
            for way, lineup, judge in (
                    (standard.FORWARD, forward_lineup(attend), truth.forward),
                    (standard.BACKWARD, backward_lineup(attend, d_os), truth.backward)):
                results = compete(lineup, sets, judge, options)
                done([{**workload.named(), "length": shape.length, "mask": shape.mask(),
                       "pass": way, "contender": name, **result}
                      for name, result in results.items()])
                torch.cuda.empty_cache()
            del sets, d_os, truth


class Trained(entries.Contender):
    """A whole step with autograd, forward and backward, as in training."""

    def __init__(self, name, attention, d_os):
        super().__init__(name)
        self.attention, self.d_os = attention, d_os

    def prepare(self, sets):
        super().prepare(sets)
        self.leaves = [(shape, [x.detach().requires_grad_() for x in tensors])
                       for ((shape, tensors),) in self.sets]

    def run(self, n):
        """[O, dQ, dK, dV]."""
        shape, leaves = self.leaves[n]
        o = self.attention(shape, *leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, self.d_os[n])]

    def release(self):
        super().release()
        self.leaves = None


def _through_attend(dropout_p):
    import attend.torch

    def attention(shape, q, k, v):
        return attend.torch.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=shape.right == 0,
            enable_gqa=shape.heads_q != shape.heads_kv)
    return attention


def _step_judge(truth):
    def judge(outputs):
        errors, fault = truth.forward(outputs[:1])
        more, other = truth.backward(outputs[1:])
        return {**errors, **more}, fault or other
    return judge


def _dropping_judge(truth, tensors, d_o, dropout_p):
    """Implementations drop different weights. But dropping a share p moves O away from the truth by
    sqrt(p / (1 - p)) of its norm, as V has mean 0; and as O is linear in V and the scores in Q and
    in K, the inner products of dO and O and of dV and V are equal, as are those of dQ and Q and of
    dK and K. Rounding adds up like a random walk."""
    moved = math.sqrt(dropout_p / (1 - dropout_p))

    def differ(one, two):
        products = [(a.double() * b.double()) for a, b in (one, two)]
        unit = truth.bound()
        allowed = unit * sum(x.square().sum().sqrt() for x in products)
        return not (products[0].sum() - products[1].sum()).abs() <= allowed

    def judge(outputs):
        q, k, v = tensors
        o, d_q, d_k, d_v = outputs
        away = truth.forward([o])[0]["O"]["norm"]
        if not 0.9 * moved <= away <= 1.1 * moved:
            return {}, f"O is {away:.3f} away from that without dropout, not {moved:.3f}"
        if differ((d_o, o), (d_v, v)) or differ((d_q, q), (d_k, k)):
            return {}, "forward and backward do not agree"
        return {}, None
    return judge


def training(options, steps, done):
    """The same for steps through attend.torch and PyTorch's SDPA. The GPU does not wait for the
    host to enqueue, so that the host's time counts if it is longer."""
    for shape, dropout_p in steps:
        cell = cells.cell("training", shape)
        if options.filter not in cell.name:
            continue
        sets = backward.make_sets(cell)
        d_os = gradients.by_o(sets)
        truth = Truth(*sets[0][0][1], d_os[0], shape.left, shape.right)
        judge = _step_judge(truth) if dropout_p == 0 else \
            _dropping_judge(truth, sets[0][0][1], d_os[0], dropout_p)
        lineup = [Trained(standard.OURS, _through_attend(dropout_p), d_os)]
        lineup += [Trained(name, gradients.through_sdpa(BACKENDS[name], dropout_p), d_os)
                   for name in (standard.CUDNN, standard.FLASH)]
        results = compete(lineup, sets, judge, options, ahead=False)
        name = cell.name + (f", dropout {dropout_p}" if dropout_p else "")
        done([{"cell": name, "contender": contender, **result}
              for contender, result in results.items()])
        del sets, d_os, truth, judge
        torch.cuda.empty_cache()
