"""Options of gptmill plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gptmill.config.errors import ConfigError, Problem
from gptmill.config.trust import TrustOptions

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class PlanRequest:
    """Plan"""

    gpu: str | None = None
    """GPU to plan for, e.g. H200, A100 80GB or RTX 4090 (default: this machine)."""
    gpus: int = 1
    """Number of GPUs that train together."""
    nodes: int | None = None
    """Machines that hold these GPUs (default: one for every 8)."""
    interconnect: str = "infiniband"
    """Network between the machines: infiniband, roce, ethernet, nvlink, or a machine's GB/s in one direction."""
    simulate: bool = False
    """Place the model on as many fake ranks, without memory, and check the planned memory against it."""
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
    tiers: bool = False
    """Instead of a plan, print what GPUs of 8 to 141 GB train, and with which settings (the presets of --hardware)."""
    json: bool = False
    """Print the plan as JSON."""
    trusting: TrustOptions = field(default_factory=TrustOptions)


def check_plan_request(request: PlanRequest) -> None:
    """Raises ConfigError with every option out of range."""
    rules = {
        "gpus": (request.gpus >= 1, "must be at least 1"),
        "nodes": (
            request.nodes is None or (request.nodes >= 1 and request.gpus % request.nodes == 0),
            f"must divide the number of GPUs, {request.gpus}: every machine has as many",
        ),
        "simulate": (
            not request.simulate or request.gpus > 1,
            "places a model on several GPUs; add their number and kind, e.g. --gpus 64 --gpu h100",
        ),
        "mfu": (request.mfu is None or 0 < request.mfu <= 1, "must be above 0 and at most 1, e.g. 0.45"),
        "price_per_hour": (request.price_per_hour is None or request.price_per_hour >= 0, "must not be negative"),
        "corpus_tokens": (request.corpus_tokens is None or 1 <= request.corpus_tokens <= 1e15, "must be at least 1"),
        "probe_steps": (
            request.probe_steps >= 2 and (request.probe or request.probe_steps == PlanRequest.probe_steps),
            "must be at least 2, and needs --probe",
        ),
        "probe": (
            not (request.probe and request.gpu),
            "measures this machine, and --gpu names another; leave one of them out",
        ),
    }
    problems = [Problem(f"{name} = {getattr(request, name)}", fix) for name, (valid, fix) in rules.items() if not valid]
    if problems:
        raise ConfigError(problems)


def count_nodes(request: PlanRequest) -> int:
    """The machines asked for, or as few as hold the GPUs with at most GPUS_PER_NODE in each, all alike."""
    if request.nodes is not None:
        return request.nodes
    least = math.ceil(request.gpus / GPUS_PER_NODE)
    return next(nodes for nodes in range(least, request.gpus + 1) if request.gpus % nodes == 0)
