"""A ROC plot as SVG: the axis of false alarms is logarithmic, as only its left end is of use."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 62, 24, 510, 368
# The smallest share shown; a curve that begins further left begins at the axis.
SMALLEST: Final = 0.0025
COLOURS: Final = ("#1b6ca8", "#4d9de0", "#9cc9ef", "#b3541e", "#e07a3f", "#3f7d4e")
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#24313c}.axis{stroke:#24313c;fill:none}"
    ".grid{stroke:#d5dde3}.curve{fill:none;stroke-width:2.2}"
    "@media(prefers-color-scheme:dark){text{fill:#dbe4ea}.axis{stroke:#dbe4ea}.grid{stroke:#3a4650}}"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (share of honest nodes alarmed, share of cheats found), from the strictest threshold on."""

    label: str
    points: Sequence[tuple[float, float]]


def draw_roc(curves: Sequence[Curve]) -> str:
    """Return the plot."""
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-label="Share of cheats found against share of honest nodes alarmed">'
        ),
        f"<style>{STYLE}</style>",
    ]
    for share in (0.0025, 0.01, 0.1, 1.0):
        x = _x(share)
        lines.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}"/>')
        lines.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{share * 100:g} %</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        lines.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share * 100:.0f} %</text>')
    lines.append(f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    lines.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">honest nodes alarmed</text>')
    lines.append(f'<text x="{LEFT}" y="{TOP - 8}">cheats found</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        lines.append(f'<path class="curve" stroke="{colour}" d="{_path(curve.points)}"/>')
        y = TOP + 20 + 24 * number
        lines.append(f'<path class="curve" stroke="{colour}" d="M{RIGHT + 14} {y}h24"/>')
        lines.append(f'<text x="{RIGHT + 46}" y="{y + 4}">{curve.label}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _x(share: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(max(share, SMALLEST) / SMALLEST) / math.log(1 / SMALLEST)


def _y(share: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * share


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Draw steps: up first, then right; one for each unit of the picture, of the points at one place the last."""
    highest = {round(_x(false)): round(_y(found)) for false, found in points}
    (x, y), *rest = highest.items()
    return f"M{x} {y}" + "".join(f"V{y}H{x}" for x, y in rest)
