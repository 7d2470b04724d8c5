#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attend compared with standard attention: times of forward and backward passes, memory peaks, the
largest batches, and differences, as tables and figures.

    tests/bench/compare_standard.py --library dist/lib/libattend_kernels.so --out figures
    tests/bench/compare_standard.py --device cpu --out figures
    tests/bench/compare_standard.py --draw figures/compare_standard_cpu.json

Standard attention is cuda_naive (which has no backward pass), matmul, softmax and matmul in the
inputs' dtype, and PyTorch's math; FlashAttention-2 and cuDNN are PyTorch's. On the CPU all use the
same number of threads; AMX is off in oneDNN and MKL, except in a second race of PyTorch alone.
Outputs are first poisoned and compared with float64, and a wrong answer gets no time.

Writes OUT/compare_standard_DEVICE.json and .md, and figures as SVG. --draw needs only JSON files of
one device. Exit code 1: an answer of attend was wrong or missing. Wrong answers of others are
reported.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import bench_kernels_chart as chart
import compare_standard_cells as standard
import compare_standard_report as reports

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ("times", "training", "memory", "batches")


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"],
                        help="default: cuda if PyTorch finds a GPU")
    parser.add_argument("--library", help="libattend_kernels.so (default: as attend_kernels does)")
    parser.add_argument("--out", default=".", help="folder for the JSON, the Markdown, the figures")
    parser.add_argument("--draw", nargs="+", help="write tables and figures of a JSON file again, "
                        "or of several of one device with different "
                        "parts")
    parser.add_argument("--quick", action="store_true", help="few lengths")
    parser.add_argument("--parts", default=",".join(PARTS), help="on a GPU: any of " +
                        ", ".join(PARTS))
    parser.add_argument("--filter", default="", help="on a GPU: cells whose name contains this")
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: a fresh one)")
    gpu = parser.add_argument_group("times on a GPU")
    gpu.add_argument("--rounds", type=int, default=7, help="maximal rounds per contender")
    gpu.add_argument("--round-ms", type=float, default=2.0, help="milliseconds of calls per round")
    gpu.add_argument("--seconds-per-cell", type=float, default=1.0, help="of timing, at most")
    cpu = parser.add_argument_group("times on a CPU")
    cpu.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    cpu.add_argument("--lengths", type=int, nargs="+", help="lengths (default: 512 to 4096)")
    cpu.add_argument("--seconds", type=float, default=1.5, help="seconds per race")
    cpu.add_argument("--turns-min", type=int, default=3, help="minimal turns per race")
    cpu.add_argument("--no-amx-rows", action="store_true", help="omit the race with AMX")
    cpu.add_argument("--amx", action="store_true", help=argparse.SUPPRESS)  # that race itself
    options = parser.parse_args(words)
    options.parts = options.parts.split(",")
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {sorted(unknown)[0]}; there are {', '.join(PARTS)}")
    return options


def save(report, options):
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"compare_standard_{report['kind']}"
    path.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    path.with_suffix(".md").write_text(reports.markdown(report), encoding="utf-8")


def keeper(report, part, options):
    """A function that parts call with their rows: saves and prints them, so that an interrupted run
    has results."""
    def done(rows):
        report[part] += rows
        shown = [f"{row['contender']} {row['ms']:.3g} ms" if "ms" in row else
                 f"{row['contender']} {row['bytes'] / 2**20:.0f} MiB" if "bytes" in row else
                 f"{row['contender']} B{row['batch']}" if "batch" in row else
                 f"{row['contender']}: {row['failure']}" for row in rows]
        first = rows[0]
        where = first.get("cell") or " ".join(str(first[key]) for key in
                                              ("workload", "mask", "length") if key in first)
        print(f"{part}: {where} {first.get('pass', '')}: {', '.join(shown)}", file=sys.stderr,
              flush=True)
        save(report, options)
    return done


