# SPDX-License-Identifier: Apache-2.0
"""Faults of the machine: a full disk, a cgroup's memory limit, steps of the clock."""

import collections
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import time
from signal import SIGHUP

import grpc

import trial  # first: it sets the path
import harness
from network_trials import Skipped, at_rest, await_answers
from system_calls import SystemCalls, library
from trial import Callers, await_rest

PAGE_BYTES = 4096
CGROUPS = pathlib.Path("/sys/fs/cgroup")


class _SmallDisk:
    """Mounts a file system of `size` bytes on a folder."""

    def __init__(self, folder, size):
        self.folder = folder
        os.makedirs(folder)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
                              capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Skipped(f"no rights to mount a small disk: {done.stderr.strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["umount", "--lazy", self.folder], check=True)


def disk_full(folder, seed, seconds, locked=False):
    """The log's disk is full: calls are still answered, and the log continues once there is
    room."""
    with _SmallDisk(os.path.join(folder, "disk"), 8 << 10) as disk:
        log = pathlib.Path(disk.folder) / "log"
        server = trial.start(os.path.join(folder, "server"), "--log-file", log,
                             "--log-level", "debug", locked=locked)
        try:
            callers = Callers(server, seed, 1, "--seconds", seconds)
            outcomes, faults = callers.wait(seconds + 120)
            assert log.stat().st_size <= 8 << 10
            free = os.statvfs(disk.folder)
            assert free.f_bavail == 0, "the disk was not full"
            log.rename(log.with_suffix(".old"))
            log.with_suffix(".old").unlink()
            server.signal(SIGHUP)
            harness.wait_for("a new log", log.exists)
            trial.assert_serves(server)
            harness.wait_for("its lines", lambda: b"log file reopened" in log.read_bytes())
            return at_rest(server, outcomes, faults)
        finally:
            server.kill()


def disk_full_of_dumps(folder, seed, seconds, locked=False):
    """Every check fails, and the disk has room for no page of a dump, for one, for two, ..., for
    all. A dump is written whole or not at all, and the call is answered either way."""
    del seconds
    if locked:
        raise Skipped("attend-faulty-server has no TLS")
    wire, pages = trial.hostile.wire, 24
    with _SmallDisk(os.path.join(folder, "disk"), pages * PAGE_BYTES) as disk:
        dumps, filler = pathlib.Path(disk.folder) / "dumps", pathlib.Path(disk.folder) / "filler"
        server = trial.start(os.path.join(folder, "server"), "--check-dump-dir", dumps,
                             "--check-dump-interval", "0",
                             program=harness.program_of_tests("attend-faulty-server"),
                             env={"ATTEND_FAULT": "corrupt"})
        ends = collections.Counter()
        try:
            with wire.connect(server.address) as service:
                for room in range(pages):
                    filler.write_bytes(bytes((pages - room) * PAGE_BYTES))
                    request = wire.small_request(seed + room, check=True, request_id=f"r{room}")
                    answer = service.Attend(request, timeout=60)
                    assert answer.HasField("check") and not answer.check.ok, "nothing to dump"
                    ends["dump", _end_of_dump(server, dumps, request, room + 1)] += 1
                    filler.unlink()
            assert ends["dump", "whole"] >= 2 and ends["dump", "none"] >= 2, ends
            failed = set(re.findall(r"cannot write \S+/(\w+\.\w+): No space left", server.log()))
            assert failed == {"request.binpb", "response.binpb", "report.json"}, failed
            await_rest(server)
            return ends
        finally:
            server.kill()


def _end_of_dump(server, dumps, request, number):
    """"whole" or "none": what was written of the `number`-th failed check's dump. Removes it."""
    def count(result):
        return server.metric("attend_check_dumps_total", result=result) or 0

    harness.wait_for("the dump's end", lambda: count("written") + count("failed") == number)
    found = list(dumps.iterdir()) if dumps.exists() else []
    if not found:
        return "none"
    assert len(found) == 1 and found[0].name.endswith(request.request_id), found
    wire, folder = trial.hostile.wire, found[0]
    assert {each.name for each in folder.iterdir()} == {"request.binpb", "response.binpb",
                                                        "report.json"}
    asked = wire.pb.AttendRequest.FromString((folder / "request.binpb").read_bytes())
    assert list(asked.raw) == list(request.raw)
    answered = wire.pb.AttendResponse.FromString((folder / "response.binpb").read_bytes())
    assert answered.raw[0] and not answered.check.ok
    assert json.loads((folder / "report.json").read_text())["request_id"] == request.request_id
    shutil.rmtree(folder)
    return "whole"


def file_size_limit(folder, seed, seconds, locked=False):
    """Files may not grow above RLIMIT_FSIZE, as with a quota."""
    log = pathlib.Path(folder) / "log"
    server = trial.start(os.path.join(folder, "server"), "--log-file", log, "--log-level", "debug",
                         limits={resource.RLIMIT_FSIZE: (8 << 10, 8 << 10)}, locked=locked)
    try:
        outcomes, faults = Callers(server, seed, 1, "--seconds", seconds,
                                   regions=False).wait(seconds + 120)
        return at_rest(server, outcomes, faults, lines=False)  # the access log is cut off too
    finally:
        server.kill()


class _Group:
    """A memory cgroup, of either version, with a limit."""

    def __init__(self, name, limit):
        own = {}
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for each in controllers.split(","):
                own[each] = path
        version1 = "memory" in own
        root = CGROUPS / ("memory" if version1 else "") / (own.get("memory" if version1 else "")
                                                           or "/").lstrip("/")
        self.folder = (root if root.exists() else CGROUPS / "memory") / name
        try:
            self.folder.mkdir()
            (self.folder / ("memory.limit_in_bytes" if version1 else "memory.max")).write_text(
                str(limit))
        except OSError as error:
            raise Skipped(f"cannot make a cgroup: {error}") from error

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self):
        harness.wait_for("the cgroup to be empty",
                         lambda: not (self.folder / "cgroup.procs").read_text())
        self.folder.rmdir()


