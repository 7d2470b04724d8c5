# SPDX-License-Identifier: Apache-2.0
"""deploy/install-deps where it ends early, and what the pages say of the wheel. deploy/quickstart
is run by tests/run's step of that name, and on a bare Debian by tests/ecosystem/trixie."""

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
    """Where install-deps puts NVIDIA's compiler. pip belongs to that group, so that a machine
    without it would get it from this test."""
    installed = subprocess.run(["dpkg-query", "-W", "-f=${db:Status-Abbrev}", "python3-pip"],
                               capture_output=True, text=True)
    if not installed.stdout.startswith("ii"):
        pytest.skip("no pip (deploy/install-deps cuda)")
    return tmp_path / "build/toolkit"


def start_install(toolkit, **settings):
    return subprocess.Popen([INSTALL_DEPS, "cuda"], start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "ATTEND_CUDA_TOOLKIT": str(toolkit), **settings})


def test_a_toolkit_that_cannot_be_had_leaves_nothing(toolkit):
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


@pytest.mark.parametrize("page, folder", [("README.md", "build/quickstart"),
                                          ("deploy/packages.md", "build/wheel")])
def test_the_pages_install_the_wheel(wheel, tmp_path, page, folder):
    """As Debian wants it: into an environment. NumPy, which would come from PyPI, is left out."""
    commands = page_block(page, "my-venv/bin/pip").splitlines()
    commands = [line.removesuffix(" numpy") for line in commands if "attend-server" not in line]
    (tmp_path / folder).mkdir(parents=True)
    shutil.copy(wheel, tmp_path / folder)
    run("bash", "-euc", "\n".join(commands), cwd=tmp_path,
        env={**os.environ, "PIP_NO_INDEX": "1"})
    assert run(tmp_path / "my-venv/bin/attend-server", "--version").startswith("attend-server 0.")


def test_no_page_has_pip_change_the_system():
    """Debian refuses it, as PEP 668 says."""
    for path in (ROOT / "README.md", *ROOT.glob("client/**/*.md"), *ROOT.glob("deploy/**/*.md")):
        for line in re.findall(r"^.*\bpip3? install.*$", path.read_text(), re.M):
            assert re.search(r"venv/bin/pip install", line), f"{path}: {line}"
