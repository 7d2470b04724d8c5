# SPDX-License-Identifier: Apache-2.0
"""Line charts as SVG with nothing but the standard library, and as PNG where matplotlib is."""

import dataclasses
import html
import math
import pathlib

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 40, 50  # margins; the legend stands in the right one
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8f5fa8", "#c98a1b", "#4a4a4a", "#2aa198", "#a05a2c")


@dataclasses.dataclass
class Chart:
    """`series` maps a name to [(x, y)], x positive. x is on a base-2 logarithmic axis; y begins at
    0, or is logarithmic too."""
    title: str
    x_label: str
    y_label: str
    series: dict
    log_y: bool = False


def short(value):
    """16384 as 16k; 0.5 as 0.5."""
    for unit, suffix in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value // unit:.0f}{suffix}"
    return f"{value:g}"


def _ticks(low, high, log_y):
    if log_y:
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        return [2.0**p for p in powers][::max(1, len(powers) // 8)]
    step = 10 ** math.floor(math.log10(high))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 8)
    return [n * step for n in range(int(high / step) + 1)]


class _Axes:
    def __init__(self, chart):
        points = [point for line in chart.series.values() for point in line]
        xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
        self.xs, self.log_y = xs, chart.log_y
        self.low, self.high = (min(ys), max(ys)) if chart.log_y else (0, max(ys) * 1.05)
        if self.low == self.high:
            self.high = self.low * 2 + 1

    def x(self, value):
        low, high = math.log2(self.xs[0]), math.log2(self.xs[-1])
        share = (math.log2(value) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        low, high = self.low, self.high
        if self.log_y:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _text(x, y, words, anchor="middle", extra=""):
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}'
    return f"<text {place}>{html.escape(words)}</text>"


def svg(chart):
    """The chart as SVG's text."""
    axes, right, bottom = _Axes(chart), WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
             f'font-family="sans-serif" font-size="12" fill="#222">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             _text((LEFT + right) / 2, 22, chart.title, extra=' font-size="15"')]
    for tick in _ticks(axes.low, axes.high, chart.log_y):
        y = axes.y(tick)
        if TOP - 1 <= y <= bottom + 1:
            parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
            words = f"{tick:.0f}" if tick >= 10 else f"{tick:.3g}"
            parts.append(_text(LEFT - 6, y + 4, words, "end"))
    for x in axes.xs:
        parts.append(_text(axes.x(x), bottom + 18, short(x)))
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#222"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, chart.x_label))
    middle = (TOP + bottom) / 2
    parts.append(_text(16, middle, chart.y_label, extra=f' transform="rotate(-90 16 {middle})"'))
    for n, (name, line) in enumerate(chart.series.items()):
        colour = COLOURS[n % len(COLOURS)]
        places = [(axes.x(x), axes.y(y)) for x, y in sorted(line)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        key = TOP + 8 + 20 * n
        parts.append(f'<path d="M{right + 14} {key}h22" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(right + 42, key + 4, name, "start"))
    return "\n".join([*parts, "</svg>\n"])


def png(chart, path):
    """Writes the chart with matplotlib. Raises ImportError without it."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7.6, 4.2))
    for n, (name, line) in enumerate(chart.series.items()):
        axes.plot(*zip(*sorted(line)), "o-", label=name, color=COLOURS[n % len(COLOURS)])
    ticks = sorted({x for line in chart.series.values() for x, _ in line})
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [short(x) for x in ticks])
    if chart.log_y:
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#ddd")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def write(charts, folder):
    """Writes {file name without ending: Chart} as SVG, and PNG if matplotlib is there. Returns what
    was written."""
    folder, written = pathlib.Path(folder), []
    for name, chart in charts.items():
        path = folder / f"{name}.svg"
        path.write_text(svg(chart), encoding="utf-8")
        written.append(path)
        try:
            png(chart, folder / f"{name}.png")
            written.append(folder / f"{name}.png")
        except ImportError:
            pass
    return written
