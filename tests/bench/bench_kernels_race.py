# SPDX-License-Identifier: Apache-2.0
"""The race of bench_kernels.py: all contenders are checked, then take turns on the same inputs."""

import math
import statistics

import torch

import bench_kernels_cells as cells
import bench_kernels_contenders as entries
import bench_kernels_fa4 as fa4
from bench_kernels_check import Reference
from bench_kernels_turns import Clock, take_turns

SMALL_BYTES, LARGE_BYTES = 32 << 20, 4 << 30
NAIVE_BYTES_MAX = 24 << 30
CACHED_BYTES_MAX = 48 << 30


def matmul_tflops(dtype, size=8192, repeats=10):
    """TFLOP/s of PyTorch's matrix product in a cell's dtype, the 100 % of the shares. None for
    float32, whose product does not use the Tensor Cores without TF32."""
    if dtype == "float32":
        return None
    a, b = (torch.randn(size, size, device="cuda:0", dtype=getattr(torch, dtype))
            for _ in range(2))
    times = []
    for n in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.matmul(a, b)
        end.record()
        end.synchronize()
        times += [begin.elapsed_time(end)] if n >= 3 else []
    return 2 * size**3 / statistics.median(times) / 1e9


def make_sets(cell):
    """Random inputs, in several sets, so that small shapes are not in the cache after the previous
    call."""
    count_bytes = sum(shape.input_bytes() for shape in cell.shapes)
    count = 4 if count_bytes < SMALL_BYTES else 2 if count_bytes < LARGE_BYTES else 1
    if len(cell.shapes) > 1:
        count = 1  # the padded rival needs another copy
    return [[(shape, entries.inputs(shape)) for shape in cell.shapes] for _ in range(count)]


def our_kernels(cell, attend, options):
    """Names of the kernels to race: the selected ones, or the Tensor Core kernels and, where they
    are not too slow, the lower rungs; and the kernel that auto selects."""
    shape = cell.shapes[0]
    names = list(options.kernel) if options.kernel else [cells.SM90, cells.SM80]
    if not options.kernel and (cell.ladder or shape.dtype == "float32"):
        names.append(cells.FP32)
        if cell.ladder and attend.workspace_bytes(shape, cells.NAIVE) <= NAIVE_BYTES_MAX:
            names.append(cells.NAIVE)
    return names


def lineup(cell, attend, options):
    """(contenders, {name: why it cannot run}, the kernel that auto selects)."""
    auto, why = attend.selected(cell.shapes[0])
    names, refused, running = our_kernels(cell, attend, options), {}, []
    if cells.AUTO in names or not options.kernel:
        # auto runs under its kernel's name, so that the kernel is not raced twice.
        names = [auto, *(name for name in names if name not in (auto, cells.AUTO))]
    elif auto not in names:
        auto, why = names[0], "selected by --kernel"
    for name in names:
        try:
            for shape in cell.shapes:
                attend.selected(shape, name)
            variants = attend.configs(cell.shapes[0], name) if options.configs == "all" else []
        except entries.CannotRun as failure:
            refused[name] = str(failure)
            continue
        running.append(entries.AttendContender(attend, name))
        running += [entries.AttendContender(attend, name, n, f"{name} {n}: {variant}")
                    for n, variant in enumerate(variants)]
    if len(cell.shapes) > 1:
        running.append(entries.AttendEach(attend, auto, name=cells.EACH))
    if any(target.rivals == (cells.FULL_OURS,) for target in cell.targets):
        running.append(entries.AttendContender(attend, auto, name=cells.FULL_OURS,
                                               mask=cells.Shape.unmasked))
    running += entries.wanted(rivals(cell, options), options)
    return running, refused, (auto, why)


def rivals(cell, options):
    shape, found = cell.shapes[0], []
    if cell.suite == "window":
        return [entries.TorchContender(cells.FULL_CUDNN, entries.BACKENDS[cells.CUDNN],
                                       mask=cells.Shape.unmasked),
                entries.FlashWindow(cells.FLASH_WINDOW), *fa4.forward(cell)]
    if len(cell.shapes) > 1:
        found.append(entries.PaddedCudnn(cells.PADDED))
    names = [cells.EFFICIENT]
    if shape.dtype != "float32":
        names = [cells.CUDNN, cells.FLASH, cells.EFFICIENT]
    names += [cells.MATH] if cell.ladder else []
    found += [entries.TorchContender(name, entries.BACKENDS[name]) for name in names]
    found += fa4.forward(cell)
    if cell.ladder and options.unfused:
        found.append(entries.Unfused("unfused"))
    return found


