"""What makes a RunConfig impossible, found before anything is built, all of it at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gptmill.config.errors import ConfigError, Problem
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values

AT_LEAST_ONE = (
    "num_layers",
    "embd_size",
    "num_heads",
    "context_length",
    "total_batch_size",
    "mini_batch_size",
    "num_epochs",
    "steps_per_epoch",
    "max_steps",
    "eval_freq",
    "eval_tokens",
    "checkpoint_freq",
    "keep_checkpoints",
    "log_freq",
)
NOT_NEGATIVE = ("warmup_steps", "sample_tokens", "seed", "weight_decay", "min_lr")
POSITIVE = ("max_lr", "eps", "grad_clip")
MAX_SEED = 2**63 - 1
MAX_NAME_BYTES = 200
BELOW_ONE = ("dropout", "label_smoothing", "beta1", "beta2")


def check_config(config: RunConfig, world_size: int = 1) -> None:
    """Raises ConfigError with every problem found."""
    if problems := find_problems(config, world_size):
        raise ConfigError(problems)


def find_problems(config: RunConfig, world_size: int = 1) -> list[Problem]:
    """Problems of single fields first; relations between fields are looked at only once those are sound."""
    values = list_values(config)
    problems = [
        *_find_out_of_range(values, AT_LEAST_ONE, lambda value: value >= 1, "must be at least 1"),
        *_find_out_of_range(values, NOT_NEGATIVE, lambda value: 0 <= value < math.inf, "must be 0 or more, and finite"),
        *_find_out_of_range(values, POSITIVE, lambda value: 0 < value < math.inf, "must be greater than 0 and finite"),
        *_find_out_of_range(values, BELOW_ONE, lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
        *_find_out_of_range(values, ("val_fraction",), lambda value: 0 < value < 1, "must lie between 0 and 1"),
    ]
    if values["run_name"] is not None and not is_folder_name(values["run_name"]):
        problems.append(_problem(values, "run_name", "must be a plain folder name; set its parent with logdir"))
    if values["seed"] > MAX_SEED:
        problems.append(_problem(values, "seed", f"must be at most {MAX_SEED}"))
    return problems or _find_conflicts(values, world_size)


def is_folder_name(name: str) -> bool:
    """Whether any file system would take the name, and as one folder."""
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and not set(name) & set("/\\")
        and len(name.encode()) <= MAX_NAME_BYTES
    )


def _find_out_of_range(
    values: dict[str, Any], names: tuple[str, ...], is_valid: Callable[[Any], bool], rule: str
) -> list[Problem]:
    return [_problem(values, name, rule) for name in names if values[name] is not None and not is_valid(values[name])]


def _find_conflicts(values: dict[str, Any], world_size: int) -> list[Problem]:
    problems = []
    width, heads = values["embd_size"], values["num_heads"]
    if width % heads:
        fitting = [count for count in range(1, width + 1) if width % count == 0]
        nearest = sorted(fitting, key=lambda count: abs(count - heads))[:2]
        fix = f"does not divide embd_size {width}; the nearest that do are {_either(nearest)}"
        problems.append(_problem(values, "num_heads", fix))
    if values["min_lr"] > values["max_lr"]:
        problems.append(_problem(values, "min_lr", f"is above max_lr {values['max_lr']:g}; lower it or raise max_lr"))
    batch, window = values["total_batch_size"], values["context_length"]
    quantum = values["mini_batch_size"] * window * world_size
    if batch % quantum:
        below = batch // quantum * quantum
        nearest = [size for size in (below, below + quantum) if size]
        product = f"mini_batch_size {values['mini_batch_size']} x context_length {window} x {world_size} rank(s)"
        fix = f"is not a multiple of {product} = {quantum:,} tokens; the nearest are {_either(nearest)}"
        problems.append(_problem(values, "total_batch_size", fix))
    if values["eval_tokens"] < window:
        fix = f"is less than one window of context_length {window}; use at least {window}"
        problems.append(_problem(values, "eval_tokens", fix))
    return problems


def _problem(values: dict[str, Any], name: str, fix: str) -> Problem:
    return Problem(f"{name} = {values[name]}", fix)


def _either(numbers: list[int]) -> str:
    return " and ".join(str(number) for number in numbers)
