# SPDX-License-Identifier: Apache-2.0
"""Faults of networks and hosts: delay, stalls, resets, half-open connections, a link that goes
down, clients and servers that are killed."""

import os
import re
import shutil
import subprocess
import sys
import time
from signal import SIGTERM

import trial  # first: it sets the path
import harness
from relay import Relay
from trial import Callers, await_rest

SHORT_TIMES = ("--write-timeout", "3", "--chunked-idle-timeout", "3", "--keepalive-time", "1",
               "--keepalive-timeout", "2", "--connection-idle-timeout", "30")


class Skipped(Exception):
    """This machine cannot run the trial."""


def at_rest(server, outcomes, faults, share=trial.FAULTS_SHARE, lines=True):
    """The checks at the end of every trial: no fault, enough valid calls answered, every gauge 0, a
    drain with exit code 0. `share` is 0 where the share of failed calls says nothing, because calls
    fail at once while there is no connection. `lines`: the access log must have every request."""
    assert not faults, "\n".join(fault["fault"] for fault in faults)
    assert any(outcomes[kind, "OK"] for kind in trial.FLOORS), "no good call was answered"
    few = trial.below_floor(outcomes, share, trial.FAULTS_ENOUGH)
    assert not few, "\n".join(few)
    _ends_well(server, lines)
    return outcomes


def _ends_well(server, lines=True):
    trial.assert_serves(server)  # the request with the highest number
    await_rest(server)
    trial.assert_no_failed_check(server)
    code = server.stop()
    assert code == 0, f"exit code {code}:\n{server.log()[-3000:]}"
    gone = trial.without_line(trial.lines_of(server)) if lines else []
    assert not gone, f"{len(gone)} requests vanished, one is {gone[0]}"


def answered(server):
    """Number of requests answered so far."""
    return int(server.metric("attend_requests_total", code="OK") or 0)


def await_answers(server, callers, count=1):
    """Waits until `count` more requests of the callers are answered."""
    before = answered(server)

    def enough():
        callers.assert_running()
        return answered(server) >= before + count

    harness.wait_for(f"{count} answers", enough, 60)


def _disturb(server, callers, seconds, disturb):
    """Calls `disturb` for `seconds`, each time after a request was answered, so that the server has
    recovered from the last time, however slow the machine is."""
    until = time.monotonic() + seconds
    while True:
        await_answers(server, callers)
        disturb()
        if time.monotonic() >= until:
            return


def _through_relay(folder, seed, seconds, locked, disturb):
    """Runs callers through a relay, to which `disturb` applies a fault."""
    server = trial.start(folder, *SHORT_TIMES, locked=locked)
    try:
        with Relay(server.address) as relay:
            callers = Callers(server, seed, 1, "--faults-on-the-way", address=relay.address)
            _disturb(server, callers, seconds, lambda: disturb(relay))
            callers.terminate()
            outcomes, faults = callers.wait(120)
        return at_rest(server, outcomes, faults, share=0)
    finally:
        server.kill()


def delay(folder, seed, seconds, locked=False):
    """The relay delays every read by up to 30 ms."""
    def disturb(relay):
        relay.delay(0.03)
        time.sleep(0.2)
    return _through_relay(folder, seed, seconds, locked, disturb)


def stall(folder, seed, seconds, locked=False):
    """Nothing passes for half a second, repeatedly."""
    def disturb(relay):
        relay.stall()
        time.sleep(0.5)
        relay.resume()
        time.sleep(0.3)
    return _through_relay(folder, seed, seconds, locked, disturb)


def reset(folder, seed, seconds, locked=False):
    """All connections are reset in the middle of calls."""
    def disturb(relay):
        time.sleep(0.1)
        relay.reset()
    return _through_relay(folder, seed, seconds, locked, disturb)


def half_open(folder, seed, seconds, locked=False):
    """Clients disappear without closing their connections. The server keeps nothing for them."""
    server = trial.start(folder, *SHORT_TIMES, locked=locked)
    try:
        with Relay(server.address) as relay:
            callers = Callers(server, seed, 1, "--faults-on-the-way", address=relay.address,
                              regions=False)
            _disturb(server, callers, seconds,
                     lambda: (time.sleep(0.4), relay.half_open()))
            callers.terminate()
            outcomes, faults = callers.wait(120)
            relay.half_open()
            trial.assert_serves(server)
            await_rest(server)  # while these connections are still open
            relay.forget()
        return at_rest(server, outcomes, faults, share=0)
    finally:
        server.kill()


