# SPDX-License-Identifier: Apache-2.0
"""The trials of tests/trials, each for a moment: that they work, and that the server stands what is
found soonest."""

import pathlib
import sys

import pytest

import harness
import hostile
import wire

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "trials"))
pytestmark = pytest.mark.usefixtures("libraries")
SEED, SECONDS = 1, 1


@pytest.fixture(scope="module")
def problems(libraries, stubs):
    sys.path[:0] = [str(harness.ROOT / "kernels/python")]
    import problems as made
    return made.Problems.make(SEED, 8)


def test_random_calls_of_every_kind(tmp_path, problems):
    """In this process, on a live server with locks, and an operator: every call ends once, good
    answers have the right bits, and nothing stays behind."""
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


@pytest.mark.parametrize("kind", ["allocate", "accept", "read", "write", "mmap", "open", "thread",
                                  "poll"])
def test_calls_to_the_system_that_fail(tmp_path, problems, kind):
    """The first ones while a server serves, and one while it starts."""
    import system_trials
    if why := system_trials.missing():
        pytest.skip(why)
    (tmp_path / "start").mkdir()
    ends, _ = system_trials.fail_while_serving(tmp_path, problems, kind, 3, SEED)
    assert "DIED" not in ends, ends.places
    ends = system_trials.fail_at_start(str(tmp_path / "start"), kind, 1)
    assert "DIED" not in ends, ends.places


@pytest.mark.parametrize("name", ["delay", "stall", "reset", "half_open", "kill_server"])
def test_connections_that_are_disturbed(tmp_path, stubs, libraries, name):
    import network_trials
    getattr(network_trials, name)(str(tmp_path), SEED, SECONDS)


@pytest.mark.parametrize("name", ["disk_full", "file_size_limit", "memory_limit", "clock_steps"])
def test_machines_that_fail(tmp_path, stubs, libraries, name):
    import machine_trials
    import network_trials
    try:
        getattr(machine_trials, name)(str(tmp_path), SEED, SECONDS)
    except network_trials.Skipped as why:
        pytest.skip(str(why))


def test_a_server_that_refuses_is_not_one_that_was_tried():
    import trial
    few = {("unary", "OK"): 10, ("unary", "RESOURCE_EXHAUSTED"): 990, ("append", "UNAVAILABLE"): 9}
    assert trial.below_floor(few) == [
        "unary: 10 of 1000 calls were answered, at least 20% must be"]
    assert not trial.below_floor({("unary", "OK"): 300, ("unary", "RESOURCE_EXHAUSTED"): 700})


def test_a_soak_tells_pools_from_the_heap(start_server):
    """And judges neither: what may grow is the memory in all."""
    import soak_report
    server = start_server()
    with wire.connect(server.address) as service:
        service.Attend(wire.small_request(), timeout=wire.SECONDS)  # touches the pools
    pools, heap = soak_report.anonymous_mib(server.proc("smaps"))
    assert pools > 0 and heap > 1
    assert pools + heap <= hostile.rss_bytes(server) / 2**20 + 1
    rows = [{"seconds": i, "memory_mib": 80, "pools_mib": 10 + i, "heap_mib": 30, "descriptors": 9,
             "threads": 9, "requests": i} for i in range(40)]
    report = soak_report.judge(rows, {"faults": [], "outcomes": []})
    assert report["flat"] and not report["series"]["pools_mib"]["flat"]
    assert "pools of a fixed size" in soak_report.plot(rows)
    grown = [{**row, "memory_mib": 80 + row["seconds"]} for row in rows]
    assert not soak_report.judge(grown, {"faults": [], "outcomes": []})["flat"]
