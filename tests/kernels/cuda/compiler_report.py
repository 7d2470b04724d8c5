#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The compiler's report on the Hopper kernels, backward pass included: registers of each;
a failure for spills, stack frames beyond that of redo_rows.cuh, registers that are not those of the
launch, wgmma that it does not leave asynchronous, and setmaxnreg that it ignores. Compiles files as
the build does, and throws the code away. Needs no GPU.

    compiler_report.py --nvcc NVCC --commands build/compile_commands.json
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

CUDA = pathlib.Path(__file__).resolve().parents[3] / "kernels" / "cuda"
SOURCES = [CUDA / "sm90" / name for name in ("f16.cu", "bias_f16.cu", "general_f16.cu")]
TILES = CUDA / "sm90" / "table.cuh"
# Those of one dtype; the other's differ in one word. Kernels for sm_80 have no asynchronous
# products, and the build turns their spills into errors.
BACKWARD = [CUDA / "backward" / name for name in ("sm90_f16.cu", "sm90_dropout_f16.cu",
                                                  "sm90_measure_f16.cu")]

# "Potential Performance Loss: wgmma.mma_async instructions are serialized", for whatever reason,
# and the equivalent: a wait that is not in the source. Other codes describe it in text.
SERIALISED = range(7510, 7521)
WORDS = re.compile(r"seriali[sz]ed|setmaxnreg", re.IGNORECASE)
CODE = re.compile(r"\(C(\d+)\)")

# Sm90Config's fields, in order, with their defaults in the table.
FIELDS = {"head_dim": None, "value_dim": "0", "warpgroups": "2", "keys": None, "stages": "2",
          "query_stages": "2", "overlap": "Overlap::kOutput", "query_in_registers": "false",
          "blocks": "1", "dropout": "false", "bits": "false", "bias_stages": "0",
          "general": "false"}
# enum Overlap, in order.
OVERLAPS = ("kOutput", "kOutputTurns", "kSoftmaxTurns")

