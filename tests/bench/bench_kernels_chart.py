# SPDX-License-Identifier: Apache-2.0
"""Line charts as SVG, with the standard library only."""

import dataclasses
import html
import math
import pathlib

WIDTH, HEIGHT = 760, 420
PANEL_WIDTH, PANEL_HEIGHT = 450, 300
HEAD = 86  # above a figure's panels: title, subtitle, legend
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8f5fa8", "#c98a1b", "#4a4a4a", "#2aa198", "#a05a2c")
DASHES = ("", "7 4", "2 3")  # distinguish lines that overlap
LABEL_APART = 30
ABSENT_SHARE = 0.16  # share of a logarithmic axis for the marks at its top


@dataclasses.dataclass
class Chart:
    """`series` maps a name to [(x, y)] with positive x. The x axis is logarithmic to base 2; the y
    axis starts at 0 or is logarithmic too. `absent` maps a name to the xs without a y, which are
    marked at the top."""
    title: str
    x_label: str
    y_label: str
    series: dict
    log_y: bool = False
    absent: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Figure:
    """Charts side by side, in `columns`, with one legend. `absent`: the meaning of their marks."""
    title: str
    subtitle: str
    panels: list
    columns: int = 2
    absent: str = ""

    def names(self):
        return list(dict.fromkeys(name for panel in self.panels
                                  for name in [*panel.series, *panel.absent]))

    def styles(self):
        """{name: (colour, dashes)}."""
        return {name: (COLOURS[n % len(COLOURS)], DASHES[n % len(DASHES)])
                for n, name in enumerate(self.names())}


def short(value):
    """16384 as 16k; 0.5 as 0.5."""
    for unit, suffix in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value // unit:.0f}{suffix}"
    return f"{value:g}"


def _ticks(low, high, log_y):
    if log_y:
        digits = (1,) if high / low > 200 else (1, 2, 5)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [digit * 10.0**power for power in powers for digit in digits
                if low <= digit * 10.0**power <= high]
    step = 10 ** math.floor(math.log10(high))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 8)
    return [n * step for n in range(int(high / step) + 1)]


class _Axes:
    """Maps a chart's numbers to positions in a box (left, top, right, bottom)."""

    def __init__(self, chart, box):
        points = [point for line in chart.series.values() for point in line]
        absent = [x for line in chart.absent.values() for x in line]
        self.xs, ys = sorted({*(x for x, _ in points), *absent}), [y for _, y in points]
        self.box, self.log_y = box, chart.log_y
        self.low, self.high = 0, max(ys) * 1.05
        if chart.log_y:
            self.low, self.high = min(ys) * 0.8, max(ys) * 1.25
            self.high *= (self.high / self.low) ** (ABSENT_SHARE if absent else 0)

    def x(self, value):
        low, high = math.log2(self.xs[0]), math.log2(self.xs[-1])
        share = (math.log2(value) - low) / (high - low) if high > low else 0.5
        return self.box[0] + share * (self.box[2] - self.box[0])

    def y(self, value):
        low, high = self.low, self.high
        if self.log_y:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return self.box[3] - (value - low) / (high - low) * (self.box[3] - self.box[1])

    def labelled(self):
        """The xs with room for a label, from the last one down."""
        found = []
        for x in reversed(self.xs):
            if not found or self.x(found[-1]) - self.x(x) >= LABEL_APART:
                found.append(x)
        return found


def _text(x, y, words, anchor="middle", extra=""):
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}'
    return f"<text {place}>{html.escape(words)}</text>"


def _page(width, height, parts):
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def _line(path, style):
    colour, dashes = style
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"' + (
        f' stroke-dasharray="{dashes}"/>' if dashes else "/>")


def _panel(chart, box, styles):
    """A chart without its legend, with its axes in `box`."""
    axes, (left, top, right, bottom) = _Axes(chart, box), box
    parts = [_text((left + right) / 2, top - 14, chart.title, extra=' font-size="14"')]
    for tick in _ticks(axes.low, axes.high, chart.log_y):
        y = axes.y(tick)
        if top - 1 <= y <= bottom + 1:
            parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
            words = f"{tick:.0f}" if tick >= 10 else f"{tick:.3g}"
            parts.append(_text(left - 6, y + 4, words, "end"))
    parts += [_text(axes.x(x), bottom + 18, short(x)) for x in axes.labelled()]
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#222"/>')
    parts.append(_text((left + right) / 2, bottom + 38, chart.x_label))
    middle = (top + bottom) / 2
    parts.append(_text(left - 48, middle, chart.y_label,
                       extra=f' transform="rotate(-90 {left - 48} {middle})"'))
    for n, (name, xs) in enumerate(chart.absent.items()):
        y, colour = top + 8 + 11 * n, styles[name][0]
        parts += [f'<path d="M{axes.x(x) - 4:.1f} {y - 4}l8 8m0 -8l-8 8" stroke="{colour}" '
                  f'stroke-width="2"/>' for x in xs]
    for name, line in chart.series.items():
        places = [(axes.x(x), axes.y(y)) for x, y in sorted(line)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(_line("M" + path, styles[name]))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{styles[name][0]}"/>'
                  for x, y in places]
    return parts


def _key(x, y, name, style):
    return [_line(f"M{x} {y}h22", style), _text(x + 28, y + 4, name, "start")]


def svg(chart):
    """The chart as SVG text."""
    if isinstance(chart, Figure):
        return _figure_svg(chart)
    styles = {name: (colour, "") for name, (colour, _) in Figure("", "", [chart]).styles().items()}
    parts = _panel(chart, (70, 40, WIDTH - 210, HEIGHT - 50), styles)
    for n, (name, style) in enumerate(styles.items()):
        parts += _key(WIDTH - 196, 48 + 20 * n, name, style)
    return _page(WIDTH, HEIGHT, parts)


def _figure_svg(figure):
    rows = -(-len(figure.panels) // figure.columns)
    width, height = PANEL_WIDTH * figure.columns, HEAD + PANEL_HEIGHT * rows
    parts = [_text(width / 2, 24, figure.title, extra=' font-size="17"'),
             _text(width / 2, 44, figure.subtitle, extra=' fill="#666"')]
    styles, x = figure.styles(), 24
    for name, style in styles.items():
        parts += _key(x, 68, name, style)
        x += 52 + 7 * len(name)
    if figure.absent and any(panel.absent for panel in figure.panels):
        parts.append(_text(x, 72, "× " + figure.absent, "start"))
    for n, panel in enumerate(figure.panels):
        left = PANEL_WIDTH * (n % figure.columns) + 68
        top = HEAD + PANEL_HEIGHT * (n // figure.columns) + 32
        parts += _panel(panel, (left, top, left + PANEL_WIDTH - 92, top + PANEL_HEIGHT - 90),
                        styles)
    return _page(width, height, parts)


def write(charts, folder):
    """Writes {file name without suffix: Chart or Figure} as SVG. Returns the paths."""
    folder, written = pathlib.Path(folder), []
    for name, chart in charts.items():
        path = folder / f"{name}.svg"
        path.write_text(svg(chart), encoding="utf-8")
        written.append(path)
    return written
