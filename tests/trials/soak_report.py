# SPDX-License-Identifier: Apache-2.0
"""Judges whether a soak's samples are flat, and plots them."""

import re

import numpy as np

SERIES = {"memory_mib": ("resident memory", "MiB"),
          "pools_mib": ("of it pools of a fixed size", "MiB"),
          "rest_mib": ("the rest of it", "MiB"),
          "heap_mib": ("given out by malloc", "MiB"),
          "descriptors": ("descriptors", ""), "threads": ("threads", "")}
# By then, everything that is allocated once exists, and malloc's high-water mark hardly rises. A
# leak continues.
WARM_UP_SHARE = 0.5
# The series that are judged, and how much each may grow after the warm-up, as a share of its level;
# README.md says why. Pools are not judged: settings bound them, and their resident size rises
# whenever more pages are in use at once than before.
GROWTH_MOST = {"rest_mib": 0.03, "heap_mib": 0.01, "descriptors": 0.01, "threads": 0.01}
# gRPC's thread pools start a thread when all of theirs are busy for the first time.
GROWTH_LEAST = {"threads": 2}
STANDARD_ERRORS = 4.0
COLOURS = ("#2b6cb0", "#63b3ed", "#90cdf4", "#805ad5", "#c05621", "#2f855a")


def pools_mib(smaps):
    """Resident MiB of the pools, whose sizes are settings. They are the only mappings that ask for
    huge pages (`hg`)."""
    pools = 0
    for mapping in re.findall(r"(?ms)^Anonymous:.*?^VmFlags:.*?$", smaps):
        if "hg" in mapping.rpartition("VmFlags:")[2].split():
            pools += int(re.match(r"Anonymous: *(\d+) kB", mapping)[1])
    return pools / 1024


def slope(seconds, values):
    """The change over the whole time by a fitted line, and its standard error. Successive samples
    are correlated, so the line is fitted to the means of twelve parts."""
    parts = min(12, len(values))
    x = np.array([part.mean() for part in np.array_split(seconds, parts)])
    y = np.array([part.mean() for part in np.array_split(values, parts)])
    if parts < 3:
        return 0.0, float("inf")
    line, residual = np.polyfit(x, y, 1, full=True)[:2]
    spread = float(residual[0]) if len(residual) else 0.0
    error = np.sqrt(spread / (parts - 2) / np.sum((x - x.mean()) ** 2))
    span = seconds[-1] - seconds[0]
    return float(line[0] * span), float(error * span)


def judge(rows, found):
    """Statistics of each series after the warm-up, and the verdict."""
    rest = rows[int(len(rows) * WARM_UP_SHARE):]
    seconds = np.array([row["seconds"] for row in rest])
    report = {"samples": len(rows), "seconds": rows[-1]["seconds"],
              "requests": rows[-1]["requests"], "faults": found["faults"],
              "calls": sum(count for *_, count in found["outcomes"]), "series": {}, "flat": True}
    codes = {}
    for _, code, count in found["outcomes"]:
        codes[code] = codes.get(code, 0) + count
    report["codes"] = codes
    for name in SERIES:
        values = np.array([row[name] for row in rest], float)
        change, error = slope(seconds, values)
        level = float(np.median(values))
        flat = change <= max(GROWTH_MOST.get(name, 0) * level, GROWTH_LEAST.get(name, 0),
                             STANDARD_ERRORS * error)
        report["series"][name] = {"median": level, "least": float(values.min()),
                                  "most": float(values.max()), "change": round(change, 3),
                                  "error": round(error, 3), "flat": bool(flat)}
        report["flat"] &= bool(flat) or name not in GROWTH_MOST
    return report


def _verdict(name, flat):
    if name not in GROWTH_MOST:
        return "not judged"
    return "flat" if flat else "NOT FLAT"


def describe(report):
    lines = [f"{report['seconds'] / 60:.1f} minutes, {report['calls']} calls of clients that "
             f"lived, {report['requests']:.0f} requests, {len(report['faults'])} faults"]
    lines += [f"{SERIES[name][0]}: {each['median']:g} {SERIES[name][1]} (from {each['least']:g} to "
              f"{each['most']:g}), change {each['change']:+g} +- {each['error']:g}: "
              f"{_verdict(name, each['flat'])}"
              for name, each in report["series"].items()]
    lines += [f"another thread {name} after {seconds / 60:.1f} minutes"
              for seconds, name in report["threads_begun"]]
    lines += [f"TOO FEW {each}" for each in report["too_few"]]
    return "\n".join(lines + [fault["fault"] for fault in report["faults"]])


def plot(rows):
    """An SVG with a panel for each series."""
    width, height, left, gap = 760, 130, 70, 26
    minutes = [row["seconds"] / 60 for row in rows]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
           f'height="{len(SERIES) * (height + gap) + 30}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>']
    for i, (name, (title, unit)) in enumerate(SERIES.items()):
        values = [row[name] for row in rows]
        top, y0 = max(values) * 1.15, 10 + i * (height + gap)
        x = [left + (width - left - 20) * m / minutes[-1] for m in minutes]
        y = [y0 + height * (1 - value / top) for value in values]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
        label = title + (f", {unit}" if unit else "")
        out += [f'<text x="{left}" y="{y0 + 12}">{label}</text>',
                f'<line x1="{left}" y1="{y0 + height}" x2="{width - 20}" y2="{y0 + height}" '
                f'stroke="#999"/>',
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}"/>']
        out += [f'<text x="{left - 6}" y="{y0 + height * (1 - part) + 4:.0f}" '
                f'text-anchor="end">{top * part:.0f}</text>' for part in (0, 0.5, 0.87)]
    bottom = len(SERIES) * (height + gap) + 4
    out += [f'<text x="{left + (width - left - 20) * part:.0f}" y="{bottom + 8}" '
            f'text-anchor="middle">{minutes[-1] * part:.0f}</text>'
            for part in (0, 0.25, 0.5, 0.75, 1)]
    out += [f'<text x="{width / 2}" y="{bottom + 22}" text-anchor="middle">minutes</text>',
            "</svg>"]
    return "\n".join(out) + "\n"
