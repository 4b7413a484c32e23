"""Where a run comes from and what it is: what its checkpoints record, and what its first event says."""

from __future__ import annotations

from typing import Any

import torch

import gptmill
from gptmill.config.run import MachineConfig, ModelConfig, RunConfig
from gptmill.config.schema import list_values
from gptmill.data.run_corpora import Corpora
from gptmill.models.fused.dispatch import describe_kernels
from gptmill.models.huggingface.layouts import describe_layout
from gptmill.models.parameters import count_parameters
from gptmill.runs.code_fingerprint import make_code_fingerprint
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunStarted
from gptmill.runtime.device import describe_device
from gptmill.runtime.memory import read_device_memory
from gptmill.runtime.precision import describe_precision
from gptmill.runtime.world import World
from gptmill.training.micro_batch import GraphedPass
from gptmill.training.plan import TrainPlan
from gptmill.training.plugin_fingerprints import list_plugin_fingerprints
from gptmill.training.resume_point import ResumePoint
from gptmill.training.run_request import RunRequest
from gptmill.training.state import TrainState
from gptmill.training.thread_warning import record_threads


def make_origin(config: RunConfig, corpora: Corpora, resume_point: ResumePoint | None, world: World) -> dict[str, Any]:
    """The provenance that every checkpoint of this process records."""
    return {
        "config": list_values(config),
        "corpus_sha256": corpora.sha256,
        "tokenizer": corpora.tokenizer.spec(),
        "tokenizer_fingerprint": corpora.fingerprint,
        "gptmill_version": gptmill.__version__,
        "torch_version": str(torch.__version__),
        "code": make_code_fingerprint(),
        "plugins": list_plugin_fingerprints(config, corpora.tokenizer.name),
        "randomness": "reseeded at every step from (seed, step, rank)"
        if config.machine.exact_ranks is None
        else "reseeded at every micro-batch from (seed, step, number)",
        **record_threads(config, world),
        "ranks": world.size,
        "parent": find_parent(config, resume_point),
    }


def find_parent(config: RunConfig, resume_point: ResumePoint | None) -> str:
    """The checkpoint or model from which this run was started; empty for a run started from scratch."""
    return resume_point.parent if resume_point else config.training.init_from or ""


def describe_run(
    request: RunRequest,
    run: RunDirectory,
    plan: TrainPlan,
    world: World,
    state: TrainState,
    corpora: Corpora,
    resume_point: ResumePoint | None,
) -> RunStarted:
    """The first event of a process."""
    config = request.config
    graphs = "captured as CUDA graphs" if isinstance(state.micro_batch_runner, GraphedPass) else ""
    precision, kernels = describe_precision(plan.precision, world.device), describe_kernels(state.model)
    return RunStarted(
        state.step,
        run=str(run.path),
        max_steps=plan.max_steps,
        tokens_per_step=plan.tokens_per_step,
        total_tokens=plan.count_tokens(),
        parameters=plan.parameters,
        active_parameters=plan.active_parameters,
        flops_per_token=plan.flops_per_token,
        peak_tflops=None if plan.peak_flops_per_second is None else plan.peak_flops_per_second / 1e12,
        optimizer=state.optimizer.describe(),
        layout=describe_layout(config.model),
        device=describe_device(world.device),
        precision=", ".join(filter(None, [precision, describe_compiling(config.machine), graphs, kernels])),
        ranks=world.size,
        strategy=world.strategy if world.size > 1 else "",
        corpus=corpora.name,
        tokenizer=corpora.fingerprint,
        version=gptmill.__version__,
        torch_version=str(torch.__version__),
        val_loss=state.val_loss,
        code=make_code_fingerprint(),
        plugins=list_plugin_fingerprints(config, corpora.tokenizer.name),
        data=corpora.sha256,
        resumed_from=resume_point.path if resume_point else "",
        parent=find_parent(config, resume_point),
        changes=list(request.changes),
        config={name: str(value) for name, value in list_values(config).items()},
        parts=count_parts(config.model, plan.padded_vocab_size),
        grad_accum_steps=plan.micro_batches,
        device_memory_gb=round((read_device_memory(world.device) or 0) / 1e9, 3),
    )


def count_parts(model: ModelConfig, vocab_size: int) -> dict[str, float]:
    """The parameters of each part that has any."""
    counts = vars(count_parameters(model, vocab_size))
    return {part: count for part, count in counts.items() if count and part != "inactive_experts"}  # part of blocks


def describe_compiling(machine: MachineConfig) -> str:
    """How the model is compiled, for the log; empty if it is not."""
    mode = machine.compile_mode
    if machine.compile:
        return "compiled" if mode == "default" else f"compiled ({mode})"
    return "" if mode == "default" else f"not compiled: compile_mode {mode} does nothing without --compile"
