"""What a budget could train: tokenizer, model, context, batch, steps, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptmill.experiments.budget.family import FAMILY, Shape
from gptmill.experiments.budget.learning_rates import choose_rates

# Of 2 layers of width 64, 1,024 tokens were the best after 0.4 M, 2,048 after 0.8 M and 1.6 M; of 4 of width 128,
# between 2,048 and 4,096 after 2.9 M and 8,192 after 8.1 M. Half of these cost up to 1 %, twice these 0.4 to 2 %.
BASE_BATCH, BASE_TOKENS, BATCH_POWER = 1700, 1e6, 0.6
# Text that is read again and again bears no larger batch. In 10 epochs of 10 MB, 8 layers of width 512 were worse with
# 16,384 tokens than with 8,192: 0.9 % on books, 1.3 % on Python's library. Neither must it be smaller: in 20 epochs of
# 1 MB of Shakespeare, 6 layers of width 256 were 2 % worse with 4,096 bytes than with 8,192.
MAX_BATCH_PER_ROOT = 6.2  # of the tokens of unique text
CONTEXTS = (128, 256, 512, 1024)  # tokens
# A model learns to use a long context late. On Python's library, 256 were no better than 128 for 3 layers of width 96
# and 2.6 M tokens; for 6 of width 192 and 15 M tokens, 256 were 3.7 % better than 128, and 512 another 1.9 %.
TOKENS_PER_CONTEXT = 20_000
MAX_MICRO_BATCH = 32_768  # tokens
# Dropout grows with the logarithm of weights per token of the text, embeddings included, times epochs. In up to four
# epochs of Shakespeare any dropout cost, even with 6 weights per byte; after 16, it had to be there. Bytes need less: 3
# layers of width 96 that read 100 kB of Shakespeare 31 times ended 3 % lower with 0.1 than with 0.2. The constants lose
# 0.1 % on average against the best dropout of each model in law.json that was trained with several.
# Whatever the weights, dropout costs in the first epochs: with 0.2, 5 epochs of Shakespeare's bytes ended 3 % above
# what the law says. The smaller the tokens, the longer that lasts: with 0.25 to 0.35, 10 epochs of bytes ended 5 to 7 %
# above it, on Shakespeare as on Python's library; with 0.1 and 7 epochs not at all.
# A run that its machine lets read more epochs than planned must not be without: with 0.05, 3 layers of width 96 lost
# 0.2 % in 4.9 epochs of Shakespeare (BPE of 4,096), and gained 1.4 % in 6.9.
MAX_FREE_EPOCHS, MAX_LIGHT_EPOCHS = 4.5, 5.0
NO_DROPOUT_UP_TO, TENTH_FACTOR = 16.0, 3.0  # times the root of a token's bytes, and 0.1 more with each such factor
MOST_PER_DOUBLING = 0.075  # of the epochs after the light ones, times that root, too
DROPOUT_STEP, MAX_DROPOUT = 0.05, 0.4
MIN_VAL_BYTES, MAX_VAL_FRACTION, MIN_VAL_FRACTION = 60_000, 0.1, 0.01
EVAL_SHARE, MIN_EVAL_TOKENS = 0.03, 16_384  # of the trained tokens
FORWARD_SHARE = 1 / 3  # of a training step's FLOPs, that an evaluation needs
EVAL_FACTOR = 1 + 2 * EVAL_SHARE * FORWARD_SHARE  # on the steps' time: evaluations at the start and at the end


@dataclass(frozen=True)
class TokenizerOption:
    """A tokenizer, measured on a sample of the corpus."""

    name: str
    vocab_size: int
    bytes_per_token: float
    bytes_per_second: float
    """How fast it encodes."""


@dataclass(frozen=True)
class CorpusFacts:
    """What the choice depends on in a corpus."""

    text_bytes: int
    density: float
    """The bits that a compressor leaves of a byte: the lower, the easier the text is to predict."""

    @property
    def usable_bytes(self) -> float:
        """What is left to train on."""
        return self.text_bytes * (1 - choose_val_fraction(self.text_bytes))


@dataclass(frozen=True)
class Candidate:
    """Something that could be trained in the time, and what to expect of it."""

    tokenizer: TokenizerOption
    shape: Shape
    context_length: int
    tokens_per_step: int
    steps: int
    step_seconds: float
    unique_bytes: float
    """Of the training text that is used."""
    bits_per_byte: float
    share: float
    """Of the time, that training takes; below 1 where more steps would overfit."""

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float:
        return self.tokens * self.tokenizer.bytes_per_token / self.unique_bytes

    @property
    def training_seconds(self) -> float:
        """Of its steps and evaluations."""
        return self.steps * self.step_seconds * EVAL_FACTOR

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.bits_per_byte * math.log(2) * self.tokenizer.bytes_per_token

    @property
    def dropout(self) -> float:
        weights = count_weights(self.shape, self.tokenizer.vocab_size)
        return choose_dropout(weights, self.tokens, self.unique_bytes, self.tokenizer.bytes_per_token)

    @property
    def eval_tokens(self) -> int:
        wanted = max(MIN_EVAL_TOKENS, round(EVAL_SHARE * self.tokens))
        return max(1, wanted // self.context_length) * self.context_length

    def list_values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options of the run; those given by the user win."""
        micro_batch = min(self.tokens_per_step, MAX_MICRO_BATCH) // self.context_length
        optimizer = str(given.get("optimizer", FAMILY["optimizer"]))
        own = {
            **FAMILY,
            **self.shape.list_values(),
            "context_length": self.context_length,
            "dropout": self.dropout,
            "total_batch_size": self.tokens_per_step,
            "mini_batch_size": max(1, micro_batch),
            "max_steps": self.steps,
            **choose_rates(optimizer, self.shape.embd_size, self.steps),
            "shift_windows": True,
            "eval_freq": max(1, self.steps),
            "eval_tokens": self.eval_tokens,
            "checkpoint_freq": max(1, math.ceil(self.steps / 4)),
            "keep_checkpoints": 1,
        }
        return {**own, **given}


