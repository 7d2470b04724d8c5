# SPDX-License-Identifier: Apache-2.0
"""The unmodified perf_analyzer from PyPI against a server: inline tensors and system shared memory,
several concurrencies.

It needs a newer glibc than Debian 12's, so it runs in a Debian 13: the folder $ATTEND_PERF_ANALYZER
or build/ecosystem/perf-analyzer, made with debootstrap if it does not exist, which takes root."""

import csv
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

import harness

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "attention_bf16_bhld_causal"
SHAPES = [f"--shape={name}:{heads},64,64" for name, heads in (("q", 4), ("k", 2), ("v", 2))]
PROGRAM = "/opt/pa/bin/perf_analyzer"
PACKAGE = "perf-analyzer>=2.60,<2.61"  # earlier versions on PyPI are empty placeholders


@pytest.fixture(scope="module")
def debian():
    """The folder of a Debian 13 with perf_analyzer."""
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    folder = pathlib.Path(os.environ.get("ATTEND_PERF_ANALYZER") or
                          ROOT / "build/ecosystem/perf-analyzer")
    if not (folder / "opt/pa/lib/libcudart.so").is_symlink():
        make(folder)
    installed = [path.name for path in folder.glob(
        "opt/pa/lib/python3*/site-packages/perf_analyzer-*.dist-info")]
    assert len(installed) == 1 and installed[0].startswith("perf_analyzer-2.60."), \
        f"{folder} has {installed}, must have {PACKAGE}; delete the folder to make it again"
    return folder


def make(folder):
    if shutil.which("debootstrap") is None:
        pytest.skip("there is no debootstrap")
    folder.mkdir(parents=True, exist_ok=True)
    certificates = folder / "etc/ssl/certs/ca-certificates.crt"
    try:
        if not (folder / "usr/bin/python3").exists():
            subprocess.run(["debootstrap", "--variant=minbase",
                            "--include=python3-venv,ca-certificates", "trixie", str(folder)],
                           check=True, capture_output=True)
        for file in ("resolv.conf", "pip.conf"):
            if pathlib.Path("/etc", file).exists():
                shutil.copy(f"/etc/{file}", folder / "etc" / file)
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", certificates)
        subprocess.run(["chroot", folder, "python3", "-m", "venv", "/opt/pa"], check=True,
                       capture_output=True)
        # Includes the CUDA runtime, which perf_analyzer loads for both kinds of shared memory, even
        # without a GPU.
        subprocess.run(["chroot", folder, "/opt/pa/bin/pip", "install", "-q", PACKAGE,
                        "nvidia-cuda-runtime-cu12"], check=True, capture_output=True)
        packages, = (folder / "opt/pa/lib").glob("python3*/site-packages")
        runtime, = packages.glob("nvidia/*/lib/libcudart.so.*")
        link = folder / "opt/pa/lib/libcudart.so"
        link.unlink(missing_ok=True)
        link.symlink_to("/" + str(runtime.relative_to(folder)))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"perf_analyzer cannot be installed: {error.stderr[-300:]}")


@pytest.fixture(scope="module")
def oip_server(tmp_path_factory):
    if not harness.binary("attend-server").exists():
        pytest.skip(f"there is no {harness.binary('attend-server')}")
    running = harness.Server(tmp_path_factory.mktemp("oip"), "--oip", "--oip-shared-memory", "/")
    yield running
    assert running.stop() == 0, running.log()


def run(debian, server, *flags):
    """Runs perf_analyzer; returns the rows of its report by concurrency."""
    return run_command(debian, [
        "-i", "grpc", "-u", server.address, "-m", MODEL, *SHAPES,
        "--measurement-mode=count_windows", "--measurement-request-count=50", *flags])


def run_command(debian, arguments, seconds=240):
    report = debian / "tmp/report.csv"
    report.unlink(missing_ok=True)
    # The chroot needs the server's /dev/shm, which is under test.
    script = ('mount --bind /dev/shm "$0/dev/shm"; '
              'exec chroot "$0" env LD_LIBRARY_PATH=/opt/pa/lib "$@"')
    (debian / "dev/shm").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-euc", script, str(debian),
         PROGRAM, "--stability-percentage=999", "-f", "/tmp/report.csv", *arguments],
        capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    with open(report) as file:
        return {int(row["Concurrency"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize("memory", ["none", "system"])
def test_concurrency_sweep(debian, oip_server, memory):
    before = oip_server.metric("attend_transport_bytes_total", transport="shm") or 0
    flags = ["--input-data=zero", "--concurrency-range=1:3", f"--shared-memory={memory}"]
    if memory == "system":
        flags.append("--output-shared-memory-size=65536")
    rows = run(debian, oip_server, *flags)
    assert set(rows) == {1, 2, 3}
    for row in rows.values():
        assert float(row["Inferences/Second"]) > 0
        # From the server's own statistics, which it reads before and after each window.
        assert float(row["Server Compute Infer"]) > 0
        assert float(row["p99 latency"]) >= float(row["p50 latency"]) > 0
    shared = oip_server.metric("attend_transport_bytes_total", transport="shm") - before
    assert (shared > 0) == (memory == "system")


def test_random_bytes_batches_parameters_and_streams(debian, oip_server):
    """By default all inputs are random bytes, including NaN and Inf."""
    rows = run(debian, oip_server, "-b", "3", "--request-parameter=scale:0.25:string",
               "--request-parameter=window_left:8:int")
    assert float(rows[1]["Inferences/Second"]) > 0
    rows = run(debian, oip_server, "--streaming", "--async", "--input-data=zero")
    assert float(rows[1]["Inferences/Second"]) > 0


def test_the_commands_of_the_page_work(debian, oip_server):
    page = (ROOT / "server/oip/README.md").read_text()
    block, = [b for b in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
              if "perf_analyzer -i" in b]
    commands = [line for line in block.replace("\\\n", " ").splitlines()
                if line.startswith("perf_analyzer ")]
    assert len(commands) == 2
    for command in commands:
        assert "127.0.0.1:8001" in command
        words = shlex.split(command.replace("127.0.0.1:8001", oip_server.address))
        rows = run_command(debian, [*words[1:], "--measurement-interval=1000"])
        assert float(rows[1]["Inferences/Second"]) > 0
