"""Plots loss curves as an SVG that is legible on light and dark pages.

    python benchmarks/curves.py OUT.svg NAME=runs/x/events.jsonl ... [--over seconds|tokens|steps] [--log] [--most 6]

Circles joined by a line are validation losses; a thin line of the same colour is the smoothed training loss. Seconds
count from process start if a benchmark recorded it, else from the start of training.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from runs import Event, Run, read_run, run_guarded

from gptmill.config.errors import UserError

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 20, 52
COLOURS = ("#3b8fd9", "#e0702c", "#2ca25f", "#c44fa8", "#b8860b", "#7a6ff0", "#17a2a2", "#d9485f")
DASHES = ("", "7 4", "2 3")  # one for each cycle through the colours
SMOOTHED = 0.01  # share of the steps that one point of the training curve averages
LINE_HEIGHT = 18
CHARACTER_WIDTH = 7
DECADES_FROM = 20.0  # a logarithmic axis with a smaller span has linear ticks
UNITS = {"seconds": "seconds from the start", "tokens": "million tokens", "steps": "steps"}
STYLE = """text{font:12px system-ui,sans-serif;fill:#555}.axis{stroke:#888;fill:none}
.grid{stroke:#888;stroke-opacity:.25}polyline{fill:none;stroke-linejoin:round}.training{stroke-width:1;stroke-opacity:.5}.validation{stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#bbb}}"""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """Validation and training losses of a run."""

    name: str
    validation: Points
    training: Points = field(default_factory=list)


@dataclass(frozen=True)
class Axis:
    """Maps values to coordinates."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def project(self, value: float) -> float:
        scale = math.log if self.is_log else float
        return self.begin + (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low)) * (
            self.end - self.begin
        )

    def list_ticks(self) -> list[float]:
        """Returns about six round numbers."""
        if self.is_log and self.high / self.low > DECADES_FROM:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        else:
            rough = (self.high - self.low) / 6
            power = 10.0 ** math.floor(math.log10(rough))
            gap = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough)
            ticks = [gap * count for count in range(math.ceil(self.low / gap), math.floor(self.high / gap) + 1)]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def main() -> int:
    parser = argparse.ArgumentParser(description="Plots the losses of runs.")
    parser.add_argument("out", help="SVG file to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=EVENTS", help="a name and a run's folder or events.jsonl")
    parser.add_argument("--over", choices=UNITS, default="seconds")
    parser.add_argument("--log", action="store_true", help="use a logarithmic loss axis")
    parser.add_argument("--most", type=float, help="highest loss to show")
    options = parser.parse_args()
    out = Path(options.out)
    if out.suffix.lower() != ".svg":
        parser.error(f"{out}: the first argument is the file to write, and its name ends in .svg")
    if not out.parent.is_dir():
        parser.error(f"{out}: there is no folder {out.parent}; create it first")
    try:
        curves = read_curves(options.runs, options.over)
        picture = draw(curves, options.over, options.most, is_log=options.log)
        out.write_text(picture, encoding="utf-8")
    except UserError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write {out}: {error.strerror or error}; name another")
    return 0


def read_curves(words: list[str], over: str) -> list[Curve]:
    """Reads the curves of runs given as NAME=EVENTS."""
    curves = []
    for word in words:
        name, _, path = word.partition("=")
        run = read_run(Path(path)) if path else None
        if run is None:
            raise UserError(f"{word}: there is no run; give NAME=FOLDER of a run or NAME=EVENTS.jsonl")
        curves.append(make_curve(name, run, over))
    return curves


def make_curve(name: str, run: Run, over: str = "seconds") -> Curve:
    """Returns the finite losses of a run over seconds, tokens or steps."""
    tokens: dict[int, float] = {0: 0.0}
    total = 0.0
    for event in run.select("StepLogged"):
        total += event["tokens_per_second"] * event["seconds"]
        tokens[event["step"]] = total

    def locate(event: Event) -> float:
        if over == "steps":
            return float(event["step"])
        return event["time"] - run.started if over == "seconds" else tokens.get(event["step"], total) / 1e6

    validation = [
        (locate(event), event["val_loss"]) for event in run.select("EvalDone") if event["val_loss"] is not None
    ]
    training = [(locate(event), event["loss"]) for event in run.select("StepLogged") if event["loss"] is not None]
    return Curve(name, validation, smooth(training))


def smooth(points: Points) -> Points:
    """Averages groups of neighbouring points; the mean is drawn at the last point of its group."""
    size = max(1, round(len(points) * SMOOTHED))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]


def draw(curves: list[Curve], over: str = "seconds", most: float | None = None, *, is_log: bool = False) -> str:
    """Returns the SVG. Without `most`, the loss axis fits the losses after the first twentieth of the x axis.

    Raises UserError if there is nothing to draw.
    """
    points = [point for curve in curves for point in (*curve.validation, *curve.training)]
    if not points:
        raise UserError("no run has a loss yet; wait for the first evaluation")
    right = max(x for x, _ in points) or 1.0
    low = min(loss for _, loss in points)
    if most is not None and not low < most < math.inf:
        raise UserError(f"--most {most:g}: the lowest loss is {low:.4g}; give a number above it")
    if is_log and low <= 0:
        raise UserError(f"--log: the lowest loss is {low:g}, which has no logarithm; drop --log")
    high = most if most is not None else max((loss for x, loss in points if x >= right / 20), default=low)
    margin = (high - low) * 0.05 or 0.05
    across = Axis(0.0, right, LEFT, WIDTH - RIGHT)
    upward = Axis(max(low - margin, low / 2), high + margin, HEIGHT - BOTTOM, TOP, is_log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(', '.join(curve.name for curve in curves))}</title><style>{STYLE}</style>",
        f'<clipPath id="frame"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>',
        *draw_axes(across, upward, over),
    ]
    for number, curve in enumerate(curves):
        parts += draw_curve(curve, across, upward, number)
    parts += draw_legend([curve.name for curve in curves])
    return "\n".join([*parts, "</svg>\n"])


def draw_axes(across: Axis, upward: Axis, over: str) -> list[str]:
    """Returns grid lines, tick labels, the two axes and their titles."""
    bottom, parts = HEIGHT - BOTTOM, []
    for tick in across.list_ticks():
        x = across.project(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>')
    for tick in upward.list_ticks():
        y = upward.project(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{UNITS[over]}</text>')
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">loss (nats)</text>')
    return parts


def draw_curve(curve: Curve, across: Axis, upward: Axis, number: int) -> list[str]:
    """Returns the lines and circles of a curve, clipped to the frame."""
    look, parts = make_look(number), ['<g clip-path="url(#frame)">']
    for kind, points in (("training", curve.training), ("validation", curve.validation)):
        if points:
            coordinates = " ".join(f"{across.project(x):.1f},{upward.project(loss):.1f}" for x, loss in points)
            parts.append(f'<polyline class="{kind}" {look} points="{coordinates}"/>')
    colour = COLOURS[number % len(COLOURS)]
    for x, loss in curve.validation:
        parts.append(f'<circle cx="{across.project(x):.1f}" cy="{upward.project(loss):.1f}" r="3" fill="{colour}"/>')
    return [*parts, "</g>"]


def draw_legend(names: list[str]) -> list[str]:
    """Returns the legend, at the upper right: falling losses leave that corner free."""
    x = WIDTH - RIGHT - 12 - CHARACTER_WIDTH * max(len(name) for name in names)
    parts = []
    for number, name in enumerate(names):
        y = TOP + 16 + LINE_HEIGHT * number
        parts.append(f'<path class="validation" {make_look(number)} d="M{x - 30} {y - 4}h22"/>')
        parts.append(f'<text x="{x}" y="{y}">{escape(name)}</text>')
    return parts


def make_look(number: int) -> str:
    """Returns the colour and dash pattern of a curve."""
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[number % len(COLOURS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