def kill_clients(folder, seed, seconds, locked=False):
    """Client processes get SIGKILL under load."""
    server = trial.start(folder, *SHORT_TIMES, locked=locked)
    try:
        until, turn = time.monotonic() + seconds, 0
        while turn == 0 or time.monotonic() < until:
            callers = Callers(server, seed + turn, 1)
            await_answers(server, callers)
            time.sleep(turn % 3 * 0.2)
            faults = callers.kill()
            assert not faults, faults[0]["fault"]
            turn += 1
        requests = answered(server)
        _ends_well(server)
        return {("clients", "killed"): turn, ("requests", "OK"): requests}
    finally:
        server.kill()


def kill_server(folder, seed, seconds, locked=False):
    """The server gets SIGKILL under load; the next one serves at the same addresses. Every call
    ends, and no answer is wrong."""
    address = f"127.0.0.1:{harness.free_port()}"
    metrics = f"127.0.0.1:{harness.free_port()}"
    server = trial.start(folder, listen=address, metrics=metrics, locked=locked)
    try:
        callers = Callers(server, seed, 1, "--faults-on-the-way")
        until, kills = time.monotonic() + seconds, 0
        while kills == 0 or time.monotonic() < until:
            await_answers(server, callers, 20)
            time.sleep(0.5)
            server.kill()
            kills += 1
            server = trial.start(folder, listen=address, metrics=metrics, locked=server.locks)
        callers.terminate()
        outcomes, faults = callers.wait(120)
        outcomes["server", "killed"] = kills
        return at_rest(server, outcomes, faults, share=0)
    finally:
        server.kill()


class _Slow:
    """Slow requests, at least one of which is accepted and still running at SIGTERM."""

    COST = 10  # attend_outstanding_cost is above it with one of these, not with callers' alone

    def __init__(self, server):
        self._calls = {}
        self._request = trial.hostile.wire.slow_request(2048)
        self._metadata = server.locks.metadata("b") if server.locks else ()
        self._channel = trial.open_channel(server.address, server.locks,
                                           trial.hostile.wire.UNLIMITED)
        self._stub = trial.hostile.wire.stub.AttentionServiceStub(self._channel)
        harness.wait_for("a slow request to be accepted", lambda: server.metric(
            "attend_outstanding_cost") > self.COST or self._ask())

    def _ask(self):
        self._request.request_id = f"slow-{len(self._calls)}"
        self._calls[self._request.request_id] = self._stub.Attend.future(
            self._request, timeout=120, metadata=self._metadata)

    def ask_refused(self):
        """The id of a request that the draining server refuses; its number follows those of all
        accepted requests."""
        self._ask()
        name, call = list(self._calls.items())[-1]
        assert call.code().name == "UNAVAILABLE", f"a draining server said {call.code()}"
        return name

    def unanswered(self):
        """Ids of the refused requests; at least one request was accepted."""
        names = [name for name, call in self._calls.items() if call.code().name != "OK"]
        self._channel.close()
        assert len(names) < len(self._calls), "what was under way has no answer"
        return names


def drain(folder, seed, seconds, locked=False):
    """Repeated SIGTERM under load: every accepted request is finished, both by the access log and
    by the clients' outcomes."""
    turn, finished, until = 0, 0, time.monotonic() + seconds
    while turn == 0 or time.monotonic() < until:
        server = trial.start(os.path.join(folder, str(turn)), "--drain-timeout", "60",
                             "--max-request-gflop", "30", locked=locked)
        try:
            callers = Callers(server, seed + turn, 1)
            time.sleep(0.5)
            slow = _Slow(server)
            server.signal(SIGTERM)
            harness.wait_for("the drain", lambda: "draining: " in server.log())
            last = slow.ask_refused()
            code = server.wait()
            assert code == 0, f"exit code {code}:\n{server.log()[-3000:]}"
            callers.terminate()
            _, faults = callers.wait(120)
            assert not faults, "\n".join(fault["fault"] for fault in faults)
            waited = re.search(r"draining: (\d+) requests to finish", server.log())
            assert int(waited[1]) > 0, "nothing was under way"
            lines = trial.lines_of(server)
            assert any(line.get("request_id") == last for line in lines), "lines are missing"
            lost = trial.dropped(lines, callers.unanswered + slow.unanswered())
            assert not lost, f"{len(lost)} accepted requests were dropped, one is {lost[0]}"
            finished += len(trial.accepted(lines))
        finally:
            server.kill()
        turn += 1
    return {("drains under load", "OK"): turn, ("accepted", "finished"): finished}


