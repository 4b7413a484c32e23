"""Self-speculation gives the tokens of ordinary decoding, however good its guesses and however close the logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gptmill.config.model import ModelConfig, Moe, RmsNorm, Rope, SwiGlu
from gptmill.inference import self_speculation
from gptmill.inference.generator import BatchGenerator, Overflow
from gptmill.inference.self_speculation import Speculation, build_draft
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.gpt import GPT, build_gpt

VOCAB, PADDED_VOCAB, CONTEXT, COUNT = 50, 64, 48, 64
GREEDY = SamplingConfig(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
GPT2 = ModelConfig(num_layers=2, embd_size=32, num_heads=4, context_length=CONTEXT)
LLAMA = replace(GPT2, norm=RmsNorm(), bias=False, positions=Rope(), feed_forward=SwiGlu(ffn_size=48), tied_head=False)
MODELS = {
    "gpt2": GPT2,
    "untied": replace(GPT2, tied_head=False),
    "llama": LLAMA,
    "grouped, windows": replace(LLAMA, num_kv_heads=2, qk_norm=True, attention_windows="8,full"),
    "soft-cap": replace(GPT2, logit_softcap=5.0, value_embeddings=1, tied_head=False),
}


@pytest.fixture(autouse=True)
def _has_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the text was checked and settled."""
    found = {"step": 0, "_settle": 0}

    def count(name: str) -> None:
        original = getattr(Speculation, name)

        def call(self: Speculation, *arguments: Any) -> Any:
            found[name] += 1
            return original(self, *arguments)

        monkeypatch.setattr(Speculation, name, call)

    for name in found:
        count(name)
    return found


@torch.no_grad()
def build(config: ModelConfig, seed: int = 0, loudness: float = 0.4) -> GPT:
    model = build_gpt(config, PADDED_VOCAB, seed, VOCAB)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, loudness, generator=generator)
    return model


def decode(model: GPT, *, speculative: bool, overflow: Overflow = "crop", prompt: list[int] = PROMPT) -> list[int]:
    generator = BatchGenerator(model, GREEDY, VOCAB, overflow=overflow, speculative=speculative)
    return [step.tokens[0] for step in generator.generate([prompt], COUNT, [0])]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_ordinary_decoding(name: str, counts: dict[str, int]) -> None:
    for seed in range(2):
        model = build(MODELS[name], seed)
        expected = decode(model, speculative=False)
        assert decode(model, speculative=True) == expected
        assert len(set(expected)) > 3
    assert 0 < counts["step"] < 2 * (CONTEXT - len(PROMPT))  # several tokens per pass


@pytest.mark.parametrize("overflow", ["half", "rolling"])
@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT, 2 * CONTEXT])
def test_texts_go_on_past_the_context(overflow: Overflow, length: int) -> None:
    model = build(LLAMA)
    prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = decode(model, speculative=False, overflow=overflow, prompt=prompt)
    assert decode(model, speculative=True, overflow=overflow, prompt=prompt) == expected


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-6])
def test_ties_are_decided_by_ordinary_steps(noise: float, counts: dict[str, int]) -> None:
    model = build(replace(GPT2, tied_head=False), seed=1)
    assert model.head is not None
    with torch.no_grad():  # every token has a double: the two best logits are always close
        model.head.weight[VOCAB // 2 : VOCAB] = model.head.weight[: VOCAB // 2] * (1 + noise)
    assert decode(model, speculative=True) == decode(model, speculative=False)
    assert counts["_settle"] > CONTEXT / 2


def test_non_finite_logits_are_left_to_ordinary_steps(counts: dict[str, int]) -> None:
    model = build(GPT2)
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    assert decode(model, speculative=True) == decode(model, speculative=False)
    assert counts["_settle"] > 0


def test_wrong_guesses_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GPT2)
    expected = decode(model, speculative=False)
    monkeypatch.setattr("gptmill.inference.generator.build_draft", lambda _, size: build_draft(build(GPT2, 9), size))
    monkeypatch.setattr(self_speculation, "NGRAM", 1)
    assert decode(model, speculative=True) == expected


def test_near_ties_are_far_wider_than_rounding() -> None:
    model, tokens = build(GPT2), torch.randint(VOCAB, (1, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model.eval().logits(tokens)
        rows = torch.cat([model.logits(tokens[:, : end + 1])[:, -1:] for end in range(32)], dim=1)
    assert (whole - rows).abs().max() * 64 < self_speculation.NEAR_TIE * whole.abs().max()


def test_only_a_single_greedy_text_in_fp32_is_guessed() -> None:
    model = build(GPT2)

    def guesses(model: GPT = model, sampling: SamplingConfig = GREEDY, batch_size: int = 1, **options: bool) -> bool:
        generator = BatchGenerator(model, sampling, VOCAB, **{"speculative": True, **options})
        return generator.find_draft(batch_size) is not None

    assert guesses()
    assert not guesses(speculative=False)
    assert not guesses(sampling=SamplingConfig(temperature=0.5))
    assert not guesses(sampling=SamplingConfig(temperature=0.0, repetition_penalty=1.1))
    assert not guesses(batch_size=2)
    assert not guesses(with_log_probs=True)
    assert not guesses(compiled=True)
    assert not guesses(build(replace(GPT2, feed_forward=Moe())))
    assert not guesses(build(GPT2).bfloat16())
