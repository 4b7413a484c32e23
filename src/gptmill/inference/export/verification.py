"""Checks an export against our own logits: re-read by our own code, and by the software that it is for.

Rounded weights are compared with our model under the same rounding, so that the tolerance need not hide a wrong
tensor. How much the rounding itself changes the logits is reported besides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.protocol import Tokenizer
from gptmill.inference.export.passes import Advance, Report, count_passes
from gptmill.inference.export.source import ExportSource
from gptmill.inference.opening import load_hf_model

TOLERANCE = 1e-4  # relative to the largest logit where that exceeds 1
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Verification:
    """How far the logits of an export are from ours."""

    readers: tuple[str, ...]
    """The software that read it back."""
    error: float
    """Largest difference to our logits with the same weights."""
    rounding: float
    """Largest difference that rounding the weights makes; 0 in fp32."""

    def describe(self) -> str:
        rounding = f"; rounding the weights changes logits by up to {self.rounding:.2g}" if self.rounding else ""
        readers = " and ".join(self.readers)
        return f"logits read back by {readers} equal ours (largest difference {self.error:.1e}){rounding}"


def make_probe(source: ExportSource) -> Tensor:
    """Tokens to compare logits on: the end of text and random ones, the same every time."""
    length = min(PROBE_TOKENS, source.config.context_length)
    tokens_BT = torch.randint(source.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    tokens_BT[:, 0] = source.tokenizer.end_of_text
    return tokens_BT


def compare(found: Tensor, expected: Tensor, reader: str) -> float:
    """The largest difference; raises UserError if it exceeds the tolerance."""
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"the export is wrong: logits read back by {reader} differ from gptmill's by {difference:.3g}; nothing was "
            f"written. Report it, with the versions of gptmill and {reader}"
        )
    return difference


@torch.no_grad()
def round_weights(source: ExportSource, round_tensor: Callable[[str, Tensor], Tensor], advance: Advance) -> None:
    """Rounds the model's own weights as the export does."""
    for name, parameter in source.model.named_parameters():
        parameter.copy_(round_tensor(name, parameter.detach().cpu()))
        advance(parameter.numel())


def verify_hf_folder(folder: Path, source: ExportSource, dtype: torch.dtype, report: Report) -> Verification:
    """Reads the folder with gptmill, and with `transformers` where that is installed."""
    # Without the library that reads a tokenizer.json, the weights alone are read back.
    given = source.tokenizer if find_spec("tokenizers") is None else None
    readers: dict[str, Callable[[Path, Tensor], Tensor]] = {"gptmill": partial(_read_by_gptmill, tokenizer=given)}
    if find_spec("transformers") is not None:
        readers["transformers"] = _read_by_transformers
    is_rounded = dtype != torch.float32
    tokens_BT, advance = make_probe(source), count_passes(report, source.parameters, is_rounded + len(readers))
    exact = source.logits(tokens_BT)
    if is_rounded:
        round_weights(source, lambda _, tensor: tensor.to(dtype).float(), advance)
    expected = source.logits(tokens_BT)
    errors = []
    for name, read in readers.items():
        errors.append(compare(read(folder, tokens_BT)[..., : source.vocab_size], expected, name))
        advance(source.parameters)
    return Verification(tuple(readers), max(errors), float((expected - exact).abs().max()))


@torch.no_grad()
def _read_by_gptmill(folder: Path, tokens_BT: Tensor, tokenizer: Tokenizer | None) -> Tensor:
    return load_hf_model(folder, torch.device("cpu"), tokenizer).model.logits(tokens_BT)


@torch.no_grad()
def _read_by_transformers(folder: Path, tokens_BT: Tensor) -> Tensor:
    with _hush_transformers():
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        logits: Tensor = model.float().eval()(tokens_BT).logits
    return logits


@contextmanager
def _hush_transformers() -> Iterator[None]:
    """Without its progress bars and remarks, which are about its own affairs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from transformers.utils import logging as transformers_logging

        their_logging: Any = transformers_logging
        had_bars = their_logging.is_progress_bar_enabled()
        their_logging.disable_progress_bar()
        yield
        if had_bars:
            their_logging.enable_progress_bar()
    finally:
        logging.disable(disabled)
