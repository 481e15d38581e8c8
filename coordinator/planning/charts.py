"""Charts as SVG: lines and bars with axes, labels and a legend, readable on light and dark pages.

No library: matplotlib would be some 60 MB beside the coordinator for a few lines. The same figures give the same bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 76, 44, 540, 362
COLOURS: Final = ("#1b6ca8", "#e07a3f", "#3f7d4e", "#8a4fa3", "#b3541e", "#4d9de0", "#c2a83e", "#6c757d")
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#24313c}.title{font-weight:600;font-size:15px}"
    ".axis{stroke:#24313c;fill:none}.grid{stroke:#d5dde3}.curve{fill:none;stroke-width:2.2}"
    ".mark{stroke:#b3261e;stroke-dasharray:5 4}"
    "@media(prefers-color-scheme:dark){text{fill:#dbe4ea}.axis{stroke:#dbe4ea}.grid{stroke:#3a4650}}"
)
_TICKS: Final = 5
# A logarithmic axis of fewer has ticks between them.
_FEW_POWERS: Final = 2.5


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y), in order of x.

    Args:
        steps: holds each y until the next x.
        dashed: what is compared with the others.
        colour: number of its colour, for lines that belong together; its place among the lines by default.
    """

    label: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dashed: bool = False
    colour: int | None = None

    def stroke(self, number: int) -> str:
        """Return how it is drawn, as attributes, at that place among the lines."""
        colour = COLOURS[(number if self.colour is None else self.colour) % len(COLOURS)]
        return f'stroke="{colour}"' + (' stroke-dasharray="6 4"' if self.dashed else "")


@dataclass(frozen=True, slots=True)
class Bars:
    """One value for each group of the chart."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis.

    Args:
        label: what it shows, with its unit.
        low, high: its ends; from the data by default, from 0 unless it is logarithmic: then whole powers of ten.
        log: in powers of ten; values of 0 and less are drawn at its low end.
        percent: values are shares of 1.
    """

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    percent: bool = False


class _Scale:
    """Places values between two ends of the picture, and says where to put ticks."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self._axis, self._start, self._end = axis, start, end
        seen = [value for value in values if math.isfinite(value) and (value > 0.0 or not axis.log)]
        low = (min(seen, default=1.0) if axis.log else min([0.0, *seen])) if axis.low is None else axis.low
        high = max(seen, default=1.0) if axis.high is None else axis.high
        if axis.log:
            low = 10.0 ** math.floor(math.log10(low)) if axis.low is None else low
            high = 10.0 ** math.ceil(math.log10(high)) if axis.high is None else high
        if high <= low:
            high = low * 10.0 if axis.log else low + 1.0
        self._low, self._high = self._into(low), self._into(high)

    def place(self, value: float) -> float:
        share = (self._into(value) - self._low) / (self._high - self._low)
        return self._start + (self._end - self._start) * min(1.0, max(0.0, share))

    def ticks(self) -> list[tuple[float, str]]:
        """Return (place, text) of each tick."""
        if self._axis.log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            digits = (1.0, 2.0, 5.0) if self._high - self._low < _FEW_POWERS else (1.0,)
            ticks = [math.log10(digit) + power for power in powers for digit in digits]
            values = [10.0**tick for tick in ticks if self._low - 1e-9 <= tick <= self._high + 1e-9]
        else:
            step = _round_step((self._high - self._low) / _TICKS)
            first = math.ceil(self._low / step - 1e-9)
            values = [step * number for number in range(first, math.floor(self._high / step + 1e-9) + 1)]
        return [(self.place(value), self._text(value)) for value in values]

    def _into(self, value: float) -> float:
        if not self._axis.log:
            return value
        return math.log10(value) if value > 0.0 else -math.inf

    def _text(self, value: float) -> str:
        return f"{100.0 * value:g} %" if self._axis.percent else f"{value:,.6g}"


def draw_lines(title: str, x: Axis, y: Axis, lines: Sequence[Line], *, mark: tuple[float, str] | None = None) -> str:
    """Return a chart of lines. Args: `mark` is an x worth noting, with its name: a target, say."""
    across = _Scale(x, [point[0] for line in lines for point in line.points], LEFT, RIGHT)
    up = _Scale(y, [point[1] for line in lines for point in line.points], BOTTOM, TOP)
    parts = _frame(title, x.label, y.label, up)
    for place, text in across.ticks():
        parts.append(f'<text x="{place:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{text}</text>')
    for number, line in enumerate(lines):
        if line.points:
            parts.append(f'<path class="curve" {line.stroke(number)} d="{_path(line, across, up)}"/>')
        parts += _legend(number, line.label, line.stroke(number))
    if mark is not None:
        place = across.place(mark[0])
        parts.append(f'<path class="mark" d="M{place:.1f} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{place + 4:.1f}" y="{TOP + 12}">{escape(mark[1])}</text>')
    return "\n".join([*parts, "</svg>", ""])


def draw_bars(title: str, y: Axis, groups: Sequence[str], bars: Sequence[Bars]) -> str:
    """Return a chart with a bar of each kind in each group, side by side.

    Raises:
        ValueError: a kind has more or fewer values than there are groups.
    """
    up = _Scale(y, [value for one in bars for value in one.values], BOTTOM, TOP)
    parts = _frame(title, "", y.label, up)
    room = (RIGHT - LEFT) / max(1, len(groups))
    width = 0.8 * room / max(1, len(bars))
    for number, group in enumerate(groups):
        middle = LEFT + room * (number + 0.5)
        parts.append(f'<text x="{middle:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{escape(group)}</text>')
    for number, one in enumerate(bars):
        for place, (_, value) in enumerate(zip(groups, one.values, strict=True)):
            x, top = LEFT + room * (place + 0.1) + width * number, up.place(value)
            box = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BOTTOM - top:.1f}"'
            parts.append(f'<rect {box} fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts += _legend(number, one.label, f'stroke="{COLOURS[number % len(COLOURS)]}"')
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str, x_label: str, y_label: str, up: _Scale) -> list[str]:
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">'
        ),
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
    ]
    for place, text in up.ticks():
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{place:.1f}" x2="{RIGHT}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}">{escape(y_label)}</text>')
    return parts


def _legend(number: int, label: str, stroke: str) -> list[str]:
    y = TOP + 20 + 24 * number
    return [
        f'<path class="curve" {stroke} d="M{RIGHT + 14} {y}h24"/>',
        f'<text x="{RIGHT + 46}" y="{y + 4}">{escape(label)}</text>',
    ]


def _path(line: Line, across: _Scale, up: _Scale) -> str:
    places = [(across.place(x), up.place(y)) for x, y in line.points]
    (x, y), *rest = places
    path = f"M{x:.1f} {y:.1f}"
    for x, y in rest:
        path += f"H{x:.1f}V{y:.1f}" if line.steps else f"L{x:.1f} {y:.1f}"
    return path


def _round_step(step: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * digit for digit in (1.0, 2.0, 5.0, 10.0) if power * digit >= step * (1 - 1e-9))
