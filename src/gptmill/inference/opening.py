"""Opens a model, whatever holds it: a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from gptmill.config.errors import UserError
from gptmill.config.requests import LoadingOptions
from gptmill.data.tokenizers.protocol import Tokenizer
from gptmill.inference.huggingface_folder import holds_hf_model, read_hf_folder
from gptmill.inference.loading import LoadedModel, build_empty, is_checkpoint, load_model, load_run_model
from gptmill.inference.model import Model, build_model
from gptmill.models.gpt import pad_vocab
from gptmill.runs.checkpoints.content import check_tensors
from gptmill.runs.directory import find_run
from gptmill.runtime.device import choose_device


def open_model(source: str, options: LoadingOptions) -> Model:
    """The model of a run by name or folder, of a checkpoint, or of a Hugging Face folder."""
    return build_model(load_source(source, options))


def load_source(source: str, options: LoadingOptions) -> LoadedModel:
    path, device = Path(source), choose_device(options.device)
    kind = "a checkpoint" if is_checkpoint(path) else "a Hugging Face model" if holds_hf_model(path) else None
    if kind is None and path.is_file():
        raise UserError(f"{path} is a file; make a run of it with gptmill import {path} --out NAME")
    if kind is None:
        run = find_run(source, options.logdir)
        return load_run_model(run, options.checkpoint, device, options.weights)
    if options.checkpoint != "latest":
        raise UserError(f"{path} is {kind}; leave out --checkpoint {options.checkpoint}, or name the run instead")
    if is_checkpoint(path):
        return load_model(path, device, options.weights)
    if options.weights != "raw":
        raise UserError(f"{path} is {kind}; leave out --weights {options.weights}")
    return load_hf_model(path, device)


def load_hf_model(folder: Path, device: torch.device, tokenizer: Tokenizer | None = None) -> LoadedModel:
    """The model of a Hugging Face folder, with the tokenizer that lies beside it unless another is given."""
    found = read_hf_folder(folder)
    tokenizer = tokenizer or found.build_tokenizer()
    found.check_vocabulary(tokenizer)
    weights = found.convert(pad_vocab(tokenizer.vocab_size))
    model = build_empty(found.config, tokenizer.vocab_size)
    check_tensors(weights, model.state_dict(), str(folder))
    model.load_state_dict(weights, assign=True)
    return LoadedModel(model.to(device).eval(), tokenizer, step=0)
