# SPDX-License-Identifier: Apache-2.0
"""Clients and servers of different versions: this tree's client with another revision's server, and
the reverse.

ATTEND_OTHER_REVISION: the other revision instead of the one below, which is built first; or
ATTEND_OTHER_BIN_DIR: a folder with its attend-server and attend-client."""

import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

import harness

# The last revision before the Open Inference Protocol, the packages and the images with CUDA.
REVISION = "689ab130"


@pytest.fixture(scope="module")
def other_bin():
    if os.environ.get("ATTEND_OTHER_BIN_DIR"):
        return pathlib.Path(os.environ["ATTEND_OTHER_BIN_DIR"]).resolve()
    done = subprocess.run([harness.ROOT / "tests/ecosystem/build_version",
                           os.environ.get("ATTEND_OTHER_REVISION", REVISION)],
                          stdout=subprocess.PIPE, text=True)
    if done.returncode == 77:
        pytest.skip("this clone does not have the other revision")
    assert done.returncode == 0
    return pathlib.Path(done.stdout.strip())


class Pair:
    """A server of one version and a client of the other."""

    def __init__(self, folder, monkeypatch, server_bin, client_bin):
        self._monkeypatch = monkeypatch
        self._client_bin = client_bin
        self._choose(server_bin)
        self.server = harness.Server(folder / "server", "--shared-memory",
                                     "--shared-memory-socket", folder / "regions")
        self.folder = folder

    def _choose(self, folder):
        """Sets the folder of the programs that harness starts; None: this tree's."""
        self._monkeypatch.setenv("ATTEND_BIN_DIR", str(folder or ""))

    def client(self, *args, **options):
        self._choose(self._client_bin)
        return harness.run_client(*args, env={"ATTEND_SERVER": self.server.address}, timeout=300,
                                  **options)

    def load(self, *args):
        report = self.folder / "load.json"
        self.client("load", "--json", report, *args)
        return json.loads(report.read_text())


@pytest.fixture(params=["client", "server"], ids=lambda side: f"the other's {side}")
def pair(request, tmp_path, monkeypatch, other_bin):
    own = os.environ.get("ATTEND_BIN_DIR")
    made = Pair(tmp_path, monkeypatch,
                *((own, other_bin) if request.param == "client" else (other_bin, own)))
    yield made
    assert made.server.stop() == 0, made.server.log()


def all_passed(output, least):
    passed, total = re.search(r"(\d+) of (\d+) passed", output).groups()
    return passed == total and int(total) >= least


def test_the_versions_differ(other_bin):
    ours, other = harness.binary("attend-server"), other_bin / "attend-server"
    assert ours.read_bytes() != other.read_bytes(), f"{other} is this tree's"


def test_info(pair):
    assert "cpu_flash" in pair.client("info").stdout


@pytest.mark.parametrize("transport", ["inline", "chunked", "shm"])
def test_check(pair, transport):
    assert all_passed(pair.client("check", "--quick", "--transport", transport).stdout, 15)


def test_check_of_the_whole_grid(pair):
    assert all_passed(pair.client("check").stdout, 100)


@pytest.mark.parametrize("transport", ["inline", "chunked", "shm"])
def test_check_gradients(pair, transport):
    assert all_passed(
        pair.client("check", "--quick", "--backward", "--transport", transport).stdout, 8)


@pytest.mark.parametrize("flags", [
    [], ["--stream"], ["--transport", "chunked"], ["--transport", "shm"],
    ["--shape", "H4,L64,causal,backward"], ["--shape", "H4,Hkv1,L100,dtype=bfloat16,window=20:0"],
    ["--tenant", "default", "--deadline-ms", "60000"],
], ids=lambda flags: " ".join(flags) or "plain")
def test_load(pair, flags):
    step, = pair.load("--count", "40", "--warmup", "0.1", "--concurrency", "4", "--check", "0.5",
                      "--verify", "0.5", *flags)["steps"]
    assert step["status"]["OK"] == step["sent"] >= 40
    assert step["unexpected"] == step["unanswered"] == 0


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--fork-share", "0.5"], ["--layers", "2"]],
                         ids=lambda flags: " ".join(flags) or "plain")
def test_load_of_sessions(pair, flags):
    pair.load("--sessions", "3", "--context", "40", "--decode", "10", "--verify", "1",
              "--shape", "H8,Hkv2,D64", *flags)


def test_sessions_from_files(pair, tmp_path):
    random = np.random.default_rng()
    for name, heads, rows in (("k", 2, 30), ("v", 2, 30), ("q1", 8, 1), ("k1", 2, 1), ("v1", 2, 1)):
        np.save(tmp_path / f"{name}.npy",
                random.standard_normal((1, heads, rows, 64), np.float32))

    def session(*words):
        paths = [tmp_path / word if word.endswith(".npy") else word for word in words]
        return pair.client("session", *paths).stdout.strip()

    whole = session("create", "--heads-kv", "2", "--dim", "64")
    session("append", whole, "--k", "k.npy", "--v", "v.npy")
    fork = session("fork", whole)
    for token in (whole, fork):
        session("attend", token, "--q", "q1.npy", "--k", "k1.npy", "--v", "v1.npy", "--out",
                f"{token}.npy")
    np.testing.assert_array_equal(np.load(tmp_path / f"{whole}.npy"),
                                  np.load(tmp_path / f"{fork}.npy"))
    session("truncate", whole, "--length", "10")
    assert whole in session("list") and fork in session("list")
    session("free", whole, fork)
    assert whole not in session("list")


def test_the_client_reports_a_refusal(pair):
    done = pair.client("load", "--count", "1", "--shape", "D64,kernel=nothing", check=False)
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stdout + done.stderr
