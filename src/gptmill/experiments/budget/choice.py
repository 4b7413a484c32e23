"""Chooses what to train: of all models, tokenizers and batches, those with the lowest loss that the time allows.

Pure: what the machine and the corpus are like comes in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.config.schema import build_config
from gptmill.experiments.budget.candidate import (
    CONTEXTS,
    EVAL_FACTOR,
    Candidate,
    CorpusFacts,
    TokenizerOption,
    choose_batch,
    count_weights,
    find_longest_context,
)
from gptmill.experiments.budget.family import FAMILY, SHAPES, Shape
from gptmill.experiments.budget.scaling_law import ScalingLaw, find_pressure
from gptmill.experiments.budget.speed_model import SpeedModel
from gptmill.models.flops import count_flops
from gptmill.models.gpt import pad_vocab

BATCHES = tuple(2**power for power in range(9, 20))  # tokens per step
MIN_STEPS = 50
# Of text. The best models of an H200 had 1 to 3, on all three corpora; half as many as the recipe shakespeare-char has.
MAX_WEIGHTS_PER_BYTE = 5.0
MAX_PROBE_FACTOR = 16  # how far beyond the largest measured model its speed is trusted
TIME_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.09, 0.06, 0.04, 0.03, 0.02)  # that training may be limited to
SPEEDUPS = tuple(1.1**power for power in range(1, 16))


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
    compile_seconds: float = 0.0
    """That compiling takes, and that are not among the seconds; 0 if nothing is compiled."""
    speedup: float = 1.0
    """By which compiled steps are faster than those that are measured."""

    @property
    def compiles(self) -> bool:
        return self.compile_seconds > 0


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
        found = list(_list_trainings(situation, option, shape))
        if found:
            yield min(found, key=_prefer_low_loss)


def _list_trainings(situation: Situation, option: TokenizerOption, shape: Shape) -> Iterator[Candidate]:
    """A model with each context that its run can learn to use, in each share of the time, with the batch that suits."""
    given = situation.given
    batches = [given["total_batch_size"]] if "total_batch_size" in given else BATCHES
    is_given, unique_tokens = "context_length" in given, situation.corpus.usable_bytes / option.bytes_per_token
    for context in [given["context_length"]] if is_given else CONTEXTS:
        for share in _list_shares(given):
            timings = [
                timing
                for batch in batches
                if batch % context == 0
                and (timing := _find_timing(situation, option, shape, context, batch, share)) is not None
            ]
            if not timings:
                break
            suitable = min(timings, key=lambda timing: _measure_batch_misfit(timing, unique_tokens))
            if not is_given and context > find_longest_context(suitable.tokens):
                break
            yield _make_candidate(situation, option, shape, context, share, suitable)


def pick_share(situation: Situation, candidate: Candidate, step_seconds: float) -> Candidate | None:
    """The candidate with another step time, in the best share of the time; None if nothing of it fits into that."""
    filled = [_fill(situation, candidate, share, step_seconds) for share in _list_shares(situation.given)]
    return min((each for each in filled if each is not None), key=_prefer_low_loss, default=None)


def find_most_steps(situation: Situation, candidate: Candidate) -> int:
    """How many steps may become of it on a machine that is faster than measured, before more of them would overfit."""
    best = candidate
    for speedup in SPEEDUPS if candidate.share == 1.0 else ():
        faster = _fill(situation, candidate, 1.0, candidate.step_seconds / speedup)
        if faster is None or faster.bits_per_byte >= best.bits_per_byte:
            break
        best = faster
    return best.steps


def _list_shares(given: Mapping[str, Any]) -> tuple[float, ...]:
    return TIME_SHARES if "max_steps" not in given else (1.0,)


def _prefer_low_loss(candidate: Candidate) -> tuple[float, int]:
    return candidate.bits_per_byte, candidate.tokens


def _measure_batch_misfit(timing: Timing, unique_tokens: float) -> float:
    return abs(math.log(timing.tokens_per_step / choose_batch(timing.tokens, unique_tokens)))


def _list_shapes(given: Mapping[str, Any]) -> list[Shape]:
    """The family's shapes, with the depth and width that are given."""
    shapes = {
        Shape(given.get("num_layers", shape.num_layers), given.get("embd_size", shape.embd_size)): None
        for shape in SHAPES
    }
    heads = given.get("num_heads")
    return [shape for shape in shapes if heads is None or shape.embd_size % heads == 0]


def _fill(situation: Situation, like: Candidate, share: float, step_seconds: float) -> Candidate | None:
    """A candidate with another step time, or in another share of the time; None if too few steps fit into it."""
    model = like.tokenizer, like.shape, like.context_length
    timing = _find_timing(situation, *model, like.tokens_per_step, share, step_seconds)
    return _make_candidate(situation, *model, share, timing) if timing else None


class Timing(NamedTuple):
    """A batch, and how many steps of it fit into the time."""

    tokens_per_step: int
    steps: int
    step_seconds: float

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step


def _find_timing(
    situation: Situation,
    option: TokenizerOption,
    shape: Shape,
    context: int,
    batch: int,
    share: float,
    measured_seconds: float | None = None,
) -> Timing | None:
    """As many steps of this as fit into a share of the time; None if too few, or too large to know their speed."""
    corpus, speed = situation.corpus, situation.speed
    flops, head_flops = _count_token_flops(shape, context, option.vocab_size)
    if flops > MAX_PROBE_FACTOR * speed.largest_flops:
        return None
    step_seconds = measured_seconds or speed.find_seconds(batch, flops, head_flops)
    bytes_per_second = batch * option.bytes_per_token / step_seconds
    # Evaluations, at the start and at the end, take their share. Text is prepared only as far as it is used.
    rate = bytes_per_second / EVAL_FACTOR
    trained = rate * situation.seconds / (1 + rate / option.bytes_per_second)
    if trained > corpus.usable_bytes:
        trained = rate * (situation.seconds - corpus.text_bytes / option.bytes_per_second)
    steps = int(situation.given.get("max_steps") or share * trained / option.bytes_per_token / batch)
    return Timing(batch, steps, step_seconds) if steps >= MIN_STEPS else None


def _make_candidate(
    situation: Situation, option: TokenizerOption, shape: Shape, context: int, share: float, timing: Timing
) -> Candidate:
    batch, steps, step_seconds = timing
    trained = timing.tokens * option.bytes_per_token
    unique = min(situation.corpus.usable_bytes, trained)
    weights, unique_tokens = count_weights(shape, option.vocab_size), unique / option.bytes_per_token
    pressure = find_pressure(weights, timing.tokens, unique_tokens)
    text = trained, unique, option.vocab_size, situation.corpus.density
    bits = situation.law.predict(shape.block_weights, *text, pressure, context * option.bytes_per_token)
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
