# SPDX-License-Identifier: Apache-2.0
"""The output of compare_standard.py, Markdown tables and figures, made from a report's plain
values."""

import compare_standard_cells as standard
from bench_kernels_chart import Chart, Figure

DOES_NOT_FIT = "does not fit"
GIB = 2**30


def _ordered(rows):
    """Contenders: ours first, then from the fastest kind to standard attention."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    order = (standard.OURS, standard.CUDNN, standard.FLASH, standard.CPU_FLASH, standard.MATH,
             standard.UNFUSED, standard.NAIVE)
    return sorted(names, key=order.index)


def _table(heads, lines):
    cells = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)


def _number(value):
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _time(row, ours):
    """ms, spread, and the ratio to ours."""
    if row is None:
        return "-"
    if "ms" not in row:
        return row["failure"]
    text = _number(row["ms"]) + (f" ±{row['spread']:.0%}" if row["spread"] > 0.05 else "")
    other = ours is not None and ours is not row and "ms" in ours
    return text + (f", {row['ms'] / ours['ms']:.2f}x" if other else "")


def _grouped(rows, *keys):
    found = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def _times_tables(rows):
    parts = []
    for (title,), of_workload in _grouped(rows, "title").items():
        names, lines = _ordered(of_workload), []
        for (way, mask, length), some in _grouped(of_workload, "pass", "mask", "length").items():
            by_name = {row["contender"]: row for row in some}
            ours = by_name.get(standard.OURS)
            lines.append([f"{way}, {mask}, L{length}",
                          *(_time(by_name.get(name), ours) for name in names)])
        order = [standard.FORWARD, standard.BACKWARD]
        lines.sort(key=lambda line: order.index(line[0].split(",")[0]))
        parts += [f"### {title}", "", _table(["ms, times ours", *names], lines), ""]
    return parts


def _error_table(rows):
    """Mean and largest differences from float64, the largest of all cells."""
    names, found = _ordered(rows), {}
    for row in rows:
        for tensor, errors in (row.get("errors") or {}).items():
            key = (row["title"], tensor, row["contender"])
            before = found.get(key, (0.0, 0.0))
            found[key] = (max(before[0], errors["mean"]), max(before[1], errors["largest"]))
    lines = []
    for title, tensor in dict.fromkeys(key[:2] for key in found):
        line = [f"{title}: {tensor}"]
        for name in names:
            worst = found.get((title, tensor, name))
            line.append("-" if worst is None else f"{worst[0]:.1e}, {worst[1]:.1e}")
        lines.append(line)
    return _table(["mean, largest", *names], lines)


def _each(names, some, text):
    """The cells of a line: `text` of each contender's row, the reason why it has no value, or
    "-"."""
    by_name = {row["contender"]: row for row in some}
    return ["-" if name not in by_name else by_name[name].get("failure") or text(by_name[name])
            for name in names]


def _memory_table(rows):
    names = _ordered(rows)
    lines = [[f"{way}, L{length}",
              *_each(names, some, lambda row: f"{row['bytes'] / 2**20:.0f}")]
             for (way, length), some in sorted(_grouped(rows, "pass", "length").items())]
    return _table(["MiB", *names], lines)


def _batch_table(rows):
    names = _ordered(rows)
    lines = [[f"{cell}, {way}",
              *_each(names, some, lambda row: f"{row['batch']} "
                                              f"({row['bytes_each'] / 2**20:.0f} MiB each)")]
             for (cell, way), some in _grouped(rows, "cell", "pass").items()]
    return _table(["largest batch", *names], lines)


def _training_table(rows):
    names, lines = _ordered(rows), []
    for (cell,), some in _grouped(rows, "cell").items():
        by_name = {row["contender"]: row for row in some}
        ours = by_name.get(standard.OURS)
        rivals = [row["ms"] for row in some if row is not ours and "ms" in row]
        ratio = min(rivals) / ours["ms"] if rivals and ours and "ms" in ours else None
        lines.append([cell, *(_time(by_name.get(name), ours) for name in names),
                      "-" if ratio is None else f"**{ratio:.2f}**" if ratio >= 1.05 else
                      f"{ratio:.2f}", f"{ours['host_ms']:.2f}" if "host_ms" in (ours or {}) else
                      "-"])
    return _table(["ms, times ours", *names, "best rival / ours", "host's part of ours, ms"], lines)


def _amx_table(rows, plain):
    """PyTorch with AMX, compared with our times from the race without."""
    keys = ("title", "pass", "mask", "length")
    ours = {tuple(row[key] for key in keys): row for row in plain
            if row["contender"] == standard.OURS}
    names, lines = _ordered(rows), []
    for key, some in _grouped(rows, *keys).items():
        by_name = {row["contender"]: row for row in some}
        lines.append([f"{key[0]}: {key[1]}, {key[2]}, L{key[3]}",
                      *(_time(by_name.get(name), ours.get(key)) for name in names)])
    return _table(["with AMX: ms, times ours without", *names], lines)


def markdown(report):
    lines = [f"# Attention and standard attention on {report['device']}", "",
             f"{report['versions']}. Seed {report['seed']}. Milliseconds, medians of interleaved "
             f"rounds; ± where half the distance between quartiles is above 5 %. All are "
             f"checked against float64 first. {report.get('remarks', '')}".rstrip(), ""]
    if report.get("times"):
        lines += _times_tables(report["times"])
        lines += ["### Largest differences from float64 over all lengths and masks", "",
                  _error_table(report["times"]), ""]
    if report.get("amx"):
        lines += ["### With AMX, for information", "", _amx_table(report["amx"], report["times"]),
                  ""]
    if report.get("memory"):
        lines += ["### Peak memory: B1 H16 D128 fp16, including inputs and outputs", "",
                  _memory_table(report["memory"]), ""]
    if report.get("batches"):
        lines += [f"### The largest batch in {standard.LIMIT_BYTES // GIB} GiB", "",
                  _batch_table(report["batches"]), ""]
    if report.get("training"):
        lines += ["### Forward + backward through attend.torch, autograd on", "",
                  _training_table(report["training"]), ""]
    return "\n".join(lines)


def summary(report):
    """A few lines for the end of a log."""
    lines = []
    for key in ("times", "training"):
        rows = report.get(key, [])
        for name in _ordered(rows):
            ratios = []
            grouped = _grouped(rows, "cell") if key == "training" else \
                _grouped(rows, "workload", "pass", "mask", "length")
            for some in grouped.values():
                by_name = {row["contender"]: row for row in some}
                pair = [by_name.get(standard.OURS, {}), by_name.get(name, {})]
                if name != standard.OURS and all("ms" in row for row in pair):
                    ratios.append(pair[1]["ms"] / pair[0]["ms"])
            if ratios:
                lines.append(f"{key}: {name} takes {min(ratios):.2f} to {max(ratios):.2f} times "
                             f"ours, in {len(ratios)} cells")
    lines += [f"FAILED {fault}" for fault in faults(report)]
    lines += [f"WRONG answers of rivals: {wrong}" for wrong in wrong_rivals(report)]
    return "\n".join(lines)


def _failures(report):
    """(contender, failure, line that describes it), except for runs that do not fit."""
    for key in ("times", "amx", "memory", "batches", "training"):
        for row in report.get(key, []):
            failure = row.get("failure")
            if failure not in (None, DOES_NOT_FIT):
                where = row.get("cell") or f"{row.get('title', key)} L{row['length']}"
                yield row["contender"], failure, (
                    f"{row['contender']} at {where}, {row.get('pass', 'step')}: {failure}")


def faults(report):
    """Wrong and missing answers of attend."""
    return [text for contender, _, text in _failures(report) if contender == standard.OURS]


def wrong_rivals(report):
    """Wrong answers of others. What they do not support is only shown in the tables."""
    return [text for contender, failure, text in _failures(report)
            if contender != standard.OURS and "wrong" in failure]


def _panel(title, rows, value, y_label):
    """A chart of the rows' `value`; rows that did not fit are marked."""
    series, absent = {}, {}
    for name in _ordered(rows):
        own = [row for row in rows if row["contender"] == name]
        line = [(row["length"], value(row)) for row in own if "failure" not in row]
        gone = [row["length"] for row in own if row.get("failure") == DOES_NOT_FIT]
        if line:
            series[name] = line
        if gone:
            absent[name] = gone
    return Chart(title, "sequence length L", y_label, series, log_y=True, absent=absent)


def figures(report):
    """{file name: Figure}."""
    subtitle = f"{report['device']}; {report['versions']}"
    found = {}
    for (key, title), rows in _grouped(report.get("times", []), "workload", "title").items():
        panels = [_panel(f"{way}, {mask}", some, lambda row: row["ms"], "ms")
                  for (way, mask), some in sorted(_grouped(rows, "pass", "mask").items(),
                                                  key=lambda one: (one[0][0] != "forward",
                                                                   one[0][1] != "full"))]
        panels = [panel for panel in panels if panel.series]
        if panels:
            found[f"standard_{key}"] = Figure(f"Attention, {title}", subtitle, panels,
                                              absent=DOES_NOT_FIT)
    memory = report.get("memory", [])
    panels = [_panel(way, some, lambda row: row["bytes"] / GIB, "GiB")
              for (way,), some in _grouped(memory, "pass").items()]
    if panels:
        found["standard_memory"] = Figure(
            "Peak memory with inputs and outputs, B1 H16 D128 fp16", subtitle, panels,
            absent=DOES_NOT_FIT)
    return found
