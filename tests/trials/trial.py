# SPDX-License-Identifier: Apache-2.0
"""Shared by the runners of trials: a server with small limits, processes of callers, and checks of
an idle server."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]

import harness  # noqa: E402
import hostile  # noqa: E402
from caller import open_channel  # noqa: E402
from locks import Locks  # noqa: E402
from operating import Files  # noqa: E402


def generate(folder):
    """Generates the runner's gRPC stubs; callers generate their own."""
    hostile.wire.generate(pathlib.Path(folder))


def beyond_loopback():
    """Flags for listening beyond loopback without TLS."""
    text = subprocess.run([harness.binary("attend-server"), "--help"], capture_output=True,
                          text=True, check=True).stdout
    return ("--insecure",) if "--insecure" in text else ()

# Small enough that callers reach each limit.
LIMITS = ("--memory-budget", "64MiB", "--max-request-bytes", "8MiB", "--max-queue", "16",
          "--lanes", "2", "--cpu-threads", "2", "--copy-threads", "2", "--stream-requests-max", "4",
          "--max-checks", "4", "--session-memory", "16MiB", "--max-sessions", "20",
          "--shared-memory-max", "2MiB", "--shared-memory-client-max", "1MiB",
          "--chunked-streams-max", "3", "--max-request-gflop", "1", "--handshake-timeout", "2",
          "--tenant", "a=1,b=2", "--reference-check", "sample:0.02")

# Gauges that are 0 when the server is idle.
ZEROS = ("attend_inflight_requests", "attend_queue_requests", "attend_tenant_queue_requests",
         "attend_host_memory_used_bytes", "attend_lanes_busy", "attend_outstanding_cost",
         "attend_shared_memory_bytes", "attend_shared_memory_regions",
         "attend_shared_memory_clients", "attend_sessions", "attend_staging_memory_bytes",
         "attend_device_memory_used_bytes")
# Limits whose attend_tenant_used is 0 then. Not those of connections and streams: connections that
# clients leave open still count.
TENANT_ZEROS = ("in_flight", "bytes", "cost", "checks", "shared_memory", "sessions",
                "small_calls")


def start(folder, *flags, locked=False, **options):
    """Starts a server with LIMITS (except where `flags` set others), per-tenant limits, an access
    log and shared memory. `locked`: True for tokens and TLS, or the Locks of an earlier server."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    locks = locked or None
    if locked is True:
        locks = Locks.make(folder / "locks")
    files = Files(folder)
    flags += (*files.flags(), *(locks.flags() if locks else ()))
    limits = [part for flag, value in zip(LIMITS[::2], LIMITS[1::2]) if flag not in flags
              for part in (flag, value)]
    if "--check-dump-dir" not in flags:
        flags += ("--check-dump-dir", folder / "dumps")
    socket = folder.resolve() / "sockets" / "regions.sock"
    server = harness.Server(folder, *limits, "--oip", "--shared-memory",
                            "--shared-memory-socket", socket, *flags, **options)
    server.regions, server.locks, server.files = str(socket), locks, files
    return server


def assert_serves(server, **options):
    """Makes a small request with a check; with tokens, as tenant b, whose connections are not
    limited. `options` are the call's."""
    wire = hostile.wire
    metadata = server.locks.metadata("b") if server.locks else ()
    with open_channel(server.address, server.locks, wire.UNLIMITED) as channel:
        answer = wire.stub.AttentionServiceStub(channel).Attend(
            wire.small_request(seed=7, check=True), timeout=wire.SECONDS, metadata=metadata,
            **options)
    assert answer.check.ok and answer.check.rows_checked > 0


def await_rest(server, seconds=60):
    """Waits until every gauge of ZEROS is 0; sessions last as long as their lease."""
    used = [("attend_tenant_used", {"limit": limit}) for limit in TENANT_ZEROS]
    for name, labels in [*((name, {}) for name in ZEROS), *used]:
        harness.wait_for(f"{name} {labels} to be 0, is {server.metric(name, **labels)}",
                         lambda name=name, labels=labels: not server.metric(name, **labels),
                         seconds)


def assert_no_failed_check(server):
    failed = server.metric("attend_reference_checks_total", result="failed")
    assert not failed, f"{failed} reference checks failed:\n{server.log()[-4000:]}"


READ_MOST = 1 << 26  # bytes of a process's report


