"""The report of a run for the terminal: loss curve, summary, phases and samples. Reads the run's logs only."""

from __future__ import annotations

import math

from gptmill.runs.directory import RunDirectory
from gptmill.runs.display import make_plain, make_writable
from gptmill.runs.events import SampleDrawn
from gptmill.runs.reporting.facts import RunFacts, collect_facts
from gptmill.runs.reporting.terminal_summary import describe_summary, make_title
from gptmill.runs.reporting.text_chart import Points, draw_chart

CURVE_POINTS = 120
MAX_DRAWN = 1e9  # a larger loss would flatten the curve


def make_report(run: RunDirectory, encoding: str = "utf-8") -> str:
    """Returns the loss curve, the summary, and the first and the last sample, in characters that `encoding` has.

    Raises FileNotFoundError if the run has no events.
    """
    facts = collect_facts(run, price_per_hour=None)
    samples = facts.samples if len(facts.samples) < 2 else [facts.samples[0], facts.samples[-1]]
    parts = [_draw_losses(facts), make_writable(describe_summary(facts), encoding)]
    return "\n\n".join(filter(None, [*parts, *(_quote(sample, encoding) for sample in samples)]))


def make_summary(run: RunDirectory, encoding: str = "utf-8") -> str:
    """Returns the summary alone, for a run that has not finished; empty if nothing was logged.

    Raises FileNotFoundError if the run has no events.
    """
    return make_writable(describe_summary(collect_facts(run, price_per_hour=None)), encoding)


def _draw_losses(facts: RunFacts) -> str:
    curve = _limit(facts.record.curves["loss"].smooth(CURVE_POINTS))
    marks = _limit([(float(item.step), item.loss) for item in facts.record.evaluations])
    if not curve:
        return ""
    legend = "dots are training, o is validation" if marks else "training"
    return make_title(f"loss by step: {legend}") + draw_chart(curve, marks)


def _limit(points: Points) -> Points:
    return [(step, loss) for step, loss in points if math.isfinite(loss) and abs(loss) < MAX_DRAWN]


def _quote(sample: SampleDrawn, encoding: str) -> str:
    return make_title(f"sample at step {sample.step:,}") + make_plain(sample.prompt + sample.text, encoding)
