# SPDX-License-Identifier: Apache-2.0
"""The trials of tests/trials, each for a moment: they run, and the server survives the first
faults."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import harness
import hostile
import wire
from system_calls import KINDS, SystemCalls

TRIALS = pathlib.Path(__file__).resolve().parents[1] / "trials"
sys.path.append(str(TRIALS))
pytestmark = [pytest.mark.usefixtures("libraries"), pytest.mark.quiet]
SEED, SECONDS = 1, 1


@pytest.fixture(scope="module")
def problems(libraries, stubs):
    sys.path[:0] = [str(harness.ROOT / "kernels/python")]
    import problems as made
    return made.Problems.make(SEED, 8)


def test_random_calls_of_every_kind(tmp_path, problems):
    """In this process, on a live server with tokens and TLS, and an operator: every call ends once,
    good answers have the right bits, and nothing is left behind."""
    import live
    import trial
    from caller import Target
    from operating import Operator

    class Options:
        seed, threads, calls, seconds, rate, only = SEED, 2, 300, 30, 0, ""

    server = trial.start(tmp_path, locked=True)
    try:
        run = live.Run(Target(server.address, server.metrics_address, server.regions,
                              locks=server.locks), problems, Options)
        operator = Operator(server, 0.1)
        with operator:
            run.run()
            harness.wait_for("each of the operator's steps",
                             lambda: operator.fault or len(operator.steps) == 9, 60)
        report = run.report()
        assert not report["faults"], report["faults"][0]["fault"]
        answered = {kind for kind, code, _ in report["outcomes"] if code == "OK"}
        assert {"unary", "request of a stream"} <= answered
        trial.await_rest(server)
        trial.assert_no_failed_check(server)
        assert server.stop() == 0, server.log()
    finally:
        server.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_failing_system_calls(tmp_path, problems, kind):
    """The first calls while a server serves, and one while it starts."""
    import system_trials
    if why := system_trials.missing():
        pytest.skip(why)
    (tmp_path / "start").mkdir()
    ends, _ = system_trials.fail_while_serving(tmp_path, problems, kind, 3, SEED)
    assert "DIED" not in ends, ends.places
    ends = system_trials.fail_at_start(str(tmp_path / "start"), kind, 1)
    assert "DIED" not in ends, ends.places


def for_a_moment(trial, folder, **options):
    import network_trials
    try:
        return trial(str(folder), SEED, SECONDS, **options)
    except network_trials.Skipped as why:
        pytest.skip(str(why))


def test_a_connection_that_has_failed_stays_failed(tmp_path):
    """The peer must not receive bytes that follow lost ones: with TLS, records that it cannot
    decrypt."""
    calls = SystemCalls(tmp_path / "calls")
    calls.fail("write")
    program = """
import errno, socket
one, other = socket.socketpair()
for _ in range(2):
    try:
        one.send(b"x")
    except OSError as error:
        print(errno.errorcode[error.errno])
