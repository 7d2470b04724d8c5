# SPDX-License-Identifier: Apache-2.0
"""The parts of tests/bench/bench_kernels.py that need no GPU: its cells, verdicts and charts."""

import dataclasses
import pathlib
import sys
import xml.etree.ElementTree as tree

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import bench_kernels  # noqa: E402
import bench_kernels_cells as cells  # noqa: E402
import bench_kernels_chart as charts  # noqa: E402
import bench_kernels_report as reports  # noqa: E402


@pytest.mark.parametrize("left,right", [(-1, -1), (-1, 0), (3, 0), (2, 4), (40, 0), (-1, 50)])
def test_visible_pairs(left, right):
    shape = cells.Shape(1, 1, 1, 13, 8, 8, left=left, right=right)
    seen = sum((left < 0 or j - i >= -left) and (right < 0 or j - i <= right)
               for i in range(13) for j in range(13))
    assert shape.pairs() == seen


def test_suites_have_the_cells_of_the_tables():
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
    assert "not measured, as time ran out: d64: one" in text
    assert "- cuda_flash_sm80: UNIMPLEMENTED: no (2 cells)" in text
    assert "| 86% |" in text and "wrong answer" in text
    assert reports.faults(report) == [
        "cuda_naive at B1 H16 L1024 D128 full: wrong answer, 3 times the bound: not timed"]
    report["configs"] = "all"
    assert "| cuda_flash_sm90 | **600.0** | **500.0** |" in reports.markdown(report)


def test_shares_are_relative_to_the_matrix_product_of_the_same_dtype():
    half, bfloat, single = (fake_cell(length, 600, 500) for length in (512, 1024, 2048))
    bfloat["shapes"][0]["dtype"], bfloat["matmul_tflops"] = "bfloat16", 800.0
    single["shapes"][0]["dtype"], single["matmul_tflops"] = "float32", None
    text = reports.markdown(fake_report(half, bfloat, single))
    assert "Matrix product in the same run, TFLOP/s: float16 700 to 700, bfloat16 800 to 800." \
        in text
    assert "| 86% |" in text and "| 75% |" in text and text.count("% |") == 2


def fake_windows(full, **times):
    """The cells of cells.windows(), with auto's time for each left window."""
    found = []
    for cell in cells.windows():
        shape = cell.shapes[0]
        results = {"cuda_flash_sm90": {"ms": times.get(f"left{shape.left}"), "correct": True}}
        if results["cuda_flash_sm90"]["ms"] is None:
            results["cuda_flash_sm90"] = {"failure": "no"}
        if cell.targets and full:
            results[cells.FULL_OURS] = {"ms": full, "correct": True}
        found.append({**fake_cell(512, 1, 1), "suite": "window", "name": cell.name, "targets": [],
                      "mask": shape.mask(), "results": results,
                      "shapes": [dataclasses.asdict(shape)]})
    return found


@pytest.mark.parametrize("full,times,verdict,counts", [
    (4.0, (0.2, 0.5, 1.5), "met", "1 met, 0 missed, 0 without"),
    (4.0, (0.2, 0.2, 1.5), "missed", "0 met, 1 missed, 0 without"),
    (1.5, (0.2, 0.5, 1.5), "missed", "0 met, 1 missed, 0 without"),
    (4.0, (0.6, 0.5, 1.5), "missed", "0 met, 1 missed, 0 without"),
    (None, (0.2, 0.5, 1.5), "not judged", "0 met, 0 missed, 1 without"),
    (4.0, (0.2, None, 1.5), "not judged", "0 met, 0 missed, 1 without")])
def test_time_falls_with_the_window(full, times, verdict, counts):
    found = fake_windows(full, left255=times[0], left1023=times[1], left4095=times[2], left512=9.0)
    text = reports.summary(fake_report(*reversed(found)))
    assert text.startswith(f"Targets: {counts}")
    line = next(line for line in text.splitlines() if "falls with the window" in line)
    shown = ["-" if ms is None else f"{ms:.3f} ms" for ms in (*times, full)]
    masks = ("window 255, 0", "window 1023, 0", "window 4095, 0", "full")
    assert line == f"- {verdict}: time falls with the window: " + "; ".join(
        f"{mask}: {ms}" for mask, ms in zip(masks, shown))
    # Without cells of windows there is no verdict.
    assert "falls with" not in reports.summary(fake_report(fake_cell(512, 600, 500)))


def test_rivals_are_selected_by_name():
    everybody = [cells.CUDNN, cells.FLASH, cells.EFFICIENT, cells.MATH, cells.PADDED,
                 cells.FLASH_WINDOW, cells.FULL_CUDNN, "unfused", cells.FA4, cells.FA2,
                 cells.FA4 + cells.DETERMINISTIC]
    assert all(cells.is_raced(name, []) for name in everybody)
    assert [name for name in everybody if cells.is_raced(name, ["cudnn"])] == \
        [cells.CUDNN, cells.PADDED, cells.FULL_CUDNN]
    assert [name for name in everybody if cells.is_raced(name, ["flash", "unfused"])] == \
        [cells.FLASH, cells.FLASH_WINDOW, "unfused", cells.FA2]
    assert [name for name in everybody if cells.is_raced(name, ["fa4"])] == \
        [cells.FA4, cells.FA4 + cells.DETERMINISTIC]
    assert {name for name in everybody if cells.is_raced(name, cells.RIVALS)} == set(everybody)


def test_filters_match_parts_of_names():
    name = "B1 H16 L8192 D128 causal"
    assert all(cells.is_listed(name, text) for text in ("", "L8192 D128", "L512|causal"))
    assert not cells.is_listed(name, "L512|full")


def test_options():
    options = bench_kernels.arguments(["--rival", "cudnn", "--rival", "unfused"])
    assert options.rival == ["cudnn", "unfused"] and options.unfused
    options = bench_kernels.arguments([])
    assert options.rival == [] and not options.unfused and options.suites == ["quick"]
    for words in (["--rival", "unknown"], ["--rival", "cudnn", "--no-rivals"], ["--suite", "d1"]):
        with pytest.raises(SystemExit):
            bench_kernels.arguments(words)


def test_charts_are_well_formed(tmp_path):
    found = reports.charts(fake_report(fake_cell(512, 600, 500), fake_cell(16384, 650, 590)))
    assert set(found) == {"tflops_d128_d128_float16_full", "memory"}
    written = charts.write(found, tmp_path)
    assert {path.name for path in written} == {f"{name}.svg" for name in found}
    root = tree.parse(tmp_path / "tflops_d128_d128_float16_full.svg").getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"512", "16k", "cuda_flash_sm90", cells.CUDNN} <= set(words)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 4
