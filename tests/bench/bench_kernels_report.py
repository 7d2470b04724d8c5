# SPDX-License-Identifier: Apache-2.0
"""The output of bench_kernels.py: Markdown tables, the verdict on every target, charts. Works on
plain values, so that it can be made from a saved JSON file."""

import collections

import bench_kernels_cells as cells
from bench_kernels_chart import Chart

MIB = 2**20


def speed(cell, name):
    """TFLOP/s of a contender, None without a time. "auto" is the kernel that was selected."""
    name = cell["auto"] if name == cells.AUTO else name
    return cell["results"].get(name, {}).get("tflops")


def verdicts(cell):
    """[(ours, rivals, ratio or None, wanted)] of the cell's targets."""
    found = []
    for target in cell["targets"]:
        ours = speed(cell, target["ours"])
        rivals = [s for s in (speed(cell, name) for name in target["rivals"]) if s]
        ratio = ours / max(rivals) if ours and rivals else None
        found.append((target["ours"], target["rivals"], ratio, target["ratio"]))
    return found


def verdict_text(ratio, wanted):
    if ratio is None:
        return "-"
    return f"**{ratio:.2f}** (>= {wanted:.2f} met)" if ratio >= wanted else \
        f"{ratio:.2f} (>= {wanted:.2f} missed)"


def window_times(suite):
    """[(mask, ms or None)] of auto: causal windows from the narrowest on, then the full mask. Empty
    if the suite has no windows; cells of one with windows differ only in the mask."""
    windows = [(cell["shapes"][0]["left"], cell) for cell in suite
               if cell["shapes"][0]["left"] >= 0 and cell["shapes"][0]["right"] == 0]
    if not windows:
        return []
    full = [r["ms"] for cell in suite for name, r in cell["results"].items()
            if name == cells.FULL_OURS and "ms" in r]
    return [*((cell["mask"], cell["results"].get(cell["auto"], {}).get("ms"))
              for _, cell in sorted(windows, key=lambda one: one[0])),
            ("full", min(full, default=None))]


def falls_with_window(times):
    """Whether each of `window_times` is below the next; None if a time is missing."""
    known = [ms for _, ms in times]
    return None if None in known else all(a < b for a, b in zip(known, known[1:]))


def names_of(suite):
    """Contenders of a suite's cells, auto's kernels first, in order of appearance."""
    names = [cell["auto"] for cell in suite]
    names += [name for cell in suite for name in cell["results"]]
    return list(dict.fromkeys(names))


def table(suite):
    """A suite's cells as Markdown: TFLOP/s on visible pairs, one line per cell."""
    names = names_of(suite)
    pairs = list(dict.fromkeys((ours, tuple(rivals)) for cell in suite
                               for ours, rivals, *_ in verdicts(cell)))
    heads = ["fp16 unless said", *names, "auto: ms", "of matmul", "error / bound", "MiB beside"]
    heads += [f"{ours} / {' or '.join(rivals)}" for ours, rivals in pairs]
    lines = [heads, ["---"] * len(heads)]
    for cell in suite:
        own = cell["results"].get(cell["auto"], {})
        line = [cell["name"]]
        for name in names:
            value = speed(cell, name)
            line.append(f"{value:.0f}" if value and value >= 100 else
                        f"{value:.1f}" if value else "-")
        timed, matmul = "ms" in own, cell["matmul_tflops"]
        line += [f"{own['ms']:.3f}" if timed else "-",
                 f"{own['tflops'] / matmul:.0%}" if timed and matmul else "-",
                 f"{own['error_over_bound']:.2f}" if "error_over_bound" in own else "-",
                 f"{own['beside_bytes'] / MIB:.3g}" if "beside_bytes" in own else "-"]
        by_pair = {(ours, tuple(rivals)): verdict_text(ratio, wanted)
                   for ours, rivals, ratio, wanted in verdicts(cell)}
        lines.append(line + [by_pair.get(pair, "") for pair in pairs])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def variants_table(suite):
    """A table of TFLOP/s: compiled variants in lines, cells in columns, the best in bold."""
    columns = [{name: r for name, r in cell["results"].items() if name.startswith("cuda_")}
               for cell in suite]
    names = list(dict.fromkeys(name for column in columns for name in column))
    lines = [["variant", *(cell["name"] for cell in suite)], ["---"] * (len(suite) + 1)]
    for name in names:
        line = [name]
        for column in columns:
            r, best = column.get(name, {}), max(c.get("tflops", 0) for c in column.values())
            value = f"{r['tflops']:.1f}" if "tflops" in r else "-"
            line.append(f"**{value}**" if r.get("tflops") == best else value)
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def faults(report):
    """Wrong answers and failures of attend's kernels, as lines."""
    found = []
    for cell in report["cells"]:
        for name, r in cell["results"].items():
            # A compiled variant may need more resources than this device has.
            refused = "cudaErrorInvalidValue" in r.get("failure", "")
            if name.startswith(("cuda_", "auto")) and not r.get("correct") and not refused:
                found.append(f"{name} at {cell['name']}: {r.get('failure', 'not run')}")
    found += [f"{r['kernel']}, {r['mask']}, {r['case']}: {r['failure']}"
              for r in report.get("redo", []) if "wrong" in r.get("failure", "")]
    found += [f"{r['contender']} at {r['cell']}: {r['failure']}"
              for name in ("decode", "backward", "cliffs", "backward_cliffs")
              for r in report.get(name, [])
              if "wrong" in r.get("failure", "")]
    return found