class Callers:
    """Processes of live.py."""

    def __init__(self, server, seed, processes, *options, address=None, regions=True,
                 metrics=True, before=()):
        command = [*before, sys.executable, HERE / "live.py", "--address",
                   address or server.address, *options]
        if metrics:
            command += ["--metrics", server.metrics_address]
        if regions:
            command += ["--regions", server.regions]
        if server.locks:
            command += ["--locks", server.folder / "locks" / "locks.json"]
        self._start([*command, "--seed", seed * 100 + i] for i in range(processes))

    def _start(self, commands):
        commands = [[str(part) for part in command] for command in commands]
        # A file, as a pipe would block a report above 64 KiB.
        self._reports = [tempfile.TemporaryFile("w+") for _ in commands]
        self._processes = [subprocess.Popen(command, stdout=report)
                           for command, report in zip(commands, self._reports)]
        self.unanswered = []  # request ids, set by wait()
        for i, process in enumerate(self._processes):
            harness.wait_for("callers to begin", lambda i=i, process=process: self._read(i) or
                             process.poll() is not None, 60)
            assert self._read(i).startswith("ready\n"), "callers that did not begin"

    def _read(self, i):
        """The output of process `i` so far."""
        return os.pread(self._reports[i].fileno(), READ_MOST, 0).decode()

    def _report(self, i):
        """Its JSON object, which follows "ready"."""
        return json.loads(self._read(i).partition("\n")[2])

    def _close(self):
        for report in self._reports:
            report.close()

    def terminate(self):
        for process in self._processes:
            process.terminate()

    def kill(self):
        """Kills the processes and returns the faults of those that had already ended, as they do
        when they find one."""
        faults = []
        for i, process in enumerate(self._processes):
            if process.poll() is None:
                process.kill()
                process.wait()
            else:
                faults += self._report(i)["faults"]
        self._close()
        return faults

    def running(self):
        return any(process.poll() is None for process in self._processes)

    def assert_running(self):
        """Callers that end early have found a fault, which this raises."""
        if not self.running():
            _, faults = self.wait()
            raise AssertionError("the callers ended early:\n" +
                                 "\n".join(fault["fault"] for fault in faults))

    def wait(self, timeout=None):
        """Waits for the processes; returns outcomes by kind and code, and faults."""
        outcomes, faults = collections.Counter(), []
        for i, process in enumerate(self._processes):
            process.wait(timeout)
            assert process.returncode == 0, f"callers ended with {process.returncode}"
            report = self._report(i)
            outcomes.update({(kind, code): count for kind, code, count in report["outcomes"]})
            faults += report["faults"]
            self.unanswered += report["unanswered"]
        self._close()
        return outcomes, faults


# The share of each kind's calls that must be answered, if at least ENOUGH were made; otherwise a
# server that refuses everything would pass. `create` is low because there are few sessions and
# each lives for a while: with many callers, most attempts to create one are refused.
FLOORS = {"unary": 0.2, "request of a stream": 0.2, "chunked": 0.1, "append": 0.1, "create": 0.02,
          "shared memory": 0.2, "oip": 0.2, "oip infer": 0.2}
ENOUGH = 200
# Under faults, a fraction of that share, and of fewer calls.
FAULTS_SHARE, FAULTS_ENOUGH = 0.25, 40


def below_floor(outcomes, share=1.0, enough=ENOUGH):
    """A line for each kind of which too few calls were answered."""
    wrong = []
    for kind, floor in FLOORS.items():
        floor *= share
        calls = sum(count for (of, _), count in outcomes.items() if of == kind)
        good = outcomes.get((kind, "OK"), 0)
        if calls >= enough and good < floor * calls:
            wrong.append(f"{kind}: {good} of {calls} calls were answered, at least {floor:.0%} "
                         "must be")
    return wrong


def lines_of(server):
    """The lines of the server's access log. The server has to be idle or to have ended."""
    with server.files.access_log.open(encoding="utf-8") as log:
        log.seek(server.files.access_log_begin)
        return [json.loads(line) for line in log]


def accepted(lines):
    """The lines of requests that the engine accepted."""
    return [line for line in lines if "receive_us" in line]


def dropped(lines, unanswered):
    """Accepted requests that neither succeeded nor were cancelled, by the server's log or by their
    callers; and requests without a line."""
    unanswered = set(unanswered)
    given_up = ("CANCELLED", "DEADLINE_EXCEEDED")
    return [line for line in accepted(lines) if line["request_id"] in unanswered or
            line["code"] != "OK" and line["code"] not in given_up] + without_line(lines)


def without_line(lines):
    """Requests that are missing in the log. The server numbers all requests from 1; those after the
    last line are not found."""
    there = {line["id"] for line in lines if "id" in line}
    missing = set(range(1, max(there, default=0) + 1)) - there
    return [{"id": number, "code": "no line"} for number in sorted(missing)]


def describe(outcomes):
    """A table with a line of outcomes for each kind."""
    kinds = collections.defaultdict(list)
    for (kind, code), count in sorted(outcomes.items()):
        kinds[kind].append(f"{code} {count}")
    return "\n".join(f"  {kind:22} {', '.join(codes)}" for kind, codes in kinds.items())
