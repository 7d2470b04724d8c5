# SPDX-License-Identifier: Apache-2.0
"""A server that does not run as root: other processes of its user cannot read its memory, which
holds keys and tokens, while its own uses of /proc still work."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

import harness

NOBODY = 65534


def become():
    """If the tests do not run as root, the server runs as their user."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@pytest.fixture
def folder():
    """A folder that another user can write to."""
    made = pathlib.Path(tempfile.mkdtemp())
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(folder):
    started = []

    def start_one(*args):
        running = harness.Server(folder / "0", *args, enter=become, core_dumps=False)
        started.append(running)
        return running

    (folder / "0").mkdir()
    (folder / "0").chmod(0o777)
    yield start_one
    for running in started:
        running.kill()


def run_as_its_user(*command):
    return subprocess.run([str(word) for word in command], preexec_fn=become, timeout=60,
                          capture_output=True, text=True, env=harness.clean_env(), cwd="/")


def read(path):
    return run_as_its_user(sys.executable, "-c", "import sys; open(sys.argv[1], 'rb').read(1)",
                           path)


def test_other_processes_of_its_user_cannot_read_its_memory(start):
    server = start()
    for name in ("environ", "mem", "maps", "auxv"):
        done = read(f"/proc/{server.process.pid}/{name}")
        assert done.returncode != 0 and "PermissionError" in done.stderr, name
    assert server.stop() == 0


def test_debugging_can_be_enabled(start):
    server = start("--core-dumps")
    assert read(f"/proc/{server.process.pid}/environ").returncode == 0
    assert server.stop() == 0


def test_metrics_and_shared_memory_still_work(start, folder):
    server = start("--shared-memory", "--shared-memory-socket", folder / "0" / "shm" / "sock")
    assert server.metric("process_open_fds") > 3
    assert server.metric("process_resident_memory_bytes") > 0
    done = run_as_its_user(harness.binary("attend-client").resolve(), "--server", server.address,
                           "check", "--quick", "--transport", "shm")
    assert done.returncode == 0, done.stderr
    assert server.stop() == 0
