#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Answers in time of a server that is asked for more than it can do, by clients with deadlines.

    tests/bench/bench_overload.py --dist build/release [--device cpu] [--shape SHAPE ...]

Starts attend-server, finds how long one request takes alone, what the server can do without
deadlines, and how many callers that takes. Then it asks for 1.5, 3 and 10 times that rate, and with
1.5, 3 and 10 times the callers, with deadlines of 3 to 20 times what a request takes alone. Prints
a table; --json FILE has the figures. Only the standard library, and the two programs."""

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

SHAPES = {"cpu": ["B1,H1,L4096,D16", "H8,L256,D64", "H1,L64,D64"],
          "cuda": ["H8,L16384,D64,dtype=float16", "H8,L4096,D64,dtype=float16",
                   "H8,L256,D64,dtype=float16"]}
TIMES = (1.5, 3, 10)
DEADLINES = (3, 5, 10, 20)
CALLERS_MAX = 256


def program(folder, name):
    """The program in the folder of a build, an installation or a distribution."""
    for part in ("", "bin", "server", "client/cli", "client", "usr/bin"):
        path = pathlib.Path(folder, part, name)
        if path.is_file() and os.access(path, os.X_OK):
            return str(path.resolve())
    found = [path for path in pathlib.Path(folder).rglob(name) if path.is_file()]
    if not found:
        sys.exit(f"{name} is not in {folder}")
    return str(found[0].resolve())


class Server:
    """One attend-server on this machine. A context manager."""

    def __init__(self, binary, flags, folder):
        self.address = f"unix:{folder}/attend.sock"
        self._log = open(pathlib.Path(folder, "log"), "wb")
        self._process = subprocess.Popen(
            [binary, "--listen", self.address, "--metrics-listen", "off", *flags],
            stdout=self._log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Loads:
    """Runs attend-client load on a server."""

    def __init__(self, binary, server, seconds, connections, transport, folder):
        self._command = [binary, "--server", server.address, "--connections", str(connections),
                         "--attempts", "1", "load", "--quiet", "--duration", str(seconds),
                         "--transport", transport,
                         "--allow", "RESOURCE_EXHAUSTED,DEADLINE_EXCEEDED"]
        self._json = pathlib.Path(folder, "load.json")

    def __call__(self, shape, deadline_ms=0, **flags):
        """The steps of one run."""
        command = [*self._command, "--shape", shape, "--json", str(self._json)]
        if deadline_ms:
            command += ["--deadline-ms", f"{deadline_ms:g}"]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode not in (0, 1):  # 1: some were never sent, which overload explains
            sys.exit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")
        return json.loads(self._json.read_text())["steps"]


def figures(step):
    statuses = step.get("status") or {}
    elapsed = step["elapsed_s"]
    return {"in_time_per_s": step["requests_per_s"],
            "refused_per_s": statuses.get("RESOURCE_EXHAUSTED", 0) / elapsed,
            "late_per_s": statuses.get("DEADLINE_EXCEEDED", 0) / elapsed,
            "p99_ms": step["latency_from_sent_ms"].get("p99")}


def capacity(loads, shape):
    """What one caller sees, the best rate, and the fewest callers that get nearly that."""
    steps = loads(shape, concurrency=f"1:{CALLERS_MAX // 4}:x2")
    alone_ms = steps[0]["latency_from_sent_ms"]["p50"]
    best = max(step["requests_per_s"] for step in steps)
    callers = next(step["concurrency"] for step in steps if step["requests_per_s"] >= 0.95 * best)
    return alone_ms, best, callers


def refusal_seconds(loads, server, shape, alone_ms, best):
    """The server's CPU time for a request that it refuses, as nothing would be in time."""
    loads(shape, concurrency=1)
    before = server.cpu_seconds()
    step, = loads(shape, deadline_ms=max(1, alone_ms / 4), rate=2 * best)
    refused = sum(n for code, n in (step.get("status") or {}).items() if code != "OK")
    return (server.cpu_seconds() - before) / refused if refused > 100 else math.nan


def measure(loads, server, shape, log):
    alone_ms, best, callers = capacity(loads, shape)
    refusal = refusal_seconds(loads, server, shape, alone_ms, best)
    log(f"\n{shape}: {alone_ms:.2f} ms alone, {best:.1f}/s at most, with {callers} callers; "
        f"a refusal takes {refusal * 1e6:.0f} us of the server's CPU time")
    log("| in time, refused, late | "
        + " | ".join(f"deadlines of {n} times that" for n in DEADLINES) + " |")
    log("|---|" + "---|" * len(DEADLINES))
    rows = []
    for kind in ("rate", "concurrency"):
        for times in TIMES:
            amount = best * times if kind == "rate" else math.ceil(callers * times)
            cells = []
            for deadline in DEADLINES:
                step, = loads(shape, deadline_ms=alone_ms * deadline,
                              **{kind: f"{amount:g}"})
                row = {"shape": shape, kind: amount, "times": times, "deadline_times": deadline,
                       **figures(step)}
                row["of_best"] = row["in_time_per_s"] / best
                rows.append(row)
                cells.append(f"{row['of_best']:.0%}, {row['refused_per_s']:.0f}/s, "
                             f"{row['late_per_s']:.0f}/s")
            name = "open" if kind == "rate" else "closed"
            log(f"| {name}, {times:g}x: {amount:g}{'/s' if kind == 'rate' else ' callers'} | "
                + " | ".join(cells) + " |")
    return {"shape": shape, "alone_ms": alone_ms, "best_per_s": best, "callers": callers,
            "refusal_cpu_s": refusal, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--dist", default="dist", help="where attend-server and attend-client are")
    parser.add_argument("--device", default="cpu", help="as attend-server's")
    parser.add_argument("--shape", action="append", help=f"default: {SHAPES}")
    parser.add_argument("--transport", default="auto", help="as attend-client load's; or shm")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--server-flag", action="append", default=[], help="one more, as --lanes=1")
    parser.add_argument("--json", help="writes the figures there")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--device", options.device, *options.server_flag]
        if options.transport == "shm":
            flags += ["--shared-memory", "--shared-memory-socket", f"{folder}/shm.sock"]
        with Server(program(options.dist, "attend-server"), flags, folder) as server:
            client = program(options.dist, "attend-client")
            for _ in range(300):
                info = subprocess.run([client, "--server", server.address, "info"],
                                      capture_output=True, check=False)
                if info.returncode == 0:
                    break
                time.sleep(0.1)
            loads = Loads(client, server, options.seconds, options.connections,
                          options.transport, folder)
            for shape in options.shape or SHAPES[options.device.split(":")[0]]:
                results.append(measure(loads, server, shape, lambda line: print(line, flush=True)))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
