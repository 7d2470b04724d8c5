# SPDX-License-Identifier: Apache-2.0
"""Puts attend's Python packages on the path, and reference.py. A server, and stubs to call it."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in
                ("client/python", "client/python/examples", "kernels/python", "tests/python")]
sys.path.append(str(ROOT / "tests/e2e"))  # for harness.py

import harness  # noqa: E402


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    """attend.v1 can be imported, as from a folder on PYTHONPATH."""
    pytest.importorskip("grpc_tools")
    folder = tmp_path_factory.mktemp("stubs")
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}",
                    f"--python_out={folder}", f"--grpc_python_out={folder}",
                    "attend/v1/attention.proto"], check=True)
    sys.path.append(str(folder))
    if "attend" in sys.modules:  # which has looked for its parts already
        sys.modules["attend"].__path__.append(str(folder / "attend"))
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    if not harness.binary("attend-server").exists():
        pytest.skip(f"there is no {harness.binary('attend-server')}")
    running = harness.Server(tmp_path_factory.mktemp("server"))
    yield running
    assert running.stop() == 0, running.log()
