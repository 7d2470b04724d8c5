# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the build, installed once, and a server for what was installed."""

import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

import harness  # noqa: E402

harness.take_interrupts()


def pytest_configure(config):
    config.addinivalue_line("markers", "long: a second build, for tests/long/run")


@pytest.fixture(scope="session")
def build():
    """The folder to install and pack: $ATTEND_BUILD_DIR, or build/release."""
    folder = pathlib.Path(os.environ.get("ATTEND_BUILD_DIR") or harness.ROOT / "build" / "release")
    assert (folder / "CMakeCache.txt").exists(), f"nothing is built in {folder}"
    return folder.resolve()


@pytest.fixture(scope="session")
def installed(build, tmp_path_factory):
    """`cmake --install`, moved afterwards: no file may depend on its path."""
    first = tmp_path_factory.mktemp("first") / "attend"
    subprocess.run(["cmake", "--install", build, "--prefix", first], check=True,
                   stdout=subprocess.DEVNULL)
    return first.rename(tmp_path_factory.mktemp("installed") / "attend")


@pytest.fixture(scope="session")
def server(build, tmp_path_factory):
    running = harness.Server(tmp_path_factory.mktemp("server"))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def wheel(build, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    said = run(harness.ROOT / "deploy/make-wheel", build, out)
    made, = out.iterdir()
    assert str(made) in said
    return made


def run(*command, seconds=120, **options):
    """Runs a command that must succeed; returns its stdout."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          timeout=seconds, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
