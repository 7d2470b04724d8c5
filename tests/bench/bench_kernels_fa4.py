# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 (package flash-attn-4, in the CuTe DSL) as a rival, if `flash_attn.cute` can be
imported. It launches on PyTorch's current stream. The first call of a kernel compiles it, which
takes many seconds and is part of prepare(). With FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 several
processes compile in advance."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import multiprocessing
import os

import torch

import bench_kernels_cells as cells
import bench_kernels_contenders as entries
import bench_kernels_gradients as gradients
from bench_kernels_turns import reason

CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
COMPILED_LENGTH, COMPILED_WINDOW, COMPILED_HEADS = 1024, 255, 2
PROCESSES_MAX = 16


def _version(package):
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} of unknown version"


@functools.cache
def module():
    """(flash_attn.cute or None, its versions or why it cannot be imported)."""
    try:
        found = importlib.import_module("flash_attn.cute")
    except Exception as failure:  # its compiler's libraries raise exceptions of many types
        return None, f"no FlashAttention-4 ({reason(failure)})"
    return found, ", ".join(map(_version, ("flash-attn-4", "nvidia-cutlass-dsl")))


@contextlib.contextmanager
def first_call():
    """A context for calls that compile: turns every failure into CannotRun."""
    try:
        yield
        torch.cuda.synchronize()
    except (entries.CannotRun, torch.OutOfMemoryError):
        raise
    except Exception as failure:  # assertions, and exceptions of the compiler
        raise entries.CannotRun(f"FA4: {reason(failure)}") from failure


def by_rows(x):
    """x in BHLD, as a view of memory in FA4's layout, BLHD."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def attention(q, k, v, **options):
    """O. All tensors are in BHLD with any strides."""
    o, *_ = module()[0].flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return o.transpose(1, 2)


def options_of(shape):
    window = tuple(None if side < 0 else side for side in (shape.left, shape.right))
    return {"causal": shape.right == 0, "window_size": window}


class Fa4(entries.Contender):
    """One call per attention, with tensors in FA4's layout."""

    def __init__(self):
        super().__init__(cells.FA4)

    def prepare(self, sets):
        super().prepare([[(shape, tuple(map(by_rows, tensors))) for shape, tensors in one]
                         for one in sets])
        with first_call():
            self.run(0)

    def run(self, n):
        return [attention(*tensors, **options_of(shape)) for shape, tensors in self.sets[n]]


class Fa4Packed(entries.Contender):
    """The ragged mix: causal and full requests in a call each, packed in advance."""

    def __init__(self):
        super().__init__(cells.FA4)

    def prepare(self, sets):
        super().prepare(sets)
        self.halves = [self._pack(right) for right in (-1, 0)]
        with first_call():
            self.run(0)

    def _pack(self, right):
        """(indices, lengths, packed q, k, v, options) of the requests with this mask."""
        some = [n for n, (shape, _) in enumerate(self.sets[0]) if shape.right == right]
        lengths = [self.sets[0][n][0].length for n in some]
        packed = [torch.cat([self.sets[0][n][1][which][0].transpose(0, 1) for n in some])
                  for which in range(3)]
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(packed[0].device)
        options = {f"{name}_{side}": value for side in "qk"
                   for name, value in (("cu_seqlens", starts), ("max_seqlen", max(lengths)))}
        return some, lengths, packed, {**options, "causal": right == 0}

    def run(self, n):
        outputs = [None] * len(self.sets[0])
        for some, lengths, packed, options in self.halves:
            o, *_ = module()[0].flash_attn_varlen_func(*packed, **options)
            for index, part in zip(some, o.split(lengths)):
                outputs[index] = part.transpose(0, 1)[None]
        return outputs

    def release(self):
        super().release()
        self.halves = None


class Fa4Gradients(gradients.TorchGradients):
    """Autograd of one call. `options` maps a set's shape to FA4's arguments."""

    def __init__(self, options, d_os, deterministic=False):
        def through(shape, *tensors):
            return attention(*tensors, deterministic=deterministic, **options(shape))

        super().__init__(cells.FA4 + (cells.DETERMINISTIC if deterministic else ""), through, d_os)

    def prepare(self, sets):
        self.d_os = list(map(by_rows, self.d_os))
        with first_call():
            super().prepare([[(shape, tuple(map(by_rows, tensors)))] for (shape, tensors), in sets])
            self.run(0)


def forward(cell):
    """The contenders of a cell's forward pass, none if FA4 is not installed."""
    if module()[0] is None or cell.shapes[0].dtype == "float32":
        return []
    return [Fa4Packed() if len(cell.shapes) > 1 else Fa4()]


def backward(options, d_os):
    """The contenders of a backward pass, in both modes."""
    return [] if module()[0] is None else [Fa4Gradients(options, d_os, deterministic)
                                           for deterministic in (False, True)]


def _compile(task):
    """Runs in another process. Failures are ignored, as they recur and are reported later."""
    shape, with_gradients = task
    with contextlib.suppress(Exception):
        sets = [[(shape, entries.inputs(shape))]]
        for contender in backward(options_of, gradients.by_o(sets)) if with_gradients else [Fa4()]:
            contender.prepare(sets)


def compile_first(shapes, backward_shapes):
    """Compiles the kernels of these shapes into FA4's cache on disk. They depend on the group size,
    not on lengths and numbers of heads."""
    tasks = {(dataclasses.replace(shape, batch=1, length=COMPILED_LENGTH,
                                  heads_q=COMPILED_HEADS * shape.heads_q // shape.heads_kv,
                                  heads_kv=COMPILED_HEADS,
                                  left=min(shape.left, COMPILED_WINDOW),
                                  right=min(shape.right, COMPILED_WINDOW)), with_gradients): None
             for some, with_gradients in ((backward_shapes, True), (shapes, False))
             for shape in some if shape.dtype != "float32"}
    if not tasks or os.environ.get(CACHE) != "1" or module()[0] is None:
        return
    # If a compiler ends its process, its kernel is compiled later by prepare().
    with contextlib.suppress(concurrent.futures.BrokenExecutor), \
            concurrent.futures.ProcessPoolExecutor(
                min(len(tasks), len(os.sched_getaffinity(0)), PROCESSES_MAX),
                mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, tasks))
