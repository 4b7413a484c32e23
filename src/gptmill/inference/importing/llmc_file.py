"""Reads llm.c's checkpoints of GPT-2 (gpt2_124M.bin): 256 integers, then all parameters in fp32 or bf16.

Version 3 is fp32, version 5 bf16; both pad the vocabulary. Projections are stored as (out, in), unlike GPT-2's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.config.regular_files import open_untrusted
from gptmill.data.files import hash_file
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.inference.published_model import LazyTensors, PublishedModel
from gptmill.models.huggingface.config_import import read_hf_config

MAGIC = 20240326
HEADER_INTEGERS = 256
HEADER_BYTES = 4 * HEADER_INTEGERS
DTYPES = {3: torch.float32, 5: torch.bfloat16}
PROJECTIONS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def is_llmc_file(path: Path) -> bool:
    with open_untrusted(path) as file:
        return file.read(4) == MAGIC.to_bytes(4, "little")


def read_llmc(path: Path) -> PublishedModel:
    """Raises UserError for a file of another version, or that its header does not describe."""
    with open_untrusted(path) as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise UserError(f"{path} ends inside its header; download it again")
    _, version, context, vocab_size, layers, heads, width, padded = np.frombuffer(header, "<i4", 8).tolist()
    if version not in DTYPES:
        raise UserError(f"{path} is version {version} of llm.c's checkpoints, and gptmill reads 3 (fp32) and 5 (bf16)")
    content = {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": context}
    try:
        config = read_hf_config(content)
    except UserError as error:
        raise UserError(f"{path}: {str(error).replace('config.json', 'its header')}") from None
    if not 1 <= vocab_size <= padded:
        raise UserError(f"{path} has a vocabulary of {vocab_size}, padded to {padded}; download it again")
    dtype = DTYPES[version]
    shapes = dict(_list_shapes(config, padded))
    expected = HEADER_BYTES + dtype.itemsize * sum(map(math.prod, shapes.values()))
    if path.stat().st_size != expected:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes, and by its header {expected:,}; download it again")
    readers, offset = {}, HEADER_BYTES
    for name, shape in shapes.items():
        readers[name] = partial(_read, path, offset, shape, dtype, is_transposed=_is_projection(name))
        offset += dtype.itemsize * math.prod(shape)
    weights = LazyTensors(readers)
    return PublishedModel(path, "llm.c", config, "gpt2", padded, weights, hash_file(path), Gpt2Tokenizer)


def _list_shapes(config: ModelConfig, padded_vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors in the order of the file: each kind of all layers, then the next."""
    width, hidden = config.embd_size, config.hidden_size
    yield "transformer.wte.weight", (padded_vocab_size, width)
    yield "transformer.wpe.weight", (config.context_length, width)
    parts = {
        "ln_1": (width,),
        "attn.c_attn": (3 * width, width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_fc": (hidden, width),
        "mlp.c_proj": (width, hidden),
    }
    for part, shape in parts.items():
        for kind, size in (("weight", shape), ("bias", shape[:1])):
            for layer in range(config.num_layers):
                yield f"transformer.h.{layer}.{part}.{kind}", size
    for kind in ("weight", "bias"):
        yield f"transformer.ln_f.{kind}", (width,)


def _is_projection(name: str) -> bool:
    return name.endswith(tuple(f"{part}.weight" for part in PROJECTIONS))


def _read(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype, *, is_transposed: bool) -> Tensor:
    count = math.prod(shape)
    content = np.fromfile(path, np.uint8, count * dtype.itemsize, offset=offset)
    tensor = torch.from_numpy(content).view(dtype).view(shape)
    return tensor.t() if is_transposed else tensor
