# SPDX-License-Identifier: Apache-2.0
"""tests/bench/compare_standard.py: its tables, its figures and its reference answers."""

import json
import pathlib
import subprocess
import sys
import types
import xml.etree.ElementTree as tree

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import bench_kernels_chart as charts  # noqa: E402
import compare_standard  # noqa: E402
import compare_standard_cells as standard  # noqa: E402
import compare_standard_report as reports  # noqa: E402
import reference  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def row(contender, length=512, **more):
    found = {"workload": "d64", "title": "D64", "length": length, "mask": "full",
             "pass": standard.FORWARD, "contender": contender}
    if "failure" not in more:
        found.update(ms=1.0, spread=0.01)
    return {**found, **more}


def report(*rows, **more):
    return {"kind": "cuda", "device": "a GPU", "versions": "torch 0", "seed": 1, "seconds": {},
            "times": list(rows), **more}


def test_workloads_have_the_shapes_of_the_comparison():
    short, long = standard.gpu_workloads(quick=False)
    assert [shape.length for shape in short.shapes if shape.right == 0] == \
        [256, 512, 1024, 2048, 3072, 4096, 4864]
    assert {(shape.batch, shape.heads_q, shape.dim) for shape in short.shapes} == {(4, 8, 64)}
    assert {shape.batch * shape.length for shape in long.shapes} == {16384}
    assert max(shape.length for shape in standard.memory_shapes(quick=False)) == 131072
    on_cpu = standard.cpu_workloads(quick=False)
    assert {(shape.dtype, shape.dim) for one in on_cpu for shape in one.shapes} == {
        (dtype, dim) for dtype in ("float32", "bfloat16") for dim in (64, 128)}
    for workload in (short, long, *on_cpu):
        assert len(set(workload.shapes)) == len(workload.shapes)


def test_tables_show_ratios_and_reasons_for_missing_times():
    found = report(row(standard.NAIVE, failure="does not fit"), row(standard.CUDNN, ms=1.5),
                   row(standard.OURS, errors={"O": {"norm": 0, "mean": 1e-5, "largest": 2e-3}}),
                   row(standard.CUDNN, length=1024, ms=12.0, spread=0.2),
                   training=[{"cell": "one", "contender": standard.OURS, "ms": 1.0, "spread": 0,
                              "host_ms": 0.25},
                             {"cell": "one", "contender": standard.CUDNN, "ms": 1.1, "spread": 0}],
                   memory=[{"length": 512, "contender": standard.OURS, "pass": standard.FORWARD,
                            "bytes": 2**29}],
                   batches=[{"cell": "D64", "contender": standard.OURS, "pass": standard.BOTH,
                             "batch": 17, "bytes_each": 2.0**20}])
    text = reports.markdown(found)
    assert "| forward, full, L512 | 1.000 | 1.500, 1.50x | does not fit |" in text
    assert "| forward, full, L1024 | - | 12.0 ±20% | - |" in text
    assert "| D64: O | 1.0e-05, 2.0e-03 | - | - |" in text
    assert "| one | 1.000 | 1.100, 1.10x | **1.10** | 0.25 |" in text
    assert "| forward, L512 | 512 |" in text and "| 17 (1 MiB each) |" in text
    assert "cuDNN takes 1.50 to 1.50 times ours, in 1 cells" in reports.summary(found)


@pytest.mark.parametrize("contender,failure,ours,theirs", [
    (standard.NAIVE, "does not fit", 0, 0), (standard.OURS, "does not fit", 0, 0),
    (standard.CUDNN, "no kernel", 0, 0), (standard.OURS, "no kernel", 1, 0),
    (standard.CUDNN, "wrong answer (O is off): not timed", 0, 1),
    (standard.OURS, "wrong answer (O is off): not timed", 1, 0)])
def test_wrong_answers_and_our_refusals_are_faults(contender, failure, ours, theirs):
    found = report(row(contender, failure=failure))
    assert (len(reports.faults(found)), len(reports.wrong_rivals(found))) == (ours, theirs)
    assert (f"{contender} at D64 L512, forward: {failure}" in reports.summary(found)) == \
        (ours + theirs > 0)


def test_figures_mark_contenders_that_do_not_fit(tmp_path):
    rows = [row(name, length, **{"pass": way}) for name in (standard.OURS, standard.MATH)
            for length in (512, 1024) for way in (standard.FORWARD, standard.BACKWARD)]
    rows.append(row(standard.UNFUSED, 2048, failure="does not fit"))
    found = reports.figures(report(*rows))
    assert list(found) == ["standard_d64"]
    assert [panel.title for panel in found["standard_d64"].panels] == \
        ["forward, full", "backward, full"]
    charts.write(found, tmp_path)
    root = tree.parse(tmp_path / "standard_d64.svg").getroot()
    words = [element.text for element in root.iter(SVG + "text")]
    assert {standard.OURS, standard.MATH, standard.UNFUSED, "× does not fit", "2k"} <= set(words)
    assert len(list(root.iter(SVG + "circle"))) == 8


