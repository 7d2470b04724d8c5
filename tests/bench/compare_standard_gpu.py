# SPDX-License-Identifier: Apache-2.0
"""compare_standard.py on a GPU: times of forward and backward passes, kernels alone and through
attend.torch."""

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
            d_os = backward.gradients_by_o(sets)
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
    """A whole step by autograd: the forward pass and then its gradients, as training calls them."""

    def __init__(self, name, attention, d_os):
        super().__init__(name)
        self.attention, self.d_os = attention, d_os

    def prepare(self, sets):
        super().prepare(sets)
        self.leaves = [(shape, [x.detach().requires_grad_() for x in tensors])
                       for ((shape, tensors),) in self.sets]

    def run(self, n):
        shape, leaves = self.leaves[n]
        return torch.autograd.grad(self.attention(shape, *leaves), leaves, self.d_os[n])

    def release(self):
        super().release()
        self.leaves = None


def _through_attend(shape, q, k, v):
    import attend.torch
    return attend.torch.scaled_dot_product_attention(
        q, k, v, is_causal=shape.right == 0, enable_gqa=shape.heads_q != shape.heads_kv)


def training(options, shapes, done):
    """The same for steps through attend.torch and PyTorch's SDPA. The host's part counts, where it
    is slower than the GPU: nothing waits for it."""
    for shape in shapes:
        cell = cells.cell("training", shape)
        if options.filter not in cell.name:
            continue
        sets = backward.make_sets(cell)
        d_os = backward.gradients_by_o(sets)
        truth = Truth(*sets[0][0][1], d_os[0], shape.left, shape.right)
        lineup = [Trained(standard.OURS, _through_attend, d_os)]
        lineup += [Trained(name, gradients.through_sdpa(BACKENDS[name]), d_os)
                   for name in (standard.CUDNN, standard.FLASH)]
        results = compete(lineup, sets, truth.backward, options, ahead=False)
        done([{"cell": cell.name, "contender": name, **result}
              for name, result in results.items()])
        del sets, d_os, truth
        torch.cuda.empty_cache()
