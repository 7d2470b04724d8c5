# SPDX-License-Identifier: Apache-2.0
"""attend-client as a user runs it: files in and out, check, load, replay, retries, exit codes."""

import json
import re
import signal
import subprocess
import threading

import numpy as np
import pytest

import harness
from harness import run_client
from reference import Case, Mask, judge, round_to


def make_case(random, dtype, **fields):
    def values(heads, length, dim):
        return round_to(dtype, random.standard_normal((2, heads, length, dim), np.float32))

    return Case(values(4, 30, 64), values(2, 45, 64), values(2, 45, 80), dtype, **fields)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_run_npy(server, random, tmp_path, dtype):
    case = make_case(random, dtype, mask=Mask("causal"))
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", getattr(case, name).astype(dtype))
    files = [part for name in "qkv" for part in (f"--{name}", tmp_path / f"{name}.npy")]
    done = run_client("run", "--server", server.address, *files, "--causal", "--check", "--verify",
                      "--out", tmp_path / "o.npy", "--lse-out", tmp_path / "lse.npy")
    o, lse = np.load(tmp_path / "o.npy"), np.load(tmp_path / "lse.npy")
    assert o.dtype == dtype and lse.dtype == np.float32
    judge(case, o.astype(np.float32), lse)
    assert "cpu_flash" in done.stdout and done.stdout.count("ok: max error") == 2


def test_the_metrics_port_is_reported_as_no_grpc_server(server):
    done = run_client("info", "--server", server.metrics_address, check=False)
    assert done.returncode == 1 and "not a gRPC server" in done.stderr, done.stderr


def test_info(server):
    text = run_client("info", "--server", server.address).stdout
    for word in ("cpu", "cpu_flash", "cpu_reference", "SERVING", "inline"):
        assert word in text
    assert re.search(r"^tenants +default *$", text, re.M)
    assert re.search(r"^tenant +default$", text, re.M)
    info = json.loads(run_client("info", "--server", server.address, "--json").stdout)
    limits = info["limits"]
    assert (f"a request costs {limits['request_gflop_max']:.0f} GFLOP; "
            f"{limits['checks_max']} accepted with a check\n") in text
    assert info["devices"][0]["name"] == "cpu"
    assert run_client("info", "--server", server.address, "--health").stdout.strip() == "SERVING"


@pytest.mark.parametrize("transport", ["auto", "inline", "chunked"])
def test_check(server, transport):
    done = run_client("check", "--server", server.address, "--quick", "--transport", transport,
                      timeout=120)
    passed, total = re.search(r"(\d+) of (\d+) passed", done.stdout).groups()
    assert passed == total and int(total) >= 15
    for dtype in ("float16", "bfloat16", "float32"):
        assert dtype in done.stdout


def load(server, tmp_path, *args, check=True):
    report = tmp_path / "load.json"
    warmup = () if "--warmup" in args else ("--warmup", "0.2")
    done = run_client("load", "--server", server.address, *warmup, "--json", report, *args,
                      check=check)
    return done, json.loads(report.read_text())


def assert_sane(step):
    assert step["status"]["OK"] > 0 and step["unexpected"] == step["unanswered"] == 0
    assert step["sent"] >= step["status"]["OK"]
    assert step["requests_per_s"] > 0 and step["flops_per_s"] > 0 and step["bytes_in_per_s"] > 0
    latency = step["latency_from_sent_ms"]
    assert 0 < latency["min"] <= latency["p50"] <= latency["p90"] <= latency["p99"]
    assert latency["p99"] <= latency["p99.9"] <= latency["max"]
    phases = step["server_phase_ms"]
    assert 0 < phases["kernel"]["p50"] <= phases["total"]["p50"] <= latency["p50"] * 1.05
    assert step["batch_requests_mean"] >= 1


def test_load_closed_loop(server, tmp_path):
    done, figures = load(server, tmp_path, "--concurrency", "1,4", "--duration", "1",
                         "--connections", "2", "--check", "0.2", "--verify", "0.2", "--shape",
                         "B1,H2,L64,D64,weight=3", "--shape", "B1,H4,Hkv1,L33,D80,causal,lse")
    one, four = figures["steps"]
    for step, concurrency in ((one, 1), (four, 4)):
        assert_sane(step)
        assert step["mode"] == "closed" and step["concurrency"] == concurrency
        assert step["server_check"]["passed"] > 0 and step["server_check"]["failed"] == 0
        assert step["client_verification"]["passed"] > 0
        assert step["client_verification"]["failed"] == 0
        # Little's law: a closed loop has `concurrency` requests in flight at all times.
        out = step["requests_per_s"] * step["latency_from_sent_ms"]["mean"] / 1e3
        assert 0.5 * concurrency < out < 1.2 * concurrency
    for word in ("p99.9", "kernel", "requests"):
        assert word in done.stdout


def test_load_survives_sigterm_of_the_server(start_server, tmp_path):
    """Accepted calls are answered; all others are UNAVAILABLE, and no answer is wrong."""
    server = start_server()
    result = {}

    def run():
        result["load"] = load(server, tmp_path, "--concurrency", "8", "--duration", "3",
                              "--warmup", "0", "--verify", "0.1", "--grace", "5", "--allow",
                              "UNAVAILABLE")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        harness.wait_for("load", lambda: server.metric("attend_requests_total", code="OK") > 100,
                         20)
        assert server.stop() == 0, server.log()
    finally:
        thread.join(60)
    step, = result["load"][1]["steps"]
    assert step["status"].keys() == {"OK", "UNAVAILABLE"}
    assert step["unanswered"] == 0 and step["client_verification"]["failed"] == 0


def save_inputs(folder):
    for name in "qkv":
        np.save(folder / f"{name}.npy", np.ones((1, 1, 8, 16), np.float32))
    return [part for name in "qkv" for part in (f"--{name}", folder / f"{name}.npy")]


def test_retries_reach_a_restarted_server(start_server, tmp_path):
    """A call that finds no server keeps trying until its deadline; a single attempt fails."""
    files = save_inputs(tmp_path)
    port = harness.free_port()
    server = start_server(listen=f"127.0.0.1:{port}")
    server.signal(signal.SIGKILL)
    server.wait()
    done = run_client("run", "--server", server.address, "--attempts", "1", *files, check=False)
    assert done.returncode == 1 and "UNAVAILABLE" in done.stderr
    process = subprocess.Popen(
        [str(harness.binary("attend-client")), "run", "--server", server.address, "--attempts",
         "1000", "--deadline-ms", "40000", *map(str, files), "--out", str(tmp_path / "o.npy")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=harness.clean_env())
    again = start_server(listen=f"127.0.0.1:{port}")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert np.allclose(np.load(tmp_path / "o.npy"), 1, rtol=0, atol=2.0**-20)
    assert again.stop() == 0
