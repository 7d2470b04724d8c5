#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rate of answers in time from an overloaded server, with clients that set deadlines.

    tests/bench/bench_overload.py --dist build/release [--device cpu] [--shape SHAPE ...]

Starts attend-server on one half of the processors and attend-client on the other, so that the load
takes no processor time from the server. Measures the latency of a single request, the best rate
without deadlines, the number of callers that it takes, and the cost of a refusal. Then sends at
1.5, 3 and 10 times that rate, and with 1.5, 3 and 10 times as many callers, with deadlines of 3 to
20 times the latency of a single request. The target is 90 % of the best rate; or the best rate less
the cost of the refusals, if that is lower and a request costs less than 20 refusals. Prints a
table; --json FILE has the figures. Needs only the standard library and the two programs."""

import argparse
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

SHAPES = {"cpu": ["B1,H1,L4096,D16", "H8,L256,D64", "H1,L64,D64"],
          "cuda": ["H8,L16384,D64,dtype=float16", "H8,L4096,D64,dtype=float16",
                   "H8,L256,D64,dtype=float16"]}
TIMES = (1.5, 3, 10)
DEADLINES = (3, 5, 10, 20)
CALLERS_MAX = 256
TARGET = 0.9
# The target depends on the refusals only if a request costs less than this many of them.
REFUSALS = 20
START_SECONDS = 60


def program(folder, name):
    """The path of a program in the folder of a build, an installation or a distribution."""
    for part in ("", "bin", "server", "client/cli", "client", "usr/bin"):
        path = pathlib.Path(folder, part, name)
        if path.is_file() and os.access(path, os.X_OK):
            return str(path.resolve())
    found = [path for path in pathlib.Path(folder).rglob(name) if path.is_file()]
    if not found:
        sys.exit(f"{name} is not in {folder}")
    return str(found[0].resolve())


class Server:
    """A context manager that runs an attend-server on this machine."""

    def __init__(self, options, processors, flags=()):
        self._folder = tempfile.TemporaryDirectory()
        self.address = f"unix:{self._folder.name}/attend.sock"
        flags = ["--device", options.device, *options.server_flag, *flags]
        if options.transport == "shm":
            flags += ["--shared-memory", "--shared-memory-socket", f"{self._folder.name}/shm.sock"]
        self.processors = len(processors)
        self._log = open(pathlib.Path(self._folder.name, "log"), "wb")
        self._ready = pathlib.Path(self._folder.name, "ready.json")
        self._process = subprocess.Popen(
            [program(options.dist, "attend-server"), "--listen", self.address, "--metrics-listen",
             "127.0.0.1:0", "--ready-file", self._ready, *flags], stdout=self._log,
            stderr=subprocess.STDOUT, preexec_fn=lambda: os.sched_setaffinity(0, processors))

    def __enter__(self):
        until = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                log = pathlib.Path(self._folder.name, "log").read_text(errors="replace")
                sys.exit(f"attend-server does not serve:\n{log}")
            time.sleep(0.1)
        self._metrics = json.loads(self._ready.read_text())["metrics"]
        return self

    def refused(self):
        """Number of requests refused on arrival so far, as they would have been late."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines
                   if line.startswith('attend_rejected_requests_total{reason="late"'))

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Loads:
    """Runs attend-client load on a server."""

    def __init__(self, options, server):
        self._command = [program(options.dist, "attend-client"), "--server", server.address,
                         "--connections", str(options.connections), "--attempts", "1", "load",
                         "--quiet", "--duration", str(options.seconds),
                         "--transport", options.transport,
                         "--allow", "RESOURCE_EXHAUSTED,DEADLINE_EXCEEDED,INVALID_ARGUMENT"]

    def __call__(self, shape, deadline_ms=0, **flags):
        """Runs attend-client load; returns the steps of its report."""
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [*self._command, "--shape", shape, "--json", file.name]
            if deadline_ms:
                command += ["--deadline-ms", f"{deadline_ms:g}"]
            for name, value in flags.items():
                command += [f"--{name.replace('_', '-')}", str(value)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode not in (0, 1):  # 1: some were never sent, as expected in overload
                sys.exit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")
            return json.loads(pathlib.Path(file.name).read_text())["steps"]


def figures(step, refused):
    """The figures of a step. `refused`: requests that the server refused, with either status."""
    statuses = step.get("status") or {}
    elapsed = step["elapsed_s"]
    sent = sum(statuses.values())
    return {"in_time_per_s": step["requests_per_s"],
            "refused_per_s": refused / elapsed,
            "late_per_s": max(0, sent - statuses.get("OK", 0) - refused) / elapsed,
            "sent_per_s": sent / elapsed,
            "p99_ms": step["latency_from_sent_ms"].get("p99")}


def capacity(loads, shape):
    """The latency of a single caller, the best rate, and the fewest callers that reach 95 % of
    it."""
    steps = loads(shape, concurrency=f"1:{CALLERS_MAX // 4}:x2")
    alone_ms = steps[0]["latency_from_sent_ms"]["p50"]
    best = max(step["requests_per_s"] for step in steps)
    callers = next(step["concurrency"] for step in steps if step["requests_per_s"] >= 0.95 * best)
    return alone_ms, best, callers


def refusal_seconds(options, processors, shape):
    """The server's CPU time per refused request, measured on a server whose limit on the cost of a
    request refuses all, at the same place as requests that would be late."""
    with Server(options, processors, ["--max-request-gflop", "1e-9"]) as server:
        loads = Loads(options, server)
        loads(shape, concurrency=CALLERS_MAX // 4)
        before = server.cpu_seconds()
        step, = loads(shape, concurrency=CALLERS_MAX // 4, warmup=0)
        statuses = step["status"]
        if set(statuses) != {"INVALID_ARGUMENT"}:
            sys.exit(f"requests that had to be refused ended with {statuses}")
        return (server.cpu_seconds() - before) / sum(statuses.values())


def target(best, refusal_share, row):
    """The target of the rate of answers in time. `refusal_share`: seconds of the server per
    refusal."""
    if best * REFUSALS * refusal_share <= 1:
        return TARGET * best
    return best * min(TARGET, max(0, 1 - row["refused_per_s"] * refusal_share))


def measure(loads, server, refusal, shape, log):
    alone_ms, best, callers = capacity(loads, shape)
    share = refusal / server.processors
    log(f"\n{shape}: {alone_ms:.2f} ms alone, {best:.1f}/s at most, with {callers} callers; "
        f"a refusal takes {refusal * 1e6:.0f} us of the server's CPU time, "
        f"1/{1 / best / share:.0f} of a request's")
    log("| of the best (target), refused, late | "
        + " | ".join(f"deadlines of {n}x the time alone" for n in DEADLINES) + " |")
    log("|---|" + "---|" * len(DEADLINES))
    rows = []
    for kind in ("rate", "concurrency"):
        for times in TIMES:
            amount = best * times if kind == "rate" else math.ceil(callers * times)
            cells = []
            for deadline in DEADLINES:
                before = server.refused()
                step, = loads(shape, deadline_ms=alone_ms * deadline, warmup=0,
                              **{kind: f"{amount:g}"})
                row = {"shape": shape, kind: amount, "times": times, "deadline_times": deadline,
                       **figures(step, server.refused() - before)}
                row["of_best"] = row["in_time_per_s"] / best
                row["target"] = target(best, share, row) / best
                row["asked"] = kind != "rate" or row["sent_per_s"] >= TARGET * amount
                row["met"] = row["asked"] and row["of_best"] >= row["target"] > 0
                rows.append(row)
                word = ("not sent" if not row["asked"] else "met" if row["met"] else
                        "missed" if row["target"] > 0 else "refusals take all time")
                cells.append(f"{row['of_best']:.0%} ({word}: {row['target']:.0%}), "
                             f"{row['refused_per_s']:.0f}/s, {row['late_per_s']:.0f}/s")
            name = "open" if kind == "rate" else "closed"
            log(f"| {name}, {times:g}x: {amount:g}{'/s' if kind == 'rate' else ' callers'} | "
                + " | ".join(cells) + " |")
    unsent = sum(not row["asked"] for row in rows)
    log(f"{sum(row['met'] for row in rows)} of {len(rows)} reach their target; for {unsent}, the "
        "client could not send the intended load")
    return {"shape": shape, "alone_ms": alone_ms, "best_per_s": best, "callers": callers,
            "refusal_cpu_s": refusal, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--dist", default="dist", help="folder of attend-server, attend-client")
    parser.add_argument("--device", default="cpu", help="as attend-server's")
    parser.add_argument("--shape", action="append", help=f"default: {SHAPES}")
    parser.add_argument("--transport", default="auto", help="as attend-client load's; or shm")
    parser.add_argument("--seconds", type=float, default=3, help="seconds per measurement")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--server-flag", action="append", default=[], help="one more, as --lanes=1")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))
    half = (len(processors) + 1) // 2
    of_server, of_client = processors[:half], processors[half:] or processors
    os.sched_setaffinity(0, of_client)  # inherited by the programs started below
    log = lambda line: print(line, flush=True)
    log(f"attend-server on processors {of_server}, attend-client on {of_client}")
    results = []
    for shape in options.shape or SHAPES[options.device.split(":")[0]]:
        refusal = refusal_seconds(options, of_server, shape)
        with Server(options, of_server) as server:
            results.append(measure(Loads(options, server), server, refusal, shape, log))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
