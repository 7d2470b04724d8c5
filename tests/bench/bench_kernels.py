#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Races attend's CUDA kernels against PyTorch's SDPA and FlashAttention-4 on one GPU.

First, every contender's output is poisoned, computed, and compared with float64 under the bound
that kernels/reference/check_rows.h derives; a wrong answer gets no time. Then all take turns on the
same random inputs (CUDA events, medians over interleaved rounds).

    tests/bench/bench_kernels.py --library dist/lib/libattend_kernels.so --out figures
    tests/bench/bench_kernels.py --suite d128 --configs all --kernel cuda_flash_sm90 --rival cudnn

Writes OUT/bench_kernels.json, .md and charts, and prints the Markdown. Exit code 1: one of attend's
kernels gave a wrong answer.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import bench_kernels_cells as cells
import bench_kernels_chart as chart
import bench_kernels_report as reports

EXTRA_SUITES = ("accuracy", "memory", "redo", "decode", "backward", "cliffs", "backward_cliffs")


def arguments(words=None):
    names = [*cells.suites(0), *EXTRA_SUITES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog=f"suites: {', '.join(names)}, all (without quick)")
    parser.add_argument("--library", help="libattend_kernels.so (default: as attend_kernels does)")
    parser.add_argument("--suite", default="quick", help="names of suites, separated by commas")
    parser.add_argument("--out", help="folder for the JSON, the Markdown and the charts")
    parser.add_argument("--kernel", action="append", default=[],
                        help="race this kernel of ours (repeat for more; default: the fast ones)")
    parser.add_argument("--configs", choices=["best", "all"], default="best",
                        help="all: race every compiled variant of the kernels")
    parser.add_argument("--filter", default="",
                        help="run only cells whose name contains this; A|B: A or B")
    rivals = parser.add_mutually_exclusive_group()
    rivals.add_argument("--rival", action="append", default=[], choices=cells.RIVALS,
                        help="race against this rival (repeat for more; default: all)")
    rivals.add_argument("--no-rivals", action="store_true", help="run only our kernels")
    parser.add_argument("--unfused", action="store_true",
                        help="also race baddbmm, softmax, bmm wherever math runs")
    parser.add_argument("--rounds", type=int, default=7,
                        help="maximal rounds per contender and cell")
    parser.add_argument("--round-ms", type=float, default=3.0,
                        help="milliseconds of calls per round")
    parser.add_argument("--seconds-per-cell", type=float, default=1.5,
                        help="maximal seconds of timing per cell")
    parser.add_argument("--budget", type=float, default=float("inf"),
                        help="start no cell after this many seconds; the remaining ones are listed")
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: a fresh one)")
    parser.add_argument("--report", help="print the tables of a JSON file again, without a GPU")
    options = parser.parse_args(words)
    options.unfused |= "unfused" in options.rival
    options.suites = options.suite.split(",")
    if options.suites == ["all"]:
        options.suites = [name for name in names if name != "quick"]
    unknown = set(options.suites) - set(names)
    if unknown:
        parser.error(f"no suite {sorted(unknown)[0]}; there are {', '.join(names)} and all")
    return options


def save(report, folder):
    if folder:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        path = pathlib.Path(folder) / "bench_kernels"
        path.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        path.with_suffix(".md").write_text(reports.markdown(report), encoding="utf-8")


def progress(cell, results):
    """Prints a line per cell, so that an interrupted run has printed results."""
    shown = [f"{name} {r['tflops']:.0f}" if "tflops" in r else
             f"{name}: {r.get('failure', 'not run')}" for name, r in results.items()]
    print(f"{cell.suite}: {cell.name}: " + ", ".join(shown), file=sys.stderr, flush=True)


def measure(options, report, attend):
    """Fills report["cells"], and saves it after every cell."""
    import bench_kernels_backward as backward
    import bench_kernels_backward_cliffs as backward_cliffs
    import bench_kernels_cliffs as cliffs
    import bench_kernels_decode as decode
    import bench_kernels_fa4 as fa4
    import bench_kernels_race as race
    import bench_kernels_redo as redo

    extras = {"accuracy": race.accuracy, "memory": race.memory, "redo": redo.redo,
              "decode": decode.decode,
              "backward": lambda library: backward.backward(library, options, in_time),
              "cliffs": lambda _: cliffs.cliffs(options, in_time),
              "backward_cliffs": lambda _: backward_cliffs.cliffs(options, in_time)}
    began = time.monotonic()

    def in_time(cell):
        late = time.monotonic() - began > options.budget
        report["left_out"] += [cell] if late else []
        return not late

    suites = {name: [cell for cell in listed if cells.is_listed(cell.name, options.filter)]
              for name, listed in cells.suites(report["seed"]).items() if name in options.suites}
    if not options.no_rivals and cells.is_raced(cells.FA4, options.rival):
        fa4.compile_first(
            [cell.shapes[0] for listed in suites.values() for cell in listed],
            [cell.shapes[0] for cell in backward.listed(options) if "backward" in options.suites])
    for name, listed in suites.items():
        matmul = {}  # by dtype; measured again for every suite, as clocks change
        for cell in listed:
            if not in_time(f"{name}: {cell.name}"):
                continue
            dtype = cell.shapes[0].dtype
            if dtype not in matmul:
                matmul[dtype] = race.matmul_tflops(dtype)
            contenders, refused, (auto, why) = race.lineup(cell, attend, options)
            results = race.Race(cell, contenders, options).run()
            report["cells"].append({
                "suite": name, "name": cell.name, "auto": auto, "why": why, "refused": refused,
                "mask": cell.shapes[0].mask(), "results": results, "matmul_tflops": matmul[dtype],
                "shapes": [dataclasses.asdict(shape) for shape in cell.shapes],
                "targets": [dataclasses.asdict(target) for target in cell.targets]})
            progress(cell, results)
            save(report, options.out)
    report["seconds"] = round(time.monotonic() - began, 1)
    for name in EXTRA_SUITES:
        if name in options.suites and in_time(name):
            report[name] = extras[name](attend)


def main():
    options = arguments()
    if options.report:
        report = json.loads(pathlib.Path(options.report).read_text(encoding="utf-8"))
        print(reports.markdown(report))
        return 1 if reports.faults(report) else 0
    import torch

    import bench_kernels_contenders as entries
    import bench_kernels_fa4 as fa4

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    seed = torch.seed() % 2**32 if options.seed is None else options.seed
    torch.manual_seed(seed)
    report = {"device": torch.cuda.get_device_name(0), "seed": seed, "configs": options.configs,
              "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
                          f"{torch.backends.cudnn.version()}, {fa4.module()[1]}",
              "suites": options.suites, "cells": [], "left_out": []}
    measure(options, report, entries.Attend(options.library))
    save(report, options.out)
    print(reports.markdown(report))
    if options.out:
        chart.write(reports.charts(report), options.out)
    wrong = reports.faults(report)
    for fault in wrong:
        print(f"FAILED {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
