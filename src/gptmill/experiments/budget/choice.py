"""Chooses what to train: of all models, tokenizers and batches, those with the lowest loss that the time allows.

Pure: what the machine and the corpus are like comes in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.config.schema import build_config
from gptmill.experiments.budget.family import FAMILY, SHAPES, Shape
from gptmill.experiments.budget.learning_rates import choose_rates
from gptmill.experiments.budget.scaling_law import ScalingLaw, find_pressure
from gptmill.experiments.budget.speed_model import SpeedModel
from gptmill.models.flops import count_flops
from gptmill.models.gpt import pad_vocab

BATCHES = tuple(2**power for power in range(9, 20))  # tokens per step
BASE_BATCH, BASE_TOKENS, BATCH_POWER = 1024, 1e6, 0.7
CONTEXTS = ((3e6, 128), (3e7, 256), (1e8, 512), (math.inf, 1024))  # up to so many weights, so many tokens
MAX_MICRO_BATCH = 32_768  # tokens
MIN_STEPS = 50
MAX_WEIGHTS_PER_BYTE = 10.0  # of text: about as many as the recipe shakespeare-char has; more would overfit
MAX_PROBE_FACTOR = 16  # how far beyond the largest measured model its speed is trusted
# Dropout grows with the logarithm of weights per token of the text, embeddings included, times epochs. In up to four
# epochs of Shakespeare any dropout cost, even with 6 weights per byte; after 16, it had to be there. The two constants
# lose 0.1 % on average against the best dropout of each model in law.json that was trained with several.
# Whatever the weights, dropout costs in the first epochs: 0.2 in 5 epochs of Shakespeare's bytes lost 3 %.
MAX_FREE_EPOCHS = 5.0
NO_DROPOUT_UP_TO, TENTH_FACTOR = 8.0, 3.0  # and 0.1 more with each such factor
MOST_PER_DOUBLING = 0.15  # of the epochs after the free ones
DROPOUT_STEP, MAX_DROPOUT = 0.05, 0.4
TIME_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.09, 0.06, 0.04, 0.03, 0.02)  # that training may be limited to
SPEEDUPS = tuple(1.1**power for power in range(1, 16))
MIN_VAL_BYTES, MAX_VAL_FRACTION, MIN_VAL_FRACTION = 60_000, 0.1, 0.01
EVAL_SHARE, MIN_EVAL_TOKENS = 0.03, 16_384  # of the trained tokens
FORWARD_SHARE = 1 / 3  # of a training step's FLOPs, that an evaluation needs


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


def choose_val_fraction(text_bytes: float) -> float:
    """The share of a text to hold out: enough for a steady loss, but a tenth at most."""
    return float(f"{min(MAX_VAL_FRACTION, max(MIN_VAL_FRACTION, MIN_VAL_BYTES / text_bytes)):.2g}")


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
    def loss(self) -> float:
        """Nats per token."""
        return self.bits_per_byte * math.log(2) * self.tokenizer.bytes_per_token

    @property
    def dropout(self) -> float:
        weights = count_weights(self.shape, self.tokenizer.vocab_size)
        return choose_dropout(weights, self.tokens, self.unique_bytes / self.tokenizer.bytes_per_token)

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


@dataclass(frozen=True)
class Situation:
    """What a choice is made from."""

    law: ScalingLaw
    speed: SpeedModel
    corpus: CorpusFacts
    tokenizers: tuple[TokenizerOption, ...]
    seconds: float
    """For preparing, training and evaluating."""
    given: Mapping[str, Any]
    """Options that the user has set."""


def choose(situation: Situation) -> list[Candidate]:
    """All candidates, the best first; raises UserError if there is none."""
    candidates = [candidate for option in situation.tokenizers for candidate in _list_candidates(situation, option)]
    if not candidates:
        raise make_time_error(situation)
    return rank(candidates)


def make_time_error(situation: Situation) -> UserError:
    left = f"{max(0.0, situation.seconds):.0f} s that are left of the budget after measuring"
    return UserError(
        f"nothing can be trained for at least {MIN_STEPS} steps in the {left}; give more time, or fix fewer options"
    )


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first; of equal losses the smaller model, since it is the faster one to use."""
    return sorted(candidates, key=lambda each: (round(each.bits_per_byte, 4), each.shape.block_weights))


def _list_candidates(situation: Situation, option: TokenizerOption) -> Iterator[Candidate]:
    given = situation.given
    most_weights = max(SHAPES[0].block_weights, MAX_WEIGHTS_PER_BYTE * situation.corpus.text_bytes)
    for shape in _list_shapes(given):
        if shape.block_weights > most_weights and not given.keys() & {"num_layers", "embd_size"}:
            continue
        context = given.get("context_length") or choose_context(shape)
        found = [
            candidate
            for batch in ([given["total_batch_size"]] if "total_batch_size" in given else BATCHES)
            for share in _list_shares(given)
            if batch % context == 0
            and (candidate := _fill(situation, option, shape, context, batch, share)) is not None
        ]
        suitable = [
            min((each for each in found if each.share == share), key=_measure_batch_misfit)
            for share in dict.fromkeys(each.share for each in found)
        ]
        if suitable:
            yield min(suitable, key=_prefer_low_loss)