def test_draw_needs_only_the_json(tmp_path, capsys, monkeypatch):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(report(row(standard.OURS), row(standard.CUDNN))), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["x", "--draw", str(path), "--out", str(tmp_path)])
    assert compare_standard.main() == 0
    assert "cuDNN takes 1.00 to 1.00" in capsys.readouterr().out
    assert {"compare_standard_cuda.md", "standard_d64.svg"} <= {p.name for p in tmp_path.iterdir()}


def drawn(monkeypatch, folder, *reports_):
    """The exit code of --draw."""
    paths = [folder / f"{n}.json" for n in range(len(reports_))]
    for path, one in zip(paths, reports_):
        path.write_text(json.dumps(one), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["x", "--draw", *map(str, paths), "--out", str(folder)])
    return compare_standard.main()


@pytest.mark.parametrize("contender,code", [(standard.CUDNN, 0), (standard.OURS, 1)])
def test_only_our_wrong_answers_set_the_exit_code(contender, code, tmp_path, monkeypatch, capsys):
    failure = "wrong answer (O is off): not timed"
    assert drawn(monkeypatch, tmp_path, report(row(contender, failure=failure))) == code
    assert f"{contender} at D64 L512, forward: {failure}" in capsys.readouterr().out


def test_reports_of_one_device_are_drawn_together(tmp_path, monkeypatch, capsys):
    times, batch = report(row(standard.OURS)), {"cell": "D64", "pass": standard.BOTH, "batch": 17,
                                                "contender": standard.OURS, "bytes_each": 2.0**20}
    other = {"kind": "cuda", "device": "a GPU", "versions": "torch 0", "seed": 2, "seconds": {},
             "batches": [batch]}
    assert drawn(monkeypatch, tmp_path, times, other) == 0
    out = capsys.readouterr().out
    assert "forward, full, L512" in out and "17 (1 MiB each)" in out
    assert drawn(monkeypatch, tmp_path, times, dict(other, device="another GPU")) == 2
    said = capsys.readouterr()
    assert said.out == "" and "1.json has the device 'another GPU', must have that of" in said.err


@pytest.mark.parametrize("code", [0, 1, -9])
@pytest.mark.parametrize("writes", [True, False])
def test_times_with_amx_are_reported_even_if_the_process_fails(code, writes, monkeypatch):
    wrong = row(standard.MATH, failure="wrong answer (O is off): not timed")

    def run(words, check, **_):
        if writes:
            path = pathlib.Path(words[words.index("--out") + 1]) / "compare_standard_cpu.json"
            path.write_text(json.dumps({"times": [wrong], "remarks": "AMX is on."}))
        if check and code:
            raise subprocess.CalledProcessError(code, words)
        return types.SimpleNamespace(returncode=code)

    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(subprocess, "run", run)
    found = report(row(standard.OURS), remarks="AMX is off.")
    compare_standard.add_amx_rows(None, found)
    assert found.get("amx") == ([wrong] if writes else None)
    assert len(reports.wrong_rivals(found)) == writes and not reports.faults(found)
    assert ("In the second race AMX is on." in found["remarks"]) == writes
    assert (f"ended with exit code {code}." in found["remarks"]) == (code != 0)


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("left", [-1, 3])
def test_the_truth_agrees_with_the_reference(left, right):
    torch = pytest.importorskip("torch")
    import bench_kernels_truth as truths
    generator = np.random.default_rng(5)
    q, d_o = (generator.standard_normal((2, 4, 11, 8)).astype(np.float32) for _ in range(2))
    k, v = (generator.standard_normal((2, 2, 11, 8)).astype(np.float32) for _ in range(2))
    options = dict(window=(left, right))
    answers = [reference.attention(q, k, v, **options)[0],
               *reference.gradients(q, k, v, d_o, **options).values()]
    o, *gradients = (torch.from_numpy(np.asarray(x, np.float32)) for x in answers)
    truth = truths.Truth(*map(torch.from_numpy, (q, k, v, d_o)), left, right)
    errors, fault = truth.forward([o])
    assert fault is None and errors["O"]["norm"] < 1e-6
    errors, fault = truth.backward(gradients)
    assert fault is None and max(e["norm"] for e in errors.values()) < 1e-6
    gradients[1][1, 1, 4] = 0  # dK of one key
    assert "dK is off" in truth.backward(gradients)[1]
    o[0, 3, 2, 1] = float("nan")  # in a head that is not compared
    assert truth.forward([o])[1] == "O is not finite"
