"""GPT-2 as it is published: rows that pad the vocabulary take little of the probability."""

from __future__ import annotations

import torch
from torch import nn

from gptmill.config.model import ModelConfig
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.huggingface.conversion import from_hf_weights, to_hf_weights

VOCAB = 100
CONFIG = ModelConfig(num_layers=3, embd_size=32, num_heads=4, context_length=24)


@torch.no_grad()
def build_published(seed: int) -> nn.Module:
    """The same shape in `transformers`, with whatever it has by default otherwise; every parameter at random."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONFIG.context_length,
        n_embd=CONFIG.embd_size,
        n_layer=CONFIG.num_layers,
        n_head=CONFIG.num_heads,
        bos_token_id=VOCAB - 1,
        eos_token_id=VOCAB - 1,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return model


@torch.no_grad()
def compute_logits(published: nn.Module, tokens: torch.Tensor, padded_vocab_size: int) -> torch.Tensor:
    """By our model with the published weights, a tied head that was saved too among them."""
    ours = GPT(CONFIG, padded_vocab_size, VOCAB).eval()
    ours.load_state_dict(from_hf_weights(published.state_dict(), "gpt2", CONFIG, padded_vocab_size), strict=True)
    return ours.logits(tokens)


def draw_tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, CONFIG.context_length), generator=torch.Generator().manual_seed(9))


@torch.no_grad()
def test_a_vocabulary_without_padding_is_taken_as_it_is() -> None:
    published, tokens = build_published(seed=2), draw_tokens()
    logits = compute_logits(published, tokens, VOCAB)
    torch.testing.assert_close(logits, published(tokens).logits, atol=1e-4, rtol=1e-4)


def test_rows_that_pad_the_vocabulary_get_the_mean_logit() -> None:
    logits = compute_logits(build_published(seed=4), draw_tokens(), pad_vocab(VOCAB))
    mean = logits[..., :VOCAB].mean(dim=-1, keepdim=True)
    torch.testing.assert_close(logits[..., VOCAB:], mean.expand(-1, -1, pad_vocab(VOCAB) - VOCAB))


def test_padding_takes_little_probability_even_where_all_logits_are_far_below_zero() -> None:
    published = build_published(seed=5)
    with torch.no_grad():
        published.transformer.ln_f.bias.fill_(30.0)
        published.transformer.wte.weight.mul_(0.1).sub_(0.1)
    logits = compute_logits(published, draw_tokens(), pad_vocab(VOCAB))
    assert logits[..., :VOCAB].max() < -50
    assert logits.softmax(dim=-1)[..., VOCAB:].sum(dim=-1).max() < 0.01


def test_mapped_weights_are_contiguous_and_stored_once() -> None:
    weights = to_hf_weights(CONFIG, GPT(CONFIG, pad_vocab(VOCAB)).state_dict(), VOCAB)
    assert all(weight.is_contiguous() for weight in weights.values())
    assert "lm_head.weight" not in weights