def memory_limit(folder, seed, seconds, locked=False):
    """A server whose memory budget exceeds its cgroup's limit does not start; one whose worst case
    fits serves under mixed load."""
    group = _Group(f"attend-trial-{os.getpid()}", 400 << 20)
    try:
        try:
            server = trial.start(folder + "/much", "--memory-budget", "500MiB", enter=group.enter)
            server.kill()
            raise AssertionError("it started with more memory than its cgroup has")
        except harness.ServerEnded as end:
            assert end.code in (1, 2) and "cgroup" in end.log, end.log
        server = trial.start(folder + "/fits", enter=group.enter, locked=locked)
        try:
            outcomes, faults = Callers(server, seed, 2, "--seconds", seconds).wait(seconds + 120)
            peak = trial.hostile._status(server, "VmHWM") >> 10
            at_rest(server, outcomes, faults)
            outcomes["peak of 400 MiB", f"{peak} MiB"] = 1
        finally:
            server.kill()
        return outcomes
    finally:
        group.close()


def killed_for_memory(folder, seed, seconds, locked=False):
    """The kernel kills a server that exceeds its cgroup's limit. Every call ends, and the next
    server serves."""
    del seconds
    address = f"127.0.0.1:{harness.free_port()}"
    group = _Group(f"attend-trial-{os.getpid()}", 120 << 20)
    try:
        server = trial.start(folder + "/one", "--memory-budget", "110MiB", "--max-request-gflop",
                             "100", listen=address, enter=group.enter, locked=locked)
        callers = Callers(server, seed, 1, "--faults-on-the-way", regions=False)
        await_answers(server, callers, 20)
        wire = trial.hostile.wire
        metadata = server.locks.metadata("b") if locked else ()
        with trial.open_channel(address, server.locks, wire.UNLIMITED) as channel:
            stub = wire.stub.AttentionServiceStub(channel)
            request = wire.small_request(length=5000, heads=2, dim=64)
            for _ in range(50):
                calls = [stub.Attend.future(request, timeout=60, metadata=metadata)
                         for _ in range(24)]
                codes = {call.code() for call in calls}
                if server.ended():
                    break
        assert server.ended(), f"it was not killed: {codes}"
        code = server.process.returncode
        assert code == -9, f"it ended with {code}:\n{server.log()[-2000:]}"
        server.kill()
        server = trial.start(folder + "/next", listen=address, locked=server.locks)
        await_answers(server, callers, 50)
        callers.terminate()
        outcomes, faults = callers.wait(120)
        return at_rest(server, outcomes, faults, share=0)
    finally:
        server.kill()
        group.close()


def clock_steps(folder, seed, seconds, locked=False):
    """The real-time clock steps back and forth by hours under load. Deadlines and leases are not
    affected."""
    if not library().exists():
        raise Skipped(f"there is no {library()}")
    calls = SystemCalls(os.path.join(folder, "calls"))
    server = trial.start(os.path.join(folder, "server"), env=calls.env, locked=locked)
    try:
        callers = Callers(server, seed, 1)
        until, turn = time.monotonic() + seconds, 0
        while turn < 4 or time.monotonic() < until:
            calls.move_clock((3600, -3600, 86400 * 400, -30, 1)[turn % 5])
            turn += 1
            time.sleep(0.4)
        callers.terminate()
        outcomes, faults = callers.wait(120)
        return at_rest(server, outcomes, faults)
    finally:
        server.kill()
        calls.close()
