# SPDX-License-Identifier: Apache-2.0
"""Puts attend's Python packages on the path, and reference.py. A server, and a client of it."""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in
                ("client/python", "client/python/examples", "kernels/python", "tests/python")]
sys.path += [str(ROOT / folder) for folder in ("tests/e2e", "tests/bench")]  # for harness.py

import harness  # noqa: E402


@pytest.fixture(scope="session")
def client(server):
    import attend
    library = harness.libraries()["ATTEND_CLIENT_LIBRARY"]
    os.environ.setdefault("ATTEND_CLIENT_LIBRARY", str(library))
    if not pathlib.Path(os.environ["ATTEND_CLIENT_LIBRARY"]).exists():
        pytest.skip(f"there is no {library}")
    with attend.Client(server.address) as opened:
        yield opened


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    if not harness.binary("attend-server").exists():
        pytest.skip(f"there is no {harness.binary('attend-server')}")
    running = harness.Server(tmp_path_factory.mktemp("server"))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory):
    """A server that shares memory, and the client's library beside it."""
    path = harness.libraries()["ATTEND_CLIENT_LIBRARY"]
    os.environ.setdefault("ATTEND_CLIENT_LIBRARY", str(path))
    for needed in (harness.binary("attend-server"),
                   pathlib.Path(os.environ["ATTEND_CLIENT_LIBRARY"])):
        if not needed.exists():
            pytest.skip(f"there is no {needed}")
    folder = tmp_path_factory.mktemp("shared")
    running = harness.Server(folder, "--shared-memory", "--shared-memory-socket", folder / "s.sock")
    yield running
    assert running.stop() == 0, running.log()
