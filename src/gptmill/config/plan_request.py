"""Options of gptmill plan."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.errors import ConfigError, Problem


@dataclass(frozen=True)
class PlanRequest:
    """Plan"""

    gpu: str | None = None
    """GPU to plan for, e.g. H200, A100 80GB or RTX 4090 (default: this machine)."""
    gpus: int = 1
    """Number of GPUs that train together."""
    mfu: float | None = None
    """Model FLOPs utilisation to assume, e.g. 0.45 (default: what gptmill reached at this size on an H200)."""
    price_per_hour: float | None = None
    """Dollars per GPU and hour (default: a typical price of that GPU)."""
    corpus_tokens: float | None = None
    """Training tokens of a corpus that is not prepared yet, e.g. 12.8e9."""
    probe: bool = False
    """Measure time and memory on this machine by a short real training."""
    probe_steps: int = 20
    """Steps of that training."""
    budget: str | None = None
    """Choose the best model that this machine can train on --corpus in this time, e.g. 20m, and say why."""
    json: bool = False
    """Print the plan as JSON."""


def check_plan_request(request: PlanRequest) -> None:
    """Raises ConfigError with every option out of range."""
    rules = {
        "gpus": (request.gpus >= 1, "must be at least 1"),
        "mfu": (request.mfu is None or 0 < request.mfu <= 1, "must be above 0 and at most 1, e.g. 0.45"),
        "price_per_hour": (request.price_per_hour is None or request.price_per_hour >= 0, "must not be negative"),
        "corpus_tokens": (request.corpus_tokens is None or 1 <= request.corpus_tokens <= 1e15, "must be at least 1"),
        "probe_steps": (request.probe_steps >= 2, "must be at least 2"),
        "probe": (
            not (request.probe and request.gpu),
            "measures this machine, and --gpu names another; leave one of them out",
        ),
    }
    problems = [Problem(f"{name} = {getattr(request, name)}", fix) for name, (valid, fix) in rules.items() if not valid]
    if problems:
        raise ConfigError(problems)
