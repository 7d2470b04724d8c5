# SPDX-License-Identifier: Apache-2.0
"""Puts attend's Python packages, installed or from the sources, and reference.py on the path.
Fixtures of a server and a client."""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("client/python/examples", "tests/python")]
sys.path += [str(ROOT / folder) for folder in ("tests/e2e", "tests/bench")]  # for harness.py

import harness  # noqa: E402

harness.use_packages()


def skip_without(*files):
    missing = [str(file) for file in files if not os.path.exists(file)]
    if missing:
        pytest.skip(f"there is no {' or '.join(missing)}")


@pytest.fixture(scope="session")
def client(server):
    import attend
    skip_without(*harness.use_libraries())
    with attend.Client(server.address) as opened:
        yield opened


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    skip_without(harness.binary("attend-server"))
    running = harness.Server(tmp_path_factory.mktemp("server"))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory):
    """A server with shared memory; needs the client's library too."""
    skip_without(harness.binary("attend-server"), *harness.use_libraries())
    folder = tmp_path_factory.mktemp("shared")
    running = harness.Server(folder, "--shared-memory", "--shared-memory-socket", folder / "s.sock")
    yield running
    assert running.stop() == 0, running.log()
