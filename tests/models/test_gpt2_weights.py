"""GPT-2's published layout: the same weights give the same logits in `transformers` and here, both ways."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptmill.config.run import ModelConfig
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.gpt2_weights import from_gpt2_weights, to_gpt2_weights

Model = TypeVar("Model", bound=torch.nn.Module)
VOCAB = 100
CONFIG = ModelConfig(num_layers=3, embd_size=32, num_heads=4, context_length=24)


def build_published() -> GPT2LMHeadModel:
    """The same shape in `transformers`, with whatever it has by default for GPT-2 otherwise."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONFIG.context_length,
        n_embd=CONFIG.embd_size,
        n_layer=CONFIG.num_layers,
        n_head=CONFIG.num_heads,
        bos_token_id=VOCAB - 1,
        eos_token_id=VOCAB - 1,
    )
    return GPT2LMHeadModel(config).eval()


@torch.no_grad()
def make_wild(model: Model, seed: int) -> Model:
    """Every parameter at random, biases and norms too, so that none can be swapped or forgotten unseen."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return model


def draw_tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, CONFIG.context_length), generator=torch.Generator().manual_seed(9))


@torch.no_grad()
def assert_same_logits(ours: GPT, published: GPT2LMHeadModel) -> None:
    tokens = draw_tokens()
    expected = published(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours.eval().logits(tokens)[..., :VOCAB], expected, atol=1e-4, rtol=1e-4)


def test_our_weights_give_the_same_logits_in_transformers() -> None:
    ours, published = make_wild(GPT(CONFIG, pad_vocab(VOCAB)), seed=1), build_published()
    published.load_state_dict(to_gpt2_weights(ours.state_dict(), VOCAB), strict=True)
    assert published.config.n_positions == CONFIG.context_length
    assert published.lm_head.weight is published.transformer.wte.weight
    assert_same_logits(ours, published)


@pytest.mark.parametrize("padded_vocab_size", [VOCAB, pad_vocab(VOCAB)])
def test_published_weights_give_the_same_logits_here(padded_vocab_size: int) -> None:
    published, ours = make_wild(build_published(), seed=2), GPT(CONFIG, padded_vocab_size)
    ours.load_state_dict(from_gpt2_weights(published.state_dict(), padded_vocab_size), strict=True)
    assert_same_logits(ours, published)


def test_weights_survive_the_way_there_and_back() -> None:
    weights = make_wild(GPT(CONFIG, pad_vocab(VOCAB)), seed=3).state_dict()
    returned = from_gpt2_weights(to_gpt2_weights(weights, VOCAB), pad_vocab(VOCAB))
    assert returned.keys() == weights.keys()
    for name, weight in weights.items():
        rows = VOCAB if name == "token_embedding.weight" else len(weight)
        assert torch.equal(returned[name][:rows], weight[:rows]), name


def test_rows_that_pad_the_vocabulary_get_the_mean_logit() -> None:
    published, ours = make_wild(build_published(), seed=4), GPT(CONFIG, pad_vocab(VOCAB))
    ours.load_state_dict(from_gpt2_weights(published.state_dict(), pad_vocab(VOCAB)))
    logits = ours.eval().logits(draw_tokens())
    mean = logits[..., :VOCAB].mean(dim=-1, keepdim=True)
    torch.testing.assert_close(logits[..., VOCAB:], mean.expand(-1, -1, pad_vocab(VOCAB) - VOCAB))


def test_padding_takes_little_probability_even_where_all_logits_are_far_below_zero() -> None:
    published = make_wild(build_published(), seed=5)
    with torch.no_grad():
        published.transformer.ln_f.bias.fill_(30.0)
        published.transformer.wte.weight.mul_(0.1).sub_(0.1)
    ours = GPT(CONFIG, pad_vocab(VOCAB))
    ours.load_state_dict(from_gpt2_weights(published.state_dict(), pad_vocab(VOCAB)))
    logits = ours.eval().logits(draw_tokens())
    assert logits[..., :VOCAB].max() < -50
    assert logits.softmax(dim=-1)[..., VOCAB:].sum(dim=-1).max() < 0.01


def test_mapped_weights_are_contiguous() -> None:
    weights = to_gpt2_weights(GPT(CONFIG, pad_vocab(VOCAB)).state_dict(), VOCAB)
    assert all(weight.is_contiguous() for weight in weights.values())
    assert all(weight.is_contiguous() for weight in from_gpt2_weights(weights, pad_vocab(VOCAB)).values())
