"""Checkpoints of llm.c and nanoGPT: the same model, and no code of a pickle executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import VOCAB, build_published, compute_logits, make_ids
from torch import Tensor

from gptmill import UserError, import_model
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.inference.importing.reading import read_published
from gptmill.inference.published_model import PublishedModel
from gptmill.models.gpt import GPT

PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
MODEL_ARGS = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "vocab_size": VOCAB, "dropout": 0.0}


def list_linear(model: Any) -> dict[str, Tensor]:
    """GPT-2's weights with projections as nn.Linear has them, as both programs do."""
    weights = model.state_dict()
    return {name: x.t() if ".c_" in name and name.endswith("weight") else x for name, x in weights.items()}


def write_llmc(path: Path, weights: dict[str, Tensor], version: int) -> None:
    header = np.zeros(256, "<i4")
    header[:8] = [20240326, version, 64, VOCAB, 2, 4, 32, VOCAB]
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    for part in PARTS:
        names += [f"transformer.h.{layer}.{part}.{kind}" for kind in ("weight", "bias") for layer in range(2)]
    names += ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    dtype = torch.float32 if version == 3 else torch.bfloat16
    tensors = [weights[name].contiguous().to(dtype).view(torch.uint8).numpy().tobytes() for name in names]
    path.write_bytes(header.tobytes() + b"".join(tensors))


def compute(read: PublishedModel) -> Tensor:
    model = GPT(read.config, VOCAB).eval()
    model.load_state_dict(read.convert(VOCAB))
    with torch.no_grad():
        return model.logits(make_ids())


@pytest.mark.parametrize("version", [3, 5])
def test_the_logits_of_llmc_are_those_of_gpt2(version: int, tmp_path: Path) -> None:
    theirs = build_published("gpt2")
    write_llmc(tmp_path / "gpt2.bin", list_linear(theirs), version)
    if version == 5:
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16().float()
    read = read_published(str(tmp_path / "gpt2.bin"))
    torch.testing.assert_close(compute(read), compute_logits(theirs, make_ids()), atol=1e-4, rtol=1e-4)
    assert isinstance(read.build_tokenizer(), Gpt2Tokenizer)


@pytest.mark.parametrize(
    ("position", "value", "said"),
    [
        (1, 2, "version 2 of llm.c's checkpoints"),
        (3, 10**6, "a vocabulary of 1000000, padded to 320"),
        (4, 3, "by its header"),
        (4, -1, "num_layers"),
        (6, 2**31 - 1, "embd_size"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(position: int, value: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "gpt2.bin"
    write_llmc(path, list_linear(build_published("gpt2")), 3)
    header = np.frombuffer(path.read_bytes()[:1024], "<i4").copy()
    header[position] = value
    path.write_bytes(header.tobytes() + path.read_bytes()[1024:])
    with pytest.raises(UserError, match=said):
        read_published(str(path))


def save_nanogpt(path: Path, weights: dict[str, Tensor], **extra: Any) -> None:
    model = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    torch.save({"model": model, "model_args": MODEL_ARGS, "iter_num": 7, "config": {"dataset": "x"}, **extra}, path)


def test_the_logits_of_nanogpt_are_those_of_gpt2(tmp_path: Path) -> None:
    theirs = build_published("gpt2")
    save_nanogpt(tmp_path / "ckpt.pt", list_linear(theirs))
    read = read_published(str(tmp_path / "ckpt.pt"))
    torch.testing.assert_close(compute(read), compute_logits(theirs, make_ids()), atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=r"so its tokenizer is not gpt2, and nanoGPT's meta\.pkl is a pickle"):
        read.build_tokenizer()
    assert import_model(tmp_path / "ckpt.pt", tmp_path / "run", tokenizer="byte").load(device="cpu").encode("a") == [97]


def test_nanogpt_may_have_no_biases(tmp_path: Path) -> None:
    theirs = build_published("gpt2")
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    weights = {name: x for name, x in list_linear(theirs).items() if not name.endswith("bias")}
    save_nanogpt(tmp_path / "ckpt.pt", weights, model_args={**MODEL_ARGS, "bias": False})
    read = read_published(str(tmp_path / "ckpt.pt"))
    torch.testing.assert_close(compute(read), compute_logits(theirs, make_ids()), atol=1e-4, rtol=1e-4)


class Bomb:
    """Executes code wherever it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_the_code_of_a_pickle_is_not_executed(tmp_path: Path) -> None:
    save_nanogpt(tmp_path / "ckpt.pt", list_linear(build_published("gpt2")), bomb=Bomb(tmp_path / "executed"))
    with pytest.raises(UserError, match="gptmill executes no code of a checkpoint"):
        read_published(str(tmp_path / "ckpt.pt"))
    assert not (tmp_path / "executed").exists()
