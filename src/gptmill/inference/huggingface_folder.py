"""Reads a Hugging Face model from a folder: config.json and safetensors, whole or in shards. Never loads a pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.json_text import read_json
from gptmill.config.regular_files import open_untrusted
from gptmill.data.tokenizers.folder import build_folder_tokenizer
from gptmill.inference.published_model import PublishedModel
from gptmill.models.huggingface.config_import import read_hf_config
from gptmill.runs.checkpoints.tensor_files import load_tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDINGS = ("wte.weight", "embed_tokens.weight")


def holds_hf_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_hf_folder(folder: Path) -> PublishedModel:
    """Raises UserError, naming the folder, for a model that gptmill cannot read."""
    content = _read_json(folder / CONFIG)
    try:
        config = read_hf_config(content)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    vocab_size = content.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise UserError(f"{folder / CONFIG} has no valid vocab_size; use a complete file")
    weights: dict[str, Tensor] = {}
    checksums = []
    for path in _list_weight_files(folder):
        with open_untrusted(path) as file:
            checksums.append(hashlib.file_digest(file, "sha256").hexdigest())
        weights |= load_tensors(path)
    if any(weights[name].shape[:1] != (vocab_size,) for name in weights if name.endswith(EMBEDDINGS)):
        raise UserError(f"{folder}: the embedding has not {vocab_size:,} rows, as {CONFIG} says; download it again")
    sha256 = checksums[0] if len(checksums) == 1 else hashlib.sha256("\n".join(checksums).encode()).hexdigest()
    return PublishedModel(
        folder,
        "Hugging Face",
        config,
        str(content["model_type"]),
        vocab_size,
        weights,
        sha256,
        build_tokenizer=lambda: build_folder_tokenizer(folder),
    )


def _list_weight_files(folder: Path) -> list[Path]:
    """The files, with links resolved: downloads of Hugging Face's cache are links."""
    if (folder / WEIGHTS).is_file():
        return [(folder / WEIGHTS).resolve()]
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder} has no {WEIGHTS}; gptmill reads safetensors only, since a pickle such as pytorch_model.bin "
            f"can execute code"
        )
    content = _read_json(folder / INDEX)
    files = content.get("weight_map") if isinstance(content, dict) else None
    names = sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or not (folder / name).is_file():
            raise UserError(f"{folder / INDEX} names {name!r:.100}, which is no safetensors file in that folder")
    if not names:
        raise UserError(f"{folder / INDEX} names no files; download the model again")
    return [(folder / name).resolve() for name in names]


def _read_json(path: Path) -> Any:
    try:
        return read_json(path, any_integers=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; download it again") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error!s:.200}); download it again") from None
