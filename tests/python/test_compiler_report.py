# SPDX-License-Identifier: Apache-2.0
"""compiler_report.py on invented reports: what it reads and what it calls a fault."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kernels" / "cuda"))

import compiler_report as report  # noqa: E402

TABLE = """
using Sm90D64 = Sm90Tile<64, 64, 4, 64, 3, 2, Overlap::kOutputTurns, false, 1>;
using Sm90D64Few = Sm90Tile<64, 64, 1, 128, 2, 2, Overlap::kOutput, true,
                            2>;
"""
D64 = "Sm90TileILi64ELi64ELi4ELi64ELi3ELi2ELNS0_7OverlapE1ELb0ELi1E"
FEW = "Sm90TileILi64ELi64ELi1ELi128ELi2ELi2ELNS0_7OverlapE0ELb1ELi2E"


def kernel(tile, registers, stack="0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"):
    name = f"_ZN6attend4cuda15FlashSm90KernelINS0_8{tile}ELb0EEEvT_"
    return (f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
            f"ptxas info    : Function properties for {name}\n    {stack}\n"
            f"ptxas info    : Used {registers} registers, used 5 barriers\n")


GOOD = kernel(D64, 96) + kernel(FEW, 128)


def judge(text):
    return report.judge(report.tiles(TABLE), text)


def test_a_good_report_has_no_faults(capsys):
    assert judge(GOOD) == []
    assert capsys.readouterr().out.split() == \
        ["Sm90D64", "96", "registers", "Sm90D64Few", "128", "registers"]


def test_tiles():
    found = report.tiles(TABLE)
    assert found == {"Sm90D64": report.Tile(D64, 96), "Sm90D64Few": report.Tile(FEW, 128)}
    with pytest.raises(SystemExit, match="Short has 8 template arguments"):
        report.tiles("using Short = Sm90Tile<64, 64, 4, 64, 3, 2, Overlap::kOutput, false>;")


@pytest.mark.parametrize("groups,blocks,registers", [(1, 1, 256), (1, 2, 128), (2, 1, 168),
                                                     (3, 1, 128), (4, 1, 96)])
def test_registers_of_a_launch(groups, blocks, registers):
    assert report.launch_registers(groups, blocks) == registers


def test_the_arguments_are_the_templates():
    text = (ROOT / "kernels/cuda/sm90/tile.cuh").read_text()
    names = re.search(r"template <([^>]*)>\s*struct Sm90Tile ", text)[1].split(",")
    assert len(names) == len(report.ARGUMENTS)
    assert re.search(r"\bkGroups\b", names[report.ARGUMENTS.index("groups")])
    assert re.search(r"\bkBlocks_\b", names[report.ARGUMENTS.index("blocks")])
    assert re.search(r"\bOverlap kOverlap_", names[report.ARGUMENTS.index("overlap")])
    overlaps = re.search(r"enum class Overlap \{([^}]*)\}", text)[1]
    assert tuple(re.findall(r"^\s*(k\w+),", overlaps, re.M)) == report.OVERLAPS
    assert "kLaunchRegisters = 65536 / (kThreads * kBlocks_) / 8 * 8;" in text
    assert "kThreads = 128 * (kGroups + 1);" in text


@pytest.mark.parametrize("line", [
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions defining accumulator registers in function 'f'",
    "ptxas info    : (C7509) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to the presence of Extern calls in the function 'f'",
    "ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum "
    "register requirements.",
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine "
    "register count at entry",
    "ptxas info    : (C7514) Potential Performance Loss: a wait was added",
    "ptxas info    : wgmma.mma_async instructions are serialised"])
def test_remarks_are_faults(line):
    assert judge(line + "\n" + GOOD) == [line]


def test_other_remarks_are_not():
    assert judge("ptxas info    : (C7521) Some other thing\n"
                 "ptxas info    : (C7600) Yet another\n" + GOOD) == []


def test_registers_that_are_not_the_launchs():
    assert judge(kernel(D64, 88) + kernel(FEW, 128)) == [
        "Sm90D64: 88 registers, must be the launch's 96"]


def test_spills_and_what_is_missing():
    spilled = kernel(D64, 96, "8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads")
    faults = judge(spilled)
    assert faults[0] == f"Sm90D64Few: no kernel was compiled for it ({FEW})"
    assert faults[1].endswith("8 bytes of stack frame, 4 of spill stores, 12 of spill loads")
    for frame, wrong in ((128, False), (136, True)):
        text = f"{frame} bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
        assert bool(judge(kernel(D64, 96, text) + kernel(FEW, 128))) == wrong
    cut = kernel(FEW, 128).rpartition("ptxas info")[0]
    assert [fault.partition(": ")[2] for fault in judge(kernel(D64, 96) + cut)] == [
        "the report lacks its registers or its stack"]
    assert "the table has no tiles" in report.judge({}, GOOD)
