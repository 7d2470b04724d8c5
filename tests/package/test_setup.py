# SPDX-License-Identifier: Apache-2.0
"""deploy/install-deps when it fails early, and the pages' instructions for the wheel.
deploy/quickstart is tested by tests/run's step of that name, and on a bare Debian by
tests/ecosystem/trixie."""

import os
import re
import shutil
import signal
import socket
import subprocess

import pytest

from conftest import run
from harness import ROOT, wait_for

INSTALL_DEPS = ROOT / "deploy/install-deps"


@pytest.fixture
def toolkit(tmp_path):
    """The folder for NVIDIA's compiler. pip is in the same package group, so that a machine without
    it would install it in this test."""
    installed = subprocess.run(["dpkg-query", "-W", "-f=${db:Status-Abbrev}", "python3-pip"],
                               capture_output=True, text=True)
    if not installed.stdout.startswith("ii"):
        pytest.skip("no pip (deploy/install-deps cuda)")
    return tmp_path / "build/toolkit"


def start_install(toolkit, **settings):
    return subprocess.Popen([INSTALL_DEPS, "cuda"], start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "ATTEND_CUDA_TOOLKIT": str(toolkit), **settings})


def test_a_failed_download_leaves_nothing(toolkit):
    process = start_install(toolkit, PIP_NO_INDEX="1")
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and "No matching distribution" in error
    assert list(toolkit.parent.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(toolkit):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        process = start_install(toolkit, PIP_INDEX_URL=index, PIP_CONFIG_FILE="/dev/null",
                                no_proxy="127.0.0.1")
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            assert [path.name[:14] for path in toolkit.parent.iterdir()] == [".cuda-toolkit."]
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=30)
    assert process.returncode != 0
    wait_for("the folder to go", lambda: not list(toolkit.parent.iterdir()))


def page_block(page, word):
    text = (ROOT / page).read_text()
    found = [block for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
             if word in block]
    assert len(found) == 1, f"{len(found)} blocks of {page} have {word}"
    return found[0]


def test_the_commands_of_the_page_install_the_wheel(wheel, tmp_path):
    """As Debian requires: into an environment."""
    commands = page_block("deploy/packages.md", "my-venv/bin/pip").splitlines()
    commands = [line for line in commands if "attend-server" not in line]
    (tmp_path / "build/wheel").mkdir(parents=True)
    shutil.copy(wheel, tmp_path / "build/wheel")
    run("bash", "-euc", "\n".join(commands), cwd=tmp_path,
        env={**os.environ, "PIP_NO_INDEX": "1"})
    assert run(tmp_path / "my-venv/bin/attend-server", "--version").startswith("attend-server 0.")


def test_pages_use_pip_only_in_virtual_environments():
    """Debian refuses anything else, following PEP 668."""
    for path in (ROOT / "README.md", *ROOT.glob("client/**/*.md"), *ROOT.glob("deploy/**/*.md")):
        for line in re.findall(r"^.*\bpip3? install.*$", path.read_text(), re.M):
            assert re.search(r"venv/bin/pip install", line), f"{path}: {line}"
