"""Reads nanoGPT's ckpt.pt through torch's loader of weights, which executes no code."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import LayerNorm, ModelConfig
from gptmill.data.files import hash_file
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.inference.importing.llmc_file import PROJECTIONS
from gptmill.inference.published_model import PublishedModel
from gptmill.models.huggingface.config_import import read_hf_config

ARGUMENTS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
COMPILED = "_orig_mod."  # before the names of a compiled model
LOAD_ERRORS = (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, EOFError, OSError, AttributeError)
GELU_REMARK = (
    "nanoGPT computes GELU exactly and gptmill by GPT-2's tanh approximation: logits differ in the third decimal place"
)


def is_torch_file(path: Path) -> bool:
    return zipfile.is_zipfile(path)


def read_nanogpt(path: Path) -> PublishedModel:
    """Raises UserError for a file with anything but tensors and plain values, before any of it is executed."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except LOAD_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path} holds more than tensors and plain values, or is damaged ({reason:.100}); gptmill executes no code "
            f"of a checkpoint: save its model_args and model alone"
        ) from None
    arguments, weights = (content.get(key) if isinstance(content, dict) else None for key in ("model_args", "model"))
    if not isinstance(arguments, dict) or not isinstance(weights, dict):
        raise UserError(f"{path} has no model_args and model, as nanoGPT's ckpt.pt does; use one of those")
    named = {str(name).removeprefix(COMPILED): tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    transposed = tuple(f"{part}.weight" for part in PROJECTIONS)
    named = {name: tensor.t() if name.endswith(transposed) else tensor for name, tensor in named.items()}
    embedding = named.get("transformer.wte.weight")
    if embedding is None or embedding.ndim != 2:
        raise UserError(f"{path} has no transformer.wte.weight; use a ckpt.pt of nanoGPT")
    config = _read_config(path, arguments)
    vocab_size = len(embedding)
    return PublishedModel(
        path,
        "nanoGPT",
        config,
        "gpt2",
        vocab_size,
        named,
        hash_file(path),
        partial(_build_tokenizer, path, vocab_size),
        (GELU_REMARK,),
    )


def _read_config(path: Path, arguments: dict[Any, Any]) -> ModelConfig:
    content = {ours: arguments[name] for name, ours in ARGUMENTS.items() if name in arguments}
    try:
        config = read_hf_config({"model_type": "gpt2", **content})
    except UserError as error:
        raise UserError(f"{path}: {str(error).replace('config.json', 'its model_args')}") from None
    has_bias = bool(arguments.get("bias", True))
    return replace(config, bias=has_bias, norm=LayerNorm(norm_bias=has_bias))


def _build_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """GPT-2's, if the vocabulary can be GPT-2's: nanoGPT does not record its tokenizer."""
    tokenizer = Gpt2Tokenizer()
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{path} has a vocabulary of {vocab_size:,}, so its tokenizer is not gpt2, and nanoGPT's meta.pkl is a "
            f"pickle, which gptmill does not read; name the tokenizer with --tokenizer"
        )
    return tokenizer
