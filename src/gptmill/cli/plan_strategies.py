"""The part of gptmill plan that compares what several GPUs can do with a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from gptmill.cli.output import format_table
from gptmill.config.durations import format_duration
from gptmill.config.parallel_relations import count_sharing_ranks, list_split_flags

if TYPE_CHECKING:
    from gptmill.experiments.fake_ranks import Placement
    from gptmill.experiments.run_plan import RunPlan
    from gptmill.training.communication import CollectiveKind
    from gptmill.training.strategy_estimate import StrategyEstimate

GB = 1e9


def list_strategy_lines(plan: RunPlan) -> Iterator[str]:
    """Memory, communication, time and cost by strategy, and which one to take; nothing for a single GPU."""
    if plan.links is None:
        return
    yield ""
    yield _describe_links(plan)
    yield "memory of each GPU in GB:"
    yield from _list_memory(plan)
    yield "each step, by what a rank sends in GB, and its time in ms:"
    yield from _list_steps(plan)
    yield _describe_choice(plan)
    if plan.placements:
        yield ""
        yield "planned and placed on fake ranks, GB of the rank that holds most:"
        yield from _list_placements(plan.placements)


def _describe_links(plan: RunPlan) -> str:
    links = plan.links
    assert links is not None
    inside = f"{links.link_rate / GB:,.0f} GB/s between GPUs of a machine"
    if links.nodes == 1:
        return f"one machine of {links.gpus} GPUs: {inside}, in each direction"
    network = f"{links.network_rate / GB:,.4g} GB/s between machines ({links.network})"
    return f"{links.nodes} machines of {links.gpus_per_node} GPUs: {inside}, {network}, in each direction"


def _list_memory(plan: RunPlan) -> list[str]:
    has = plan.machine.memory_bytes
    known = f"of {has / GB:,.1f}" if has else "of ?"
    rows = []
    for each in plan.strategies:
        parts = [f"{size / GB:,.2f}" for size in asdict(each.memory).values()]
        fits = {True: "fits", False: "does not fit", None: ""}[each.fits]
        rows.append([each.strategy, f"{each.memory.total / GB:,.1f}", *parts, fits])
    kinds = list(asdict(plan.strategies[0].memory))
    return format_table(["", known, *kinds, "fits"], rows, {"", "fits"})


def _list_steps(plan: RunPlan) -> list[str]:
    kinds = _list_kinds(plan)
    columns = ["", *(kind.replace("_", "-") for kind in kinds)]
    columns += ["compute", "communication", "exposed", "step", "tokens/s", "MFU", "run", "cost"]
    return format_table(columns, [_make_step_row(plan, each, kinds) for each in plan.strategies], {""})


def _list_kinds(plan: RunPlan) -> list[CollectiveKind]:
    """The collectives that any strategy needs."""
    return [kind for kind in plan.strategies[0].sent_bytes if any(each.sent_bytes[kind] for each in plan.strategies)]


def _make_step_row(plan: RunPlan, each: StrategyEstimate, kinds: list[CollectiveKind]) -> list[str]:
    sent = [f"{each.sent_bytes[kind] / GB:,.2f}" for kind in kinds]
    time = each.time
    if time is None:
        return [each.strategy, *sent, *["?"] * 8]
    cost = plan.price(time.run)
    seconds = (time.compute_seconds, time.communication_seconds, time.exposed_seconds, time.step_seconds)
    return [
        each.strategy,
        *sent,
        *(f"{1000 * each:,.1f}" for each in seconds),
        f"{time.tokens_per_second:,.0f}",
        "?" if time.mfu is None else f"{time.mfu:.1%}",
        format_duration(time.run.total),
        "?" if cost is None else f"${cost:,.0f}",
    ]


def _describe_choice(plan: RunPlan) -> str:
    chosen, wanted = plan.strategy, plan.config.machine.parallel
    assert chosen is not None
    machine = plan.config.machine
    flags = " ".join(list_split_flags(machine))
    if flags and chosen.fits is False:
        return f"{flags} does not fit: share a copy of the model among more GPUs, or use --gradient_checkpointing full"
    if flags:
        copies = plan.plan.ranks // count_sharing_ranks(machine)
        known = "one copy" if copies == 1 else f"{copies} copies"
        return f"{flags}, with {known} of the model: the plan above is for it"
    if wanted != "auto":
        asked = "as asked for" if chosen.strategy == wanted else f"which {wanted} is on these machines"
        return f"--parallel {chosen.strategy}, {asked}: the plan above is for it"
    if chosen.fits is False:
        return (
            "nothing fits: take more GPUs, a smaller --mini_batch_size or --gradient_checkpointing full; "
            f"{chosen.strategy} needs the least, and the plan above is for it"
        )
    if chosen.time is None:
        return f"name the GPU, e.g. --gpu H100, to learn which is cheapest; the plan above is for {chosen.strategy}"
    return f"cheapest that fits: --parallel {chosen.strategy}; the plan above is for it"


def _list_placements(placements: tuple[Placement, ...]) -> list[str]:
    rows = []
    for each in placements:
        pairs = zip(asdict(each.planned).values(), asdict(each.placed).values(), strict=True)
        cells = [f"{planned / GB:,.3f} / {placed / GB:,.3f}" for planned, placed in pairs]
        verdict = "" if each.agrees else "  the plan is wrong"
        rows.append(
            [each.strategy, f"{each.ranks}", *cells, f"{each.least_total / GB:,.3f}", f"{each.error:.2%}{verdict}"]
        )
    columns = ["", "ranks", *asdict(placements[0].planned), "least of a rank", "largest error"]
    return format_table(columns, rows, {""})
