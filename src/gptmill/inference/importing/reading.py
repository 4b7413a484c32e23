"""Reads a published model, whatever its format: a Hugging Face folder, or a file of llama.cpp, llm.c or nanoGPT."""

from __future__ import annotations

import os
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.regular_files import open_untrusted
from gptmill.inference.huggingface_folder import holds_hf_model, read_hf_folder
from gptmill.inference.importing.gguf_file import MAGIC
from gptmill.inference.importing.gguf_model import read_gguf
from gptmill.inference.importing.llmc_file import is_llmc_file, read_llmc
from gptmill.inference.importing.nanogpt_file import is_torch_file, read_nanogpt
from gptmill.inference.loading import is_checkpoint
from gptmill.inference.published_model import PublishedModel

USAGE = "give a Hugging Face folder, a .gguf file, llm.c's .bin or nanoGPT's ckpt.pt"


def read_published(source: str) -> PublishedModel:
    """Raises UserError for what is missing, damaged or of another format."""
    path = Path(source)
    if "://" in source:
        raise UserError(f"{source}: a URL is not read; download the model and give its folder or file")
    if not os.path.lexists(path):
        raise UserError(f"there is no {source}; {USAGE}")
    if path.is_dir():
        return _read_folder(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{source} is not a regular file; {USAGE}")
    path = path.resolve()  # downloads of Hugging Face's cache are links
    with open_untrusted(path) as file:
        start = file.read(len(MAGIC))
    if start == MAGIC:
        return read_gguf(path)
    if is_llmc_file(path):
        return read_llmc(path)
    if is_torch_file(path):
        return read_nanogpt(path)
    if path.suffix == ".safetensors":
        raise UserError(f"{source} is one file of a model; give its folder, with the config.json")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
        raise UserError(f"{source} is a pickle, which can execute code, or damaged; {USAGE}")
    raise UserError(f"{source} is of no format that gptmill knows; {USAGE}")


def _read_folder(path: Path) -> PublishedModel:
    if holds_hf_model(path):
        return read_hf_folder(path)
    if is_checkpoint(path) or (path / "config.toml").is_file():
        raise UserError(f"{path} is gptmill's own; use it as it is, without an import")
    raise UserError(f"{path} has no config.json; {USAGE}")
