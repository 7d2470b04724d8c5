#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The effect of one tenant's overload on another: compared with a tenant at exactly its share, one
that sends ten times as much may raise the other's p99 by at most 20 % and lower its rate by at most
5 %.

    tests/bench/bench_neighbours.py [--bin FOLDER] [--device cpu|cuda:0] [--shape SHAPE] ...

Starts a server with the tenants quiet and loud, measures its capacity (closed loop) and the cost of
a request, and limits loud (--limits) to `--share` of the capacity. Both then send at that rate in
an open loop; in turns with that, loud sends at `--times` its rate and is refused. Nothing is
retried, so loud ignores the server's pushback. Each round has both, in alternating order; ratios
are medians of the rounds' ratios. Exit code 1 if a target is missed. Needs only Python.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
P99_RATIO_MAX = 1.20
RATE_RATIO_MIN = 0.95
CORES_TO_PIN = 8  # with fewer cores, server and clients share all of them


def cores_of(count):
    """The cores of server, quiet and loud; None: any."""
    if count < CORES_TO_PIN:
        return None, None, None
    quarter = count // 4
    server = count - 2 * quarter
    return (range(server), range(server, server + quarter), range(server + quarter, count))


def pinned(cores, command):
    command = [str(word) for word in command]
    return command if cores is None else \
        ["taskset", "-c", f"{cores[0]}-{cores[-1]}", *command]


class Server:
    def __init__(self, args, folder, cores):
        self.limits = folder / "limits.toml"
        self.limits.write_text("")
        ready = folder / "ready.json"
        self.log = open(folder / "server.log", "wb")
        command = [args.bin / "attend-server", "--device", args.device, "--tenant=quiet=1,loud=1",
                   f"--limits={self.limits}", "--listen", "127.0.0.1:0", "--metrics-listen",
                   "127.0.0.1:0", "--ready-file", ready, "--log-level", "error", "--shared-memory",
                   "--shared-memory-socket", folder / "shm.sock", *args.server_flag]
        self.process = subprocess.Popen(pinned(cores, command), stdout=self.log, stderr=self.log)
        while not ready.exists():
            if self.process.poll() is not None:
                sys.exit((folder / "server.log").read_text())
            time.sleep(0.05)
        self.ready = json.loads(ready.read_text())

    def metric(self, name, **labels):
        with urllib.request.urlopen(f"http://{self.ready['metrics']}/metrics", timeout=10) as page:
            text = page.read().decode()
        for line in text.splitlines():
            match = re.fullmatch(name + r"\{(.*)\} (\S+)", line)
            if match and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[1])).items():
                return float(match[2])
        raise KeyError(name)

    def set_limits(self, text):
        self.limits.write_text(text)
        before = self.metric("attend_reloads_total", result="ok")
        self.process.send_signal(signal.SIGHUP)
        while self.metric("attend_reloads_total", result="ok") == before:
            time.sleep(0.01)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.log.close()


class Load:
    """A running attend-client load."""

    def __init__(self, args, server, tenant, cores, flags):
        self.path = server.limits.parent / f"{tenant}.json"
        self.path.unlink(missing_ok=True)
        command = [args.bin / "attend-client", "load", "--server", server.ready["listen"][0],
                   "--tenant", tenant, "--shape", args.shape, "--transport", args.transport,
                   "--connections", args.connections, "--json", self.path, "--quiet",
                   "--allow", "RESOURCE_EXHAUSTED", *flags]
        self.process = subprocess.Popen(pinned(cores, command), stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)

    def step(self):
        text, _ = self.process.communicate()
        # Exit code 1 means that some requests were due and never sent, which the figures show.
        if self.process.returncode not in (0, 1) or not self.path.exists():
            sys.exit(f"attend-client ended with {self.process.returncode}:\n{text}")
        return json.loads(self.path.read_text())["steps"][0]


def measure(args, server, cores, rate, times):
    """Quiet's figures while loud sends `times` its share."""
    _, quiet_cores, loud_cores = cores
    loud = Load(args, server, "loud", loud_cores,
                ["--rate", rate * times, "--arrivals", "constant", "--warmup", 0,
                 "--duration", args.seconds + 3, "--max-outstanding", args.outstanding])
    quiet = Load(args, server, "quiet", quiet_cores,
                 ["--rate", rate, "--warmup", 1.5, "--duration", args.seconds,
                  "--max-outstanding", args.outstanding])
    step, loud_step = quiet.step(), loud.step()
    return {"quiet_p50_ms": step["latency_from_intended_ms"]["p50"],
            "quiet_p99_ms": step["latency_from_intended_ms"]["p99"],
            "quiet_per_s": step["requests_per_s"],
            "quiet_refused": step["status"].get("RESOURCE_EXHAUSTED", 0),
            "loud_offered_per_s": loud_step["sent"] / loud_step["elapsed_s"],
            "loud_per_s": loud_step["requests_per_s"],
            "loud_refused": loud_step["status"].get("RESOURCE_EXHAUSTED", 0)}


