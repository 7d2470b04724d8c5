# SPDX-License-Identifier: Apache-2.0
"""The relocatable folder: ATTEND_BIN_DIR is its bin/, moved away from where it was made. Everything
runs there with an empty environment and its own libraries."""

import json
import os
import pathlib
import subprocess

import pytest

import harness
import notices
import wire

BIN = pathlib.Path(os.environ.get("ATTEND_BIN_DIR") or "/nonexistent")
pytestmark = pytest.mark.skipif(not (BIN.parent / ".attend-dist").exists(),
                                reason="ATTEND_BIN_DIR names no dist folder")
C_LIBRARY = ("libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so", "libresolv.so")


def test_serves_with_an_empty_environment(tmp_path):
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [BIN / "attend-server", "--device", "cpu", "--listen", "127.0.0.1:0", "--metrics-listen",
         "127.0.0.1:0", "--ready-file", ready], env={}, cwd="/", stdout=subprocess.DEVNULL)
    try:
        harness.wait_for("ready", lambda: ready.exists() or process.poll() is not None,
                         harness.START_SECONDS_MAX)
        address = json.loads(ready.read_text())["listen"][0]
        wire.assert_serves(address)
        mapped = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
        libraries = {line.split()[-1] for line in mapped.splitlines() if ".so" in line}
        outside = {path for path in libraries if not path.startswith(str(BIN.parent.resolve()))}
        foreign = {path for path in outside
                   if not pathlib.Path(path).name.startswith((*C_LIBRARY, "ld-linux"))}
        assert not foreign, foreign
        done = subprocess.run([BIN / "attend-client", "info", "--server", address], env={},
                              capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and "cpu_flash" in done.stdout, done.stderr
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_scripts_for_operators_are_included():
    scripts = BIN.parent / "share/attend"
    for name in ("make-test-ca", "make-token"):
        assert (scripts / name).read_bytes() == (harness.ROOT / "deploy" / name).read_bytes()
        assert os.access(scripts / name, os.X_OK)


def test_the_c_library_is_not_bundled():
    names = {path.name for path in (BIN.parent / "lib").iterdir()}
    assert names and not {n for n in names if n.startswith((*C_LIBRARY, "ld-linux"))}
    assert {"libstdc++.so.6", "libgcc_s.so.1"} <= names


def test_every_library_has_its_notice():
    said = subprocess.run([BIN / "attend-server", "--version"], check=True, capture_output=True,
                          text=True).stdout
    notices.assert_complete(
        (BIN.parent / "share/doc/attend/NOTICES").read_text(),
        [path.name for path in (BIN.parent / "lib").iterdir()
         if not path.name.startswith("libattend_")], with_cuda="CUDA none" not in said)