print(other.recv(1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=False, env={**os.environ, **calls.env})
    assert done.stdout.split() == ["ECONNRESET", "EPIPE", "b''"], done
    calls.close()


@pytest.mark.parametrize("name", ["delay", "stall", "reset", "half_open", "partition", "lossy",
                                  "kill_clients", "kill_server", "drain"])
def test_disturbed_connections(tmp_path, stubs, libraries, name):
    import network_trials
    for_a_moment(getattr(network_trials, name), tmp_path)


@pytest.mark.parametrize("name", ["reset", "drain"])
def test_disturbed_connections_with_tokens_and_tls(tmp_path, stubs, libraries, name):
    import network_trials
    for_a_moment(getattr(network_trials, name), tmp_path, locked=True)


@pytest.mark.parametrize("name", ["disk_full", "disk_full_of_dumps", "file_size_limit",
                                  "memory_limit", "killed_for_memory", "clock_steps"])
def test_failures_of_the_machine(tmp_path, stubs, libraries, name):
    import machine_trials
    for_a_moment(getattr(machine_trials, name), tmp_path)


def test_every_trial_of_the_runners_is_listed_here():
    """The runners have no trial that is not listed here."""
    listed = subprocess.run([TRIALS / "faults", "--list"], capture_output=True, text=True,
                            check=True).stdout.split("\n")[:-1]
    here = pathlib.Path(__file__).read_text(encoding="utf-8")
    named = {name for name in listed if f'"{name}"' in here}
    assert set(listed) == named | {f"{phase} {kind}" for phase in ("start", "serving")
                                   for kind in KINDS}


def test_a_short_soak_writes_its_files(tmp_path):
    """Everything at once, with its three files. Whether memory stays flat takes longer to tell."""
    done = subprocess.run([TRIALS / "soak", "--minutes", "0.05", "--seed", "1", "--out", tmp_path],
                          capture_output=True, text=True, timeout=300, check=False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["faults"] and report["samples"] > 0, done.stdout + done.stderr
    assert sum(report["codes"].values()) > 0 and report["codes"]["OK"] > 0, done.stdout
    assert (tmp_path / "samples.csv").read_text().startswith("seconds,memory_mib,pools_mib,")
    assert "<svg" in (tmp_path / "soak.svg").read_text()


def test_reports_of_callers_survive_killing_the_others():
    """Callers that have ended keep their report, however long it is."""
    import trial
    fault = {"fault": "!" * (1 << 20)}
    callers = trial.Callers.__new__(trial.Callers)
    callers._start([[sys.executable, "-c", f"import json, time; print('ready', flush=True); {end}"]
                    for end in ("print(json.dumps({'faults': [{'fault': '!' * (1 << 20)}]}))",
                                "time.sleep(3600)")])
    callers._processes[0].wait(60)
    assert callers.running()
    assert callers.kill() == [fault]
    assert not callers.running()


def line(number, name, code, accepted=True):
    return {"id": number, "request_id": name, "code": code,
            **({"receive_us": 5} if accepted else {})}


def test_a_dropped_request_is_detected():
    import trial
    lines = [line(1, "good-1", "OK"), line(2, "good-2", "OK"), line(3, "good-3", "UNAVAILABLE"),
             line(4, "good-4", "CANCELLED"), line(5, "good-5", "UNAVAILABLE", accepted=False),
             {"code": "OK", "method": "of no request"}]
    found = trial.dropped(lines, unanswered=["good-2", "good-5", "good-9"])
    assert [each["request_id"] for each in found] == ["good-2", "good-3"]


def test_a_vanished_request_is_detected():
    """The request has no line at all: lines may come in any order."""
    import trial
    lines = [line(5, "good-5", "UNAVAILABLE", accepted=False), line(3, "good-3", "OK"),
             line(1, "good-1", "OK"), {"code": "OK", "method": "of no request"}]
    assert [each["id"] for each in trial.dropped(lines, unanswered=[])] == [2, 4]
    assert not trial.dropped(lines[2:], unanswered=[]) and not trial.dropped([], unanswered=[])


def test_a_trial_needs_a_share_of_answered_calls():
    import trial
    few = {("unary", "OK"): 10, ("unary", "RESOURCE_EXHAUSTED"): 990, ("append", "UNAVAILABLE"): 9}
    assert trial.below_floor(few) == [
        "unary: 10 of 1000 calls were answered, at least 20% must be"]
    assert not trial.below_floor({("unary", "OK"): 300, ("unary", "RESOURCE_EXHAUSTED"): 700})
    few = {("unary", "OK"): 1, ("unary", "RESOURCE_EXHAUSTED"): 49}
    assert not trial.below_floor(few) and trial.below_floor(few, 0.25, 40)


def test_a_soak_detects_growth_outside_the_pools(start_server):
    """Only in the second half, where a leak continues and one-time allocations are done. Resident
    memory may rise by one step of malloc's, memory allocated from malloc may not."""
    import soak_report
    server = start_server()
    with wire.connect(server.address) as service:
        service.Attend(wire.small_request(), timeout=wire.SECONDS)  # allocates the pools
    pools = soak_report.pools_mib(server.proc("smaps"))
    assert 0 < pools < hostile.rss_bytes(server) / 2**20
    rows = [{"seconds": i, "memory_mib": 90 + i, "pools_mib": 10 + i, "rest_mib": 80,
             "heap_mib": 40, "descriptors": 9, "threads": 9, "requests": i} for i in range(40)]

    def flat(of_second, name="heap_mib"):
        changed = [{**row, name: of_second(row["seconds"])} for row in rows]
        return soak_report.judge(changed, {"faults": [], "outcomes": []})["flat"]

    for each in ("heap_mib", "rest_mib"):
        assert flat(lambda _: 80, each) and flat(lambda second: min(70 + second, 90), each)
        assert not flat(lambda second: 80 + second / 5, each)
    assert flat(lambda second: 80 + (second >= 30), "rest_mib")
    assert not flat(lambda second: 80 + (second >= 30))
    assert not flat(lambda second: 80 + second / 20)
    # One more thread may belong to a pool. One every five seconds may not.
    assert flat(lambda second: 36 + (second >= 30), "threads")
    assert not flat(lambda second: 36 + second // 5, "threads")
    assert "pools of a fixed size" in soak_report.plot(rows)