def prepare(args, server, cores):
    """The cost of a request, and the rate of a tenant's share, which becomes loud's limit."""
    key = {"gflop": "cost", "bytes": "bytes"}[args.limit]
    huge = {"gflop": "gflop-per-second = 0.001\ngflop-burst = 1e9\n",
            "bytes": "bytes-per-second = 1\nbytes-burst = 1024TiB\n"}[args.limit]
    server.set_limits("[loud]\n" + huge)
    Load(args, server, "loud", cores[2], ["--count", 1, "--warmup", 0]).step()
    cost = server.metric("attend_tenant_used", tenant="loud", limit=key)
    closed = ["--concurrency", args.concurrency, "--duration", args.seconds]
    capacity = Load(args, server, "quiet", cores[1], closed).step()["requests_per_s"]
    rate = args.share * capacity
    # A burst of a second would affect some rounds and not others.
    burst = max(0.1 * rate, 2) * cost
    amount, most = (f"gflop-per-second = {rate * cost / 1e9:.6f}",
                    f"gflop-burst = {burst / 1e9:.6f}") if args.limit == "gflop" else \
        (f"bytes-per-second = {int(rate * cost)}B", f"bytes-burst = {int(burst)}B")
    server.set_limits(f"[loud]\n{amount}\n{most}\n")
    print(f"{args.device}: {args.shape} over {args.transport}: {capacity:.1f} requests/s at most, "
          f"{cost:.4g} {key} units each; share {rate:.1f}/s; loud's limit: {amount}", flush=True)
    return {"capacity_per_s": capacity, "rate_per_s": rate, "request_units": cost,
            "limit": amount}


def run(args, folder):
    cores = cores_of(os.cpu_count())
    server = Server(args, folder, cores[0])
    try:
        result = prepare(args, server, cores)
        rounds = []
        for n in range(args.rounds):
            order = (1, args.times) if n % 2 == 0 else (args.times, 1)
            both = {times: measure(args, server, cores, result["rate_per_s"], times)
                    for times in order}
            at, over = both[1], both[args.times]
            rounds.append({"at": at, "over": over,
                           "p99_ratio": over["quiet_p99_ms"] / at["quiet_p99_ms"],
                           "rate_ratio": over["quiet_per_s"] / at["quiet_per_s"]})
            print(f"round {n + 1}: p99 {at['quiet_p99_ms']:.2f} -> {over['quiet_p99_ms']:.2f} ms, "
                  f"rate {at['quiet_per_s']:.1f} -> {over['quiet_per_s']:.1f}/s; loud got "
                  f"{at['loud_per_s']:.1f} -> {over['loud_per_s']:.1f} of "
                  f"{over['loud_offered_per_s']:.1f}/s", flush=True)
    finally:
        server.stop()
    for name in ("p99_ratio", "rate_ratio"):
        result[name] = statistics.median(each[name] for each in rounds)
    return {**result, "rounds": rounds}


def main():
    build = pathlib.Path(os.environ.get("ATTEND_BIN_DIR") or ROOT / "dist/bin")
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bin", type=pathlib.Path, default=build,
                        help="folder of attend-server and attend-client (deploy/make-dist)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="B1,H1,L4096,D64,dtype=float16")
    parser.add_argument("--transport", default="inline")
    parser.add_argument("--limit", choices=("gflop", "bytes"), default="gflop")
    parser.add_argument("--share", type=float, default=0.35, help="of the capacity, for quiet")
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=8, help="seconds per measurement")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=16, help="to measure the capacity")
    parser.add_argument("--outstanding", type=int, default=256, help="most in flight per tenant")
    parser.add_argument("--server-flag", action="append", default=[])
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, pathlib.Path(folder))
    facts = {"device": args.device, "shape": args.shape, "transport": args.transport,
             "cores": os.cpu_count(), "times": args.times, "share": args.share}
    if args.json:
        args.json.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    good = result["p99_ratio"] <= P99_RATIO_MAX and result["rate_ratio"] >= RATE_RATIO_MIN
    print(f"quiet's p99 {result['p99_ratio']:.3f}x (at most {P99_RATIO_MAX}x), its rate "
          f"{result['rate_ratio']:.3f}x (at least {RATE_RATIO_MIN}x): "
          f"{'met' if good else 'MISSED'}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
