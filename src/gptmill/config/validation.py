"""What makes a RunConfig impossible, found before anything is built, all of it at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptmill.config.errors import ConfigError, Problem
from gptmill.config.mixtures import parse_mixture
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.config.stages import parse_context_stages

MAX_SEED = 2**63 - 1
MAX_NAME_BYTES = 200
MIN_GUARD_WINDOW = 16  # fewer steps are no band
Values = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """What each of some fields must be by itself."""

    names: str
    is_valid: Callable[[Any], bool]
    rule: str


@dataclass(frozen=True)
class Relation:
    """What a field must be beside others; only looked at where all of them are sound by themselves."""

    name: str
    others: str
    find_fix: Callable[[Values, int], str]


def check_config(config: RunConfig, world_size: int = 1) -> None:
    """Raises ConfigError with every problem found."""
    if problems := find_problems(config, world_size):
        raise ConfigError(problems)


def find_problems(config: RunConfig, world_size: int = 1) -> list[Problem]:
    """Every field that is wrong by itself, and every relation that does not hold between sound ones."""
    values = list_values(config)
    fixes: dict[str, str] = {}
    for limit in RANGES:
        for name in limit.names.split():
            if values[name] is not None and not limit.is_valid(values[name]):
                fixes[name] = limit.rule
    broken = frozenset(fixes)
    for relation in RELATIONS:
        fields = {relation.name, *relation.others.split()}
        if not fields & broken and (fix := relation.find_fix(values, world_size)):
            fixes[relation.name] = fix
    return [Problem(f"{name} = {values[name]}", fix) for name, fix in fixes.items()]


def is_folder_name(name: str) -> bool:
    """Whether any file system would take the name, and as one folder."""
    is_plain = name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\")
    return is_plain and len(name.encode()) <= MAX_NAME_BYTES


def _fix_heads(values: Values, world_size: int) -> str:  # noqa: ARG001
    width, heads = values["embd_size"], values["num_heads"]
    if width % heads == 0:
        return ""
    fitting = (count for count in range(1, width + 1) if width % count == 0)
    nearest = sorted(fitting, key=lambda count: abs(count - heads))[:2]
    return f"does not divide embd_size {width}; the nearest that do are {_join(sorted(nearest))}"


def _fix_min_lr(values: Values, world_size: int) -> str:  # noqa: ARG001
    max_lr = values["max_lr"]
    return f"is above max_lr {max_lr:g}; lower it or raise max_lr" if values["min_lr"] > max_lr else ""


def _fix_batch(values: Values, world_size: int) -> str:
    batch, windows, window = (values[name] for name in ("total_batch_size", "mini_batch_size", "context_length"))
    quantum = windows * window * world_size
    if batch % quantum == 0:
        return ""
    below = batch // quantum * quantum
    nearest = _join([size for size in (below, below + quantum) if size])
    product = f"mini_batch_size {windows} x context_length {window} x {world_size} rank(s) = {quantum:,} tokens"
    return f"is not a multiple of {product}; the nearest are {nearest}"


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


def _fix_stages(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["context_stages"] is None:
        return ""
    if values["documents"] == "whole":
        return "cuts windows, and documents = whole has none; leave it out, or use documents packed or masked"
    window = values["context_length"]
    try:
        lengths = [stage.length for stage in parse_context_stages(values["context_stages"])]
    except ValueError as error:
        return str(error)
    wrong = [length for length in lengths if window % length]
    return f"has windows of {wrong[0]} tokens, which do not divide context_length {window}" if wrong else ""


def _join(numbers: list[int]) -> str:
    return " and ".join(str(number) for number in numbers)


RANGES = (
    Range("num_layers embd_size num_heads context_length", lambda value: value >= 1, "must be at least 1"),
    Range("total_batch_size mini_batch_size num_epochs", lambda value: value >= 1, "must be at least 1"),
    Range("steps_per_epoch max_steps eval_freq eval_tokens", lambda value: value >= 1, "must be at least 1"),
    Range("checkpoint_freq keep_checkpoints milestone_freq log_freq", lambda value: value >= 1, "must be at least 1"),
    Range("max_skips snapshot_freq early_stop_patience", lambda value: value >= 1, "must be at least 1"),
    Range("guard_window", lambda value: value >= MIN_GUARD_WINDOW, f"must be at least {MIN_GUARD_WINDOW}"),
    Range("hang_factor", lambda value: 1 < value < math.inf, "must be greater than 1"),
    Range("warmup_steps sample_tokens max_rollbacks", lambda value: value >= 0, "must not be negative"),
    Range(
        "weight_decay min_lr early_stop_min_delta hang_seconds",
        lambda value: 0 <= value < math.inf,
        "must be finite and not negative",
    ),
    Range(
        "max_lr eps grad_clip cache_gb spike_threshold",
        lambda value: 0 < value < math.inf,
        "must be finite and greater than 0",
    ),
    Range("dropout label_smoothing beta1 beta2", lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    Range("val_fraction", lambda value: 0 < value < 1, "must lie between 0 and 1"),
    Range("seed", lambda value: 0 <= value <= MAX_SEED, f"must lie between 0 and {MAX_SEED}"),
    Range("logdir data_dir corpus tokenizer copy_to", lambda value: value != "", "must not be empty"),
    Range("score", is_folder_name, "must be a plain name, as given to gptmill data score"),
    Range("run_name", is_folder_name, "must be a plain folder name; set its parent with logdir"),
)
RELATIONS = (
    Relation("num_heads", "embd_size", _fix_heads),
    Relation("min_lr", "max_lr", _fix_min_lr),
    Relation("total_batch_size", "mini_batch_size context_length", _fix_batch),
    Relation("eval_tokens", "context_length", _fix_eval_tokens),
    Relation("mixture", "corpus data_dir", _fix_mixture),
    Relation("order", "documents", _fix_order),
    Relation("context_stages", "documents context_length", _fix_stages),
)
