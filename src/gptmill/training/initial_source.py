"""What --init_from names: a run, a checkpoint or a Hugging Face folder, found and read.

A run records the source that it found as PATH#sha256=CHECKSUM, so that it can start again from the same weights.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gptmill.config.errors import UserError, suggest
from gptmill.config.model import ModelConfig
from gptmill.inference.compression import read_compression
from gptmill.inference.huggingface_folder import holds_hf_model, read_hf_folder
from gptmill.inference.loading import read_model_config
from gptmill.inference.published_model import PublishedModel
from gptmill.runs.checkpoints.manifest import MANIFEST, read_manifest
from gptmill.runs.checkpoints.selection import Chosen, has_checkpoints, load_chosen
from gptmill.runs.checkpoints.storage import STEP_FOLDER, load_checkpoint, read_step
from gptmill.runs.checkpoints.tiers import TIER
from gptmill.runs.directory import RunDirectory, list_runs

GROUP = "model"
PIN = "#sha256="
SELECTED = re.compile(r"(.+)@(latest|best|[0-9]+)")  # RUN@STEP
NANOGPT_VALUES = {
    "resume": "to resume a run use --resume latest",
    "scratch": "a new run starts from scratch without --init_from; leave it out",
    "gpt2": "download the model, and give the folder with its config.json and model.safetensors",
}
USAGE = "give the name or folder of a run, a checkpoint, or a folder with a Hugging Face model"


@dataclass(frozen=True)
class CheckpointWeights:
    """The weights of a gptmill checkpoint, and the tokenizer that they were trained with."""

    path: Path
    config: ModelConfig
    weights: dict[str, Tensor]
    sha256: str
    tokenizer_fingerprint: str


Source = CheckpointWeights | PublishedModel


def read_source(init_from: str, logdir: str) -> Source:
    """Raises UserError for a source that is missing, damaged, or no longer the recorded one."""
    where, sha256 = split_pin(init_from)
    if sha256 and not os.path.lexists(where):
        raise UserError(f"{where}, whose weights the run starts from, is gone; restore it, or start a new run")
    source = _read(where, logdir)
    if sha256 and source.sha256 != sha256:
        raise UserError(f"the weights in {where} have changed since the run started; restore them, or start a new run")
    return source


def split_pin(init_from: str) -> tuple[str, str]:
    """The source, and the recorded checksum of its weights, if any."""
    where, _, sha256 = init_from.rpartition(PIN) if PIN in init_from else (init_from, "", "")
    return where, sha256


def make_pin(source: Source) -> str:
    """What a run records: the absolute path and the checksum of its weights."""
    return f"{os.path.realpath(source.path)}{PIN}{source.sha256}"


def is_same_source(given: str | None, recorded: str | None, logdir: str) -> bool:
    """Whether the recorded source is what the user's words may have meant at the start of the run.

    Compares names only: the source may be gone, and a run may have newer checkpoints since.
    """
    if given is None or recorded is None or given == recorded:
        return given == recorded
    found = Path(split_pin(recorded)[0])
    for name, step in _list_readings(split_pin(given)[0]):
        for path in (Path(logdir) / name, Path(name)):
            is_tier = TIER.fullmatch(path.name) and Path(os.path.realpath(path.parent)) == found.parent
            is_of_run = Path(os.path.realpath(path)) == found.parent.parent and STEP_FOLDER.fullmatch(found.name)
            if is_tier or Path(os.path.realpath(path)) == found:
                return True
            if is_of_run and step in ("latest", "best", str(read_step(found))):
                return True
    return False


def _read(where: str, logdir: str) -> Source:
    path = Path(where)
    for name, wanted in _list_readings(where):
        for folder in (Path(logdir) / name, Path(name)):
            if (folder / "config.toml").is_file():
                return _read_run(RunDirectory(folder), wanted)
    if os.path.lexists(path / MANIFEST):
        return _read_checkpoint(Chosen(load_checkpoint(path, (GROUP,)), path, []))
    if holds_hf_model(path):
        return read_hf_folder(path)
    raise UserError(f"--init_from {where}: {_explain_absence(where, logdir)}")


def _list_readings(where: str) -> list[tuple[str, str]]:
    """The names of runs that the text may mean, each with its checkpoint; a name may contain an @ itself."""
    match = SELECTED.fullmatch(where)
    return [(where, "latest"), *([(match[1], match[2])] if match else [])]


def _read_run(run: RunDirectory, wanted: str) -> CheckpointWeights:
    if not has_checkpoints(run.checkpoints):
        raise UserError(f"run {run.path} has no checkpoint yet; let it train until its first one is saved")
    chosen = load_chosen(run.checkpoints, wanted, (GROUP,))
    for complaint in chosen.complaints:
        sys.stderr.write(f"warning: {complaint}; using step {chosen.checkpoint.step} instead\n")
    return _read_checkpoint(chosen)


def _read_checkpoint(chosen: Chosen[Tensor]) -> CheckpointWeights:
    path, values = chosen.path, chosen.checkpoint.values
    config = read_model_config(values.get("config"), f"checkpoint {path}")
    compression = read_compression(values, f"checkpoint {path}")
    if compression is not None and compression.is_quantized:
        raise UserError(
            f"{path} holds {compression.method} weights, which cannot be trained; start from what it was made from: "
            f"{compression.source}"
        )
    sha256 = read_manifest(path).hash_group(GROUP)
    fingerprint = str(values.get("tokenizer_fingerprint"))[:200]
    return CheckpointWeights(path, config, dict(chosen.checkpoint.tensors[GROUP]), sha256, fingerprint)


def _explain_absence(where: str, logdir: str) -> str:
    path = Path(where)
    if path.is_dir():
        return f"that folder has neither config.toml, {MANIFEST} nor config.json; {USAGE}"
    if path.exists():
        return f"that is a file; make a run of it with gptmill import {where} --out NAME, and give that name"
    if "://" in where:
        return "a URL is not read; download the model and give its folder"
    if advice := NANOGPT_VALUES.get("gpt2" if where.startswith("gpt2") else where):
        return advice
    near = suggest(where, [run.path.name for run in list_runs(logdir)])
    return f"there is no such run in {logdir}/ and no such folder{near}; {USAGE}"
