"""gptmill plan: what a run will take, before it is paid for."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gptmill import cli
from gptmill.cli.output import print_line
from gptmill.cli.plan_strategies import list_strategy_lines
from gptmill.cli.plan_tiers import list_tier_lines
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.durations import format_duration
from gptmill.config.errors import UserError
from gptmill.config.plan_request import PlanRequest
from gptmill.config.requests import PresetOptions
from gptmill.config.serialization import format_flags

if TYPE_CHECKING:
    from gptmill.experiments.run_plan import RunPlan

SUMMARY = """\
Prints what a run of RECIPE with these flags will take: tokens, epochs, parameters, FLOPs, memory, disk, and time and
cost on a GPU by name (--gpu H200) or measured here (--probe); for many GPUs (--gpus 64 --nodes 8) with each way to
share the model. Warns of what is far from usual. Trains nothing else.
RECIPE is the path of a .toml file or one of these:
"""
PART_NAMES = {
    "token_embedding": "token embedding",
    "position_embedding": "positions",
    "value_embeddings": "value embeddings",
    "blocks": "blocks",
    "final_norm": "final norm",
    "head": "LM head",
    "mtp_heads": "multi-token prediction",
}
LABEL_WIDTH = 18


def run(arguments: list[str]) -> int:
    recipe, flags, presets, request = parse_recipe_call("plan", SUMMARY, PlanRequest, arguments)
    if request.budget is not None:
        return run_budget(recipe, flags, presets, request)
    if request.tiers:
        return run_tiers(recipe, flags, presets, request)
    from gptmill.api.planning import plan_recipe

    plan = plan_recipe(recipe, flags, presets, request)
    code = 0 if all(each.agrees for each in plan.placements) else exit_codes.FAILED
    if request.json:
        print_line(json.dumps(plan.to_dict(), indent=1))
        return code
    for label, text in list_rows(plan):
        print_line(f"{label:<{LABEL_WIDTH}}{text}")
    for line in list_strategy_lines(plan):
        print_line(line)
    for warning in plan.warnings:
        print_line(f"warning: {warning.message}")
    return code


def run_budget(recipe: str | None, flags: dict[str, Any], presets: PresetOptions, request: PlanRequest) -> int:
    """Prints what gptmill train --budget would train, and why."""
    if presets != PresetOptions() or replace(request, budget=None) != PlanRequest():
        raise UserError(
            "--budget measures this machine and chooses a model for it; leave out the other options of gptmill plan, "
            "--size and --hardware"
        )
    from gptmill.api.budget import make_budget_plan

    assert request.budget is not None
    make_budget_plan(recipe, flags, request.budget, cli.STARTED, print_line)
    print_line(f"train it with: {shlex.join(['gptmill', 'train', f'--budget={request.budget}', *format_flags(flags)])}")
    return 0


def run_tiers(recipe: str | None, flags: dict[str, Any], presets: PresetOptions, request: PlanRequest) -> int:
    """Prints what GPUs of each size train."""
    if recipe or flags or presets != PresetOptions() or replace(request, tiers=False) != PlanRequest():
        raise UserError("--tiers prints a table of all GPUs and plans no run; leave out the other options")
    from gptmill.training.hardware_tiers import list_tiers

    for line in list_tier_lines(list_tiers()):
        print_line(line)
    return 0


def list_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """The table: a label and a text each."""
    return [
        ("device", describe_device(plan)),
        ("tokens", describe_tokens(plan)),
        ("corpus", describe_corpus(plan)),
        ("parameters", describe_parameters(plan)),
        ("FLOPs", f"{plan.plan.count_flops():.3g}, {plan.plan.flops_per_token / 1e6:,.1f} M per token"),
        ("learning rate", describe_schedule(plan)),
        ("peak memory", describe_memory(plan)),
        *describe_time(plan),
        ("disk", describe_disk(plan)),
    ]


def describe_device(plan: RunPlan) -> str:
    count = f"{plan.plan.ranks} x " if plan.plan.ranks > 1 else ""
    return f"{count}{plan.machine.name}, {plan.plan.precision}"


def describe_tokens(plan: RunPlan) -> str:
    numbers, training = plan.plan, plan.config.training
    from gptmill.training.plan_checks import CHINCHILLA, format_count

    ratio = plan.tokens / (numbers.active_parameters or numbers.parameters)
    return (
        f"{format_count(plan.tokens)} in {numbers.max_steps:,} steps of {numbers.tokens_per_step:,} "
        f"({numbers.micro_batches} x {training.mini_batch_size} x {plan.config.model.context_length:,}"
        f"{' on each device' if numbers.ranks > 1 else ''}), {ratio:,.3g} per parameter ({CHINCHILLA} are "
        "compute-optimal)"
    )


def describe_corpus(plan: RunPlan) -> str:
    corpus = plan.corpus
    if corpus.tokens is None or plan.epochs is None:
        return f"{corpus.name} is not prepared: epochs unknown; {corpus.advice}"
    from gptmill.training.plan_checks import format_count

    median = corpus.median_document_tokens
    documents = f", median document {median:,} tokens" if median is not None else ""
    note = {"prepared": "", "given": " (as given)", "estimated": " (estimated from the size of the text)"}
    advice = f"; {corpus.advice}" if corpus.advice else ""
    return (
        f"{corpus.name}: {format_count(corpus.tokens)} tokens{note[corpus.source]}, {plan.epochs:,.2f} epochs"
        f"{documents}{advice}"
    )


def describe_parameters(plan: RunPlan) -> str:
    from gptmill.training.plan_checks import format_count

    counts = vars(plan.parameters)
    parts = [f"{label} {format_count(counts[name])}" for name, label in PART_NAMES.items() if counts[name]]
    active = plan.parameters.active
    used = f", {format_count(active)} of them used per token" if active != plan.parameters.total else ""
    return f"{plan.parameters.total:,}: {', '.join(parts)}{used}"


def describe_schedule(plan: RunPlan) -> str:
    from gptmill.training.schedules import make_lr

    config, steps = plan.config.optimizer, plan.plan.max_steps
    half, last = (make_lr(step, config, steps) for step in (steps // 2, steps - 1))
    return (
        f"{config.optimizer.tag}, {config.max_lr:g} after {config.warmup_steps:,} steps "
        f"({config.warmup_steps / steps:.1%}), {config.schedule.tag}: {half:.2g} halfway, {last:.2g} at the end"
    )


def describe_memory(plan: RunPlan) -> str:
    memory, has, free = plan.plan.memory, plan.machine.memory_bytes, plan.machine.available_bytes
    total = f" of {has / 1e9:,.1f} GB" if has else ""
    if free is not None:
        total = f" of {free / 1e9:,.1f} GB that are free now"
    if plan.probe is not None or memory is None:
        return f"{plan.memory_bytes / 1e9:,.2f} GB{total}, measured"
    kinds = vars(plan.strategy.memory if plan.strategy else memory)
    parts = [f"{name} {size / 1e9:,.2f}" for name, size in kinds.items()]
    snapshots = f"snapshots {plan.counts.snapshot_bytes / plan.savers / 1e9:,.2f}"
    beside = plan.memory_bytes - memory.total - plan.counts.snapshot_bytes
    rest = f"; {snapshots} GB in host memory" if plan.machine.is_gpu else f", {snapshots}, process {beside / 1e9:,.2f}"
    return f"{plan.memory_bytes / 1e9:,.2f} GB{total}, by estimate: {', '.join(parts)}{rest}"


def describe_time(plan: RunPlan) -> list[tuple[str, str]]:
    time = plan.time
    if time is None:
        known = "--gpu H200, for example, estimates it" if plan.machine.is_gpu else "--probe measures it here"
        return [("time", f"unknown; {known}")]
    mfu = f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
    parts = {
        "training": time.training,
        f"{plan.counts.evaluations:,} evaluations": time.evaluation,
        f"{plan.counts.saves:,} checkpoints": time.checkpoints,
        "start and end": time.startup,
    }
    spent = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
    rows = [
        ("speed", f"{time.tokens_per_second:,.0f} tokens/s{mfu}; {time.basis}"),
        ("time", f"{format_duration(time.total)}: {spent}"),
    ]
    if plan.cost is not None:
        source = "as given" if plan.machine.is_price_given else "a typical price"
        rows.append(("cost", f"${plan.cost:,.2f} at ${plan.machine.price_per_hour:,.2f} per GPU and hour, {source}"))
    return rows


def describe_disk(plan: RunPlan) -> str:
    counts, free = plan.counts, plan.free_disk_bytes
    left = f"; {free / 1e9:,.1f} GB are free" if free is not None else ""
    return (
        f"{counts.checkpoints_bytes / 1e9:,.2f} GB for at most {counts.kept_checkpoints} checkpoints of "
        f"{counts.checkpoint_bytes / 1e9:,.3f} GB, {counts.log_bytes / 1e6:,.1f} MB of logs{left}"
    )
