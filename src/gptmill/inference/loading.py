"""Loads the model of a checkpoint, which may come from an untrusted source."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.renamed import add_unrecorded
from gptmill.config.run import ModelConfig, RunConfig
from gptmill.config.schema import build_config, list_values
from gptmill.config.settings import read_settings
from gptmill.config.validation import find_problems
from gptmill.data.tokenizers import Tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import check_fingerprint, make_fingerprint
from gptmill.inference.compression import check_compressible, pack_layers, read_compression, replace_linears
from gptmill.models.gpt import build_gpt, build_meta_gpt, pad_vocab
from gptmill.models.language_model import LanguageModel
from gptmill.models.own_model import build_own_model
from gptmill.models.parameters import count_parameters
from gptmill.runs.checkpoints.content import Checkpoint, Described, check_tensors
from gptmill.runs.checkpoints.manifest import MANIFEST
from gptmill.runs.checkpoints.selection import has_checkpoints, load_chosen
from gptmill.runs.checkpoints.storage import load_checkpoint
from gptmill.runs.directory import RunDirectory

Weights = Literal["raw", "ema"]
GROUPS: dict[Weights, str] = {"raw": "model", "ema": "ema"}  # of a checkpoint's tensors


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with the tokenizer that it was trained with."""

    model: LanguageModel
    tokenizer: Tokenizer
    step: int


def load_run_model(run: RunDirectory, wanted: str, device: torch.device, weights: Weights = "raw") -> LoadedModel:
    """Loads a checkpoint of a run: latest, best, or a step. A damaged latest one is passed over with a warning.

    `weights` "ema" loads the exponential moving average instead of the weights.
    """
    if not has_checkpoints(run.checkpoints):
        raise UserError(f"{run.path} has no checkpoint yet; let it train until its first one is saved")
    chosen = load_chosen(run.checkpoints, wanted, groups=(GROUPS[weights],))
    for complaint in chosen.complaints:
        sys.stderr.write(f"warning: {complaint}; using step {chosen.checkpoint.step} instead\n")
    return build_loaded(chosen.checkpoint, f"checkpoint {chosen.path}", device, GROUPS[weights])


def load_model(checkpoint: Path, device: torch.device, weights: Weights = "raw") -> LoadedModel:
    """Loads the model of a checkpoint onto a device; the checkpoint's folder may lie anywhere."""
    saved = load_checkpoint(checkpoint, groups=(GROUPS[weights],))
    return build_loaded(saved, f"checkpoint {checkpoint}", device, GROUPS[weights])


def is_checkpoint(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST)


def build_loaded(saved: Checkpoint[Tensor], source: str, device: torch.device, group: str = "model") -> LoadedModel:
    """Builds the model from the weights in `group`; raises UserError, naming `source`, for an invalid checkpoint."""
    for name in ("config", "tokenizer", "tokenizer_fingerprint"):
        if name not in saved.values:
            raise UserError(f"{source} holds no {name}; use a checkpoint saved by gptmill train")
    if group not in saved.tensors:
        raise UserError(f"{source} was trained without ema_decay; use its raw weights")
    config = read_model_config(saved.values["config"], source)
    tokenizer = restore_tokenizer(saved.values["tokenizer"], source)
    check_fingerprint(str(saved.values["tokenizer_fingerprint"])[:200], make_fingerprint(tokenizer), source)
    tensors = saved.tensors[group]
    check_size(config, pad_vocab(tokenizer.vocab_size), tensors, source)
    model = build_empty(config, tokenizer.vocab_size)
    compression = read_compression(saved.values, source)
    if compression is not None and compression.is_quantized:
        replace_linears(check_compressible(model, compression, source), compression)
    check_tensors(tensors, model.state_dict(), source)
    model.load_state_dict(tensors, assign=True)
    model.to(device).eval()
    pack_layers(model)
    return LoadedModel(model, tokenizer, saved.step)


def build_empty(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """A model to load weights into. A plug-in's part may have buffers that are not saved, so it is built in full."""
    if "architecture" in config.own_parts:
        return build_own_model(config, pad_vocab(vocab_size), seed=0, vocab_size=vocab_size)
    if config.own_parts:
        return build_gpt(config, pad_vocab(vocab_size), seed=0, vocab_size=vocab_size)
    return build_meta_gpt(config, pad_vocab(vocab_size), vocab_size)


def read_model_config(values: Any, source: str) -> ModelConfig:
    """The model section of a saved config; raises UserError, naming `source`, for an invalid one."""
    config = build_config(ModelConfig, add_unrecorded(read_settings(ModelConfig, values, source)))
    if problems := find_problems(replace(RunConfig(), model=config)):
        # The other sections have their defaults here, which may not suit the model's context_length.
        own = [problem for problem in problems if problem.where.partition(" ")[0] in list_values(config)]
        if own:
            raise UserError(f"the config in {source} is damaged: {own[0]!s:.200}")
    return config


def check_size(config: ModelConfig, padded_vocab_size: int, tensors: Mapping[str, Described], source: str) -> None:
    """Raises UserError if the tensors are far too small for the config, before a huge model is built in vain."""
    needed = count_parameters(config, padded_vocab_size)
    is_own = "architecture" in config.own_parts
    modules = 0 if is_own else config.num_layers + config.value_embeddings + config.mtp_heads
    sizes = [prod(tensor.shape) for tensor in tensors.values()]
    # Missing and extra tensors are reported later; here only the order of magnitude matters.
    is_small = needed.total > 2 * sum(sizes) or needed.token_embedding > max(sizes, default=0)
    if modules > len(tensors) or is_small:
        raise UserError(f"the tensors in {source} are fewer or smaller than its config says; use another checkpoint")
