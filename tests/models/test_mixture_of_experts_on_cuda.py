"""Mixtures of experts on the GPU, against the loop over experts on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gptmill.config.model import Moe
from gptmill.config.run import ModelConfig
from gptmill.models.mixture_of_experts import MixtureOfExperts, has_grouped_gemm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="no GPU with bf16"
)
WIDTH = 64


def build_wild(per_token: int = 2) -> MixtureOfExperts:
    """Experts that differ much, and a router that is sure of itself."""
    config = ModelConfig(embd_size=WIDTH, num_heads=2, feed_forward=Moe(8, per_token, ffn_size=96))
    mixture, generator = MixtureOfExperts(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return mixture


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def measure_all(mixture: MixtureOfExperts, x_BTC: Tensor, is_autocast: bool) -> list[Tensor]:
    """The counts, the result, and the gradients of the input and of every parameter."""
    x_BTC = x_BTC.detach().requires_grad_()
    with torch.autocast(x_BTC.device.type, dtype=torch.bfloat16, enabled=is_autocast):
        y_BTC, stats = mixture(x_BTC)
    loss = y_BTC.float().square().sum() + stats.aux_loss + stats.z_loss
    return [stats.tokens_E, y_BTC.detach(), *torch.autograd.grad(loss, [x_BTC, *mixture.parameters()])]


def assert_near(results: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert torch.equal(results[0].cpu(), expected[0].cpu())
    for result, exact in zip(results[1:], expected[1:], strict=True):
        assert (result.cpu().float() - exact.cpu().float()).norm() <= tolerance * exact.norm().cpu()


@pytest.mark.parametrize(("is_autocast", "tolerance"), [(True, 0.02), (False, 1e-4)])
@pytest.mark.parametrize("per_token", [2, 8])
def test_the_gpu_agrees_with_the_cpu(is_autocast: bool, tolerance: float, per_token: int) -> None:
    mixture, x_BTC = build_wild(per_token), draw(3, 111, WIDTH)
    expected = measure_all(mixture, x_BTC, is_autocast=False)
    mixture.cuda()
    assert has_grouped_gemm(x_BTC.cuda().bfloat16(), mixture.gate_up)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        assert_near(measure_all(mixture, x_BTC.cuda(), is_autocast), expected, tolerance)
    finally:
        torch.set_float32_matmul_precision(before)


def test_experts_that_nobody_visits_learn_nothing() -> None:
    mixture, x_BTC = build_wild(per_token=1).cuda(), draw(2, 99, WIDTH).abs().cuda()
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[2, 0] = 5.0
    tokens_E, _, _, *gradients = measure_all(mixture, x_BTC, is_autocast=True)
    named = dict(zip([name for name, _ in mixture.named_parameters()], gradients, strict=True))
    assert tokens_E.tolist() == [0, 0, 198, 0, 0, 0, 0, 0]
    for gradient in (named["gate_up"], named["down_proj"]):
        assert [bool(matrix.any()) for matrix in gradient] == [False, False, True, *[False] * 5]
        assert gradient.isfinite().all()


def test_the_same_bits_every_time() -> None:
    mixture, x_BTC = build_wild().cuda(), draw(4, 512, WIDTH).cuda()
    first = measure_all(mixture, x_BTC, is_autocast=True)
    for _ in range(5):
        again = measure_all(mixture, x_BTC, is_autocast=True)
        assert all(torch.equal(tensor, other) for tensor, other in zip(first, again, strict=True))


def test_the_host_never_waits() -> None:
    mixture, x_BTC = build_wild().cuda(), draw(4, 512, WIDTH).cuda()
    measure_all(mixture, x_BTC, is_autocast=True)  # libraries wait when they start
    torch.cuda.set_sync_debug_mode("error")
    try:
        measure_all(mixture, x_BTC, is_autocast=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_it_compiles_whole() -> None:
    mixture, x_BTC = build_wild().cuda(), draw(4, 128, WIDTH).cuda()
    expected = measure_all(mixture, x_BTC, is_autocast=True)
    compiled = torch.compile(mixture, fullgraph=True)
    assert_near(measure_all(compiled, x_BTC, is_autocast=True), expected, 0.02)
