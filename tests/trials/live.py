# SPDX-License-Identifier: Apache-2.0
"""Callers in one process: live.py OPTIONS. Prints the outcomes and faults to stdout as one JSON
object, also on SIGTERM, and the threads' stacks to stderr on SIGUSR1. tests/trials/fuzz and soak
start several."""

import argparse
import collections
import faulthandler
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in
                ("tests/e2e", "tests/python", "kernels/python")]

import harness  # noqa: E402
import wire  # noqa: E402

harness.use_libraries()

# Relative frequency of each kind of call, by its function's name.
WEIGHTS = {"unary": 30, "stream": 8, "in_chunks": 6, "given_up": 8, "compressed": 1, "session": 15,
           "shared": 5, "oip": 8, "broken": 20, "odd_calls": 4, "empty_stream": 1, "bad_chunks": 3,
           "garbage": 2, "scrape": 1, "reconnect": 0.5}


def kinds():
    """The functions of WEIGHTS."""
    import attention_calls
    import bad_calls
    import stateful_calls

    def reconnect(caller):
        caller.connect()

    def stream(caller):
        attention_calls.stream(caller, bad_calls.spoil)

    found = {"stream": stream, "reconnect": reconnect}
    for module in (bad_calls, stateful_calls, attention_calls):
        for name in WEIGHTS.keys() - found.keys():
            if hasattr(module, name):
                found[name] = getattr(module, name)
    return found


class Run:
    """Runs callers on threads, until they have made their calls, the time is over, or one finds a
    fault."""

    def __init__(self, target, problems, options):
        import caller
        self._options, self._kinds = options, kinds()
        self._only = options.only.split(",") if options.only else list(WEIGHTS)
        self.stop = threading.Event()
        self.faults = []
        self._callers = [caller.Caller(target, problems, options.seed * 1000 + i)
                         for i in range(options.threads)]

    def run(self):
        threads = [threading.Thread(target=self._run, args=(each,)) for each in self._callers]
        for thread in threads:
            thread.start()
        parent = os.getppid()
        for thread in threads:
            while thread.is_alive():  # polls, so that signals are handled
                thread.join(0.2)
                if os.getppid() != parent:  # the runner has died
                    self.stop.set()

    def _run(self, caller):
        from stateful_calls import free_all
        weights = [WEIGHTS[name] for name in self._only]
        calls = self._options.calls // len(self._callers)
        pause = len(self._callers) / self._options.rate if self._options.rate else 0
        until = time.monotonic() + self._options.seconds
        done, step = 0, 0
        while not self.stop.is_set() and done < calls and time.monotonic() < until:
            name = caller.random.choices(self._only, weights)[0]
            step += 1
            before = done
            try:
                self._kinds[name](caller)
            except Exception:  # any exception is a fault to report
                self.faults.append({"caller": caller.seed, "step": step, "kind": name,
                                    "fault": traceback.format_exc()})
                self.stop.set()
            done = sum(caller.outcomes.values())
            if pause:
                self.stop.wait(pause * max(done - before, 1))
        free_all(caller)
        caller.close()

    def report(self):
        outcomes = collections.Counter()
        for each in self._callers:
            outcomes.update(each.outcomes)
        return {"faults": self.faults,
                "unanswered": [each for caller in self._callers for each in caller.unanswered],
                "outcomes": [[kind, code, count] for (kind, code), count in
                             sorted(outcomes.items())]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--metrics", default="")
    parser.add_argument("--regions", default="")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--calls", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--rate", type=float, default=0, help="calls a second; 0: no limit")
    parser.add_argument("--only", default="", help="comma-separated kinds of calls")
    parser.add_argument("--problems", type=int, default=8, help="number of distinct problems")
    parser.add_argument("--locks", help="the file of locks.Locks")
    parser.add_argument("--faults-on-the-way", action="store_true",
                        help="calls may also end as on a lost connection")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as stubs:
        wire.generate(pathlib.Path(stubs))
        import caller
        import problems
        from locks import Locks
        target = caller.Target(options.address, options.metrics, options.regions,
                               locks=options.locks and Locks.read(options.locks))
        if options.faults_on_the_way:
            target.refusals += (caller.CODE.CANCELLED, caller.CODE.DEADLINE_EXCEEDED)
        run = Run(target, problems.Problems.make(options.seed, options.problems), options)
        signal.signal(signal.SIGTERM, lambda *_: run.stop.set())
        faulthandler.register(signal.SIGUSR1)
        print("ready", flush=True)
        run.run()
    json.dump(run.report(), sys.stdout)
    print(flush=True)


if __name__ == "__main__":
    main()
