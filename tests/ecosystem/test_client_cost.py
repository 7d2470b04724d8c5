# SPDX-License-Identifier: Apache-2.0
"""The cost of a call as documented in client/python: sending 96 MiB takes at most 1.3 times the
C++ client's time. tests/e2e/test_python_bench.py tests the benchmark itself with small calls."""

import subprocess
import sys

import pytest

import harness


def test_a_large_call_costs_little_more_than_from_cpp():
    server = harness.binary("attend-server")
    needed = (server, harness.binary("attend-client"), *harness.libraries().values())
    if missing := [str(path) for path in needed if not path.exists()]:
        pytest.skip(f"there is no {' or '.join(missing)}")
    done = subprocess.run(
        [sys.executable, harness.ROOT / "tests/bench/bench_python_client.py", "--build",
         server.resolve().parents[1], "--mib", "96", "--ratio-max", "1.3"],
        capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
