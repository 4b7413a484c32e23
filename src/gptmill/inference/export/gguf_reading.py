"""Reads a GGUF export back with gguf's own reader, and compares its logits with ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gptmill.inference.export.gguf_file import choose_type, decode, encode
from gptmill.inference.export.gguf_tensors import from_gguf_tensors, list_hf_names
from gptmill.inference.export.hf_folder import make_hf_weights
from gptmill.inference.export.passes import Advance, Report, count_passes
from gptmill.inference.export.source import ExportSource
from gptmill.inference.export.verification import Verification, compare, make_probe, round_weights
from gptmill.inference.loading import build_empty
from gptmill.models.gpt import pad_vocab
from gptmill.models.huggingface.conversion import from_hf_weights
from gptmill.models.huggingface.layouts import choose_layout
from gptmill.models.language_model import LanguageModel

# Our names of the matrices that stay in F32.
PRECISE = {"position_embedding.weight": "position_embd.weight", "router.weight": "ffn_gate_inp.weight"}


def verify_gguf(path: Path, source: ExportSource, dtype: str, report: Report) -> Verification:
    """Dequantises the file, and compares the logits of its weights with those of ours, rounded alike."""
    tokens_BT, advance = make_probe(source), count_passes(report, source.parameters, 2)
    exact = source.logits(tokens_BT)
    round_weights(source, lambda name, tensor: round_tensor(name, tensor, dtype), advance)
    expected = source.logits(tokens_BT)
    with torch.no_grad():
        found = read_gguf_model(path, source, advance).logits(tokens_BT)[..., : source.vocab_size]
    error = compare(found, expected, "gguf")
    return Verification(("gguf",), error, float((expected - exact).abs().max()))


def round_tensor(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """One of our tensors, rounded as its rows are in the file."""
    theirs = next((gguf_name for ending, gguf_name in PRECISE.items() if name.endswith(ending)), name)
    kind = choose_type(theirs, tensor, dtype)
    return torch.from_numpy(decode(encode(tensor, kind, name), kind))


def read_gguf_model(path: Path, source: ExportSource, advance: Advance) -> LanguageModel:
    """A model of the source's config with the weights of the file."""
    layout, config = choose_layout(source.config), replace(source.config, mtp_heads=0)
    assert layout is not None
    names = list_hf_names(make_hf_weights(source))
    hf_weights = from_gguf_tensors(read_gguf_tensors(path, advance), names, layout, config)
    padded = pad_vocab(source.vocab_size)
    model = build_empty(config, padded)
    model.load_state_dict(from_hf_weights(hf_weights, layout, config, padded), assign=True)
    return model.eval()


def read_gguf_tensors(path: Path, advance: Advance = lambda _count: None) -> dict[str, Tensor]:
    """All tensors of a file, in fp32."""
    from gguf import GGUFReader

    tensors = {}
    for tensor in GGUFReader(path).tensors:
        array = np.ascontiguousarray(decode(tensor.data, tensor.tensor_type.name))
        tensors[tensor.name] = torch.from_numpy(array)
        advance(array.size)
    return tensors
