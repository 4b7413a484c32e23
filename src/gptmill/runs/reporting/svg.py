"""Line charts as SVG: scales, round ticks, curves, and labels at the ends of the lines. Colours come from the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from zlib import crc32

from gptmill.runs.reporting.formatting import clean

TOP, BOTTOM, LEFT = 14.0, 30.0, 50.0
LABEL_GAP = 14.0
CHAR_WIDTH = 6.4
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
TALL_TICKS, WIDE_TICK_PIXELS = 5, 75.0
PADDING = 0.04

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve. `style` is a number: the page gives each its own colour and dashes."""

    points: Points
    label: str = ""
    style: int = 0
    is_marked: bool = False
    """With a dot at each point, which shows its value when pointed at."""
    band: Sequence[tuple[float, float, float]] = ()
    """x, lowest and highest value: drawn faintly behind the curve."""


@dataclass(frozen=True)
class Axis:
    """How values become positions."""

    low: float
    high: float
    is_log: bool = False
    format: Callable[[float], str] = field(default=lambda value: f"{value:g}")

    def place(self, value: float) -> float:
        """Returns where a value lies, from 0 to 1."""
        low, high, value = (self._scale(number) for number in (self.low, self.high, value))
        return (value - low) / (high - low)

    def _scale(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.is_log else value

    def list_ticks(self, about: int) -> list[float]:
        """Returns about so many round numbers in the range."""
        if self.is_log:
            return self._list_log_ticks(about)
        rough = (self.high - self.low) / max(1, about)
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(magnitude * factor for factor in ROUND if magnitude * factor >= rough * 0.75)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _list_log_ticks(self, about: int) -> list[float]:
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 5), (1, 3), (1,)):
            ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= about + 2:
                return ticks
        return ticks[:: math.ceil(len(ticks) / about)]


@dataclass(frozen=True)
class Chart:
    """A chart of some lines over the same steps."""

    lines: Sequence[Line]
    x: Axis
    y: Axis
    title: str
    """What is drawn, for those who cannot see it."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical marks, such as restarts."""

    def draw(self, width: float, height: float) -> str:
        """Returns an svg element; its text has the size of the page's if it is shown `width` pixels wide."""
        right = max([10.0, *(CHAR_WIDTH * len(line.label) + 12 for line in self.lines if line.label)])
        frame = _Frame(self, width - right, height)
        identity = f"c{crc32(f'{self.title}{width}{height}'.encode()):x}"
        parts = [
            f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{_escape(self.title)}">',
            f'<clipPath id="{identity}"><rect x="{LEFT:g}" y="{TOP - 4:g}" width="{width - right - LEFT + 4:g}" '
            f'height="{height - TOP - BOTTOM + 4:g}"/></clipPath>',
            *frame.draw_axes(),
            *frame.draw_marks(),
            f'<g clip-path="url(#{identity})">',
            *(part for line in self.lines for part in frame.draw_line(line)),
            "</g>",
            *frame.draw_labels(),
            "</svg>",
        ]
        return "\n".join(parts)


@dataclass(frozen=True)
class _Frame:
    """A chart of a certain size."""

    chart: Chart
    right: float
    height: float

    def x(self, value: float) -> float:
        return LEFT + self.chart.x.place(value) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - self.chart.y.place(value) * (self.height - BOTTOM - TOP)

    def draw_axes(self) -> list[str]:
        chart, parts = self.chart, []
        for tick in chart.y.list_ticks(TALL_TICKS if self.height > 220 else 3):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{self.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="end" x="{LEFT - 7:g}" y="{y + 4:.1f}">{_escape(chart.y.format(tick))}</text>')
        base = self.height - BOTTOM
        parts.append(f'<line class="axis" x1="{LEFT:g}" x2="{self.right:.1f}" y1="{base:g}" y2="{base:g}"/>')
        ticks = chart.x.list_ticks(max(2, int((self.right - LEFT) / WIDE_TICK_PIXELS)))
        for tick in ticks:
            x = self.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:g}" y2="{base + 4:g}"/>')
            parts.append(f'<text class="mid" x="{x:.1f}" y="{base + 18:g}">{_escape(chart.x.format(tick))}</text>')
        return parts

    def draw_marks(self) -> list[str]:
        return [
            f'<line class="mark" x1="{self.x(step):.1f}" x2="{self.x(step):.1f}" y1="{TOP:g}" '
            f'y2="{self.height - BOTTOM:g}"><title>{_escape(text)}</title></line>'
            for step, text in self.chart.marks
        ]

    def draw_line(self, line: Line) -> list[str]:
        parts = []
        if line.band:
            edges = [(x, value) for x, low, high in line.band for value in ((low, high) if low < high else (low,))]
            parts.append(f'<path class="band s{line.style}" d="{self._make_path(edges)}"/>')
        if len(line.points) > 1:
            parts.append(f'<path class="line s{line.style}" d="{self._make_path(line.points)}"/>')
        if line.is_marked or len(line.points) == 1:
            for x, y in line.points:
                title = f"step {x:,.0f}: {y:.4f}"
                place = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"'
                parts.append(f'<circle class="dot s{line.style}" {place} r="2.6"><title>{title}</title></circle>')
        return parts

    def draw_labels(self) -> list[str]:
        """Labels at the ends of the lines, moved apart where they would touch."""
        labelled = sorted(
            ((self.y(line.points[-1][1]), line) for line in self.chart.lines if line.label and line.points),
            key=lambda pair: pair[0],
        )
        parts, lowest = [], self.height - BOTTOM - LABEL_GAP * (len(labelled) - 1)
        last = -math.inf
        for y, line in labelled:
            last = max(min(max(y, TOP), lowest), last + LABEL_GAP)
            lowest += LABEL_GAP
            text = f'<text class="label s{line.style}" x="{self.right + 8:.1f}" y="{last + 4:.1f}">'
            parts.append(f"{text}{_escape(line.label)}</text>")
        return parts

    def _make_path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def make_axis(
    values: Sequence[float], format_tick: Callable[[float], str], *, is_log: bool = False, from_zero: bool = False
) -> Axis:
    """Returns an axis over the values, with some room around them."""
    low, high = min(values), max(values)
    if is_log and low > 0:
        low, high = (low, high) if high > low * 1.01 else (low / 2, high * 2)
        room = (high / low) ** PADDING
        return Axis(low / room, high * room, is_log=True, format=format_tick)
    low = min(0.0, low) if from_zero else low
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = (0.0, high * 1.2) if high > 0 else (low - 1.0, high + 1.0)
    room = PADDING * (high - low)
    return Axis(low if from_zero and low == 0 else low - room, high + room, format=format_tick)


def _escape(text: str) -> str:
    return escape(clean(text, 200), quote=True)