class Race:
    """The race of one cell. `results` maps contenders' names to their measurements."""

    def __init__(self, cell, contenders, options):
        self.cell, self.contenders, self.options = cell, contenders, options
        self.sets, self.references = make_sets(cell), {}
        self.results = {c.name: {} for c in contenders}

    def reference(self, contender, n):
        problems = contender.problems(self.sets[n])
        key = (n, *(shape for shape, _ in problems))
        if key not in self.references:
            self.references[key] = Reference(problems)
        return self.references[key]

    def check(self, contender):
        """Runs and checks every set; True if the contender may be timed."""
        result, worst = self.results[contender.name], [0.0, 0.0, 0.0]
        contender.prepare(self.sets)
        with contender.context():
            for n in range(len(self.sets)):
                contender.poison(n)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                outputs = contender.run(n)
                torch.cuda.synchronize()
                if n == 0:
                    result["beside_bytes"] = self._beside(contender, outputs, before)
                judged = self.reference(contender, n).judge(outputs)
                worst = [max(a, b) for a, b in zip(worst, judged)]
                if contender.is_attend and n == 0:
                    contender.first = [o.clone() for o in outputs]
                del outputs
        result.update(error_over_bound=worst[0], max_abs_error=worst[1], mean_abs_error=worst[2],
                      correct=worst[0] <= 1, note=contender.note)
        if result["correct"] or getattr(contender, "unchecked", False):
            return True
        result["failure"] = f"wrong answer, {worst[0]:.3g} times the bound: not timed"
        return False

    @staticmethod
    def _beside(contender, outputs, before):
        known = contender.beside_bytes()
        if known is not None:
            return known
        own = sum(o.numel() * o.element_size() for o in outputs)
        return max(0, torch.cuda.max_memory_allocated() - before - own)

    def finish(self, clock):
        contender = clock.contender
        result = self.results[contender.name]
        flops = sum(contender.mask(shape).flops() for shape in self.cell.shapes)
        if contender.is_attend:
            contender.poison(0)
            result["same_bits"] = all(map(torch.equal, contender.run(0), contender.first))
            if not result["same_bits"]:
                result.update(correct=False, failure="two runs differ in bits: not timed")
                return
        ms = statistics.median(clock.times_ms)
        result.update(ms=ms, tflops=flops / ms / 1e9, times_ms=clock.times_ms,
                      calls=clock.calls)

    def run(self):
        running = []
        for contender in self.contenders:
            try:
                if self.check(contender):
                    running.append(Clock(contender, len(self.sets), self.options,
                                         len(self.contenders)))
            except (entries.CannotRun, RuntimeError, TypeError, AttributeError) as failure:
                self.results[contender.name]["failure"] = str(failure).splitlines()[0][:120]
                if contender.is_attend and "illegal" in str(failure):
                    raise  # the CUDA context is unusable from here on
                torch.cuda.empty_cache()
        take_turns(running)
        for clock in running:
            self.finish(clock)
        for contender in self.contenders:
            contender.release()
            contender.first = None
        self.sets = self.references = None
        if torch.cuda.memory_reserved() > CACHED_BYTES_MAX:  # freeing is slow
            torch.cuda.empty_cache()
        return self.results


def accuracy(attend):
    """Mean and largest absolute difference from PyTorch's backends at B4 H8 L1024 D64, float16:
    [{mask, ours, rival, mean_abs, max_abs}]."""
    found = []
    for right in (-1, 0):
        shape = cells.Shape(4, 8, 8, 1024, 64, 64, right=right)
        sets = make_sets(cells.cell("accuracy", shape))[:1]
        ours = entries.AttendContender(attend, cells.AUTO)
        ours.prepare(sets)
        got = ours.run(0)[0].double()
        for name, backend in entries.BACKENDS.items():
            rival = entries.TorchContender(name, backend)
            rival.prepare(sets)
            try:
                with rival.context():
                    difference = (got - rival.run(0)[0].double()).abs()
            except RuntimeError as failure:
                found.append({"mask": shape.mask(), "rival": name,
                              "failure": str(failure).splitlines()[0]})
                continue
            found.append({"mask": shape.mask(), "rival": name,
                          "kernel": attend.selected(shape)[0],
                          "mean_abs": difference.mean().item(),
                          "max_abs": difference.max().item()})
    return found


def memory(attend):
    """Memory beside Q, K, V and O by length, at B1 H16 D128 float16, one run each:
    [{length, contender, beside_bytes}]."""
    found = []
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        cell = cells.cell("memory", cells.Shape(1, 16, 16, length, 128, 128))
        sets = make_sets(cell)[:1]
        shape = cell.shapes[0]
        found += [{"length": length, "contender": name,
                   "beside_bytes": attend.workspace_bytes(shape, name)}
                  for name in (cells.AUTO, cells.NAIVE)]
        contenders = [entries.TorchContender(name, backend)
                      for name, backend in entries.BACKENDS.items()]
        for contender in [*contenders, entries.Unfused("unfused")]:
            try:
                contender.prepare(sets)
                with contender.context():
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    outputs = contender.run(0)
                    torch.cuda.synchronize()
                beside = Race._beside(contender, outputs, before)
                del outputs
            except RuntimeError:
                beside = math.nan
            found.append({"length": length, "contender": contender.name, "beside_bytes": beside})
            contender.release()
        del sets
        torch.cuda.empty_cache()
    return [one for one in found if not math.isnan(one["beside_bytes"])]