def choose_val_fraction(text_bytes: float) -> float:
    """The share of a text to hold out: enough for a steady loss, but a tenth at most."""
    return float(f"{min(MAX_VAL_FRACTION, max(MIN_VAL_FRACTION, MIN_VAL_BYTES / text_bytes)):.2g}")


def choose_batch(tokens: float, unique_tokens: float) -> float:
    """Tokens per step that suit a run of so many tokens: more of them bear a larger batch, up to a limit."""
    wanted = float(BASE_BATCH * (tokens / BASE_TOKENS) ** BATCH_POWER)
    return min(wanted, MAX_BATCH_PER_ROOT * math.sqrt(unique_tokens))


def find_longest_context(tokens: float) -> int:
    """The longest context that a run of so many tokens can learn to use."""
    return max([context for context in CONTEXTS if context * TOKENS_PER_CONTEXT <= tokens], default=CONTEXTS[0])


def count_weights(shape: Shape, vocab_size: int) -> int:
    """All of a model's weights, the embedding's included."""
    return shape.block_weights + vocab_size * shape.embd_size


def choose_dropout(weights: float, tokens: float, unique_bytes: float, bytes_per_token: float) -> float:
    """The dropout that keeps so many weights, embeddings included, from learning the text by heart."""
    unique_tokens = unique_bytes / bytes_per_token
    if tokens <= MAX_FREE_EPOCHS * unique_tokens:
        return 0.0
    epochs, root = tokens / unique_tokens, math.sqrt(bytes_per_token)
    wanted = 0.1 * math.log(weights / unique_tokens * epochs * root / NO_DROPOUT_UP_TO, TENTH_FACTOR)
    bearable = DROPOUT_STEP + MOST_PER_DOUBLING * root * math.log2(max(1.0, epochs / MAX_LIGHT_EPOCHS))
    return round(min(max(round(min(wanted, bearable) / DROPOUT_STEP) * DROPOUT_STEP, 0.0), MAX_DROPOUT), 2)