def measure_gpu(options, report):
    import torch

    import bench_kernels_contenders as entries
    import compare_standard_gpu as gpu
    import compare_standard_memory as memory
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    report.update(device=torch.cuda.get_device_name(0),
                  versions=f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
                           f"{torch.backends.cudnn.version()}")
    attend, quick, seed = entries.Attend(options.library), options.quick, report["seed"]
    work = {
        "times": lambda done: gpu.times(attend, options, standard.gpu_workloads(quick), done),
        "training": lambda done: gpu.training(options, standard.training_steps(quick), done),
        "memory": lambda done: memory.peaks(attend, standard.memory_shapes(quick), seed, done),
        "batches": lambda done: memory.batches(attend, standard.batch_shapes(), seed, done)}
    for part in options.parts:
        began = time.monotonic()
        report[part] = []
        work[part](keeper(report, part, options))
        torch.cuda.empty_cache()
        report["seconds"][part] = round(time.monotonic() - began, 1)


def _cpu_model():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor())


def measure_cpu(options, report):
    import torch

    import compare_standard_cpu as cpu
    torch.set_num_threads(options.threads)
    how = "AMX is used if the machine has it" if options.amx else "AMX is off by " + " and ".join(
        f"{name}={value}" for name, value in cpu.NO_AMX.items())
    rates = {dtype: cpu.matmul_gflops(dtype) for dtype in ("float32", "bfloat16")}
    report.update(
        device=f"{_cpu_model()}, {options.threads} threads",
        versions=f"PyTorch {torch.__version__}",
        remarks=f"{how}; PyTorch's matrix product of 2048 runs at " + ", ".join(
            f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in rates.items()) + ".")
    report["times"] = []
    workloads = standard.cpu_workloads(options.quick, options.lengths)
    if options.amx:
        workloads = [one for one in workloads if "bfloat16" in one.key]
    cpu.times(options, workloads, keeper(report, "times", options))
    if not options.amx and not options.no_amx_rows and "amx_bf16" in pathlib.Path(
            "/proc/cpuinfo").read_text(encoding="utf-8"):
        add_amx_rows(options, report)


def add_amx_rows(options, report):
    """Races PyTorch with AMX in another process, as the settings that turn AMX off are read only
    when PyTorch is loaded."""
    import compare_standard_cpu as cpu
    with tempfile.TemporaryDirectory() as folder:
        words = [word for word in sys.argv[1:]] + ["--device", "cpu", "--amx", "--out", folder]
        environment = {name: value for name, value in os.environ.items() if name not in cpu.NO_AMX}
        code = subprocess.run([sys.executable, __file__, *words], env=environment, check=False,
                              stdout=subprocess.DEVNULL).returncode
        path = pathlib.Path(folder) / "compare_standard_cpu.json"
        if path.exists():
            other = json.loads(path.read_text(encoding="utf-8"))
            report["amx"] = other["times"]
            report["remarks"] += f" In the second race {other['remarks']}"
    if code != 0:
        report["remarks"] += f" The second race ended with exit code {code}."


def merged(paths):
    """Merges several files to a report. ValueError if their devices differ."""
    report = {}
    for path in paths:
        other = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if report and other["device"] != report["device"]:
            raise ValueError(f"{path} has the device {other['device']!r}, must have that of "
                             f"{paths[0]}, {report['device']!r}")
        report.update(other)
    return report


def finish(report, options):
    """Writes everything that is made of the report; returns the exit code."""
    save(report, options)
    print(reports.markdown(report))
    for path in chart.write(reports.figures(report), options.out):
        print(f"wrote {path}")
    print(reports.summary(report))
    return 1 if reports.faults(report) else 0


def main():
    options = arguments()
    if options.draw:
        try:
            report = merged(options.draw)
        except ValueError as failure:
            print(f"--draw: {failure}", file=sys.stderr)
            return 2
        return finish(report, options)
    if options.library:
        os.environ["ATTEND_KERNELS_LIBRARY"] = options.library
    sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "kernels/python")]
    if options.device == "cpu":
        import compare_standard_cpu as cpu
        cpu.prepare(options)
    import torch
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu" and options.device is None:
        print("no GPU was found; use --device cpu", file=sys.stderr)
        return 2
    seed = torch.seed() % 2**32 if options.seed is None else options.seed
    torch.manual_seed(seed)
    report = {"kind": kind, "seed": seed, "seconds": {}}
    (measure_cpu if kind == "cpu" else measure_gpu)(options, report)
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