def notes(suite):
    """Reasons for missing times, and remarks, without duplicates."""
    lines = []
    for cell in suite:
        for name, why in [*cell["refused"].items(),
                          *((n, r["failure"]) for n, r in cell["results"].items()
                            if "failure" in r),
                          *((n, r["note"]) for n, r in cell["results"].items() if r.get("note"))]:
            lines.append(f"{name}: {why}")
        lines.append(f"auto takes {cell['auto']}: {cell['why']}")
    counts = collections.Counter(lines)
    return "\n".join(f"- {line}" + (f" ({count} cells)" if count > 1 else "")
                     for line, count in counts.items())


def summary(report):
    """Numbers of targets met and missed, each missed one, and whether time falls with the
    window."""
    judged = [(cell, *verdict) for cell in report["cells"] for verdict in verdicts(cell)]
    known = [one for one in judged if one[3] is not None]
    missed = [one for one in known if one[3] < one[4]]
    windows = [times for suite in by_suite(report).values() if (times := window_times(suite))]
    fall = [falls_with_window(times) for times in windows]
    lines = [f"Targets: {len(known) - len(missed) + fall.count(True)} met, "
             f"{len(missed) + fall.count(False)} missed, "
             f"{len(judged) - len(known) + fall.count(None)} without a rival or a time."]
    lines += [f"- missed: {cell['name']}: {ours} / {' or '.join(rivals)} {ratio:.3f}, wanted "
              f"{wanted:.2f}" for cell, ours, rivals, ratio, wanted in missed]
    for times, met in zip(windows, fall):
        listed = "; ".join(f"{mask}: -" if ms is None else f"{mask}: {ms:.3f} ms"
                           for mask, ms in times)
        verdict = {True: "met", False: "missed", None: "not judged"}[met]
        lines.append(f"- {verdict}: time falls with the window: {listed}")
    if report.get("left_out"):
        lines.append(f"- not measured, as time ran out: {', '.join(report['left_out'])}")
    return "\n".join(lines)


def by_suite(report):
    suites = collections.defaultdict(list)
    for cell in report["cells"]:
        suites[cell["suite"]].append(cell)
    return suites


def markdown(report):
    """The whole report."""
    rates = collections.defaultdict(list)
    for cell in report["cells"]:
        if cell["matmul_tflops"]:
            rates[cell["shapes"][0]["dtype"]].append(cell["matmul_tflops"])
    lines = [f"# Kernels on {report['device']}", "",
             f"{report['versions']}. Seed {report['seed']}. TFLOP/s on visible pairs, medians of "
             f"interleaved rounds; outputs poisoned, all contenders checked against float64 first."]
    if rates:
        listed = ", ".join(f"{dtype} {min(found):.0f} to {max(found):.0f}"
                           for dtype, found in rates.items())
        lines[-1] += f" Matrix product in the same run, TFLOP/s: {listed}."
    for name, suite in by_suite(report).items():
        lines += ["", f"## {name}", "", variants_table(suite) if report["configs"] == "all" else
                  table(suite), "", notes(suite)]
    if report.get("accuracy"):
        lines += ["", "## Difference to PyTorch, B4 H8 L1024 D64 (stretch: mean <= 2e-4)", "",
                  "| mask | rival | mean | largest |", "|---|---|---|---|"]
        lines += [f"| {a['mask']} | {a['rival']} | {a['mean_abs']:.2e} | {a['max_abs']:.2e} |"
                  if "mean_abs" in a else f"| {a['mask']} | {a['rival']} | {a['failure']} | |"
                  for a in report["accuracy"]]
    if report.get("memory"):
        lines += ["", "## Memory beside Q, K, V and O, B1 H16 D128 (MiB)", ""]
        lines.append(memory_table(report["memory"]))
    if report.get("redo"):
        lines += ["", "## Rows computed again, B1 H16 L4096 D128 bfloat16", "",
                  "| kernel | mask | inputs | ms | of ordinary |", "|---|---|---|---|---|"]
        lines += [f"| {r['kernel']} | {r['mask']} | {r['case']} | " + (
            f"{r['ms']:.3f} | {r['ratio']:.2f} |" if "ms" in r else f"{r['failure']} | |")
                  for r in report["redo"]]
    if report.get("decode"):
        lines += ["", "## Decoding, bfloat16, by graph, K and V not in the cache", "",
                  "| cell | contender | us | TB/s of K and V |", "|---|---|---|---|"]
        lines += [f"| {r['cell']} | {r['contender']} | " + (
            f"{r['us']:.1f} | {r['tbs']:.2f} |" if "us" in r else f"{r['failure']} | |")
                  for r in report["decode"]]
    if report.get("backward"):
        lines.append(backward_table(report["backward"]))
    for name, direction in (("cliffs", "forward"), ("backward_cliffs", "backward")):
        if not report.get(name):
            continue
        lines += ["", f"## Beside the plain {direction} pass", "",
                  "| cell | contender | kernel | ms | TFLOP/s, hidden pairs too | of our plain |",
                  "|---|---|---|---|---|---|"]
        lines += [f"| {r['cell']} | {r['contender']} | {r['kernel']} | " + (
            f"{r['ms']:.3f} | {r['tflops']:.0f} | {r['of_plain']:.2f}x |" if "ms" in r
            else f"{r['failure']} | | |") for r in report[name]]
    return "\n".join([*lines, "", summary(report), ""])


