"""The decode step by kernels gives the model's logits; on a CPU, by the kernels' reference implementations."""

from __future__ import annotations

import pytest
import torch

from gptmill.config.model import ModelConfig, Relu2, RmsNorm, Rope, SwiGlu
from gptmill.inference.generator import BatchGenerator
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.fused.fused_decoding import FusedDecoder, can_fuse_decoding
from gptmill.models.gpt import GPT, build_gpt
from gptmill.models.kernels.greedy import advance_greedily
from gptmill.models.kernels.support import has_kernels
from gptmill.models.kv_cache import build_kv_cache

DEVICES = [
    torch.device("cpu"),
    pytest.param(torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
CONTEXT, VOCAB = 300, 100
BASE = {"num_layers": 2, "embd_size": 48, "num_heads": 4, "head_size": 16, "context_length": CONTEXT}
QWEN = {"norm": RmsNorm(), "positions": Rope(), "num_kv_heads": 2, "qk_norm": True, "bias": False}
MODELS = {
    "gpt2": ModelConfig(**BASE),  # type: ignore[arg-type]
    "qwen3": ModelConfig(**BASE, **QWEN, feed_forward=SwiGlu(), attention_windows="40,full"),  # type: ignore[arg-type]
    "relu2": ModelConfig(**BASE, feed_forward=Relu2(), tied_head=False, logit_softcap=5.0),  # type: ignore[arg-type]
}


def build(name: str, device: torch.device) -> GPT:
    model = build_gpt(MODELS[name], 128, seed=0, vocab_size=VOCAB).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.to(device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 6, 33])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_the_models(name: str, batch_size: int, device: torch.device) -> None:
    model = build(name, device)
    length = CONTEXT if device.type == "cuda" else 60
    generator = torch.Generator().manual_seed(2)
    tokens_BT = torch.randint(0, VOCAB, (batch_size, length), generator=generator).to(device)
    # Texts of unequal length: those that begin later have read fewer tokens at the same step.
    late_B = torch.arange(batch_size, device=device) % 3
    expected_BTV = model.logits(tokens_BT)[..., :VOCAB]
    layers = build_kv_cache(model.config, batch_size, device).layers
    decoder = FusedDecoder(model, batch_size, CONTEXT, VOCAB)
    rows_B = torch.arange(batch_size, device=device)
    for step in range(length):
        positions_B = (step - late_B).clamp(min=0)
        found_BV = decoder.step(tokens_BT[rows_B, positions_B], positions_B, layers)
        torch.testing.assert_close(found_BV, expected_BTV[rows_B, positions_B].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_greedy_tokens_are_the_first_of_the_likeliest(device: torch.device) -> None:
    logits_BV = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0)).to(device)
    logits_BV[0, [17, 19_999]] = 50.0
    logits_BV[1] = float("nan")
    logits_BV[2, 9_000] = float("inf")
    tokens_B, positions_B = torch.zeros(3, dtype=torch.int64, device=device), torch.tensor([4, 5, 6], device=device)
    sampled_BS, step_1 = torch.zeros(3, 7, dtype=torch.int64, device=device), torch.tensor([2], device=device)
    advance_greedily(logits_BV, step_1, tokens_B, positions_B, sampled_BS)
    assert tokens_B.tolist() == sampled_BS[:, 2].tolist() == [17, 0, 9_000]
    assert positions_B.tolist() == [5, 6, 7]
    assert sampled_BS.count_nonzero() == 2


@pytest.mark.skipif(not has_kernels(torch.device("cuda")), reason="no GPU")
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_plain_model(name: str) -> None:
    model = build(name, torch.device("cuda"))
    prompts = [[1, 2, 3], [4], list(range(50))]
    assert can_fuse_decoding(model, len(prompts))
    texts = []
    for use_graphs in (False, True):
        generator = BatchGenerator(model, SamplingConfig(temperature=0.0), VOCAB, use_graphs=use_graphs)
        texts.append([step.tokens for step in generator.generate(prompts, 200, [0, 1, 2])])
    assert texts[0] == texts[1]


def test_parts_that_the_kernels_do_not_know_are_left_to_the_model() -> None:
    assert not can_fuse_decoding(build("gpt2", torch.device("cpu")), 1)  # no GPU
