"""Evaluates models on tasks, splits, texts and by what they write: one checkpoint, or all of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptmill.api.configuration import Recipe
from gptmill.api.progress import show_amount
from gptmill.api.run import Run
from gptmill.config.errors import ConfigError, UserError
from gptmill.config.eval_request import EvalRequest, find_problems
from gptmill.config.keywords import build_request
from gptmill.config.run import RunConfig
from gptmill.config.trust import trusting
from gptmill.evals.diversity import DiversityScores, score_diversity
from gptmill.evals.likelihood import LikelihoodScorer, Report
from gptmill.evals.measured_texts import MeasuredText, open_split, read_text
from gptmill.evals.prompts import Example
from gptmill.evals.request_encoding import Sequences
from gptmill.evals.task import Task, load_tasks
from gptmill.evals.task_data import load_examples
from gptmill.evals.task_scores import TaskScores, list_requests, score_task
from gptmill.evals.text_loss import TextScores, measure_text
from gptmill.inference.huggingface_folder import holds_hf_model
from gptmill.inference.loading import LoadedModel, is_checkpoint
from gptmill.inference.model import Model
from gptmill.inference.opening import load_source
from gptmill.runs.checkpoints.storage import list_step_folders, read_step
from gptmill.runs.directory import RunDirectory, find_run
from gptmill.runtime.compiling import list_compile_options, raise_recompile_limit
from gptmill.runtime.gpu_warm_up import start_warm_up
from gptmill.runtime.world import World, open_world

Scores = TaskScores | TextScores | DiversityScores


@dataclass(frozen=True)
class Scored:
    """The scores of one task, text or set of samples at one step of a run."""

    step: int
    scores: Scores


def evaluate(
    model: Model | Recipe, tasks: str | None = None, *, progress: bool = True, **options: Any
) -> Mapping[str, Scores]:
    """Evaluates a model, or that of a run, a checkpoint or a Hugging Face folder; returns the scores by name.

    The options are those of gptmill eval: task_data, limit, text, data_dir, split, checkpoint, … Without any, the loss
    of the run's validation split is measured.
    """
    request = build_request(EvalRequest, {"tasks": tasks, **options})
    check_request(request)
    if request.all or request.every is not None:
        raise UserError("evaluate takes one checkpoint; for several, call it for each of open_run(…).checkpoints")
    if isinstance(model, Model):
        world, inputs = World(0, 1, model.device), Inputs(request)
        loaded = LoadedModel(model.module, model.tokenizer, model.step)
        found = list(score_model(loaded, inputs, world, progress=progress))
    else:
        with trusting(request.trusting.trust), open_world(request.loading.device) as world:
            start_warm_up(world.device)
            inputs = Inputs(request)
            found = list(score_source(os.fspath(model), inputs, world, progress=progress))
    return {scored.scores.name: scored.scores for scored in found}


def check_request(request: EvalRequest) -> None:
    if problems := find_problems(request):
        raise ConfigError(problems)


class Inputs:
    """What a request asks to evaluate on. The tasks' data is read at once, before a model is loaded."""

    def __init__(self, request: EvalRequest) -> None:
        self.request = request
        self.tasks: list[tuple[Task, list[Example]]] = [
            (task, load_examples(task, request.task_data, request.limit, download=request.download))
            for task in (load_tasks(request.tasks) if request.tasks is not None else ())
        ]
        self.has_several = request.all or request.every is not None
        """Whether several checkpoints are evaluated."""
        self._sequences: dict[str, Sequences] = {}
        self._texts: list[MeasuredText] | None = None

    def encode(self, task: Task, examples: list[Example], scorer: LikelihoodScorer) -> Sequences | None:
        """Encodes a task once for all checkpoints of a run, which share a tokenizer.

        For one checkpoint there is nothing to share: its scorer encodes while the device computes.
        """
        if not self.has_several:
            return None
        if task.name not in self._sequences:
            self._sequences[task.name] = scorer.encode(list_requests(examples))
        return self._sequences[task.name]

    def open_texts(self, loaded: LoadedModel, config: RunConfig | None) -> list[MeasuredText]:
        """Opens the text and the split that are asked for; without anything else, the validation split."""
        if self._texts is None:
            request = self.request
            texts = [] if request.text is None else [read_text(Path(request.text), loaded.tokenizer)]
            is_default = request.tasks is None and request.text is None and request.samples is None
            if is_default or request.split is not None or request.data_dir is not None:
                texts += open_split(request.split or "val", request.data_dir, config, loaded.tokenizer)
            self._texts = texts
        return self._texts


