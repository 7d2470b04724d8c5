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
import wire
from harness import run_client
from reference import Case, Mask, judge, round_to
from tensor_files import read_safetensors, write_safetensors


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_run_safetensors(server, random, tmp_path, dtype):
    case = make_case(random, dtype, mask=Mask("window", left=9, right=2), softcap=4.0)
    write_safetensors(tmp_path / "in.safetensors", dtype, {n: getattr(case, n) for n in "qkv"})
    run_client("run", "--server", server.address, "--safetensors", tmp_path / "in.safetensors",
               "--window-left", "9", "--window-right", "2", "--softcap", "4", "--return-lse",
               "--out", tmp_path / "out.safetensors")
    out = read_safetensors(tmp_path / "out.safetensors")
    judge(case, out["o"], out["lse"])


def test_run_fortran_order_and_blhd(server, random, tmp_path):
    """.npy files in column-major order are what they say, and layouts are not BHLD alone."""
    case = make_case(random, "float32")
    for name in "qkv":
        array = np.asfortranarray(getattr(case, name).transpose(0, 2, 1, 3))
        np.save(tmp_path / f"{name}.npy", array)
    files = [part for name in "qkv" for part in (f"--{name}", tmp_path / f"{name}.npy")]
    done = run_client("run", "--server", server.address, *files, "--layout", "blhd", "--out",
                      tmp_path / "o.npy", check=False)
    if done.returncode == 2:  # refused is honest too, if it says why
        assert "fortran" in done.stderr.lower()
        return
    judge(case, np.load(tmp_path / "o.npy").transpose(0, 2, 1, 3))


