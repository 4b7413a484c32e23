"""A plug-in with one part of every kind, as users would write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gptmill


@dataclass(frozen=True)
class GruOptions:
    """A recurrent network."""

    gru_width: int = 16
    """gru: width of the state."""


@gptmill.register("architecture", "gru", options=GruOptions)
class Gru(nn.Module):
    """Returns logits."""

    def __init__(self, config: gptmill.ModelConfig, vocab_size: int) -> None:
        super().__init__()
        width = config.architecture.gru_width
        self.embedding = nn.Embedding(vocab_size, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor, _targets: Tensor | None) -> Tensor:
        return self.head(self.dropout(self.gru(self.embedding(ids))[0]))


@gptmill.register("architecture", "bigram")
class Bigram(nn.Module):
    """Returns a loss, and has no logits."""

    def __init__(self, _config: gptmill.ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.table(ids).flatten(0, 1), targets.flatten())


@gptmill.register("attention", "mean")
class MeanAttention(nn.Module):
    """The mean of all earlier tokens; knows no KV cache."""

    def __init__(self, config: gptmill.ModelConfig, _layer: int) -> None:
        super().__init__()
        self.values = nn.Linear(config.embd_size, config.embd_size)
        self.register_buffer("counts", torch.arange(1, config.context_length + 1), persistent=False)

    def forward(self, x_BTC: Tensor, _context: gptmill.BlockContext, _cache: object = None) -> Tensor:
        return self.values(x_BTC).cumsum(1) / self.counts[: x_BTC.shape[1], None]


@gptmill.register("feed_forward", "snake")
class Snake(nn.Module):
    def __init__(self, config: gptmill.ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.embd_size, config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.embd_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.proj(x + x.sin().square())


@gptmill.register("optimizer", "two-sgds")
def build_two_sgds(model: nn.Module, config: gptmill.OptimizerConfig) -> list[torch.optim.Optimizer]:
    """One optimizer for the matrices and one for the rest, without weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [torch.optim.SGD(matrices, config.max_lr, momentum=0.9), torch.optim.SGD(vectors, config.max_lr)]


@dataclass(frozen=True)
class SqrtOptions:
    """Inverse square root."""

    sqrt_steps: int = 2
    """sqrt: steps before the decay."""


@gptmill.register("schedule", "sqrt", options=SqrtOptions)
def decay_by_sqrt(step: int, _max_steps: int, options: SqrtOptions) -> float:
    return (options.sqrt_steps / max(step, options.sqrt_steps)) ** 0.5


@gptmill.register("tokenizer", "upper")
class UpperTokenizer:
    """Bytes of the text in upper case."""

    name, vocab_size, end_of_text = "upper", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.upper().encode(), dtype=np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(number for number in ids if number < 256)

    def spec(self) -> dict[str, str]:
        return {"name": self.name}

    @classmethod
    def train(cls, _texts: Iterable[str]) -> UpperTokenizer:
        return cls()

    @classmethod
    def restore(cls, _spec: dict[str, str]) -> UpperTokenizer:
        return cls()


@dataclass(frozen=True)
class SubtitleOptions:
    """Subtitles."""

    srt_skip: int = 2
    """.srt: lines of a block before its text."""


@gptmill.register("format", ".srt", options=SubtitleOptions)
def read_subtitles(file: BinaryIO, options: SubtitleOptions) -> Iterator[str]:
    for block in file.read().decode().split("\n\n"):
        if block.startswith("bad"):
            raise ValueError("a block without a number")
        yield "\n".join(block.split("\n")[options.srt_skip :])


@dataclass(frozen=True)
class CountOptions:
    """Numbers."""

    count_word: str = "number"
    """count: what to write before each number."""


@gptmill.register("source", "count", options=CountOptions)
def count(rest: str, options: CountOptions) -> Iterator[str]:
    for number in range(int(rest)):
        yield f"{options.count_word} {number} comes after {number - 1}. " * 4


@gptmill.register("evaluator", "broken")
class BrokenEvaluator:
    def __init__(self, _options: object) -> None:
        pass

    def evaluate(self, _model: gptmill.Model) -> float:
        raise RuntimeError("no score today")


@gptmill.register("evaluator", "unbuilt")
class UnbuiltEvaluator(BrokenEvaluator):
    def __init__(self, _options: object) -> None:
        raise FileNotFoundError("no such probe")


@gptmill.register("tracker", "unbuilt")
class UnbuiltTracker(gptmill.Tracker):
    def __init__(self, _run: Path, _resumed_at: int, _options: object) -> None:
        raise ConnectionError("no answer")


@gptmill.register("tracker", "lines")
class Lines(gptmill.Tracker):
    """One line per step and evaluation; drops the lines of later steps, as a tracker must."""

    def __init__(self, run: Path, resumed_at: int, _options: object) -> None:
        self.path = run / "lines.txt"
        self.rewind(resumed_at)

    def track(self, event: gptmill.Event) -> None:
        if type(event).__name__ in ("StepLogged", "EvalDone"):
            with self.path.open("a") as file:
                file.write(f"{event.step} {type(event).__name__}\n")

    def rewind(self, step: int) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.path.write_text("".join(f"{line}\n" for line in lines if int(line.split()[0]) <= step))


@gptmill.register("tracker", "broken")
class BrokenTracker(gptmill.Tracker):
    def __init__(self, _run: Path, _resumed_at: int, _options: object) -> None:
        pass

    def track(self, event: gptmill.Event) -> None:
        raise RuntimeError(f"cannot track {event.step}")
