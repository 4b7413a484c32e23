"""Runs the bench: chooses rows, batch size and data, and measures one row after the other, failures included."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.requests import BenchRequest
from gptmill.config.run import RunConfig
from gptmill.config.serialization import format_flags
from gptmill.config.validation import check_config
from gptmill.data.corpus_preparation import DEFAULT_TOKENIZER
from gptmill.data.files import write_durably
from gptmill.experiments.bench.ablations import ALL, CUDA, FP8, MIXED, NAIVE_DESCRIPTION, NAIVE_KEY, Row, choose_rows
from gptmill.experiments.bench.environment import find_commit
from gptmill.experiments.bench.measurement import OUT_OF_MEMORY, RowResult, TimedTrials, describe_failure
from gptmill.experiments.bench.random_corpus import write_random_corpus
from gptmill.experiments.bench.result_table import describe_measurement, make_table
from gptmill.experiments.child_run import Say
from gptmill.experiments.trials import UNTRACKED, open_trials_folder
from gptmill.runtime.device import choose_device, describe_device
from gptmill.runtime.precision import choose_precision, is_slow, require_fp8

DEFAULT_RECIPES = {"cuda": "gpt2-124m"}
DEFAULT_RECIPE = "demo"
WARM_UP_STEPS = 10
MANY_STEPS = 1_000_000  # more than are ever run: the run is killed before it evaluates or saves
MAX_RANDOM_TOKENS = 200_000_000
DATA_FLAGS = ("corpus", "data_dir", "mixture")
SET_HERE = ("max_steps", "run_name")
AS_IT_IS = Row("run", "as it is", "", {})


def choose_recipe(recipe: str | None, flags: dict[str, Any]) -> str:
    """Returns the given recipe, or the default one for the device."""
    return recipe or DEFAULT_RECIPES.get(choose_device(flags.get("device", "auto")).type, DEFAULT_RECIPE)


def run_bench(recipe: str, flags: dict[str, Any], request: BenchRequest, say: Say) -> bool:
    """Measures and reports, after Ctrl-C what is measured so far; returns False if nothing could be measured."""
    _check_request(flags, request)
    config = make_config(recipe, flags)
    check_config(config, 1)
    device = choose_device(config.machine.device)
    rows, skipped = choose_rows(request.rows, list_capabilities(device)) if request.ablate else ([AS_IT_IS], [])
    if request.ablate:
        rows = [row._replace(flags=adapt_precision(row.flags, device)) for row in rows]
    # One micro-batch per step: with gradient accumulation, the naive row would take minutes.
    has_single_micro_batch = request.ablate and "total_batch_size" not in flags
    results: list[RowResult] = []
    with open_trials_folder(None, config.tracking.logdir) as folder:
        bench = _Bench(recipe, flags, request.steps, folder, say, has_single_micro_batch=has_single_micro_batch)
        say(f"{recipe} on {describe_device(device)}, {bench.describe_data()}")
        for line in skipped:
            say(line)
        if not rows:
            raise UserError("this machine can run none of these rows; choose other --rows")
        with _always_report(results, bench, request, say):
            bench.measure_all(rows, results)
    if not request.ablate and results[0].measurement is None:
        raise UserError(results[0].problem)
    return any(result.measurement is not None for result in results)


def list_capabilities(device: torch.device) -> set[str]:
    """Returns the requirements of rows that this device meets."""
    if device.type != "cuda":
        return set() if is_slow("bf16", device) else {MIXED}
    try:
        require_fp8(describe_device(device), torch.cuda.get_device_capability(device))
    except UserError:
        return {CUDA, MIXED}
    return {CUDA, FP8, MIXED}


class _Bench:
    """Measures rows of one recipe in one folder."""

    def __init__(
        self, recipe: str, flags: dict[str, Any], steps: int, folder: Path, say: Say, *, has_single_micro_batch: bool
    ) -> None:
        self.warm_up = min(WARM_UP_STEPS, steps)
        self.steps = steps
        self._recipe, self._folder, self._say = recipe, folder, say
        self._is_random = not any(name in flags for name in DATA_FLAGS)
        self._config = make_config(recipe, flags)
        self._windows = self._config.training.mini_batch_size
        self._has_single_micro_batch = has_single_micro_batch
        self._flags = {**flags, **_shorten(self._config, folder)}
        if self._is_random:
            self._flags |= self._write_data(folder / "random")

    @property
    def _tokens_per_step(self) -> int:
        if self._has_single_micro_batch:
            return self._windows * self._config.model.context_length
        return self._config.training.total_batch_size

    def describe_data(self) -> str:
        return "random tokens" if self._is_random else "your data"

    def describe_rows(self) -> list[str]:
        """Describes what all rows have in common, and the naive one."""
        windows = f"{self._windows:,} x {self._config.model.context_length:,} tokens"
        return [
            f"medians of {self.steps:,} steps of {self._tokens_per_step:,} tokens, after {self.warm_up:,} warm-up "
            f"steps; micro-batches of {windows}",
            NAIVE_DESCRIPTION,
        ]

    def make_record(self) -> dict[str, Any]:
        """Returns the same as JSON values."""
        return {
            "recipe": self._recipe,
            "data": self.describe_data(),
            "mini_batch_size": self._windows,
            "total_batch_size": self._tokens_per_step,
            "steps": self.steps,
            "warm_up": self.warm_up,
        }

    def measure_all(self, rows: list[Row], results: list[RowResult]) -> None:
        """Appends each row's result to `results` as soon as it is measured."""
        started = time.monotonic()
        for number, row in enumerate(rows):
            if len(rows) > 1:
                left = timedelta(seconds=round((time.monotonic() - started) / max(1, number) * (len(rows) - number)))
                estimate = f", about {left} left" if number else ""
                self._say(f"row {number + 1} of {len(rows)}: {row.title}{estimate}")
            result = self._measure(row)
            while row.key == NAIVE_KEY and result.problem == OUT_OF_MEMORY and self._windows % 2 == 0:
                self._windows //= 2
                self._say(f"out of memory; measuring all rows with --mini_batch_size {self._windows}")
                result = self._measure(row)
            if result.problem and len(rows) > 1:
                self._say(f"  {result.problem}")
            results.append(result)

    def _measure(self, row: Row) -> RowResult:
        if self._windows % row.micro_batches:
            problem = f"needs a mini_batch_size divisible by {row.micro_batches}, not {self._windows}"
            return RowResult(row, None, problem)
        sizes = {"mini_batch_size": self._windows // row.micro_batches, "total_batch_size": self._tokens_per_step}
        arguments = [self._recipe, *format_flags({**self._flags, **row.flags, **sizes, **self._join_plugins(row)})]
        trials = TimedTrials(self._folder, arguments, self.warm_up + self.steps, self.steps, self._say)
        try:
            return RowResult(row, trials.measure(f"{row.key}-{self._windows}"))
        except UserError as error:
            return RowResult(row, None, describe_failure(error))

    def _join_plugins(self, row: Row) -> dict[str, Any]:
        """The user's plug-ins and that of the row, where it has one."""
        names = [name for name in (self._config.plugins.plugin, row.flags.get("plugin")) if name]
        return {"plugin": ",".join(names)} if names else {}

    def _write_data(self, folder: Path) -> dict[str, Any]:
        """Writes random tokens for all steps, up to MAX_RANDOM_TOKENS before they repeat."""
        data, window, step = self._config.data, self._config.model.context_length, self._tokens_per_step
        tokens = max(min(step * (self.warm_up + self.steps + 1), MAX_RANDOM_TOKENS), 2 * step)
        write_random_corpus(folder, data.tokenizer or DEFAULT_TOKENIZER, tokens + window, 2 * window + 1)
        order = "shuffle" if data.order == "curriculum" else data.order  # random documents have no scores
        return {"data_dir": str(folder), "order": order}


@contextmanager
def _always_report(results: list[RowResult], bench: _Bench, request: BenchRequest, say: Say) -> Iterator[None]:
    """Reports all results at the end, after Ctrl-C too."""
    try:
        yield
    finally:
        measured = [result.measurement for result in results if result.measurement is not None]
        if request.ablate and results:
            for line in [*bench.describe_rows(), *make_table(results)]:
                say(line)
        elif measured:
            for line in describe_measurement(measured[0], bench.steps, bench.warm_up):
                say(line)
        commit = find_commit()
        if measured:
            code = f"commit {commit}" if commit else f"code {measured[0].code}"
            say(f"gptmill {measured[0].version} ({code}), torch {measured[0].torch_version}, {measured[0].device}")
        if request.json is not None and results:
            rows = [_make_record(result) for result in results]
            _write_json(request.json, {**bench.make_record(), "commit": commit, "rows": rows})


def _make_record(result: RowResult) -> dict[str, Any]:
    row, measurement = result.row, result.measurement
    outcome = {"problem": result.problem} if measurement is None else asdict(measurement)
    return {"row": row.key, "title": row.title, "flags": row.flags, "micro_batches": row.micro_batches, **outcome}


def _write_json(path: str, record: dict[str, Any]) -> None:
    try:
        write_durably(Path(path), json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another path for --json") from None


def _check_request(flags: dict[str, Any], request: BenchRequest) -> None:
    for name in flags:
        if name in SET_HERE:
            raise UserError(f"--{name} is set by the bench itself; leave it out (--steps sets the measured steps)")
        if request.ablate and name in ALL:
            raise UserError(f"--{name} is varied by the rows of --ablate; leave out one of the two")
    if request.rows is not None and not request.ablate:
        raise UserError("--rows selects rows of --ablate; add --ablate")
    if request.steps < 1:
        raise UserError(f"--steps {request.steps}: must be at least 1")
    if request.json is not None:
        path = Path(request.json).absolute()
        if not request.json or path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"--json {request.json}: cannot write this file; choose another path")
    if "RANK" in os.environ:
        raise UserError("the bench starts its own processes; run it without torchrun")


def adapt_precision(flags: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Replaces bf16 in a row's flags by the mixed precision that the device supports."""
    if flags["precision"] != "bf16" or (device.type != "cuda" and not is_slow("bf16", device)):
        return flags
    return {**flags, "precision": choose_precision("auto", device)}


def _shorten(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Returns the flags of a measured run: only steps, all of one size, without evaluation or checkpoints."""
    return {
        "max_steps": MANY_STEPS,
        "eval_freq": MANY_STEPS,
        "eval_tokens": config.model.context_length,
        "sample_tokens": 0,
        "eval_tasks": None,
        "eval_task_freq": None,
        "checkpoint_freq": MANY_STEPS,
        "keep_checkpoints": 1,
        "milestone_freq": None,
        "mirror_to": None,
        "init_from": None,
        "context_warmup": None,
        "batch_size_warmup": None,
        "early_stop_patience": None,
        "log_freq": 1,
        **UNTRACKED,
        "logdir": str(folder),
    }