@pytest.mark.parametrize("args,words", [
    (["run", "--q", "/nonexistent.npy", "--k", "x", "--v", "x"], ["/nonexistent.npy"]),
    (["run"], ["--q"]), (["run", "--no-such-flag"], ["no-such-flag"]), ([], []),
    (["load", "--shape", "B1,H8,Q9"], ["Q9"]), (["load", "--concurrency", "0"], ["concurrency"]),
    (["load", "--allow", "FINE"], ["FINE"]), (["check", "--dtype", "float8"], ["float8"]),
    (["replay", "/nonexistent"], ["/nonexistent"]), (["info", "--connections", "0"], ["connec"]),
], ids=str)
def test_bad_use(args, words):
    done = run_client(*args, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout
    assert all(word in done.stderr for word in words), done.stderr


def test_no_server():
    done = run_client("info", "--server", f"127.0.0.1:{harness.free_port()}", "--timeout-s", "1",
                      "--attempts", "1", check=False)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1


def test_the_metrics_port_is_no_grpc_server(server):
    done = run_client("info", "--server", server.metrics_address, check=False)
    assert done.returncode == 1 and "not a gRPC server" in done.stderr, done.stderr


def test_load_says_what_was_due_and_never_sent(server, tmp_path):
    """However few requests an overloaded open loop can send, all that were due are counted."""
    done, figures = load(server, tmp_path, "--rate", "20000", "--duration", "0.5", "--arrivals",
                         "constant", "--max-outstanding", "1", "--shape", "B1,H4,L512,D64",
                         check=False)
    step, = figures["steps"]
    assert abs(step["due"] - 10000) <= 1
    assert step["due"] == step["sent"] + step["unanswered"] + step["due_never_sent"]
    assert step["due_never_sent"] > 0 and done.returncode == 1 and "NEVER SENT" in done.stdout


def test_refused_call(server, random, tmp_path):
    """The server's message reaches the user, with its code, and the exit code is 1."""
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", np.zeros((1, 1, 4, 300), np.float32))
    files = [part for name in "qkv" for part in (f"--{name}", tmp_path / f"{name}.npy")]
    done = run_client("run", "--server", server.address, *files, "--out", tmp_path / "o.npy",
                      check=False)
    assert done.returncode == 1 and not (tmp_path / "o.npy").exists()
    assert "INVALID_ARGUMENT" in done.stderr and "300" in done.stderr and "256" in done.stderr


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


def test_server_from_the_environment(server):
    assert "cpu_flash" in run_client("info", env={"ATTEND_SERVER": server.address}).stdout


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
        # Little's law: a closed loop has `concurrency` requests out at all times.
        out = step["requests_per_s"] * step["latency_from_sent_ms"]["mean"] / 1e3
        assert 0.5 * concurrency < out < 1.2 * concurrency
    for word in ("p99.9", "kernel", "requests"):
        assert word in done.stdout


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
def test_load_open_loop(server, tmp_path, arrivals):
    _, figures = load(server, tmp_path, "--rate", "50", "--duration", "2", "--arrivals", arrivals,
                      "--shape", "B1,H1,L16,D64", "--seed", "5")
    step, = figures["steps"]
    assert_sane(step)
    assert step["mode"] == "open" and step["rate_per_s"] == 50
    intended, sent = step["latency_from_intended_ms"], step["latency_from_sent_ms"]
    assert intended["count"] == sent["count"] and intended["p99"] >= 0.95 * sent["p99"]
    if arrivals == "constant":
        assert abs(intended["count"] - 100) <= 2


def test_load_stream_and_count(server, tmp_path):
    _, figures = load(server, tmp_path, "--concurrency", "3", "--count", "200", "--stream",
                      "--shape", "B1,H1,L16,D64")
    step, = figures["steps"]
    assert_sane(step)
    assert figures["method"] == "AttendStream" and step["latency_from_sent_ms"]["count"] == 200


def test_load_with_cancellations_and_deadlines(server, tmp_path):
    _, figures = load(server, tmp_path, "--concurrency", "8", "--duration", "1", "--shape",
                      "B1,H8,L256,D64", "--cancel-share", "0.3", "--deadline-ms", "2",
                      "--deadline-share", "0.3", "--verify", "0.1", "--allow",
                      "CANCELLED,DEADLINE_EXCEEDED,RESOURCE_EXHAUSTED")
    step, = figures["steps"]
    assert step["status"].keys() <= {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    assert step["status"]["OK"] > 0 and step["status"]["CANCELLED"] > 0
    assert step["client_verification"]["failed"] == 0 and step["unexpected"] == 0
    harness.wait_for("nothing in flight", lambda: server.metric("attend_inflight_requests") == 0)
    wire.assert_serves(server.address)


def test_load_counts_refusals(start_server, tmp_path):
    """A server that refuses makes the load fail, unless that is allowed."""
    server = start_server("--lanes", "1", "--max-queue", "1", "--max-batch-requests", "1")
    args = ["--concurrency", "16", "--duration", "1", "--shape", "B1,H4,L256,D64"]
    done, figures = load(server, tmp_path, *args, check=False)
    assert done.returncode == 1
    assert figures["steps"][0]["status"]["RESOURCE_EXHAUSTED"] > 0
    done, _ = load(server, tmp_path, *args, "--allow", "RESOURCE_EXHAUSTED")
    assert "RESOURCE_EXHAUSTED" in done.stdout


def test_load_interrupted_prints_what_it_has(server, tmp_path):
    before = server.metric("attend_requests_total", code="OK")
    process = subprocess.Popen(
        [str(harness.binary("attend-client")), "load", "--server", server.address, "--duration",
         "60", "--warmup", "0", "--json", str(tmp_path / "load.json")], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=harness.clean_env())
    try:
        harness.wait_for("load", lambda: server.metric("attend_requests_total", code="OK") >
                         before + 50, 20)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in out and "p99" in out
    step, = json.loads((tmp_path / "load.json").read_text())["steps"]
    assert step["interrupted"] and step["status"]["OK"] >= 50


def test_load_survives_sigterm_of_the_server(start_server, tmp_path):
    """What the server accepted is answered; all else is UNAVAILABLE (or CANCELLED, by gRPC, in the
    instant of its shutdown) and nothing is wrong."""
    server = start_server()
    result = {}

    def run():
        result["load"] = load(server, tmp_path, "--concurrency", "8", "--duration", "3",
                              "--warmup", "0", "--verify", "0.1", "--grace", "5", "--allow",
                              "UNAVAILABLE,CANCELLED")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        harness.wait_for("load", lambda: server.metric("attend_requests_total", code="OK") > 100,
                         20)
        assert server.stop() == 0, server.log()
    finally:
        thread.join(60)
    step, = result["load"][1]["steps"]
    assert {"OK", "UNAVAILABLE"} <= step["status"].keys() <= {"OK", "UNAVAILABLE", "CANCELLED"}
    assert step["status"].get("CANCELLED", 0) <= 8  # at most the calls that were out at once
    assert step["unanswered"] == 0 and step["client_verification"]["failed"] == 0


def save_inputs(folder):
    for name in "qkv":
        np.save(folder / f"{name}.npy", np.ones((1, 1, 8, 16), np.float32))
    return [part for name in "qkv" for part in (f"--{name}", folder / f"{name}.npy")]


def test_retries_reach_a_restarted_server(start_server, tmp_path):
    """A call that finds nobody keeps trying within its deadline; one attempt alone fails."""
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


def test_deadline_of_a_call(start_server, random, tmp_path):
    files = save_inputs(tmp_path)
    server = start_server("--lanes", "1")
    with wire.connect(server.address) as service:
        slow = service.Attend.future(wire.slow_request(), timeout=60)
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        done = run_client("run", "--server", server.address, "--deadline-ms", "20", *files,
                          check=False)
        assert done.returncode == 1 and "deadline" in done.stderr.lower()
        slow.result()


def test_replay(server, random, tmp_path):
    """A dump as the server writes one, with an answer that is wrong in one byte: the replay says
    that this machine's answer is right and differs from the dumped one."""
    dump = tmp_path / "dump"
    dump.mkdir()
    request = wire.small_request(seed=11, length=40, return_lse=True, request_id="dumped")
    with wire.connect(server.address) as service:
        answer = service.Attend(request, timeout=wire.SECONDS)
    (dump / "request.binpb").write_bytes(request.SerializeToString())
    (dump / "response.binpb").write_bytes(answer.SerializeToString())
    (dump / "report.json").write_text(json.dumps({"request_id": "dumped", "detail": "planted"}))
    same = run_client("replay", dump, "--server", server.address)
    assert "planted" in same.stdout and same.stdout.count("bitwise equal") == 2
    assert "not reproduced" in same.stdout
    wrong = bytearray(answer.raw[0])
    wrong[17] ^= 0x40
    answer.raw[0] = bytes(wrong)
    (dump / "response.binpb").write_bytes(answer.SerializeToString())
    other = run_client("replay", dump, "--server", server.address, "--kernel", "cpu_reference")
    assert other.stdout.count("bitwise equal") <= 1 and "cpu_reference" in other.stdout
    (dump / "request.binpb").write_bytes(b"\xff\xff\xff")
    assert run_client("replay", dump, "--server", server.address, check=False).returncode == 2
