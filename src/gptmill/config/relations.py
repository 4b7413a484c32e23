"""Constraints between fields of a RunConfig, each with its fix: batch sizes, learning rates and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gptmill.config.plugins import list_parts, split_names
from gptmill.config.value_syntax import parse_mixture, parse_stages

# Whose state is a number per number of a parameter, or whole where a matrix is. What a plug-in does is not known.
SHARDABLE_OPTIMIZERS = ("adamw", "muon", "lion")
MOST_WINDOWS = 10**8  # of a step on one rank whose divisors are worth the search

Values = dict[str, Any]
"""The values of all fields by name; "world_size", the number of ranks that read different data; "own_parts", fields
with a part of a plug-in; "model", the ModelConfig."""


@dataclass(frozen=True)
class Relation:
    """A constraint of a field that depends on other fields; checked only if each of them is valid by itself."""

    name: str
    others: str
    check: Callable[[Values], str]
    """Returns what is wrong and how to fix it, or an empty text."""


def _check_min_lr(values: Values) -> str:
    max_lr, min_lr = values["max_lr"], values.get("min_lr", 0.0)
    return f"is above max_lr {max_lr:g}; lower it or raise max_lr" if min_lr > max_lr else ""


def _check_total_batch_size(values: Values) -> str:
    return _check_batch_size(values["total_batch_size"], values)


def _check_batch_size(batch: int, values: Values) -> str:
    windows, window, world_size = values["mini_batch_size"], values["context_length"], values["world_size"]
    quantum = windows * window * world_size
    if batch % quantum == 0:
        return ""
    below = batch // quantum * quantum
    nearest = join_numbers([size for size in (below, below + quantum) if size])
    product = f"mini_batch_size {windows} x context_length {window} x {world_size} rank(s) = {quantum:,} tokens"
    return f"is not a multiple of {product}; the nearest are {nearest}{_suggest_mini_batch_size(batch, values)}"


def _suggest_mini_batch_size(batch: int, values: Values) -> str:
    """The largest smaller one that divides the batch among the ranks, where there is one."""
    windows, rest = divmod(batch, values["context_length"] * values["world_size"])
    if rest or not 1 <= windows <= MOST_WINDOWS:
        return ""
    small = [size for size in range(1, math.isqrt(windows) + 1) if windows % size == 0]
    divisors = [*small, *(windows // size for size in small)]
    fitting = max(size for size in divisors if size <= values["mini_batch_size"])
    return f"; or keep it, with --mini_batch_size {fitting}"


def _check_batch_size_warmup(values: Values) -> str:
    if values["batch_size_warmup"] is None:
        return ""
    try:
        sizes = [stage.size for stage in parse_stages(values["batch_size_warmup"], "65536:500,131072:2000")]
    except ValueError as error:
        return str(error)
    fixes = ((size, _check_batch_size(size, values)) for size in sizes)
    return next((f"has a batch of {size} tokens, which {fix}" for size, fix in fixes if fix), "")


def _check_eval_tokens(values: Values) -> str:
    window = values["context_length"]
    is_short = values["eval_tokens"] < window
    return f"is less than one window of context_length {window}; use at least {window}" if is_short else ""


def _check_eval_task_freq(values: Values) -> str:
    freq, eval_freq = values["eval_task_freq"], values["eval_freq"]
    if freq is None or freq % eval_freq == 0:
        return ""
    nearest = join_numbers(
        [size for size in (freq // eval_freq * eval_freq, (freq // eval_freq + 1) * eval_freq) if size]
    )
    return f"is not a multiple of eval_freq {eval_freq}; the nearest are {nearest}"


def _check_mixture(values: Values) -> str:
    if values["mixture"] is None:
        return ""
    if extra := [name for name in ("corpus", "data_dir") if values[name] is not None]:
        return f"replaces corpus and data_dir, but {extra[0]} = {values[extra[0]]} is set too; remove one of them"
    try:
        parse_mixture(values["mixture"])
    except ValueError as error:
        return str(error)
    return ""


def _check_order(values: Values) -> str:
    if values["documents"] != "whole" or values["order"] == "shuffle":
        return ""
    return "orders windows, but documents = whole has none; use order shuffle, or documents packed or masked"


def _check_shift_windows(values: Values) -> str:
    if not values["shift_windows"] or values["documents"] != "whole":
        return ""
    return "shifts windows, but documents = whole has none; remove it, or use documents packed or masked"


def _check_context_warmup(values: Values) -> str:
    if values["context_warmup"] is None:
        return ""
    if values["documents"] == "whole":
        return "shortens windows, but documents = whole has none; remove it, or use documents packed or masked"
    window = values["context_length"]
    try:
        lengths = [stage.size for stage in parse_stages(values["context_warmup"], "256:500,512:1500")]
    except ValueError as error:
        return str(error)
    wrong = next((length for length in lengths if window % length), None)
    if wrong is None:
        return ""
    below = next(length for length in range(min(wrong, window), 0, -1) if window % length == 0)
    return f"has windows of {wrong} tokens, which do not divide context_length {window}; use {below} instead"


def _make_parts_check(field: str, kind: str) -> Callable[[Values], str]:
    def check(values: Values) -> str:
        known = [part.name for part in list_parts([kind])]
        unknown = [name for name in split_names(values[field]) if name not in known]
        if not unknown:
            return ""
        names = (
            f"the registered ones are {', '.join(known)}" if known else f"load one with --plugin, or remove --{field}"
        )
        return f"names no registered {kind}: {', '.join(unknown)}; {names}"

    return check


def _check_histogram_freq(values: Values) -> str:
    has_tracker = any(values[name] for name in ("use_tensorboard", "use_wandb", "use_trackio", "trackers"))
    is_unseen = values["histogram_freq"] is not None and not has_tracker
    return "has no tracker to show histograms; add --use_tensorboard, or remove it" if is_unseen else ""


def _check_parallel(values: Values) -> str:
    wanted, optimizer = values["parallel"], values["optimizer"]
    if wanted in ("fsdp", "hsdp") and optimizer not in SHARDABLE_OPTIMIZERS:
        return (
            f"cannot shard the state of optimizer {optimizer}; use --parallel zero1, or optimizer "
            f"{', '.join(SHARDABLE_OPTIMIZERS[:-1])} or {SHARDABLE_OPTIMIZERS[-1]}"
        )
    return ""


def _check_exact_ranks(values: Values) -> str:
    if not values["exact_ranks"] or values["parallel"] in ("auto", "zero1"):
        return ""
    return f"adds up gradients in its own way, not that of --parallel {values['parallel']}; remove one of them"


def join_words(words: Sequence[str]) -> str:
    return " and ".join(words)


def join_numbers(numbers: list[int]) -> str:
    return " and ".join(str(number) for number in numbers)


RELATIONS = (
    Relation("evaluators", "", _make_parts_check("evaluators", "evaluator")),
    Relation("trackers", "", _make_parts_check("trackers", "tracker")),
    Relation("histogram_freq", "use_tensorboard use_wandb use_trackio trackers", _check_histogram_freq),
    Relation("min_lr", "max_lr", _check_min_lr),
    Relation("total_batch_size", "mini_batch_size context_length", _check_total_batch_size),
    Relation("batch_size_warmup", "mini_batch_size context_length", _check_batch_size_warmup),
    Relation("eval_tokens", "context_length", _check_eval_tokens),
    Relation("eval_task_freq", "eval_freq", _check_eval_task_freq),
    Relation("mixture", "corpus data_dir", _check_mixture),
    Relation("order", "documents", _check_order),
    Relation("shift_windows", "documents", _check_shift_windows),
    Relation("exact_ranks", "parallel", _check_exact_ranks),
    Relation("context_warmup", "documents context_length", _check_context_warmup),
    Relation("parallel", "", _check_parallel),
)
