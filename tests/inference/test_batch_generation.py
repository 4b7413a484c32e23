"""Batches of unequal prompts: each text is what its prompt alone gives, whatever the options and the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gptmill.config.model import ModelConfig, Moe, NoPositions, RmsNorm, Rope, SwiGlu
from gptmill.inference.generator import BatchGenerator, Overflow
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.gpt import GPT, build_gpt

pytestmark = pytest.mark.slow

VOCAB, PADDED_VOCAB, CONTEXT = 50, 64, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
PLAIN = ModelConfig(num_layers=2, embd_size=32, num_heads=4, context_length=CONTEXT)
LLAMA = replace(PLAIN, positions=Rope(), norm=RmsNorm(), feed_forward=SwiGlu(), num_kv_heads=2, bias=False)
CONFIGS = {
    "gpt2": PLAIN,
    "llama": LLAMA,
    "windows, QK-norm, soft-cap, value embeddings": replace(
        LLAMA, attention_windows="5,full", qk_norm=True, logit_softcap=15.0, value_embeddings=1
    ),
    "experts": replace(PLAIN, feed_forward=Moe(num_experts=4, ffn_size=16), positions=NoPositions()),
}
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9], [3, 2], list(range(30))]
GREEDY = SamplingConfig(temperature=0.0)
OPTIONS = {
    "greedy": GREEDY,
    "temperature": SamplingConfig(),
    "all filters": SamplingConfig(0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    "penalised greedy": SamplingConfig(0.0, repetition_penalty=1.5),
}


def build_wild(config: ModelConfig = PLAIN, device: str = "cpu") -> GPT:
    """Matrices far louder than fresh ones, so that the next token depends on all that came before."""
    model = build_gpt(config, PADDED_VOCAB, seed=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.4, generator=generator)
    return model.to(device).eval()


def sample(
    model: GPT, prompts: list[list[int]], count: int, sampling: SamplingConfig = GREEDY, overflow: Overflow = "crop"
) -> list[list[int]]:
    generator = BatchGenerator(model, sampling, VOCAB, overflow=overflow)
    steps = list(generator.generate(prompts, count, [7 + sum(prompt) for prompt in prompts]))
    assert len(steps) == count
    return [list(text) for text in zip(*(step.tokens for step in steps), strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_text_does_not_depend_on_its_batch(config: ModelConfig, sampling: SamplingConfig, device: str) -> None:
    model = build_wild(config, device)
    together = sample(model, PROMPTS, 12, sampling)
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert sample(model, [prompt], 12, sampling) == [text]
    assert len({token for text in together for token in text}) > 5
    assert sample(model, PROMPTS[::-1], 12, sampling) == together[::-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@torch.no_grad()
def test_cropped_texts_see_the_last_context_length_tokens(config: ModelConfig, device: str) -> None:
    model, texts = build_wild(config, device), [list(prompt) for prompt in PROMPTS]
    for _ in range(2 * CONTEXT):
        for text in texts:
            logits = model.logits(torch.tensor([text[-CONTEXT:]], device=device))[0, -1, :VOCAB]
            text.append(int(logits.argmax()))
    expected = [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert sample(model, PROMPTS, 2 * CONTEXT) == expected


@pytest.mark.parametrize(
    "config", [LLAMA, CONFIGS["windows, QK-norm, soft-cap, value embeddings"]], ids=["full", "windows"]
)
@torch.no_grad()
def test_a_rolling_cache_attends_to_the_last_context_length_keys(config: ModelConfig) -> None:
    """The reference: a model with room for the whole text, whose layers see a window of the context's length."""
    model = build_wild(config)
    windows = ",".join(str(min(CONTEXT, window or CONTEXT)) for window in config.list_windows())
    roomy = GPT(replace(config, context_length=4 * CONTEXT, attention_windows=windows), PADDED_VOCAB).eval()
    roomy.load_state_dict(model.state_dict())
    prompts, expected = PROMPTS[:4], []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(2 * CONTEXT):
            text.append(int(roomy.logits(torch.tensor([text]))[0, -1, :VOCAB].argmax()))
        expected.append(text[len(prompt) :])
    assert sample(model, prompts, 2 * CONTEXT, overflow="rolling") == expected
    assert sample(model, prompts[:1], 2 * CONTEXT, overflow="rolling") == expected[:1]
    assert sample(model, prompts, 2 * CONTEXT, overflow="crop") != expected


@torch.no_grad()
def test_rows_whose_older_half_is_dropped_do_not_disturb_the_others() -> None:
    model = build_wild()
    together = sample(model, PROMPTS, 3 * CONTEXT, overflow="half")
    assert together == [sample(model, [prompt], 3 * CONTEXT, overflow="half")[0] for prompt in PROMPTS]


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_log_probabilities_are_the_models_own(device: str) -> None:
    model, prompt = build_wild(device=device), PROMPTS[0]
    generator = BatchGenerator(model, SamplingConfig(0.7, top_k=5), VOCAB, with_log_probs=True)
    steps = list(generator.generate([prompt, PROMPTS[1]], 8, [1, 2]))
    text = [*prompt, *(step.tokens[0] for step in steps)]
    logits = model.logits(torch.tensor([text], device=device))[0, len(prompt) - 1 : -1, :VOCAB]
    expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(text[len(prompt) :], device=device)[:, None])[:, 0]
    assert [step.log_probs[0] for step in steps if step.log_probs] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_one_generator_serves_many_batches_even_at_once(device: str) -> None:
    model = build_wild(device=device)
    generator = BatchGenerator(model, GREEDY, VOCAB)
    expected = {tuple(prompt): sample(model, [prompt], 9)[0] for prompt in PROMPTS}
    for prompt in PROMPTS:
        assert [step.tokens[0] for step in generator.generate([prompt], 9, [0])] == expected[tuple(prompt)]
    pair = [generator.generate([prompt], 9, [0]) for prompt in PROMPTS[:2]]
    texts = zip(*((first.tokens[0], second.tokens[0]) for first, second in zip(*pair, strict=True)), strict=True)
    assert [list(text) for text in texts] == [expected[tuple(prompt)] for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_have_moved_are_the_ones_used(device: str) -> None:
    model = build_wild(device=device)
    generator = BatchGenerator(model, GREEDY, VOCAB)
    before = [step.tokens[0] for step in generator.generate([PROMPTS[0]], 9, [0])]
    with torch.no_grad():
        weights = {name: tensor.neg() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    after = [step.tokens[0] for step in generator.generate([PROMPTS[0]], 9, [0])]
    assert after == sample(model, [PROMPTS[0]], 9)[0] != before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_graphs_change_no_token_as_a_text_grows_through_all_views() -> None:
    model = build_wild(replace(LLAMA, context_length=600), "cuda")
    texts = []
    for use_graphs in (True, False):
        generator = BatchGenerator(model, GREEDY, VOCAB, use_graphs=use_graphs)
        assert generator.use_graphs == use_graphs
        texts.append([step.tokens for step in generator.generate(PROMPTS, 640, range(len(PROMPTS)))])
    assert texts[0] == texts[1]
