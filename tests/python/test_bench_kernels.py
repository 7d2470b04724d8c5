# SPDX-License-Identifier: Apache-2.0
"""The parts of tests/bench/bench_kernels.py that need no GPU: its cells, verdicts and charts."""

import dataclasses
import pathlib
import sys
import xml.etree.ElementTree as tree

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import bench_kernels_cells as cells  # noqa: E402
import bench_kernels_chart as charts  # noqa: E402
import bench_kernels_report as reports  # noqa: E402


@pytest.mark.parametrize("left,right", [(-1, -1), (-1, 0), (3, 0), (2, 4), (40, 0), (-1, 50)])
def test_visible_pairs(left, right):
    shape = cells.Shape(1, 1, 1, 13, 8, 8, left=left, right=right)
    seen = sum((left < 0 or j - i >= -left) and (right < 0 or j - i <= right)
               for i in range(13) for j in range(13))
    assert shape.pairs() == seen


def test_suites_hold_what_the_tables_ask_for():
    suites = cells.suites(seed=3)
    assert [len(suites[name]) for name in ("d128", "d64", "d64long", "d256", "bf16gqa")] == \
        [12, 6, 12, 8, 2]
    mix = suites["ragged"][0].shapes
    assert len(mix) == 64 and sum(shape.right == 0 for shape in mix) == 32
    assert min(s.length for s in mix) >= 64 and max(s.length for s in mix) <= 8192
    assert sorted(mix, key=str) == sorted(cells.suites(seed=4)["ragged"][0].shapes, key=str)
    for listed in suites.values():
        assert len({cell.name for cell in listed}) == len(listed)


def fake_cell(length, ours, cudnn, **more):
    shape = cells.Shape(1, 16, 16, length, 128, 128)
    cell = cells.cell("d128", shape, 1.05)
    results = {"cuda_flash_sm90": {"tflops": ours, "ms": 1.0, "error_over_bound": 0.5,
                                   "beside_bytes": 256, "correct": True},
               cells.CUDNN: {"tflops": cudnn, "ms": 1.0, "correct": True}, **more}
    return {"suite": "d128", "name": cell.name, "auto": "cuda_flash_sm90", "why": "Hopper",
            "refused": {"cuda_flash_sm80": "UNIMPLEMENTED: no"}, "mask": "full",
            "results": results, "matmul_tflops": 700.0, "shapes": [dataclasses.asdict(shape)],
            "targets": [dataclasses.asdict(target) for target in cell.targets]}


def fake_report(*found):
    return {"device": "a GPU", "versions": "torch 0", "seed": 1, "configs": "best",
            "cells": list(found), "left_out": ["d64: one"],
            "accuracy": [{"mask": "full", "rival": "x", "mean_abs": 1e-4, "max_abs": 1e-3}],
            "memory": [{"length": length, "contender": "auto", "beside_bytes": 256}
                       for length in (512, 1024)]}


def test_verdicts_and_faults():
    wrong = {"cuda_naive": {"failure": "wrong answer, 3 times the bound: not timed",
                            "correct": False}}
    report = fake_report(fake_cell(512, 600, 500), fake_cell(1024, 500, 500, **wrong))
    text = reports.markdown(report)
    assert "**1.20** (>= 1.05 met)" in text and "1.00 (>= 1.05 missed)" in text
    assert "Targets: 1 met, 1 missed, 2 without a rival or a time." in text
    assert "out of time, not measured: d64: one" in text
    assert "- cuda_flash_sm80: UNIMPLEMENTED: no (2 cells)" in text
    assert "| 86% |" in text and "wrong answer" in text
    assert reports.faults(report) == [
        "cuda_naive at B1 H16 L1024 D128 full: wrong answer, 3 times the bound: not timed"]
    report["configs"] = "all"
    assert "| cuda_flash_sm90 | **600.0** | **500.0** |" in reports.markdown(report)


def test_charts_are_well_formed(tmp_path):
    found = reports.charts(fake_report(fake_cell(512, 600, 500), fake_cell(16384, 650, 590)))
    assert set(found) == {"tflops_d128_d128_float16_full", "memory"}
    written = charts.write(found, tmp_path)
    assert {path.name for path in written} >= {f"{name}.svg" for name in found}
    root = tree.parse(tmp_path / "tflops_d128_d128_float16_full.svg").getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"512", "16k", "cuda_flash_sm90", cells.CUDNN} <= set(words)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 4
