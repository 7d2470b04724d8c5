#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Charts of what `attend-client load --sessions N --json FILE` measured, over the number of
sessions: tokens per second, and the time of a step.

    for n in 1 4 16 64; do attend-client load --sessions $n --json sessions_$n.json; done
    tests/bench/load_sessions_chart.py --out charts sessions_*.json

Files of one shape, context and method are one line of a chart.
"""

import argparse
import json
import pathlib
import sys

import bench_kernels_chart as chart


def line_name(figures):
    layers = "" if figures["layers"] == 1 else f" x{figures['layers']} layers"
    method = "streams" if figures["method"] == "AttendStream" else "calls"
    return f"{figures['shape']} {figures['context']} tokens{layers}, {method}"


def charts(runs):
    """{file name without ending: Chart} of the loads' JSON."""
    rates, times = {}, {}
    for figures in runs:
        sessions, name = figures["sessions"], line_name(figures)
        if not figures["tokens"]:
            raise ValueError(f"{name}: no token was decoded by {sessions} sessions")
        rates.setdefault(name, []).append((sessions, figures["tokens_per_s"]))
        for quantile in ("p50", "p99"):
            line = times.setdefault(f"{name}, {quantile}", [])
            line.append((sessions, figures["step_ms"][quantile]))
    return {
        "sessions_tokens": chart.Chart("Tokens decoded", "sessions", "tokens/s", rates),
        "sessions_step": chart.Chart("Time of a step", "sessions", "ms", times, log_y=True),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="JSON of the loads")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the charts")
    options = parser.parse_args()
    try:
        made = charts([json.loads(path.read_text(encoding="utf-8")) for path in options.files])
    except (KeyError, ValueError) as fault:
        print(f"load_sessions_chart: {fault}: not the JSON of a load of sessions", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for path in chart.write(made, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
