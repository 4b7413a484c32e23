"""What must hold between fields of a RunConfig, each with the fix: batches, rates and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptmill.config.mixtures import parse_mixture
from gptmill.config.stages import parse_stages

Values = dict[str, Any]


@dataclass(frozen=True)
class Relation:
    """What a field must be beside others; only looked at where all of them are sound by themselves."""

    name: str
    others: str
    find_fix: Callable[[Values, int], str]


def _fix_min_lr(values: Values, world_size: int) -> str:  # noqa: ARG001
    max_lr, min_lr = values["max_lr"], values.get("min_lr", 0.0)
    return f"is above max_lr {max_lr:g}; lower it or raise max_lr" if min_lr > max_lr else ""


def _fix_batch(values: Values, world_size: int) -> str:
    return _fix_batch_size(values["total_batch_size"], values, world_size)


def _fix_batch_size(batch: int, values: Values, world_size: int) -> str:
    windows, window = values["mini_batch_size"], values["context_length"]
    quantum = windows * window * world_size
    if batch % quantum == 0:
        return ""
    below = batch // quantum * quantum
    nearest = join_numbers([size for size in (below, below + quantum) if size])
    product = f"mini_batch_size {windows} x context_length {window} x {world_size} rank(s) = {quantum:,} tokens"
    return f"is not a multiple of {product}; the nearest are {nearest}"


def _fix_batch_stages(values: Values, world_size: int) -> str:
    if values["batch_size_warmup"] is None:
        return ""
    try:
        sizes = [stage.size for stage in parse_stages(values["batch_size_warmup"], "65536:500,131072:2000")]
    except ValueError as error:
        return str(error)
    fixes = ((size, _fix_batch_size(size, values, world_size)) for size in sizes)
    return next((f"has a batch of {size} tokens, which {fix}" for size, fix in fixes if fix), "")


def _fix_eval_tokens(values: Values, world_size: int) -> str:  # noqa: ARG001
    window = values["context_length"]
    is_short = values["eval_tokens"] < window
    return f"is less than one window of context_length {window}; use at least {window}" if is_short else ""


def _fix_mixture(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["mixture"] is None:
        return ""
    if extra := [name for name in ("corpus", "data_dir") if values[name] is not None]:
        return f"names all the data of the run, and {extra[0]} = {values[extra[0]]} does too; leave one of them out"
    try:
        parse_mixture(values["mixture"])
    except ValueError as error:
        return str(error)
    return ""


def _fix_order(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["documents"] != "whole" or values["order"] == "shuffle":
        return ""
    return "orders windows, and documents = whole has none; use order shuffle, or documents packed or masked"


def _fix_shift(values: Values, world_size: int) -> str:  # noqa: ARG001
    if not values["shift_windows"] or values["documents"] != "whole":
        return ""
    return "moves windows, and documents = whole has none; leave it out, or use documents packed or masked"


def _fix_stages(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["context_warmup"] is None:
        return ""
    if values["documents"] == "whole":
        return "cuts windows, and documents = whole has none; leave it out, or use documents packed or masked"
    window = values["context_length"]
    try:
        lengths = [stage.size for stage in parse_stages(values["context_warmup"], "256:500,512:1500")]
    except ValueError as error:
        return str(error)
    wrong = next((length for length in lengths if window % length), None)
    if wrong is None:
        return ""
    below = next(length for length in range(min(wrong, window), 0, -1) if window % length == 0)
    return f"has windows of {wrong} tokens, which do not divide context_length {window}; the next below is {below}"


def join_numbers(numbers: list[int]) -> str:
    return " and ".join(str(number) for number in numbers)


RELATIONS = (
    Relation("min_lr", "max_lr", _fix_min_lr),
    Relation("total_batch_size", "mini_batch_size context_length", _fix_batch),
    Relation("batch_size_warmup", "mini_batch_size context_length", _fix_batch_stages),
    Relation("eval_tokens", "context_length", _fix_eval_tokens),
    Relation("mixture", "corpus data_dir", _fix_mixture),
    Relation("order", "documents", _fix_order),
    Relation("shift_windows", "documents", _fix_shift),
    Relation("context_warmup", "documents context_length", _fix_stages),
)
