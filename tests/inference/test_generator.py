"""The generator: what it draws, what it never draws, and that it goes on past the context."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch

from gptmill.config.model import ModelConfig, Rope
from gptmill.inference.generator import generate
from gptmill.inference.token_sampling import SamplingConfig, draw_uniforms, sample_tokens
from gptmill.models.gpt import GPT, build_gpt

pytestmark = pytest.mark.slow

CONTEXT = 16
VOCAB, PADDED_VOCAB = 50, 64
GREEDY = SamplingConfig(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
GRAPHS = 2 * 2 + 1  # of prefill and decode: the embedding, a block; and the LM head


TINY = ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=CONTEXT)


def build_wild(context_length: int = CONTEXT, seed: int = 1, config: ModelConfig = TINY) -> GPT:
    """Matrices far louder than fresh ones, so that the next token depends on all that came before."""
    config = replace(config, context_length=context_length)
    model = build_gpt(config, PADDED_VOCAB, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.0, generator=generator)
    return model


def draw(model: GPT, prompt: list[int], count: int, rule: SamplingConfig, seed: int = 0) -> list[int]:
    return list(generate(model, prompt, count, rule, VOCAB, seed))


@torch.no_grad()
def find_likeliest(model: GPT, tokens: list[int]) -> int:
    """The plain way: no cache, everything computed again."""
    return int(model.eval().logits(torch.tensor([tokens]))[0, -1, :VOCAB].argmax())


def count_draws(logits: list[float], rule: SamplingConfig, draws: int) -> Counter[int]:
    logits_BV = torch.tensor(logits).expand(draws, -1)
    return Counter(sample_tokens(logits_BV, draw_uniforms(0, draws), rule).tolist())


@pytest.mark.parametrize("seed", range(4))
def test_greedy_generation_equals_computing_everything_again(seed: int) -> None:
    model, tokens = build_wild(seed=seed), list(PROMPT)
    while len(tokens) <= CONTEXT:
        tokens.append(find_likeliest(model, tokens))
    assert draw(model, PROMPT, CONTEXT + 1 - len(PROMPT), GREEDY) == tokens[len(PROMPT) :]


@pytest.mark.parametrize("context_length", [1, 2, 3, CONTEXT])
@pytest.mark.parametrize("prompt_length", [1, CONTEXT - 1, CONTEXT, 3 * CONTEXT])
def test_generation_goes_on_past_the_context(context_length: int, prompt_length: int) -> None:
    model = build_wild(context_length)
    prompt = torch.randint(VOCAB, (prompt_length,), generator=torch.Generator().manual_seed(4)).tolist()
    for rule in (GREEDY, SamplingConfig(temperature=1.0)):
        tokens = draw(model, prompt, 2 * CONTEXT, rule)
        assert len(tokens) == 2 * CONTEXT
        assert all(0 <= token < VOCAB for token in tokens)


@pytest.mark.parametrize("seed", range(4))
def test_past_the_context_its_older_half_is_forgotten(seed: int) -> None:
    model, visible = build_wild(seed=seed), list(PROMPT)
    expected = []
    for _ in range(4 * CONTEXT):
        visible = visible if len(visible) <= CONTEXT else visible[-CONTEXT // 2 :]
        expected.append(find_likeliest(model, visible))
        visible.append(expected[-1])
    assert draw(model, PROMPT, 4 * CONTEXT, GREEDY) == expected
    assert len(set(expected)) > 3


def test_a_prompt_longer_than_the_context_counts_by_its_end() -> None:
    model = build_wild()
    prompt = torch.randint(VOCAB, (3 * CONTEXT,), generator=torch.Generator().manual_seed(4)).tolist()
    assert draw(model, prompt, 1, GREEDY) == [find_likeliest(model, prompt[-CONTEXT:])]


def test_the_prompt_is_left_as_it_was() -> None:
    prompt = list(PROMPT)
    draw(build_wild(), prompt, 2 * CONTEXT, GREEDY)
    assert prompt == PROMPT


@pytest.mark.parametrize("rule", [GREEDY, SamplingConfig(), SamplingConfig(top_k=5), SamplingConfig(2.0, top_p=0.9)])
def test_ids_that_pad_the_vocabulary_are_never_drawn(rule: SamplingConfig) -> None:
    model = build_wild()
    with torch.no_grad():  # the final state is the same everywhere, and points at the rows of the padding
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(0.5)
        model.token_embedding.weight[VOCAB:] = 50 * model.final_norm.bias
        unmasked = model.eval().logits(torch.tensor([PROMPT])).softmax(dim=-1)
    assert unmasked[0, -1, VOCAB:].sum() > 0.999
    assert all(token < VOCAB for token in draw(model, PROMPT, 100, rule))


@pytest.mark.parametrize("rule", [SamplingConfig(top_k=1), SamplingConfig(top_p=1e-9), SamplingConfig(1.7, 50, 1e-4)])
def test_the_narrowest_rules_are_greedy(rule: SamplingConfig) -> None:
    model = build_wild()
    assert draw(model, PROMPT, 2 * CONTEXT, rule, seed=5) == draw(model, PROMPT, 2 * CONTEXT, GREEDY)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert count_draws([1.0, 5.0, -3.0, 4.0], SamplingConfig(temperature), 20) == {1: 20}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_softmax_says(temperature: float) -> None:
    logits = [2.0, 0.0, 1.0, -1.0, 0.5]
    drawn = count_draws(logits, SamplingConfig(temperature), 4000)
    expected = (torch.tensor(logits) / temperature).softmax(dim=-1).tolist()
    assert [drawn[token] / 4000 for token in range(5)] == pytest.approx(expected, abs=0.03)


def test_top_k_leaves_the_others_in_proportion() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().tolist()
    drawn = count_draws(logits, SamplingConfig(top_k=2), 3000)
    assert drawn.keys() == {1, 3}
    assert drawn[1] / 3000 == pytest.approx(0.5 / 0.75, abs=0.04)
    assert count_draws(logits, SamplingConfig(top_k=99), 3000).keys() == {0, 1, 2, 3}


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_fewest_tokens_that_hold_it(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().tolist()
    assert count_draws(logits, SamplingConfig(top_p=top_p), 1000).keys() == kept


def test_the_same_seed_draws_the_same_text_whatever_was_drawn_before() -> None:
    model, rule = build_wild(), SamplingConfig(temperature=1.0)
    with torch.no_grad():
        model.token_embedding.weight.mul_(0.1)  # flatter, so that seeds can differ
    first = draw(model, PROMPT, 40, rule, seed=1)
    torch.rand(3)
    assert draw(model, PROMPT, 40, rule, seed=1) == first
    assert draw(model, PROMPT, 40, rule, seed=2) != first


def test_a_longer_text_begins_with_the_shorter_one() -> None:
    model, rule = build_wild(), SamplingConfig(temperature=1.0)
    longer = generate(model, PROMPT, 3 * CONTEXT, rule, VOCAB, 7)
    assert list(islice(longer, 10)) == draw(model, PROMPT, 10, rule, seed=7)


def test_generation_keeps_no_gradients_and_lets_others_have_theirs() -> None:
    model = build_wild()
    tokens = generate(model, PROMPT, 5, GREEDY, VOCAB, 0)
    next(tokens)
    assert torch.is_grad_enabled()
    list(tokens)
    assert all(parameter.grad is None for parameter in model.parameters())


# Compiled


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def draw_compiled(model: GPT, prompt: list[int], count: int) -> list[int]:
    """With a backend that runs the graphs as they are: what is compiled, and how often, is the same."""
    return list(generate(model, prompt, count, GREEDY, VOCAB, 0, compiled=True, backend="eager"))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("num_layers", [2, 4])
def test_compiled_generation_has_as_many_graphs_whatever_the_lengths_and_layers(num_layers: int) -> None:
    context = 150  # two chunks and a part of one
    model = build_wild(context, config=replace(TINY, num_layers=num_layers))
    prompt = torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(4)).tolist()
    for length, count in [(1, 3), (5, 20), (64, 2), (65, 9), (128, 40), (140, 30), (200, 3)]:
        assert draw_compiled(model, prompt[:length], count) == draw(model, prompt[:length], count, GREEDY), length
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == GRAPHS
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.usefixtures("_fresh_compiler")
def test_what_is_compiled_for_training_is_not_compiled_again_to_draw() -> None:
    model = build_wild()
    wanted = draw(model, PROMPT, 9, GREEDY)
    model.compile_parts(backend="eager")
    assert draw(model, PROMPT, 9, GREEDY) == wanted
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("context_length", [1, 2, CONTEXT])
def test_compiled_generation_goes_on_past_short_contexts(context_length: int) -> None:
    model = build_wild(context_length)
    assert draw_compiled(model, PROMPT, 3 * CONTEXT) == draw(model, PROMPT, 3 * CONTEXT, GREEDY)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_generation_with_windows_shared_heads_and_rotations() -> None:
    config = replace(TINY, positions=Rope(), num_kv_heads=1, qk_norm=True, attention_windows="5,full")
    model = build_wild(config=config)
    assert draw_compiled(model, PROMPT, 2 * CONTEXT) == draw(model, PROMPT, 2 * CONTEXT, GREEDY)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiling_leaves_nothing_on_the_model() -> None:
    model = build_wild()
    names = set(vars(model))
    drawn = draw_compiled(model, PROMPT, 3)
    assert set(vars(model)) == names
    with torch.no_grad():
        model.token_embedding.weight.mul_(-1.0)  # trained on: the graphs hold for the new weights
    assert draw_compiled(model, PROMPT, 9) == draw(model, PROMPT, 9, GREEDY) != drawn
    assert draw_compiled(copy.deepcopy(model), PROMPT, 9) == draw(model, PROMPT, 9, GREEDY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == GRAPHS
