"""compress: a smaller or sparser model from a run, as a run of its own, and what that costs."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmill.api.configuration import Recipe
from gptmill.api.progress import show_amount
from gptmill.api.run import Run
from gptmill.api.training import return_run, run_training
from gptmill.config.compress_request import CompressRequest, check_request
from gptmill.config.errors import UserError
from gptmill.config.keywords import build_request
from gptmill.config.optimizer import Muon
from gptmill.config.requests import StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.config.trust import trusting
from gptmill.evals.compression_measures import ModelMeasures, measure_models, open_evaluation
from gptmill.inference.compressed_run import choose_out, make_checkpoint, read_source, write_run, write_start
from gptmill.inference.compression import check_compressible, compress_model, make_compression
from gptmill.inference.loading import build_loaded, load_run_model
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.selection import list_candidates
from gptmill.runs.checkpoints.tensor_files import measure_tensors
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.device import choose_device
from gptmill.runtime.ranks import read_world_size
from gptmill.training.run_request import make_run_request

RECOVERY_LR = 1 / 3  # of the run's peak
MIN_LR = 0.1  # of the recovery's peak


@dataclass(frozen=True)
class Compressed:
    """The compressed run, and both models' measures."""

    run: Run
    method: str
    before: ModelMeasures
    after: ModelMeasures


def compress(run: Run | Recipe, method: str = "int8", *, progress: bool = True, **options: Any) -> Compressed:
    """Compresses the model of a run or checkpoint into a run of its own; the options are those of gptmill compress."""
    source = str(run.path) if isinstance(run, Run) else os.fspath(run)
    request = build_request(CompressRequest, {"method": method, **options})
    with trusting(request.trusting.trust):
        return compress_source(source, request, progress=progress)


def compress_source(source: str, request: CompressRequest, *, progress: bool = True) -> Compressed:
    """Compresses, recovers if asked to, and measures the model and what was written, as others will load it."""
    check_request(request)
    if read_world_size() > 1:
        raise UserError("gptmill compress runs in one process; start it without torchrun")
    device, found = choose_device(request.loading.device), read_source(source, request.loading)
    out = choose_out(request.out, found, request.method, request.loading.logdir)
    for complaint in found.complaints:
        sys.stderr.write(f"warning: {complaint}; using step {found.checkpoint.step} instead\n")
    config = _use_data(found.config, request)
    where = f"checkpoint {found.path}"
    plain = build_loaded(found.checkpoint, where, torch.device("cpu"))
    compression = make_compression(request, str(found.path))
    model = check_compressible(plain.model, compression, where)
    with show_amount("evaluating", "tokens") if progress else nullcontext(_report_nothing) as report:
        evaluation = open_evaluation(config, request, plain, device, report)
        checkpoint = make_checkpoint(found, compress_model(model, compression), compression)
        if request.recover_steps:
            made = _recover(out, checkpoint, config, request, progress=progress).directory
        else:
            made = write_run(out, checkpoint, config)
        plain.model.to(device)
        models = [plain, load_run_model(made, "latest", device)]
        sizes = [measure_tensors(found.checkpoint.tensors["model"]), _measure_file(made)]
        before, after = measure_models(models, sizes, evaluation)
    return Compressed(Run(made), request.method, before, after)


def _measure_file(run: RunDirectory) -> int:
    return (list_candidates(run.checkpoints, "latest")[0] / "model.safetensors").stat().st_size


def _recover(
    out: Path, checkpoint: Checkpoint[Tensor], config: RunConfig, request: CompressRequest, *, progress: bool
) -> Run:
    """Trains the pruned weights as the run was trained, at a lower learning rate, with their zeros kept."""
    fields = _make_recovery(config, request, out)
    start = write_start(out, checkpoint)
    try:
        launch = make_run_request(None, {**fields, "init_from": str(start)}, StartOptions())
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    outcome = run_training(launch, progress=progress)
    run = return_run(outcome)
    if outcome.exit_code:
        raise UserError(
            f"the recovery {outcome.reason}; continue it with: gptmill train --run_name {out.name} "
            f"--logdir {out.parent} --resume latest"
        )
    return run


def _make_recovery(config: RunConfig, request: CompressRequest, out: Path) -> dict[str, Any]:
    """The fields of the recovery's config: those of the run, with its own length, learning rates and name."""
    steps, optimizer = request.recover_steps, config.optimizer
    factor = RECOVERY_LR if request.recover_lr is None else request.recover_lr / optimizer.max_lr
    fields = {
        **list_values(config),
        "run_name": out.name,
        "logdir": str(out.parent),
        "device": request.loading.device,
        "keep_zeros": True,
        "max_steps": steps,
        "warmup_steps": min(optimizer.warmup_steps, steps // 10),
        "max_lr": factor * optimizer.max_lr,
        "context_warmup": None,
        "batch_size_warmup": None,
        "early_stop_patience": None,
    }
    if isinstance(optimizer.optimizer, Muon):
        fields["matrix_lr"] = factor * optimizer.optimizer.matrix_lr
    if "min_lr" in fields:
        fields["min_lr"] = MIN_LR * fields["max_lr"]
    return fields


def _use_data(config: RunConfig, request: CompressRequest) -> RunConfig:
    """The run's config with the corpus of the request, if that names one."""
    if request.data_dir is None:
        return config
    return replace(config, data=replace(config.data, data_dir=request.data_dir, corpus=None, mixture=None))


def _report_nothing(_done: int, _total: int) -> None:
    """For callers that want no progress shown."""
