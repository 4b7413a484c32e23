"""plan: what a run will take, before it is paid for."""

from __future__ import annotations

import os
import sys
from typing import Any

from gptmill.api.configuration import Recipe, parse_fields
from gptmill.config.errors import UserError
from gptmill.config.hardware import HardwareName
from gptmill.config.keywords import build_request
from gptmill.config.plan_request import PlanRequest
from gptmill.config.recipes import make_config
from gptmill.config.requests import PresetOptions
from gptmill.config.run import RunConfig
from gptmill.config.trust import admit_plugins
from gptmill.experiments.run_plan import RunPlan, make_run_plan
from gptmill.training.presets import resolve_presets


def plan(
    config: RunConfig | Recipe | None = None,
    *,
    gpu: str | None = None,
    gpus: int = 1,
    nodes: int | None = None,
    interconnect: str = "infiniband",
    simulate: bool = False,
    mfu: float | None = None,
    price_per_hour: float | None = None,
    corpus_tokens: float | None = None,
    probe: bool = False,
    probe_steps: int = 20,
    size: str | None = None,
    hardware: HardwareName | None = None,
    progress: bool = True,
    **fields: Any,
) -> RunPlan:
    """Plans a run without training it: tokens, epochs, parameters, FLOPs, memory, time, cost, disk and warnings.

    All options are those of gptmill plan. `config` is a RunConfig, or the name or path of a recipe; `fields` go on
    top. With `probe`, a short real training on this machine measures time and memory. Several GPUs are planned with
    each strategy (`RunPlan.strategies`); `simulate` checks their memory against fake ranks (`RunPlan.placements`).
    """
    options = {
        "gpu": gpu,
        "gpus": gpus,
        "nodes": nodes,
        "interconnect": interconnect,
        "simulate": simulate,
        "mfu": mfu,
        "price_per_hour": price_per_hour,
        "corpus_tokens": corpus_tokens,
        "probe": probe,
        "probe_steps": probe_steps,
    }
    request = build_request(PlanRequest, {name: value for name, value in options.items() if value is not None})
    if isinstance(config, RunConfig):
        if fields or size is not None or hardware is not None:
            raise UserError("fields, size and hardware go on top of a recipe; change the RunConfig itself instead")
        admit_plugins(config.plugins.plugin, "the RunConfig")  # which may be that of a stranger's run
        return make_run_plan(config, request, _say if progress else lambda _: None)
    recipe = None if config is None else os.fspath(config)
    presets = build_request(PresetOptions, {"size": size, "hardware": hardware})
    return plan_recipe(recipe, parse_fields(recipe, fields), presets, request, progress=progress)


def plan_recipe(
    recipe: str | None, flags: dict[str, Any], presets: PresetOptions, request: PlanRequest, *, progress: bool = True
) -> RunPlan:
    """Plans a recipe with flags on top: what gptmill plan and `plan` have in common."""
    resolved = make_config(recipe, resolve_presets(recipe, flags, presets))
    return make_run_plan(resolved, request, _say if progress else lambda _: None)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
