# SPDX-License-Identifier: Apache-2.0
"""Other systems, each tested by a script that exits with 77 where it cannot run: the image of a
plain `docker build`, and the quick start on a bare Debian 13."""

import subprocess

import pytest

import harness


def passes(*command):
    done = subprocess.run(command, cwd=harness.ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_quick_start_passes_on_debian_13():
    output = passes("tests/ecosystem/trixie")
    assert output.startswith("13"), output[:200]
    assert "client.attention: (1, 8, 1024, 64)" in output, "the wheel"
    assert "the server finished its requests and exited with code 0" in output


def test_the_image_with_cuda_kernels_serves():
    passes("tests/container/run", "--cuda")
