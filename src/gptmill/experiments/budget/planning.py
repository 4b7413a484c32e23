"""Plans a budget: samples the corpus, measures the machine, and chooses what to train."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from gptmill.config.durations import parse_duration
from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.validation import check_config
from gptmill.experiments.budget.candidate import CONTEXTS, MIN_VAL_BYTES, Candidate
from gptmill.experiments.budget.choice import Situation, choose, find_most_steps
from gptmill.experiments.budget.compile_choice import compile_if_it_pays
from gptmill.experiments.budget.corpus_sample import MeasuredTokenizer, Sample, measure_tokenizers, read_sample
from gptmill.experiments.budget.fitted_law import load_law
from gptmill.experiments.budget.search import CPU_TURNS, GPU_TURNS, correct, measure_best
from gptmill.experiments.budget.speed_probe import CANDIDATE_SHARE, measure_candidate, measure_speed
from gptmill.runtime.device import describe_device
from gptmill.runtime.host_allocator import keep_freed_memory, keep_large_blocks
from gptmill.runtime.world import World, open_world

MIN_SECONDS = 20.0
MIN_EXCERPT_BYTES = 400_000  # of a corpus that is not used as a whole
START_SECONDS = 2.0  # building the model, the dry run, opening the run
END_SECONDS = 6.0  # the last checkpoint, its margin, and the exit of the process
# What a budget decides itself, or what a run within one cannot do.
REFUSED = ("data_dir", "mixture", "num_epochs", "steps_per_epoch", "context_warmup", "batch_size_warmup", "init_from")

Say = Callable[[str], None]


@dataclass(frozen=True)
class BudgetPlan:
    """What will be trained, and what it was chosen from."""

    corpus: str
    seconds: float
    """The whole budget."""
    started: float
    """When it began, on time.monotonic()."""
    sample: Sample
    situation: Situation
    candidates: tuple[Candidate, ...]
    """The best first."""
    tokenizers: tuple[MeasuredTokenizer, ...]
    device: str
    values: Mapping[str, Any]
    """All options of the run but those of its data."""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def tokenizer(self) -> MeasuredTokenizer:
        return next(each for each in self.tokenizers if each.option == self.best.tokenizer)

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of measured over expected losses: of the law's and of the text's."""
        return math.hypot(self.situation.law.spread, self.sample.spread)

    @property
    def most_steps(self) -> int:
        """Whatever the time allows, more of them would overfit."""
        return find_most_steps(self.situation, self.best)

    @property
    def needed_bytes(self) -> int:
        """The text to prepare: what one pass of the run reads, and the validation split."""
        total = self.situation.corpus.text_bytes
        needed = max(MIN_EXCERPT_BYTES, round(1.05 * self.best.unique_bytes + MIN_VAL_BYTES))
        return total if needed > 0.9 * total else needed

    def find_seconds_left(self) -> float:
        """Until the budget ends."""
        return self.started + self.seconds - time.monotonic()

    def put_first(self, candidate: Candidate) -> BudgetPlan:
        """The plan that trains this candidate instead of the best."""
        others = [each for each in self.candidates if each.shape != candidate.shape]
        values = {**_list_values(candidate, self.situation.given), "compile": self.values["compile"]}
        return replace(self, candidates=(candidate, *others), values=values)


def parse_budget(text: str) -> float:
    """The seconds of --budget; raises UserError for what is none, or too short for anything."""
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise UserError(f"--budget {text}: {error}") from None
    if seconds < MIN_SECONDS:
        raise UserError(
            f"--budget {text}: too short: loading PyTorch, measuring, preparing and saving take some of it; give at "
            f"least {MIN_SECONDS:.0f}s"
        )
    return seconds


def check_given(recipe: str | None, given: Mapping[str, Any]) -> str:
    """The corpus; raises UserError for what does not go with a budget."""
    if "RANK" in os.environ:
        raise UserError("--budget plans for one process; run it without torchrun")
    if recipe is not None:
        raise UserError(
            f"--budget chooses what the recipe {recipe} would fix; leave out the recipe, and give the options that you "
            f"want to keep as flags, e.g. --num_layers 4"
        )
    if refused := [name for name in REFUSED if name in given]:
        raise UserError(
            f"--budget does not go with {', '.join(f'--{name}' for name in refused)}; leave out one of both"
        )
    if not given.get("corpus"):
        raise UserError(
            "--budget needs a text to train on: add --corpus my.txt (any source that gptmill prepare takes)"
        )
    batch, context = given.get("total_batch_size"), given.get("context_length", CONTEXTS[0])
    if batch is not None and batch % context:
        raise UserError(
            f"--total_batch_size {batch} is no multiple of a context of {context} tokens; give another, or leave it out"
        )
    return str(given["corpus"])


def plan_budget(corpus: str, seconds: float, started: float, given: Mapping[str, Any], say: Say) -> BudgetPlan:
    """Plans within the budget, whose clock is running; `given` are the options that the user has set."""
    sample = read_sample(corpus)
    given = {name: value for name, value in given.items() if name != "corpus"}
    say("measuring this machine")
    with open_world(given.get("device", "auto")) as world, ExitStack() as stack:
        if world.device.type == "cpu":  # as a run does it
            stack.enter_context(keep_freed_memory())
            stack.enter_context(keep_large_blocks())
        speed = measure_speed(given, seconds, world, lambda text: say(f"  {text}"))
        device = describe_device(world.device)
        say("trying tokenizers")
        tokenizers = list(measure_tokenizers(sample, given.get("tokenizer")))
        options = tuple(tokenizer.option for tokenizer in tokenizers)
        plain = Situation(load_law(), speed, sample.facts, options, _find_left(started + seconds), given)
        situation = compile_if_it_pays(plain, world.device.type)
        expected = choose(situation)
        say("measuring the best candidates")
        measured = _measure_best(situation, expected, seconds, world, say)
    situation = replace(situation, seconds=_find_left(started + seconds) - situation.compile_seconds)
    candidates = tuple(correct(situation, expected, measured))
    values = _list_values(candidates[0], given)
    values.setdefault("compile", situation.compiles)
    check_config(make_config(None, {**values, "data_dir": corpus}))  # before anything is written
    return BudgetPlan(corpus, seconds, started, sample, situation, candidates, tuple(tokenizers), device, values)


def _list_values(candidate: Candidate, given: Mapping[str, Any]) -> dict[str, Any]:
    return candidate.list_values({name: value for name, value in given.items() if name != "tokenizer"})


def _measure_best(
    situation: Situation, expected: Sequence[Candidate], seconds: float, world: World, say: Say
) -> dict[int, float]:
    turns = CPU_TURNS if world.device.type == "cpu" else GPU_TURNS
    limit = CANDIDATE_SHARE * seconds / turns

    def measure(candidate: Candidate) -> float:
        return measure_candidate(candidate, situation.given, limit, world) / situation.speedup

    measured = measure_best(situation, expected, measure, turns)
    for number, step_seconds in measured.items():
        say(f"  {_describe_step(expected[number], step_seconds)}")
    return measured


def _describe_step(candidate: Candidate, seconds: float) -> str:
    took = f"{1000 * seconds:.1f} ms" if math.isfinite(seconds) else "too large for the memory"
    name = f"{candidate.shape.num_layers} x {candidate.shape.embd_size}, {candidate.tokenizer.name}"
    return f"{name}, {candidate.tokens_per_step:,} tokens: {took}"


def _find_left(deadline: float) -> float:
    """Seconds for preparing, training and evaluating."""
    return deadline - time.monotonic() - START_SECONDS - END_SECONDS
