"""What is exported: a model, its tokenizer, and what is known of the run that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.config.requests import LoadingOptions
from gptmill.data.tokenizers import Tokenizer
from gptmill.inference.compression import dequantize, list_quantized
from gptmill.inference.export.run_facts import RunFacts, read_run_facts
from gptmill.inference.huggingface_folder import holds_hf_model
from gptmill.inference.loading import LoadedModel, is_checkpoint
from gptmill.inference.opening import load_source
from gptmill.models.gpt import GPT
from gptmill.runs.directory import RunDirectory, find_run


@dataclass(frozen=True)
class ExportSource:
    """A model to export."""

    name: str
    """That of the run, or of the folder that the model comes from."""
    model: GPT
    tokenizer: Tokenizer
    step: int
    weights_kind: str
    """raw or ema."""
    facts: RunFacts | None
    """None for a model that no run here has trained."""
    is_dequantized: bool = False
    """Whether the weights were integers before."""

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Without the rows that only pad the embedding."""
        return self.tokenizer.vocab_size

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(tensor.numel() for tensor in self.model.parameters())

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """On the CPU."""
        return {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Our logits, on the CPU, for the tokens of the vocabulary."""
        device = next(self.model.parameters()).device
        return self.model.logits(tokens_BT.to(device))[..., : self.vocab_size].float().cpu()


def open_export_source(source: str, options: LoadingOptions) -> ExportSource:
    """Loads the model of a run, a checkpoint or a Hugging Face folder; raises UserError if no format can hold it."""
    loaded = load_source(source, options)
    run = find_run_of(source, options.logdir)
    facts = None if run is None else read_run_facts(run, loaded.step)
    name = run.path.resolve().name if run else Path(source).resolve().name
    return make_export_source(loaded, name, options.weights, facts)


def make_export_source(loaded: LoadedModel, name: str, weights_kind: str, facts: RunFacts | None) -> ExportSource:
    if not isinstance(loaded.model, GPT) or loaded.model.config.own_parts:
        parts = ", ".join(
            f"{part} = {getattr(loaded.model.config, part).tag}" for part in loaded.model.config.own_parts
        )
        raise UserError(
            f"{name} has a part of a plug-in ({parts}), which other software does not know; export is for "
            f"models of built-in parts only"
        )
    is_quantized = bool(list_quantized(loaded.model))
    model = dequantize(loaded.model) if is_quantized else loaded.model
    return ExportSource(
        name, model.float(), loaded.tokenizer, loaded.step, weights_kind, facts, is_dequantized=is_quantized
    )


def find_run_of(source: str, logdir: str) -> RunDirectory | None:
    """The run that a name, a folder or one of its checkpoints belongs to."""
    path = Path(source)
    if is_checkpoint(path):
        run = RunDirectory(path.resolve().parent.parent)
        return run if run.config.is_file() else None
    return None if holds_hf_model(path) else find_run(source, logdir)
