# SPDX-License-Identifier: Apache-2.0
"""Taking turns on one GPU: contenders are checked, then timed in interleaved rounds."""

import gc
import statistics
import time

import torch

import bench_kernels_contenders as entries

CALLS_MAX = 200  # per round; beyond about 1000 launches the host would wait
CALLS_BEHIND = 10  # least per round, if the GPU does not wait until all are enqueued
CYCLES_PER_MS = 2_000_000  # for torch.cuda._sleep, at an H200's highest clock
DOES_NOT_FIT = "does not fit"


class Clock:
    """Times `contender.run(n)`, n below `sets`, in rounds of several calls."""

    def __init__(self, contender, sets, options, contenders=1, ahead=True):
        """`contenders`: the number that share options.seconds_per_cell. `ahead`: the GPU waits
        until the host has enqueued all calls, so that there are no gaps between them."""
        self.contender, self.sets, self.times_ms, self.ahead = contender, sets, [], ahead
        with contender.context():
            contender.run(0)
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start = time.perf_counter()
            begin.record()
            for n in range(3):
                contender.run(n % sets)
            self.host_ms = (time.perf_counter() - start) * 1e3 / 3
            end.record()
            end.synchronize()
        self.ms = max(begin.elapsed_time(end) / 3, 1e-3)
        self.calls = max(1 if ahead else CALLS_BEHIND,
                         min(CALLS_MAX, round(options.round_ms / self.ms)))
        share_ms = options.seconds_per_cell * 1e3 / contenders
        self.rounds = max(3, min(options.rounds, int(share_ms / (self.ms * self.calls))))

    def time_round(self, turn):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.contender.context():
            if self.ahead:
                host = self.calls * self.host_ms if self.host_ms > self.ms / 4 else 0.05
                torch.cuda._sleep(int(min(1.3 * host + 0.1, 40) * CYCLES_PER_MS))
            begin.record()
            for n in range(self.calls):
                self.contender.run((turn + n) % self.sets)
            end.record()
        end.synchronize()
        self.times_ms.append(begin.elapsed_time(end) / self.calls)


def take_turns(clocks):
    """Runs all rounds of all clocks, each round in another order."""
    for turn in range(max((clock.rounds for clock in clocks), default=0)):
        for n in range(len(clocks)):
            clock = clocks[(n + turn) % len(clocks)]
            if turn < clock.rounds:
                clock.time_round(turn)


def spread(times):
    """Half the interquartile range, relative to the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def reason(failure):
    """A short description of an exception."""
    if isinstance(failure, torch.OutOfMemoryError):
        return DOES_NOT_FIT
    return (str(failure).splitlines() or [type(failure).__name__])[0][:120]


def _check(contender, sets, judge, result):
    """Whether a contender may be timed. Runs it twice, to compare the bits."""
    contender.prepare(sets)
    with contender.context():
        contender.poison(0)
        outputs = contender.run(0)
        torch.cuda.synchronize()
        result["errors"], fault = judge(outputs)
        if fault:
            result["failure"] = f"wrong answer ({fault}): not timed"
            return False
        first = [output.clone() for output in outputs]
        del outputs
        contender.poison(0)
        result["same_bits"] = all(map(torch.equal, contender.run(0), first))
    if contender.is_attend and not result["same_bits"]:
        result["failure"] = "wrong answer (two runs differ in bits): not timed"
    return "failure" not in result


def compete(contenders, sets, judge, options, ahead=True):
    """{name: result}. `judge` maps outputs to (errors, fault or None). A result has these `errors`,
    `same_bits`, and either `ms`, `spread` and `host_ms` (the time to enqueue), or a `failure`."""
    results, clocks = {c.name: {} for c in contenders}, []
    for contender in contenders:
        result = results[contender.name]
        try:
            if _check(contender, sets, judge, result):
                clocks.append(Clock(contender, len(sets), options, len(contenders), ahead))
        except (entries.CannotRun, RuntimeError, TypeError, AttributeError) as failure:
            result["failure"] = reason(failure)
            if contender.is_attend and "illegal" in str(failure):
                raise  # the CUDA context is unusable from here on
        if "failure" in result:
            contender.release()
            gc.collect()
            torch.cuda.empty_cache()
    take_turns(clocks)
    for clock in clocks:
        results[clock.contender.name].update(ms=statistics.median(clock.times_ms),
                                             spread=spread(clock.times_ms), calls=clock.calls,
                                             rounds=clock.rounds, host_ms=clock.host_ms)
    for contender in contenders:
        contender.release()
    return results
