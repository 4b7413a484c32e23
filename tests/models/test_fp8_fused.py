"""fp8 behind the norms and in the head, fused and not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gptmill.config.model import ModelConfig
from gptmill.models.fused import fp8_layers
from gptmill.models.fused.dispatch import MODELS
from gptmill.models.fused.fp8_layers import Fp8Linear, use_fp8
from gptmill.models.gpt import GPT, build_gpt
from gptmill.models.kernels import fp8, qkv_projection
from gptmill.models.kernels.linear_cross_entropy import linear_cross_entropy
from gptmill.models.losses import IGNORE_INDEX

TINY = ModelConfig(num_layers=2, embd_size=32, num_heads=2, context_length=16)


def build(*, quantized: bool, fused: bool) -> GPT:
    model = build_gpt(TINY, 64, seed=0, model_class=MODELS["auto" if fused else "none"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    if quantized:
        use_fp8(model, "fused", emulated=True)
    return model.train()


def run(model: GPT) -> dict[str, Tensor]:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2))
    loss = model(tokens, tokens.roll(1, dims=1)).objective / 32
    loss.backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("fused", [False, True])
def test_fp8_behind_norms_is_near_the_plain_model(fused: bool) -> None:
    exact, found = run(build(quantized=False, fused=False)), run(build(quantized=True, fused=fused))
    distances = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    assert 1e-4 < max(distances.values()) < 0.35, distances


def test_only_the_way_forward_of_the_layers_behind_norms_is_fp8() -> None:
    layers = [part for part in build(quantized=True, fused=True).modules() if isinstance(part, Fp8Linear)]
    assert len(layers) == 4
    assert all(layer.forward_only for layer in layers)


def test_a_fused_norm_hands_over_what_is_fp8_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cast apart: each of four weights, the first norm's result, the head's two."""
    casts: list[tuple[int, ...]] = []
    cast = fp8.quantize_fp8

    def count(x: Tensor, dtype: torch.dtype) -> fp8.ScaledTensor:
        casts.append(tuple(x.shape))
        return cast(x, dtype)

    for module in (fp8, fp8_layers, qkv_projection):
        monkeypatch.setattr(module, "quantize_fp8", count)
    run(build(quantized=True, fused=True))
    assert casts.count((32, 32)) == 1  # tokens x width: where no sum stands before the norm
    assert len(casts) == 5


@pytest.mark.parametrize("chunk", [None, 16])
def test_an_fp8_head_is_near_the_exact_one(chunk: int | None) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(48, 32, requires_grad=True), (0.3 * torch.randn(64, 32)).requires_grad_()
    targets = torch.randint(64, (48,))
    targets[5] = IGNORE_INDEX
    exact = linear_cross_entropy(x, weight, targets, chunk)[0]
    found = linear_cross_entropy(x, weight, targets, chunk, "fp8-emulated")[0]
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)
    assert found != exact
    grads = torch.autograd.grad(found, (x, weight)), torch.autograd.grad(exact, (x, weight))
    for one, other in zip(*grads, strict=True):
        assert 1e-4 < (one - other).norm() / other.norm() < 0.1
