# SPDX-License-Identifier: Apache-2.0
"""compiler_report.py on made-up reports: what it parses and which lines are faults."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kernels" / "cuda"))

import compiler_report as report  # noqa: E402

TABLE = """
using Sm90D64 = Sm90Tile<Sm90Config{.head_dim = 64,
                                    .warpgroups = 4,
                                    .keys = 64,
                                    .stages = 8,
                                    .query_stages = 2,
                                    .overlap = Overlap::kOutputTurns}>;
using Sm90D64Few = Sm90Tile<Sm90Config{
    .head_dim = 64, .value_dim = 64, .warpgroups = 1, .keys = 128, .stages = 2, .query_stages = 2,
    .query_in_registers = true, .blocks = 2}>;
"""
D64 = ("Sm90TileIXtlNS0_10Sm90ConfigELi64ELi0ELi4ELi64ELi8ELi2ELNS0_7OverlapE1ELb0ELi1ELb0ELb0ELi0"
       "ELb0EEE")
FEW = ("Sm90TileIXtlNS0_10Sm90ConfigELi64ELi64ELi1ELi128ELi2ELi2ELNS0_7OverlapE0ELb1ELi2ELb0ELb0"
       "ELi0ELb0EEE")


def kernel(tile, registers, stack="0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"):
    name = f"_ZN6attend4cuda15FlashSm90KernelINS0_8{tile}ELb0EEEvNS0_12RaggedParamsE"
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


def test_tiles_are_parsed():
    found = report.tiles(TABLE)
    assert found == {"Sm90D64": report.Tile(D64, 96), "Sm90D64Few": report.Tile(FEW, 128)}
    for wrong in ("64, 64, 4, 64, 3, 2, Overlap::kOutput, false, 1",
                  TABLE.partition("{")[2].partition("}")[0].replace(".keys", ".key")):
        with pytest.raises(SystemExit, match="Wrong does not have the fields head_dim, value_dim"):
            report.tiles(f"using Wrong = Sm90Tile<Sm90Config{{{wrong}}}>;")


@pytest.mark.parametrize("warpgroups,blocks,registers", [(1, 1, 256), (1, 2, 128), (2, 1, 168),
                                                     (3, 1, 128), (4, 1, 96)])
def test_registers_of_a_launch(warpgroups, blocks, registers):
    assert report.launch_registers(warpgroups, blocks) == registers


def test_fields_match_the_header():
    text = (ROOT / "kernels/cuda/sm90/tile.cuh").read_text()
    config = re.search(r"^struct Sm90Config \{$(.*?)^\};$", text, re.M | re.S)[1]
    fields = re.findall(r"^ +\w+ (\w+)(?: = ([\w:]+))?;", config, re.M)
    assert [(name, value or None) for name, value in fields] == list(report.FIELDS.items())
    overlaps = re.search(r"enum class Overlap \{([^}]*)\}", text)[1]
    assert tuple(re.findall(r"^\s*(k\w+),", overlaps, re.M)) == report.OVERLAPS
    assert "kLaunchRegisters = 65536 / (kThreads * kBlocks) / 8 * 8;" in text
    assert "kThreads = 128 * (kConsumers + 1);" in text


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
def test_remarks_of_lost_performance_are_faults(line):
    assert judge(line + "\n" + GOOD) == [line]


def test_other_remarks_are_not_faults():
    assert judge("ptxas info    : (C7521) Some other thing\n"
                 "ptxas info    : (C7600) Yet another\n" + GOOD) == []


def test_another_number_of_registers_than_the_launchs_is_a_fault():
    assert judge(kernel(D64, 88) + kernel(FEW, 128)) == [
        "Sm90D64: 88 registers, must be the launch's 96"]


def test_spills_and_missing_kernels_are_faults():
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


def backward(target, stack="0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"):
    return (f"ptxas info    : Compiling entry function '_Z9Gradients' for '{target}'\n"
            f"ptxas info    : Function properties for _Z9Gradients\n    {stack}\n"
            f"ptxas info    : Used 250 registers, used 1 barriers\n")


def test_spills_of_the_backward_pass_are_faults_on_every_gpu(capsys):
    assert report.judge_backward(backward("sm_80") + backward("sm_90")) == []
    assert capsys.readouterr().out.split("\n")[:2] == [
        " 250 registers sm_80 _Z9Gradients", " 250 registers sm_90 _Z9Gradients"]
    spilled = backward("sm_80", "8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads")
    for text in (spilled + backward("sm_90"), backward("sm_90") + spilled):
        assert report.judge_backward(text) == [
            "_Z9Gradients for sm_80: (stack frame, spill stores, spill loads) is (8, 4, 4), must "
            "be 0 bytes each"]
    cut = backward("sm_80").rpartition("ptxas info")[0]
    assert len(report.judge_backward(cut + backward("sm_90"))) == 1
    assert report.judge_backward("") == ["no kernel was compiled"]


def test_the_sources_of_the_backward_pass_exist():
    assert report.BACKWARD and all(source.exists() for source in report.BACKWARD)
