"""Writes an imported model as a run: config.toml, a checkpoint of step 0, and the tokenizer's files.

The run appears whole or not at all, after its checkpoint was read back and compared with what was converted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gptmill
from gptmill.config.errors import UserError
from gptmill.config.run import DataConfig, RunConfig
from gptmill.config.schema import list_values
from gptmill.data.files import flush_to_disk, restore_replaced, stage, write_durably
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint
from gptmill.data.tokenizers.special_tokens import TOKENIZER_CONFIG
from gptmill.data.tokenizers.tokenizer_json import FILE_NAME, JsonTokenizer
from gptmill.inference.loading import build_loaded
from gptmill.inference.published_model import PublishedModel, Report, check_finite
from gptmill.models.gpt import pad_vocab
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import load_checkpoint, save_checkpoint
from gptmill.runs.checkpoints.tiers import link_tiers
from gptmill.runs.code_fingerprint import make_code_fingerprint
from gptmill.runs.directory import RunDirectory, save_config
from gptmill.runs.run_lock import is_locked

GROUP = "model"
PROBE_TOKENS = 16


def check_target(run: RunDirectory, *, overwrite: bool) -> None:
    """Raises UserError for a folder that an import must not replace."""
    path = run.path
    restore_replaced(path)
    if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
        return
    if path.is_symlink() or not run.has_files:
        raise UserError(f"{path} exists and is not a run; choose another --out")
    if not overwrite:
        raise UserError(f"run {path} exists; choose another --out, or add --overwrite to replace it")
    if is_locked(run):
        raise UserError(f"run {path} is being trained by another process; stop it first, or choose another --out")


def write_run(run: RunDirectory, model: PublishedModel, tokenizer: Tokenizer, report: Report) -> None:
    """Converts the model and writes the run; replaces one that is there."""
    weights = model.convert(pad_vocab(tokenizer.vocab_size), report)
    check_finite(weights, str(model.path))
    with stage(run.path) as path:
        path.mkdir()
        partial = RunDirectory(path)
        config = _write_files(partial, run.path, model, tokenizer)
        values = _make_values(config, model, tokenizer)
        saved = save_checkpoint(partial.checkpoints, Checkpoint(0, {GROUP: weights}, values))
        link_tiers(partial.checkpoints, saved.path, [], keep=1)
        _verify(saved.path, weights, model.path)
        flush_to_disk(path)


def _write_files(partial: RunDirectory, final: Path, model: PublishedModel, tokenizer: Tokenizer) -> RunConfig:
    """config.toml, and the tokenizer as files that `--tokenizer` takes, if it has no name that it takes."""
    name = tokenizer.name
    if isinstance(tokenizer, JsonTokenizer):
        name = str(final.absolute())
        write_durably(partial.path / FILE_NAME, tokenizer.definition)
        special = tokenizer.special_tokens
        named = {"eos_token": special.end_of_text, "bos_token": special.begin_of_text}
        settings: dict[str, Any] = {key: token for key, token in named.items() if token}
        settings["add_bos_token"] = bool(special.begin_of_text)
        write_durably(partial.path / TOKENIZER_CONFIG, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")
    config = RunConfig(model=model.config, data=DataConfig(tokenizer=name))
    save_config(partial, config)
    return config


def _make_values(config: RunConfig, model: PublishedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a checkpoint records: all that a model needs to be used, and where it comes from."""
    return {
        "config": list_values(config),
        "tokenizer": tokenizer.spec(),
        "tokenizer_fingerprint": make_fingerprint(tokenizer),
        "gptmill_version": gptmill.__version__,
        "torch_version": str(torch.__version__),
        "code": make_code_fingerprint(),
        "imported": {
            "source": os.path.realpath(model.path),
            "format": model.format,
            "layout": model.layout,
            "sha256": model.sha256,
        },
    }


@torch.no_grad()
def _verify(path: Path, weights: Mapping[str, Tensor], source: Path) -> None:
    """Reads the checkpoint as every other verb does, and compares it with the weights that were converted."""
    checkpoint = load_checkpoint(path, (GROUP,))
    loaded = build_loaded(checkpoint, f"what was made of {source}", torch.device("cpu"))
    saved = loaded.model.state_dict()
    different = [name for name, weight in weights.items() if not torch.equal(saved[name], weight)]
    count = min(PROBE_TOKENS, loaded.tokenizer.vocab_size, loaded.model.config.context_length)
    logits_BTV = loaded.model.logits(torch.arange(count)[None])
    if different or not torch.isfinite(logits_BTV).all():
        fault = f"{different[0]} was not stored as converted" if different else "its logits are not finite"
        raise UserError(f"{source} was not imported: {fault}; try again, or use another model")
