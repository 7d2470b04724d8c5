# SPDX-License-Identifier: Apache-2.0
"""deploy/notices where something is missing. Complete notices are tested with the wheel, and by
tests/e2e/test_dist.py, whose folder becomes the image."""

import subprocess

from conftest import run
from harness import ROOT
from notices import assert_complete

ZLIB = "/usr/lib/x86_64-linux-gnu/libz.so.1"


def test_a_library_of_no_package_is_refused(build, tmp_path):
    (tmp_path / "libx.so.1").write_bytes(b"")
    done = subprocess.run([ROOT / "deploy/notices", build, tmp_path / "libx.so.1"],
                          capture_output=True, text=True)
    assert done.returncode == 1 and "libx.so.1 belongs to no Debian package" in done.stderr
    assert done.stdout == ""


def test_terms_missing_from_a_toolkit_are_named_by_their_address(tmp_path):
    """NVIDIA's terms are named by their address if the toolkit has none."""
    (tmp_path / "toolkit/bin").mkdir(parents=True)
    compiler = tmp_path / "toolkit/bin/nvcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    (tmp_path / "CMakeCache.txt").write_text(
        f"ATTEND_WITH_CUDA:INTERNAL=ON\nCMAKE_CUDA_COMPILER:FILEPATH={compiler}\n")
    done = subprocess.run([ROOT / "deploy/notices", tmp_path, ZLIB],
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("no terms of NVIDIA") == 2
    assert_complete(done.stdout, ["libz.so.1"], with_cuda=True)
    (tmp_path / "CMakeCache.txt").write_text("")
    assert_complete(run(ROOT / "deploy/notices", tmp_path, ZLIB),
                    ["libz.so.1"], with_cuda=False)
