"""Opens the model inside a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gptmill.config.run import ModelConfig
from gptmill.config.schema import build_config
from gptmill.data.tokenizers import Tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import check_fingerprint, make_fingerprint
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.runs.checkpoints.storage import load_checkpoint


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, with the tokenizer that it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    step: int


def load_model(checkpoint: Path, device: torch.device) -> LoadedModel:
    """The model of a checkpoint on a device; only its weights are read, not the optimizer's state."""
    saved = load_checkpoint(checkpoint, groups=("model",))
    tokenizer = restore_tokenizer(saved.values["tokenizer"], f"checkpoint {checkpoint}")
    check_fingerprint(saved.values["tokenizer_fingerprint"], make_fingerprint(tokenizer), f"checkpoint {checkpoint}")
    config = build_config(ModelConfig, saved.values["config"])
    with torch.device("meta"):
        model = GPT(config, pad_vocab(tokenizer.vocab_size))
    model.load_state_dict(saved.tensors["model"], assign=True)
    return LoadedModel(model.to(device).eval(), tokenizer, saved.step)
