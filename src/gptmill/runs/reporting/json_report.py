"""A report as JSON: every number that the page states, and the curves that it draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gptmill.runs.events import replace_non_finite
from gptmill.runs.reporting.facts import RunFacts
from gptmill.runs.reporting.learning import Point
from gptmill.runs.reporting.series import Series
from gptmill.runs.run_comparison import find_differences

MARKER = '"generator": "gptmill report"'


def render_json(runs: Sequence[RunFacts]) -> str:
    """Returns an object with the runs, and for several the options that differ; null for what is not known."""
    record: dict[str, Any] = {"generator": "gptmill report", "runs": [_make_record(facts) for facts in runs]}
    if len(runs) > 1:
        configs = [facts.start.config if facts.start else {} for facts in runs]
        record["differences"] = find_differences(configs)
    return json.dumps(replace_non_finite(record), ensure_ascii=True) + "\n"


def _make_record(facts: RunFacts) -> dict[str, Any]:
    record, start, learning = facts.record, facts.start, facts.learning
    environment = dict(vars(start)) if start else {}
    for name in ("config", "parts", "step", "time", "val_loss"):
        environment.pop(name, None)
    return {
        "name": record.name,
        "state": facts.state,
        "step": record.last_step,
        "max_steps": start.max_steps if start else None,
        "tokens": round(record.tokens),
        "started": record.starts[0].time if record.starts else None,
        "learning": _make_learning(facts) if learning else None,
        "losses": {
            change.kind: {
                "first": _make_point(change.first),
                "last": _make_point(change.last),
                "best": _make_point(change.best),
                "improvement": change.improvement,
            }
            for change in facts.losses
        },
        "phases": [asdict(phase) for phase in facts.phases],
        "timeline": [
            {**_make_point(row.point), "checkpoint": row.checkpoint or None, "is_best": row.is_best}
            for row in facts.timeline
        ],
        "scores": {name: {"step": step, "score": score} for name, (step, score) in record.scores.items()},
        "speed": {**asdict(facts.speed), "explanations": facts.explanations},
        "goodput": asdict(facts.goodput),
        "cost": asdict(facts.cost),
        "samples": [
            {"step": item.step, "prompt": item.prompt, "text": item.text, "more_texts": item.more_texts}
            for item in facts.samples
        ],
        "incidents": [asdict(incident) for incident in facts.incidents],
        "more_incidents": facts.more_incidents,
        "config": start.config if start else {},
        "parameters_by_part": start.parts if start else {},
        "environment": environment,
        "curves": {
            name: _make_curve(series) for name, series in {**record.curves, **record.telemetry}.items() if series.groups
        },
    }


def _make_learning(facts: RunFacts) -> dict[str, Any]:
    learning = facts.learning
    assert learning is not None
    points = {name: getattr(learning, name) for name in ("initial", "final", "best", "most")}
    return {
        "kind": learning.kind,
        "improvement": learning.improvement,
        **{name: _make_point(point) if point else None for name, point in points.items()},
        "not_finite": learning.not_finite,
    }


def _make_point(point: Point) -> dict[str, float]:
    return {**asdict(point), "perplexity": point.perplexity}


def _make_curve(series: Series) -> dict[str, list[float]]:
    """Returns the groups of the curve; their extremes only where a group has several points."""
    groups = series.groups
    names = ("mean", "low", "high") if any(group.count > 1 for group in groups) else ("mean",)
    values = {name: [float(f"{getattr(group, name):.7g}") for group in groups] for name in names}
    return {"step": [group.last for group in groups], **values}
