"""A model that other software has saved: its config, its weights under the names of `transformers`, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.data.tokenizers import Tokenizer
from gptmill.models.huggingface.conversion import VOCAB_TENSORS, iterate_hf_weights
from gptmill.models.parameters import count_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Report = Callable[[int, int], None]
"""Is told how many parameters are converted, and of how many."""


@dataclass(frozen=True)
class PublishedModel:
    """A model as it was read, not yet converted."""

    path: Path
    format: str
    """Hugging Face, GGUF, llm.c or nanoGPT."""
    config: ModelConfig
    layout: str
    """Whose names the weights have: gpt2, llama, mistral, qwen3 or qwen3_moe."""
    vocab_size: int
    """Rows of its embedding, padding included."""
    weights: Mapping[str, Tensor]
    sha256: str
    """Checksum of the weights; of several files, that of their checksums."""
    build_tokenizer: Callable[[], Tokenizer]
    """Raises UserError for a model that comes without a tokenizer that gptmill can use."""
    remarks: tuple[str, ...] = ()
    """What its user should know."""

    def check_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Raises UserError for a tokenizer with more tokens than the embedding has rows."""
        if tokenizer.vocab_size > self.vocab_size:
            raise UserError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size:,} tokens, but the model's embedding only "
                f"{self.vocab_size:,} rows; use the tokenizer that belongs to the model"
            )

    def convert(self, padded_vocab_size: int, report: Report = lambda _done, _total: None) -> dict[str, Tensor]:
        """The weights in fp32 as our state dict, with this many rows for the vocabulary."""
        rows = max(self.vocab_size, padded_vocab_size)
        total, done = count_parameters(self.config, padded_vocab_size).total, 0
        weights: dict[str, Tensor] = {}
        try:
            for name, tensor in self._iterate(rows):
                if tensor.dtype not in DTYPES:
                    raise UserError(f"{self.path}: {name} is of {tensor.dtype}; use a model whose weights are floats")
                cut = tensor[:padded_vocab_size] if name in VOCAB_TENSORS else tensor
                weights[name] = cut.float().contiguous()
                done += cut.numel()
                report(done, total)
        except (RuntimeError, IndexError) as error:  # shapes that do not even fit each other
            raise UserError(
                f"{self.path}: the shapes of its weights do not match its config ({error!s:.150}); download it again"
            ) from None
        return weights

    def _iterate(self, rows: int) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from iterate_hf_weights(self.weights, self.layout, self.config, rows)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read, and dequantised, when they are asked for: never all of them at once."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raises UserError for weights that are infinite or NaN."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} in {source} is not finite: that model has diverged; use an earlier checkpoint")
