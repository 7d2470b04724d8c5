#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the compiler says of the Hopper kernels: registers of each; a failure for spills, stack
frames, and wgmma that it does not leave asynchronous. Compiles one file as the build does, and
throws the code away. Needs no GPU.

    compiler_report.py --nvcc NVCC --commands build/compile_commands.json
"""

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import sys

CUDA = pathlib.Path(__file__).resolve().parents[2] / "kernels" / "cuda"
SOURCE = CUDA / "flash_sm90_f16.cu"
TILES = CUDA / "flash_sm90_table.cuh"

# "Potential Performance Loss: wgmma.mma_async instructions are serialized", for whatever reason,
# and what comes to the same: a wait that nobody wrote.
SERIALISED = range(7510, 7521)

ENTRY = re.compile(r"Compiling entry function '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
REMARK = re.compile(r"\(C(\d+)\)|wgmma.*serialized")


def build_command(commands, nvcc, source):
    """The build's own command for the source, changed to report and to leave nothing behind."""
    found = [entry for entry in json.loads(pathlib.Path(commands).read_text())
             if pathlib.Path(entry["directory"], entry["file"]).resolve() == source]
    if len(found) != 1:
        sys.exit(f"{commands} has {len(found)} commands for {source}, not one")
    words = shlex.split(found[0]["command"])[1:]
    output = words.index("-o")
    del words[output:output + 2]
    words.remove("-c")
    return [nvcc, *words, "-Xptxas", "-v", "-cubin", "-o", "/dev/null"], found[0]["directory"]


def tiles(text):
    """Name and mangled template arguments of every tile in the table."""
    found = {}
    for name, arguments in re.findall(r"using\s+(\w+)\s*=\s*Sm90Tile<([^>]*)>", text):
        values = [{"false": "Lb0E", "true": "Lb1E"}.get(value.strip(), f"Li{value.strip()}E")
                  for value in arguments.split(",")]
        found[name] = "Sm90TileI" + "".join(values)
    return found


def kernels(report):
    """Of every kernel: registers, and bytes of stack frame, spill stores and spill loads."""
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


def remarks(report):
    for line in report.splitlines():
        match = REMARK.search(line)
        if match and (match.group(1) is None or int(match.group(1)) in SERIALISED):
            yield line.strip()


def judge(names, report):
    """Prints a line per tile; returns what is wrong."""
    faults = list(remarks(report))
    found = kernels(report)
    if not names:
        faults.append("the table has no tiles")
    for name, mangled in names.items():
        of_tile = [kernel for kernel in found if mangled in kernel]
        if not of_tile:
            faults.append(f"{name}: no kernel was compiled for it ({mangled})")
        for kernel in of_tile:
            print(f"{name:<16} {found[kernel].get('registers', '?'):>4} registers")
    for kernel, values in found.items():
        if len(values) != 2:
            faults.append(f"{kernel}: the report lacks its registers or its stack")
        elif any(values["stack"]):
            frame, stores, loads = values["stack"]
            faults.append(f"{kernel}: {frame} bytes of stack frame, {stores} of spill stores, "
                          f"{loads} of spill loads")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvcc", required=True, help="the CUDA compiler")
    parser.add_argument("--commands", required=True, help="the build's compile_commands.json")
    args = parser.parse_args()
    command, folder = build_command(args.commands, args.nvcc, SOURCE)
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    report = run.stdout + run.stderr
    faults = judge(tiles(TILES.read_text()), report)
    if run.returncode != 0:
        faults.append(f"{shlex.join(command)} ended with {run.returncode}:\n{report}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
