"""Writes a compressed model as a run of its own, which appears complete by one rename."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gptmill.config.compress_request import Method
from gptmill.config.errors import UserError
from gptmill.config.renamed import add_unrecorded
from gptmill.config.requests import LoadingOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
from gptmill.config.settings import read_settings
from gptmill.data.files import flush_to_disk, stage
from gptmill.inference.compression import VALUE, Compression, read_compression
from gptmill.inference.huggingface_folder import holds_hf_model
from gptmill.inference.loading import GROUPS, is_checkpoint
from gptmill.models.gpt import GPT
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.selection import Chosen, has_checkpoints, load_chosen
from gptmill.runs.checkpoints.storage import load_checkpoint, save_checkpoint
from gptmill.runs.checkpoints.tiers import LATEST, link_tier
from gptmill.runs.directory import RunDirectory, find_run, save_config

PRUNED = "pruned"  # the folder in a run that holds what its recovery starts from
INHERITED = "config corpus_sha256 tokenizer tokenizer_fingerprint gptmill_version torch_version code plugins".split()


@dataclass(frozen=True)
class Source:
    """The checkpoint to compress, with the weights that were asked for as its model."""

    checkpoint: Checkpoint[Tensor]
    path: Path
    name: str
    """The name of its run."""
    config: RunConfig
    complaints: list[str]
    """Why newer checkpoints were passed over."""


def read_source(source: str, options: LoadingOptions) -> Source:
    """The checkpoint of a run, or one given by path; raises UserError for what cannot be compressed."""
    group, path = GROUPS[options.weights], Path(source)
    if is_checkpoint(path):
        if options.checkpoint != "latest":
            raise UserError(f"{path} is a checkpoint; leave out --checkpoint {options.checkpoint}, or name the run")
        chosen = Chosen(load_checkpoint(path, (group,)), path, [])
    elif holds_hf_model(path):
        raise UserError(f"{path} is a Hugging Face model; make it a run first: gptmill import {path} --out NAME")
    else:
        run = find_run(source, options.logdir)
        if not has_checkpoints(run.checkpoints):
            raise UserError(f"{run.path} has no checkpoint yet; let it train until its first one is saved")
        chosen = load_chosen(run.checkpoints, options.checkpoint, (group,))
    saved, where = chosen.checkpoint, f"checkpoint {chosen.path}"
    if group not in saved.tensors:
        raise UserError(f"{where} was trained without ema_decay; leave out --weights ema")
    compression = read_compression(saved.values, where)
    if compression is not None and compression.is_quantized:
        raise UserError(f"{where} is quantized already ({compression.method}); compress {compression.source} instead")
    config = build_config(RunConfig, add_unrecorded(read_settings(RunConfig, saved.values.get("config"), where)))
    real = chosen.path.resolve()
    name = real.parent.parent.name if real.parent.name == "checkpoints" else real.name
    saved = Checkpoint(saved.step, {"model": saved.tensors[group]}, saved.values)
    return Source(saved, real, name, config, chosen.complaints)


def choose_out(out: str | None, source: Source, method: Method, logdir: str) -> Path:
    """The folder of the new run: a name in logdir, or a path; raises UserError if it is taken."""
    name = out or f"{source.name}-{method.replace(':', '-')}"
    path = Path(name) if os.sep in name else Path(logdir) / name
    if path.name in ("", ".", ".."):
        raise UserError(f"--out {out}: give a name or the path of a new folder")
    if os.path.lexists(path):
        raise UserError(f"{path} exists already; choose another --out, or remove it: gptmill runs remove {path}")
    return path


def make_checkpoint(source: Source, model: GPT, compression: Compression) -> Checkpoint[Tensor]:
    """The compressed weights with what the source says of itself; they have no optimizer state and no losses."""
    values = {name: source.checkpoint.values[name] for name in INHERITED if name in source.checkpoint.values}
    record: dict[str, Any] = {**values, VALUE: compression.make_value(), "parent": str(source.path)}
    return Checkpoint(source.checkpoint.step, {"model": dict(model.state_dict())}, record)


def write_run(path: Path, checkpoint: Checkpoint[Tensor], config: RunConfig) -> RunDirectory:
    """A run with this one checkpoint."""
    tracking = replace(config.tracking, run_name=path.name, logdir=str(path.parent))
    with stage(path) as partial:
        partial.mkdir()
        run = RunDirectory(partial)
        saved = save_checkpoint(run.checkpoints, checkpoint)
        link_tier(run.checkpoints, LATEST, saved.path)
        save_config(run, replace(config, tracking=tracking))
        flush_to_disk(partial)
    return RunDirectory(path)


def write_start(path: Path, checkpoint: Checkpoint[Tensor]) -> Path:
    """A folder for a run that will train from this checkpoint, which is returned."""
    with stage(path) as partial:
        name = save_checkpoint(partial / PRUNED, checkpoint).path.name
        flush_to_disk(partial)
    return path / PRUNED / name
