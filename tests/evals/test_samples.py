"""Samples during training: how many, how long, with which seeds, on which ranks, and when they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmill.config.model import ModelConfig
from gptmill.config.run import EvaluationConfig, RunConfig
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.evals import samples
from gptmill.evals.samples import COMPILE_AFTER_STEPS, MAX_RANKS, Samples, count_new_tokens, make_sample_seed
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.gpt import GPT, build_gpt
from gptmill.runs.events import SampleDrawn
from gptmill.runtime.world import World

TOKENIZER = ByteTokenizer()
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


@pytest.fixture
def model() -> GPT:
    return build_gpt(ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=64), 320, 0)


class Recorder:
    """Stands in for the generation: yields these steps, and remembers what it was asked for."""

    def __init__(self, steps: list[list[int]]) -> None:
        self.steps = steps
        self.calls: list[tuple[Any, ...]] = []
        self.compiled: list[bool] = []

    def __call__(self, _model: object, *arguments: Any, compiled: bool = False, **_: Any) -> Iterator[list[int]]:
        self.calls.append(arguments)
        self.compiled.append(compiled)
        return iter(self.steps)


def draw(model: GPT, config: EvaluationConfig, step: int = 0, world: World = ALONE) -> SampleDrawn:
    drawn = Samples(config, TOKENIZER, world).evaluate(model, step, lambda: False)
    assert drawn is not None
    return drawn


def test_the_defaults_are_five_of_32_tokens_at_temperature_1_from_the_top_50_with_seed_42(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the training script that the project comes from has them; with GPT-2's tokens, its prompt has 7."""
    recorder = Recorder([[97] * 5])
    monkeypatch.setattr(samples, "generate_batch", recorder)
    config = RunConfig().evaluation
    assert len(draw(model, config).texts) == 5
    ((prompts, num_new, sampling, _vocab_size, seeds),) = recorder.calls
    assert prompts == [[TOKENIZER.end_of_text, *b"Hello, I am a language model"]] * 5
    assert sampling == SamplingConfig(temperature=1.0, top_k=50)
    assert seeds[0] == 42
    assert len(set(seeds)) == 5
    assert num_new == 16, "half of the tokens, since the prompt has 28 of these"
    assert count_new_tokens(config.sample_tokens, 7) == 25


@pytest.mark.parametrize(("total", "prompt", "new"), [(32, 7, 25), (32, 0, 32), (32, 28, 16), (1, 9, 1), (4, 28, 2)])
def test_a_sample_has_its_length_with_the_prompt_and_half_of_it_is_new(total: int, prompt: int, new: int) -> None:
    assert count_new_tokens(total, prompt) == new


def test_no_two_samples_of_any_ranks_have_the_same_seed() -> None:
    assert [make_sample_seed(42, rank, 0) for rank in range(3)] == [42, 43, 44]
    seeds = {make_sample_seed(2**63 - 1, rank, number) for rank in range(50) for number in range(50)}
    assert len(seeds) == 2500
    assert max(seeds) < 2**63


def test_samples_are_the_same_every_time_and_leave_the_random_numbers_of_training_alone(model: GPT) -> None:
    config = EvaluationConfig(sample_prompt="ab", sample_tokens=12)
    before = torch.get_rng_state()
    first, second = draw(model, config), draw(model, config)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.texts == second.texts
    assert len(set(first.texts.values())) == 5
    assert draw(model, replace(config, sample_seed=43)).texts != first.texts
    greedy = draw(model, replace(config, sample_temperature=0.0))
    assert len(set(greedy.texts.values())) == 1


def test_each_sample_ends_with_its_document(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    end = TOKENIZER.end_of_text
    steps = Recorder([[97, 98], [end, 99], [100, end], [101, 101]])
    monkeypatch.setattr(samples, "generate_batch", steps)
    drawn = draw(model, EvaluationConfig(num_samples=2))
    assert drawn.texts == {"rank 0 sample 0": "a", "rank 0 sample 1": "bc"}


def test_a_stop_ends_the_samples(model: GPT) -> None:
    drawn = Samples(EvaluationConfig(), TOKENIZER, ALONE).evaluate(model, 0, lambda: True)
    assert drawn is not None
    assert set(drawn.texts.values()) == {""}


def test_every_rank_samples_and_rank_0_has_them_all(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[int, Tensor] = {}

    def add_up(world: World, tensor: Tensor) -> Tensor:
        sent[world.rank] = tensor.clone()
        return torch.stack(list(sent.values())).sum(dim=0)

    monkeypatch.setattr(World, "all_reduce_sum", add_up)
    config, size = EvaluationConfig(num_samples=2, sample_prompt="ab", sample_tokens=8), MAX_RANKS + 2
    for rank in reversed(range(1, size)):
        assert Samples(config, TOKENIZER, World(rank, size, CPU)).evaluate(model, 0, lambda: False) is None
    drawn = draw(model, config, world=World(0, size, CPU))
    names = [f"rank {rank} sample {number}" for rank in range(MAX_RANKS) for number in range(2)]
    assert list(drawn.texts) == names
    assert len(set(drawn.texts.values())) == len(names), "each rank has seeds of its own"
    alone = draw(model, config)
    assert list(alone.texts.items()) == list(drawn.texts.items())[:2], "the number of ranks changes no sample"


@pytest.mark.parametrize("compiled", [True, False])
def test_samples_are_compiled_once_it_pays_and_only_in_a_run_that_is(
    model: GPT, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    recorder = Recorder([[token] for token in b"abc"])
    monkeypatch.setattr(samples, "generate_batch", recorder)
    config = EvaluationConfig(eval_freq=50, num_samples=1, sample_prompt="", sample_tokens=COMPILE_AFTER_STEPS // 4)
    found = Samples(config, TOKENIZER, ALONE, compiled=compiled)
    for step in (0, 50, 199, 200, 1000):
        drawn = found.evaluate(model, step, lambda: False)
        assert drawn is not None
        assert drawn.text == "abc"
    assert recorder.compiled == [False, False, False, compiled, compiled]