def backward_table(rows):
    """A table with a line for each cell; ratios are the rival's time over ours."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = ["", "## The backward pass: ms, TFLOP/s of five products, a rival's time over ours", "",
             '"=": two runs gave the same bits; "~": they did not.', "",
             "| cell | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for cell in dict.fromkeys(row["cell"] for row in rows):
        of = {row["contender"]: row for row in rows if row["cell"] == cell}
        shown = []
        for name in names:
            row, ours = of.get(name, {}), of[names[0]]
            text = f"{row['ms']:.3f}, {row['tflops']:.0f}" if "ms" in row else "-"
            if name != names[0] and "ms" in row and "ms" in ours:
                text += f", {row['ms'] / ours['ms']:.2f}x"
            if "ms" in row and "same_bits" in row:
                text += " =" if row["same_bits"] else " ~"
            shown.append(text)
        lines.append(f"| {cell} | " + " | ".join(shown) + " |")
    why = collections.Counter(f"{row['contender']}: {row['failure']}" for row in rows
                              if "failure" in row)
    return "\n".join([*lines, "", *(f"- {line} ({n} cells)" for line, n in why.items())])


def memory_table(rows):
    names = list(dict.fromkeys(row["contender"] for row in rows))
    values = {(row["length"], row["contender"]): row["beside_bytes"] / MIB for row in rows}
    lines = [["L", *names], ["---"] * (len(names) + 1)]
    for length in sorted({row["length"] for row in rows}):
        lines.append([str(length), *(f"{values[length, n]:.4g}" if (length, n) in values else "-"
                                     for n in names)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def charts(report):
    """{file name: Chart}: TFLOP/s over L per suite, head dim and mask; memory over L."""
    lines = collections.defaultdict(lambda: collections.defaultdict(list))
    for cell in report["cells"]:
        if len(cell["shapes"]) != 1 or cell["suite"] in ("window", "quick"):
            continue
        shape = cell["shapes"][0]
        dims = f"{shape['dim']}" + (f"_{shape['dim_v']}" if shape["dim_v"] != shape["dim"] else "")
        key = (cell["suite"], dims, shape["heads_q"], shape["dtype"], cell["mask"])
        for name, r in cell["results"].items():
            if "tflops" in r:
                lines[key][name].append((shape["length"], r["tflops"]))
    found = {}
    for (suite, dims, heads, dtype, mask), series in lines.items():
        if max(len(line) for line in series.values()) > 1:
            title = f"D{dims.replace('_', '/')}, {heads} heads, {dtype}, {mask}"
            found[f"tflops_{suite}_d{dims}_{dtype}_{mask}"] = Chart(
                title, "sequence length", "TFLOP/s on visible pairs",
                {name: line for name, line in series.items() if len(line) > 1})
    if report.get("memory"):
        series = collections.defaultdict(list)
        for row in report["memory"]:
            # On the logarithmic axis, less than a KiB is shown as a KiB.
            series[row["contender"]].append((row["length"], max(row["beside_bytes"], 1024) / MIB))
        found["memory"] = Chart("Memory beside Q, K, V and O: B1 H16 D128 fp16", "sequence length",
                                "MiB", dict(series), log_y=True)
    return found
