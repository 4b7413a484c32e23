"""Opens the model inside a checkpoint, which may be a stranger's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.run import ModelConfig, RunConfig
from gptmill.config.schema import build_config, list_values
from gptmill.config.settings import read_settings
from gptmill.config.validation import find_problems
from gptmill.data.tokenizers import Tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import check_fingerprint, make_fingerprint
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.initialisation import SkipInit
from gptmill.models.parameters import count_parameters
from gptmill.runs.checkpoints.content import Checkpoint, check_tensors
from gptmill.runs.checkpoints.selection import has_checkpoints, load_chosen
from gptmill.runs.checkpoints.storage import load_checkpoint
from gptmill.runs.directory import RunDirectory

AVERAGE = "ema"  # the group of tensors that holds the moving average of the weights


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, with the tokenizer that it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    step: int


def load_run_model(
    run: RunDirectory, wanted: str, device: torch.device, weights: Literal["raw", "ema"] = "raw"
) -> LoadedModel:
    """The model of a run's checkpoint: latest, best, or a step's. A damaged latest is passed over, with a warning.

    `weights` "ema" takes the moving average that was kept beside the weights.
    """
    if not has_checkpoints(run.checkpoints):
        raise UserError(f"{run.path} has no checkpoint yet; let it train until its first one is saved")
    group = "model" if weights == "raw" else AVERAGE
    chosen = load_chosen(run.checkpoints, wanted, groups=(group,))
    if group not in chosen.checkpoint.tensors:
        raise UserError(f"checkpoint {chosen.path} was trained without ema_decay; use its raw weights")
    for complaint in chosen.complaints:
        sys.stderr.write(f"warning: {complaint}; using step {chosen.checkpoint.step} instead\n")
    return build_loaded(chosen.checkpoint, f"checkpoint {chosen.path}", device, group)


def load_model(checkpoint: Path, device: torch.device) -> LoadedModel:
    """The model of a checkpoint on a device."""
    return build_loaded(load_checkpoint(checkpoint, groups=("model",)), f"checkpoint {checkpoint}", device)


def build_loaded(saved: Checkpoint, place: str, device: torch.device, group: str = "model") -> LoadedModel:
    """The model of a checkpoint's weights, ready to use; the optimizer's state is not asked for."""
    for name in ("config", "tokenizer", "tokenizer_fingerprint"):
        if name not in saved.values:
            raise UserError(f"{place} holds no {name}; use one that gptmill train has saved")
    config = read_model_config(saved.values["config"], place)
    tokenizer = restore_tokenizer(saved.values["tokenizer"], place)
    check_fingerprint(str(saved.values["tokenizer_fingerprint"])[:200], make_fingerprint(tokenizer), place)
    tensors = saved.tensors[group]
    check_size(config, pad_vocab(tokenizer.vocab_size), tensors, place)
    with torch.device("meta"), SkipInit():
        model = GPT(config, pad_vocab(tokenizer.vocab_size))
    check_tensors(tensors, model.state_dict(), place)
    model.load_state_dict(tensors, assign=True)
    return LoadedModel(model.to(device).eval(), tokenizer, saved.step)


def read_model_config(values: Any, place: str) -> ModelConfig:
    """The model's part of a config that was saved in `place`; raises UserError for one that no run could have had."""
    config = build_config(ModelConfig, read_settings(ModelConfig, values, place))
    if problems := find_problems(replace(RunConfig(), model=config)):
        # Of what is no part of the model, only the defaults are looked at, and may not suit its context_length.
        own = [problem for problem in problems if problem.where.partition(" ")[0] in list_values(config)]
        if own:
            raise UserError(f"the config in {place} is damaged: {own[0]!s:.200}")
    return config


def check_size(config: ModelConfig, padded_vocab_size: int, tensors: Mapping[str, Tensor], place: str) -> None:
    """A model of a thousand million layers must not be built only to find that the file holds none of them."""
    needed = count_parameters(config, padded_vocab_size)
    modules = config.num_layers + config.value_embeddings + config.mtp_heads
    sizes = [tensor.numel() for tensor in tensors.values()]
    # Tensors that are missing or too many are named later; here it is only the order of magnitude that counts.
    is_small = needed.total > 2 * sum(sizes) or needed.token_embedding > max(sizes, default=0)
    if modules > len(tensors) or is_small:
        raise UserError(f"the tensors in {place} are fewer or smaller than its config says; use another checkpoint")
