# SPDX-License-Identifier: Apache-2.0
"""The backward pass compared with PyTorch's cuDNN and FlashAttention-2, and FlashAttention-4, in
turns. Ours is always deterministic; the rivals run in their default mode, and FlashAttention also
in its deterministic mode (PyTorch does not offer cuDNN's). FLOPs are counted as five products per
visible pair, whatever a kernel computes."""

import torch
from torch.nn.attention import SDPBackend

import bench_kernels_cells as cells
import bench_kernels_contenders as entries
import bench_kernels_fa4 as fa4
import bench_kernels_gradients as gradients
import bench_kernels_race as race
from bench_kernels_truth import Truth
from bench_kernels_turns import compete

OURS = "attend"
CUDNN, FLASH = "cudnn", cells.FA2
CACHE_BYTES = 128 << 20


def _shape(length, causal, dim=128, dim_v=None, heads_q=16, heads_kv=16, **more):
    return cells.Shape(max(1, cells.TOKENS // length), heads_q, heads_kv, length, dim, dim_v or dim,
                       right=0 if causal else -1, **more)


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SHAPES = [_shape(length, causal, dim) for dim in (64, 128) for causal in (False, True)
          for length in LENGTHS]
SHAPES += [_shape(length, causal, dim, dim_v) for dim, dim_v in ((96, 96), (192, 128), (256, 256))
           for causal in (False, True) for length in (2048, 4096, 16384)]
SHAPES += [_shape(8192, True, heads_q=32, heads_kv=8, dtype="bfloat16")]
SHAPES += [_shape(8192, True, left=left) for left in (255, 1023, 4095)]
CELLS = [cells.cell("backward", shape) for shape in SHAPES]


def flops(shape):
    """FLOPs of dO V^T, Q K^T, dS K, dS^T Q and P^T dO."""
    return 2.0 * (3 * shape.dim + 2 * shape.dim_v) * shape.pairs() * shape.batch * shape.heads_q


def make_sets(cell):
    """Random inputs; a single set if it exceeds a GPU's cache, as graphs of several would compete
    for memory."""
    sets = race.make_sets(cell)
    return sets[:1] if cell.shapes[0].input_bytes() > CACHE_BYTES else sets


def lineup(shape, attend, d_os):
    found = [gradients.AttendGradients(attend, d_os, name=OURS),
             gradients.AttendGradients(attend, d_os, cells.SM80, cells.SM80)]
    if shape.left >= 0:
        rivals = {FLASH: gradients.through_flash}
    else:
        rivals = {CUDNN: gradients.through_sdpa(SDPBackend.CUDNN_ATTENTION),
                  FLASH: gradients.through_sdpa(SDPBackend.FLASH_ATTENTION)}
    for name, attention in rivals.items():
        found.append(gradients.TorchGradients(name, attention, d_os))
    found.append(gradients.TorchGradients(FLASH + cells.DETERMINISTIC, rivals[FLASH], d_os, True))
    return found + fa4.backward(fa4.options_of, d_os)


def listed(options):
    return [cell for cell in CELLS if cells.is_listed(cell.name, options.filter)]


def backward(attend, options, in_time):
    """A line for each contender of each cell: {cell, contender, ms, tflops, same_bits, ...}, with
    `failure` instead of the times if there is none."""
    lines = []
    for cell in listed(options):
        if not in_time(f"backward: {cell.name}"):
            continue
        (shape,), sets = cell.shapes, make_sets(cell)
        d_os = gradients.by_o(sets)
        truth = Truth(*sets[0][0][1], d_os[0], shape.left, shape.right)
        results = compete(entries.wanted(lineup(shape, attend, d_os), options), sets,
                          truth.backward, options)
        for name, result in results.items():
            line = {"cell": cell.name, "contender": name, **result}
            if "ms" in line:
                line["tflops"] = flops(shape) / line["ms"] / 1e9
            lines.append(line)
            print({key: line[key] for key in line if key != "errors"}, flush=True)
        del sets, d_os, truth
        torch.cuda.empty_cache()
    return lines
