# SPDX-License-Identifier: Apache-2.0
"""Every program and library that is built, installed or packed, as the dynamic linker sees it."""

import os
import re
import subprocess
import zipfile

import pytest

from conftest import run
from harness import ROOT

OWN = ("attend-server", "attend-client", "libattend_client.so", "libattend_kernels.so")


def elf_files(folder):
    """Programs and shared libraries; objects and archives load nothing."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with open(path, "rb") as file:
            head = file.read(18)
        if head[:4] == b"\x7fELF" and head[16] in (2, 3):
            found.append(path)
    return found


@pytest.fixture(scope="session")
def packed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def dist(build, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist") / "dist"
    run(ROOT / "deploy/make-dist", build, folder)
    return folder


@pytest.fixture(params=("build", "installed", "packed", "dist"))
def files(request):
    """All ELF files of a folder; those of the project are among them."""
    found = elf_files(request.getfixturevalue(request.param))
    assert set(OWN) <= {path.name for path in found}
    return found


def empty_elements(path):
    """Elements of its library path that are neither absolute nor relative to the file."""
    said = run("readelf", "-dW", path)
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", said)
    return [(each, element) for each in paths for element in each.split(":")
            if not element.startswith(("/", "$ORIGIN"))]


def test_no_search_path_has_the_current_folder(files):
    wrong = {str(path): elements for path in files if (elements := empty_elements(path))}
    assert not wrong


def test_a_planted_library_in_the_current_folder_is_not_loaded(build, tmp_path):
    """Such as a download folder, where a program is started beside its data."""
    for program in ("server/attend-server", "client/attend-client"):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", build / program))
        for name in (*needed, "libssl.so.3", "libprotobuf.so.32"):
            (tmp_path / name).write_bytes(b"planted")
        tried = subprocess.run([build / program, "--version"], cwd=tmp_path, text=True,
                               env={**os.environ, "LD_DEBUG": "libs"}, capture_output=True,
                               timeout=60)
        assert tried.returncode == 0, tried.stderr[-2000:]
        looked = re.findall(r"trying file=(.*)", tried.stderr)
        assert looked and not [file for file in looked if not file.startswith("/")]


def missing_hardening(path):
    """Names the options of deploy/cmake/AttendOptions.cmake that left no trace in the file."""
    dynamic, headers = run("readelf", "-dW", path), run("readelf", "-lW", path)
    symbols = set(re.findall(r" UND (\w+)", run("readelf", "--dyn-syms", "-W", path)))
    program = ".so" not in path.name
    found = {
        "now": re.search(r"\(FLAGS_1\).*\bNOW\b", dynamic),
        "relro": "GNU_RELRO" in headers,
        "no executable stack": re.search(r"GNU_STACK .* RW  ", headers),
        "stack protector": "__stack_chk_fail" in symbols,
        "fortified functions": any(re.fullmatch(r"__\w+_chk", name) for name in symbols),
        "position independent": not program or re.search(r"\(FLAGS_1\).*\bPIE\b", dynamic),
    }
    return [name for name, there in found.items() if not there]


def test_our_binaries_are_hardened(files):
    wrong = {str(path): missing for path in files
             if path.name in OWN and (missing := missing_hardening(path))}
    assert not wrong
