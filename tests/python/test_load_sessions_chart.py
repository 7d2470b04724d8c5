# SPDX-License-Identifier: Apache-2.0
"""The charts of loads of sessions."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "bench/load_sessions_chart.py"


def figures(sessions, method="Attend", tokens=100):
    return {"shape": "H32,Hkv8,D128", "context": 4096, "layers": 1, "method": method,
            "sessions": sessions, "tokens": tokens, "tokens_per_s": 100.0 * sessions,
            "step_ms": {"p50": 1.0 + sessions, "p99": 3.0 + sessions}}


def draw(folder, *runs):
    files = []
    for n, run in enumerate(runs):
        files.append(folder / f"{n}.json")
        files[-1].write_text(json.dumps(run), encoding="utf-8")
    return subprocess.run([sys.executable, SCRIPT, "--out", folder / "charts", *files],
                          capture_output=True, text=True, check=False)


def test_each_method_is_a_line(tmp_path):
    done = draw(tmp_path, figures(4), figures(1), figures(4, "AttendStream"))
    assert done.returncode == 0, done.stderr
    tokens = (tmp_path / "charts/sessions_tokens.svg").read_text(encoding="utf-8")
    assert "tokens/s" in tokens and tokens.count("<circle") == 3
    assert all(f"H32,Hkv8,D128 4096 tokens, {way}<" in tokens for way in ("calls", "streams"))
    step = (tmp_path / "charts/sessions_step.svg").read_text(encoding="utf-8")
    assert step.count("<circle") == 6 and ", calls, p99<" in step


@pytest.mark.parametrize("run,words", [
    (figures(2, tokens=0), "no token was decoded by 2 sessions"), ({"steps": []}, "sessions"),
])
def test_other_files_are_refused(tmp_path, run, words):
    done = draw(tmp_path, run)
    assert done.returncode == 1 and words in done.stderr
    assert not (tmp_path / "charts").exists()