def _inside(name, folder, seed, seconds, locked):
    """Runs the function `name` of this file in a new network namespace."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        raise Skipped("no rights to make network namespaces, or no ip and unshare")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, __file__, name, folder, str(seed), str(seconds),
         "locked" if locked else ""],
        capture_output=True, text=True, timeout=seconds + 300, check=False)
    if done.returncode == 77:
        raise Skipped(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    return {("partition", line): 1 for line in done.stdout.strip().splitlines()[-1:]}


def partition(folder, seed, seconds, locked=False):
    """The link between clients and server goes down and comes back."""
    return _inside("in_partition", folder, seed, seconds, locked)


def lossy(folder, seed, seconds, locked=False):
    """A link that loses 5 % of its packets and delays the others by 20 ms."""
    return _inside("in_lossy", folder, seed, seconds, locked)


def _run(*command):
    return subprocess.run(command, check=False, capture_output=True, text=True)


class _Link:
    """A veth link between this process's namespace, 10.9.0.1, and another, 10.9.0.2."""

    def __init__(self):
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"])
        own = os.readlink("/proc/self/ns/net")
        harness.wait_for("the other namespace", lambda: os.readlink(
            f"/proc/{self._holder.pid}/ns/net") != own)
        other = str(self._holder.pid)
        for command in ("ip link set lo up", "ip link add v0 type veth peer name v1",
                        f"ip link set v1 netns {other}", "ip addr add 10.9.0.1/24 dev v0",
                        "ip link set v0 up"):
            done = _run(*command.split())
            if done.returncode != 0:
                print(f"no veth: {done.stderr.strip()}")
                sys.exit(77)
        self.enter = ["nsenter", "--net", "--target", other]
        for command in ("ip link set lo up", "ip addr add 10.9.0.2/24 dev v1", "ip link set v1 up"):
            assert _run(*self.enter, *command.split()).returncode == 0

    def lose(self):
        """Loses packets from now on."""
        done = _run(*"tc qdisc replace dev v0 root netem delay 20ms loss 5%".split())
        if done.returncode != 0:
            self.close()
            print(f"the kernel has no netem: {done.stderr.strip()}")
            sys.exit(77)

    def set(self, state):
        assert _run("ip", "link", "set", "v0", state).returncode == 0

    def close(self):
        self._holder.kill()
        self._holder.wait()


def _linked(folder, seed, seconds, locked, disturb, loses=False):
    link = _Link()
    if loses:
        link.lose()
    server = trial.start(folder, *SHORT_TIMES, "--listen", "10.9.0.1:0",
                         *(() if locked else trial.beyond_loopback()), locked=locked)
    far = next(each for each in server.addresses if each.startswith("10.9."))
    try:
        callers = Callers(server, seed, 1, "--faults-on-the-way", address=far, regions=False,
                          metrics=False, before=link.enter)
        _disturb(server, callers, seconds, lambda: disturb(link))
        callers.terminate()
        outcomes, faults = callers.wait(200)
        at_rest(server, outcomes, faults, share=0)
        answered = sum(count for (_, code), count in outcomes.items() if code == "OK")
        print(f"{sum(outcomes.values())} calls, {answered} OK")
    finally:
        server.kill()
        link.close()


def in_partition(folder, seed, seconds, locked):
    def disturb(link):
        time.sleep(1)
        link.set("down")
        time.sleep(4)  # longer than the server's keepalive timeout
        link.set("up")
    _linked(folder, seed, seconds, locked, disturb)


def in_lossy(folder, seed, seconds, locked):
    _linked(folder, seed, seconds, locked, lambda link: time.sleep(1), loses=True)


if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as stubs:
        trial.generate(stubs)
        {"in_partition": in_partition, "in_lossy": in_lossy}[sys.argv[1]](
            sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), bool(sys.argv[5]))