ENTRY = re.compile(r"Compiling entry function '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def build_command(commands, nvcc, source):
    """The build's own command for the source, changed to report and to write no output file."""
    found = [entry for entry in json.loads(pathlib.Path(commands).read_text())
             if pathlib.Path(entry["directory"], entry["file"]).resolve() == source]
    if len(found) != 1:
        sys.exit(f"{commands} has {len(found)} commands for {source}, not one")
    words = shlex.split(found[0]["command"])[1:]
    output = words.index("-o")
    del words[output:output + 2]
    return [nvcc, *words, "-Xptxas", "-v", "-o", "/dev/null"], found[0]["directory"]


@dataclasses.dataclass(frozen=True)
class Tile:
    mangled: str  # its template argument, as spelled in the names of its kernels
    registers: int  # that a launch hands out to each thread: kLaunchRegisters


# The compiler's spelling of fields that are not numbers.
MANGLED = {"false": "Lb0E", "true": "Lb1E",
           **{f"Overlap::{name}": f"LNS0_7OverlapE{n}E" for n, name in enumerate(OVERLAPS)}}


def launch_registers(warpgroups, blocks):
    """As computed in sm90/tile.cuh: setmaxnreg moves registers between warpgroups, and their sum
    must equal the launch's registers, so ptxas must use exactly these."""
    threads = 128 * (warpgroups + 1)
    return 65536 // (threads * blocks) // 8 * 8


def tiles(text):
    """{name: Tile} of the table. Raises Error if a Sm90Tile has other fields than FIELDS."""
    found = {}
    for name, listed in re.findall(r"using\s+(\w+)\s*=\s*Sm90Tile<([^>]*)>", text):
        config = {**FIELDS, **dict(re.findall(r"\.(\w+)\s*=\s*([\w:]+)", listed))}
        if len(config) != len(FIELDS) or None in config.values():
            sys.exit(f"{name} does not have the fields {', '.join(FIELDS)}")
        mangled = [MANGLED.get(value, f"Li{value}E") for value in config.values()]
        found[name] = Tile("Sm90TileIXtlNS0_10Sm90ConfigE" + "".join(mangled) + "EE",
                           launch_registers(int(config["warpgroups"]), int(config["blocks"])))
    return found


def kernels(report):
    """For every kernel: registers, and bytes of stack frame, spill stores and spill loads."""
    found, name = {}, None
    for line in report.splitlines():
        if match := ENTRY.search(line):
            name = match.group(1)
            found[name] = {}
        elif name and (match := STACK.search(line)):
            found[name]["stack"] = tuple(map(int, match.groups()))
        elif name and (match := REGISTERS.search(line)):
            found[name]["registers"] = int(match.group(1))
    return found


def redo_bytes(kernel):
    """The part of a thread's stack that RowRedo::Output takes: a quarter of the floats of two
    rows."""
    match = re.search(r"Sm90ConfigELi(\d+)ELi(\d+)E", kernel)
    return 2 * (int(match[2]) or int(match[1])) if match else 0


def remarks(report):
    """Lines about synchronous execution of what must be asynchronous, or about setmaxnreg."""
    for line in report.splitlines():
        code = CODE.search(line)
        if WORDS.search(line) or code and int(code.group(1)) in SERIALISED:
            yield line.strip()


def judge(listed, report):
    """Prints a line per tile of `listed`, {name: Tile}; returns the faults."""
    faults = []
    found = kernels(report)
    if not listed:
        faults.append("the table has no tiles")
    for name, tile in listed.items():
        of_tile = [kernel for kernel in found if tile.mangled in kernel]
        if not of_tile:
            faults.append(f"{name}: no kernel was compiled for it ({tile.mangled})")
        for kernel in of_tile:
            used = found[kernel].get("registers")
            print(f"{name:<16} {used or '?':>4} registers")
            if used is not None and used != tile.registers:
                faults.append(f"{name}: {used} registers, must be the launch's {tile.registers}")
    return faults + judge_kernels(report)


def judge_kernels(report):
    """The faults of kernels that have no tiles of the table."""
    faults = list(remarks(report))
    found = kernels(report)
    if not found:
        faults.append("no kernel was compiled")
    for kernel, values in found.items():
        if len(values) != 2:
            faults.append(f"{kernel}: the report lacks its registers or its stack")
            continue
        frame, stores, loads = values["stack"]
        if frame > redo_bytes(kernel) or stores or loads:
            faults.append(f"{kernel}: {frame} bytes of stack frame, {stores} of spill stores, "
                          f"{loads} of spill loads")
    return faults


def judge_backward(report):
    """The same for kernels of the backward pass, which may have no stack frame at all; a file may
    be compiled for several GPUs, whose reports follow each other."""
    faults = list(remarks(report))
    parts = re.split(r"(?=^.*Compiling entry function)", report, flags=re.MULTILINE)[1:]
    if not parts:
        faults.append("no kernel was compiled")
    for part in parts:
        for kernel, values in kernels(part).items():
            target = re.search(r"for '(\w+)'", part)[1]
            print(f"{values.get('registers', '?'):>4} registers {target} {kernel}")
            if values.get("stack") != (0, 0, 0) or "registers" not in values:
                faults.append(f"{kernel} for {target}: (stack frame, spill stores, spill loads) is "
                              f"{values.get('stack')}, must be 0 bytes each")
    return faults


def compile_and_judge(args, sources, judged):
    reports, faults = [], []
    for source in sources:
        command, folder = build_command(args.commands, args.nvcc, source)
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        reports.append(run.stdout + run.stderr)
        if run.returncode != 0:
            faults.append(f"{shlex.join(command)} ended with {run.returncode}:\n{reports[-1]}")
    return judged("".join(reports)) + faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvcc", required=True, help="the CUDA compiler")
    parser.add_argument("--commands", required=True, help="the build's compile_commands.json")
    args = parser.parse_args()
    work = [(SOURCES, lambda report: judge(tiles(TILES.read_text()), report)),
            *(([source], judge_backward) for source in BACKWARD)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [fault for found in pool.map(lambda each: compile_and_judge(args, *each), work)
                  for fault in found]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