def pick_share(situation: Situation, candidate: Candidate, step_seconds: float) -> Candidate | None:
    """The candidate with another step time, in the best share of the time; None if nothing of it fits into that."""
    batch, shares = candidate.tokens_per_step, _list_shares(situation.given)
    filled = [
        _fill(situation, candidate.tokenizer, candidate.shape, candidate.context_length, batch, share, step_seconds)
        for share in shares
    ]
    return min((each for each in filled if each is not None), key=_prefer_low_loss, default=None)


def find_most_steps(situation: Situation, candidate: Candidate) -> int:
    """How many steps may become of it on a machine that is faster than measured, before more of them would overfit."""
    best = candidate
    for speedup in SPEEDUPS if candidate.share == 1.0 else ():
        faster = _fill(
            situation, candidate.tokenizer, candidate.shape, candidate.context_length, candidate.tokens_per_step, 1.0,
            candidate.step_seconds / speedup,
        )  # fmt: skip
        if faster is None or faster.bits_per_byte >= best.bits_per_byte:
            break
        best = faster
    return best.steps


def _list_shares(given: Mapping[str, Any]) -> tuple[float, ...]:
    return TIME_SHARES if "max_steps" not in given else (1.0,)


def _prefer_low_loss(candidate: Candidate) -> tuple[float, int]:
    return candidate.bits_per_byte, candidate.tokens


def _measure_batch_misfit(candidate: Candidate) -> float:
    return abs(math.log(candidate.tokens_per_step / choose_batch(candidate.tokens)))


def choose_batch(tokens: float) -> float:
    """Tokens per step that suit a run of so many tokens: more of them bear a larger batch."""
    return float(BASE_BATCH * (tokens / BASE_TOKENS) ** BATCH_POWER)


def choose_context(shape: Shape) -> int:
    """The context that suits a model: a larger one has more use for it."""
    return next(size for most, size in CONTEXTS if shape.block_weights <= most)


def count_weights(shape: Shape, vocab_size: int) -> int:
    """All of a model's weights, the embedding's included."""
    return shape.block_weights + vocab_size * shape.embd_size


def choose_dropout(weights: float, tokens: float, unique_tokens: float) -> float:
    """The dropout that keeps so many weights, embeddings included, from learning the text by heart."""
    if tokens <= MAX_FREE_EPOCHS * unique_tokens:
        return 0.0
    epochs = tokens / unique_tokens
    wanted = 0.1 * math.log(weights / unique_tokens * epochs / NO_DROPOUT_UP_TO, TENTH_FACTOR)
    bearable = DROPOUT_STEP + MOST_PER_DOUBLING * math.log2(epochs / MAX_FREE_EPOCHS)
    return round(min(max(round(min(wanted, bearable) / DROPOUT_STEP) * DROPOUT_STEP, 0.0), MAX_DROPOUT), 2)


def _list_shapes(given: Mapping[str, Any]) -> list[Shape]:
    """The family's shapes, with the depth and width that are given."""
    shapes = {
        Shape(given.get("num_layers", shape.num_layers), given.get("embd_size", shape.embd_size)): None
        for shape in SHAPES
    }
    heads = given.get("num_heads")
    return [shape for shape in shapes if heads is None or shape.embd_size % heads == 0]


def _fill(
    situation: Situation,
    option: TokenizerOption,
    shape: Shape,
    context: int,
    batch: int,
    share: float,
    measured_seconds: float | None = None,
) -> Candidate | None:
    """As many steps of this as fit into a share of the time; None if too few, or too large to know their speed."""
    law, corpus, speed = situation.law, situation.corpus, situation.speed
    flops, head_flops = _count_token_flops(shape, context, option.vocab_size)
    if flops > MAX_PROBE_FACTOR * speed.largest_flops:
        return None
    step_seconds = measured_seconds or speed.find_seconds(batch, flops, head_flops)
    usable = corpus.text_bytes * (1 - choose_val_fraction(corpus.text_bytes))
    bytes_per_second = batch * option.bytes_per_token / step_seconds
    # Evaluations, at the start and at the end, take their share. Text is prepared only as far as it is used.
    rate = bytes_per_second / (1 + 2 * EVAL_SHARE * FORWARD_SHARE)
    trained = rate * situation.seconds / (1 + rate / option.bytes_per_second)
    if trained > usable:
        trained = rate * (situation.seconds - corpus.text_bytes / option.bytes_per_second)
    steps = int(situation.given.get("max_steps") or share * trained / option.bytes_per_token / batch)
    if steps < MIN_STEPS:
        return None
    trained = steps * batch * option.bytes_per_token
    unique = min(usable, trained)
    weights, unique_tokens = count_weights(shape, option.vocab_size), unique / option.bytes_per_token
    pressure = find_pressure(weights, steps * batch, unique_tokens)
    bits = law.predict(shape.block_weights, trained, unique, option.vocab_size, corpus.density, pressure)
    return Candidate(option, shape, context, batch, steps, step_seconds, unique, bits, share)


@cache
def _count_token_flops(shape: Shape, context: int, vocab_size: int) -> tuple[float, float]:
    """Of the blocks, and of the LM head."""
    model = build_config(ModelConfig, _select_model({**FAMILY, **shape.list_values(), "context_length": context}))
    blocks = count_flops(model, 0, context)
    return blocks, count_flops(model, pad_vocab(vocab_size), context) - blocks


def _select_model(values: dict[str, Any]) -> dict[str, Any]:
    names = ("norm", "bias", "positions", "qk_norm", "feed_forward", "zero_init")
    return {
        name: value for name, value in values.items() if name in (*names, *Shape(1, 64).list_values(), "context_length")
    }
