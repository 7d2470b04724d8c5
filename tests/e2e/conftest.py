# SPDX-License-Identifier: Apache-2.0
"""Fixtures: generated stubs, a shared server for tests that do not change it, and a factory for
servers of a single test. Makes the built Python packages and libraries importable."""

import importlib
import os
import pathlib
import secrets
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent / "python"))  # for dropout.py

import certificates  # noqa: E402
import harness  # noqa: E402
import wire  # noqa: E402

harness.use_packages()
harness.take_interrupts()
# They start first, so that no worker of pytest-xdist ends with one of them alone.
SLOWEST = ("test_operate", "test_lifecycle", "test_readme", "test_hostile_strangers",
           "test_hostile_messages", "test_client", "test_metrics_access", "test_load_reports")


def pytest_configure(config):
    config.addinivalue_line("markers", "quiet: runs without other tests beside it (tests/run)")


def pytest_collection_modifyitems(items):
    """Moves the files of SLOWEST to the front, in its order."""
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST
               else len(SLOWEST))


@pytest.fixture(scope="session", autouse=True)
def stubs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stubs")
    if "attend" in sys.modules:  # it has already looked up its parts
        sys.modules["attend"].__path__.append(str(folder / "attend"))
    wire.generate(folder)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Shared: the default settings. It must still be running, and stop cleanly, after all tests."""
    running = harness.Server(tmp_path_factory.mktemp("server"))
    yield running
    assert not running.ended(), running.log()
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def sessions_server(tmp_path_factory):
    """Shared by the tests of sessions: two tenants."""
    running = harness.Server(tmp_path_factory.mktemp("sessions"), "--tenant=a=1,b=1")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory, libraries, request):
    """One for a module: with shared memory, and the flags in its SERVER_FLAGS."""
    folder = tmp_path_factory.mktemp("shared")
    running = harness.Server(folder, "--shared-memory", "--shared-memory-socket", folder / "s.sock",
                             *getattr(request.module, "SERVER_FLAGS", ()))
    running.socket = str(folder / "s.sock")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def client(shared_server):
    """The Python library's client of that server."""
    with importlib.import_module("attend").Client(shared_server.address, timeout=60) as made:
        yield made


@pytest.fixture
def start_server(tmp_path):
    """start_server(*flags): a server that is killed after the test, if it is still running."""
    started = []

    def start(*args, **options):
        running = harness.Server(tmp_path / f"server{len(started)}", *args, **options)
        started.append(running)
        return running

    yield start
    for running in started:
        running.kill()


@pytest.fixture
def start_both(start_server, tmp_path):
    """start_both(*flags): a server at a port and at a Unix socket."""
    return lambda *flags, **options: start_server(
        *flags, listen=f"127.0.0.1:0,unix:{tmp_path}/socket", **options)


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """An authority that the server does not know; it issues the same names."""
    return certificates.Authority(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="session")
def libraries():
    """The libraries of the build under test, unless the caller names others."""
    if missing := harness.use_libraries():
        pytest.skip(f"there is no {' or '.join(missing)}")


@pytest.fixture
def random(request):
    """Fresh random numbers; the seed is in the output of a failed test."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)
