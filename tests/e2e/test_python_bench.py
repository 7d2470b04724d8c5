# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the Python client run, and print the figures that the pages quote."""

import re
import subprocess
import sys

import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")


def run(name, *arguments):
    build = harness.binary("attend-server").resolve().parents[1]
    if not (build / "client/attend-client").exists():
        pytest.skip(f"{build} is no folder of a build")
    done = subprocess.run([sys.executable, harness.ROOT / "tests/bench" / name, "--build", build,
                           *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_beside_the_cpp_client():
    small = ("--mib", "1", "--turns", "1", "--seconds", "0.1")
    code, out, err = run("bench_python_client.py", *small, "--ratio-max", "1000")
    assert code == 0, err
    rows = re.findall(r"^(\w+(?:, client.empty)?) +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.M)
    assert [row[0] for row in rows] == ["inline", "chunked", "shared", "shared, client.empty"]
    for _, theirs, ours, _ in rows:
        assert 0 < float(theirs) and 0 < float(ours)
    code, _, err = run("bench_python_client.py", *small, "--ratio-max", "0.001")
    assert code == 1 and "beyond 0.001 times" in err


@pytest.mark.parametrize("table", ["padded", "ways", "decode"])
def test_the_tables_of_the_pages_can_be_measured(table):
    code, out, err = run("bench_python_ways.py", "--only", table, "--seconds", "0.1")
    assert code == 0, err
    times = re.findall(r"^  .+? +([\d.]+) ms$", out, re.M)
    assert len(times) >= 2 and all(float(each) > 0 for each in times), out
