"""Options of gptmill eval."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.errors import Problem
from gptmill.config.plugins import PluginConfig
from gptmill.config.requests import LoadingOptions
from gptmill.config.trust import TrustOptions

NOT_FOR_HARNESS = ("tasks", "split", "data_dir", "text", "stride", "samples", "all", "every", "compile", "batch_tokens")


@dataclass(frozen=True)
class EvalRequest:
    """Evaluation"""

    tasks: str | None = None
    """Tasks, e.g. hellaswag,lambada, or the path of a task's .toml; list: show them."""
    harness: str | None = None
    """Tasks, groups or patterns that lm-evaluation-harness runs itself, e.g. arc_easy,mmlu (needs the eval extra)."""
    task_data: str | None = None
    """Data of the tasks: a JSONL file, a folder that holds the files, or TASK=PATH,TASK=PATH (default: the cache)."""
    download: bool = False
    """Download the tasks' data to the cache where it is missing."""
    limit: int | None = None
    """Evaluate the first N examples of each task, or of each of its groups."""
    split: Literal["train", "val"] | None = None
    """Measure the loss of a whole split of the run's corpus (default: val, if nothing else is asked for)."""
    data_dir: str | None = None
    """Prepared corpus to measure the loss of, instead of the run's own."""
    text: str | None = None
    """Text file to measure the loss of."""
    stride: int | None = None
    """Tokens by which windows move (default: half a context for --text; a whole one for a split, as in training)."""
    samples: int | None = None
    """Generate this many texts and measure their diversity: distinct n-grams, and repetition within a text."""
    all: bool = False
    """Evaluate all checkpoints of the run, and show each metric over training."""
    every: int | None = None
    """Evaluate the run's checkpoints whose step is a multiple of N, and show each metric over training."""
    json: str | None = None
    """Write all results to this JSON file."""
    compile: bool = False
    """Compile the model first; pays off for many examples on a GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of computation; auto: bf16 on GPUs that have it, fp16 on older ones, fp32 on a CPU."""
    batch_tokens: int | None = None
    """Tokens per batch (default: 65,536 on a GPU, 2,048 on a CPU)."""
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    trusting: TrustOptions = field(default_factory=TrustOptions)


def find_problems(request: EvalRequest) -> list[Problem]:
    """Values out of range, and options that exclude each other."""
    problems = [
        Problem(f"--{name} {value}", "must be at least 1")
        for name in ("limit", "stride", "samples", "every", "batch_tokens")
        if (value := getattr(request, name)) is not None and value < 1
    ]
    problems += [
        Problem(f"--{name}", "is for tasks; name them with --tasks or --harness")
        for name in ("task_data", "limit", "download")
        if request.tasks is None and request.harness is None and getattr(request, name)
    ]
    problems += [
        Problem(f"--{name}", "is not for --harness, which evaluates one checkpoint on its own tasks; leave it out")
        for name in NOT_FOR_HARNESS
        if request.harness is not None and getattr(request, name)
    ]
    if request.all and request.every is not None:
        problems.append(Problem("--all", "and --every exclude each other; use one"))
    if (request.all or request.every is not None) and request.loading.checkpoint != "latest":
        problems.append(Problem(f"--checkpoint {request.loading.checkpoint}", "is one; leave out --all and --every"))
    return problems