def score_source(source: str, inputs: Inputs, world: World, *, progress: bool = True) -> Iterator[Scored]:
    """Yields the scores of a model, or of a run's checkpoints, each as soon as it is known. All ranks call it."""
    request = inputs.request
    config = find_config(source, request.loading.logdir)
    if not inputs.has_several:
        yield from score_model(load_onto(source, request, world), inputs, world, config, progress=progress)
        return
    for path in list_checkpoints(source, request):
        try:
            alone = replace(request, loading=replace(request.loading, checkpoint="latest"))
            loaded = load_onto(str(path), alone, world)
        except UserError as error:
            sys.stderr.write(f"warning: {error}; the others are evaluated\n")
            continue
        yield from score_model(loaded, inputs, world, config, progress=progress)


def list_checkpoints(source: str, request: EvalRequest) -> list[Path]:
    """The checkpoints that --all or --every chooses; of several of one step, the newest."""
    if is_checkpoint(Path(source)) or holds_hf_model(Path(source)):
        raise UserError(f"{source} is one model; --all and --every need a run")
    folder = find_run(source, request.loading.logdir).checkpoints
    paths = {read_step(path): path for path in list_step_folders(folder)}
    chosen = [path for step, path in sorted(paths.items()) if step % (request.every or 1) == 0]
    if not chosen:
        found = ", ".join(map(str, sorted(paths))) or "none yet"
        raise UserError(f"{source} has no checkpoint at a multiple of {request.every or 1} steps; it has {found}")
    return chosen


def find_config(source: str, logdir: str) -> RunConfig | None:
    """The config of the run that a model belongs to; None for a model on its own."""
    path = Path(source)
    if is_checkpoint(path):
        directory = RunDirectory(path.resolve().parent.parent)
        return Run(directory).config if directory.config.is_file() else None
    return None if holds_hf_model(path) else Run(find_run(source, logdir)).config


def load_onto(source: str, request: EvalRequest, world: World) -> LoadedModel:
    """The model on the rank's device, compiled if asked for."""
    loaded = load_source(source, replace(request.loading, device="cpu"))
    loaded.model.to(world.device)
    if request.compile:
        raise_recompile_limit()
        loaded.model.compile_parts(dynamic=False, options=list_compile_options())
    return loaded


def score_model(
    loaded: LoadedModel, inputs: Inputs, world: World, config: RunConfig | None = None, *, progress: bool = True
) -> Iterator[Scored]:
    """Yields the scores of one model: of texts, of tasks, and of samples, which every rank generates alike."""
    request, context_length = inputs.request, loaded.model.config.context_length

    def build_scorer(separator: int | None = None) -> LikelihoodScorer:
        batch_tokens, is_fixed = request.batch_tokens, request.compile
        return LikelihoodScorer(
            loaded.model,
            loaded.tokenizer,
            world,
            precision=request.precision,
            batch_tokens=batch_tokens,
            fixed_shapes=is_fixed,
            separator=separator,
        )

    def show(name: str, unit: str) -> AbstractContextManager[Report]:
        if progress and world.is_main:
            return show_amount(f"step {loaded.step:,}: {name}", unit)
        return nullcontext(lambda _done, _total: None)

    for text in inputs.open_texts(loaded, config):
        stride = request.stride or (max(1, context_length // 2) if text.overlaps else context_length)
        if stride > context_length:
            raise UserError(f"--stride {stride:,} is more than the model's context_length {context_length:,}")
        with show(text.name, "tokens") as report:
            scorer = build_scorer(text.separator)
            scores = measure_text(text.name, text.streams, loaded.tokenizer, scorer, context_length, stride, report)
        yield Scored(loaded.step, scores)
    for task, examples in inputs.tasks:
        with show(task.name, "sequences") as report:
            scorer = build_scorer()
            sequences = inputs.encode(task, examples, scorer)
            yield Scored(loaded.step, score_task(task, examples, scorer, report, sequences=sequences))
    if request.samples is not None:
        with show("samples", "texts") as report:
            yield Scored(loaded.step, score_diversity(loaded, request.samples, report))
