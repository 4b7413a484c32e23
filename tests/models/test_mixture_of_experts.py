"""Mixtures of experts: each token gets exactly what its own experts say, and routers learn to share the work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.config.model import Moe
from gptmill.config.run import ModelConfig
from gptmill.models.mixture_of_experts import MixtureOfExperts, has_grouped_gemm, make_stats

WIDTH = 16

needs_grouped = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch < 2.10 groups matmuls on GPUs alone")
# torch.compile warns of what it does itself: instantiating autograd functions, looking at the gradients of non-leaves.
ignores_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")


def build_wild(experts: int = 4, per_token: int = 2, hidden: int = 24, width: int = WIDTH) -> MixtureOfExperts:
    """Experts that differ much, and a router that is sure of itself."""
    config = ModelConfig(embd_size=width, num_heads=2, feed_forward=Moe(experts, per_token, ffn_size=hidden))
    mixture = MixtureOfExperts(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return mixture


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mix_token_by_token(mixture: MixtureOfExperts, x_BTC: Tensor) -> Tensor:
    """The definition, one token and one expert at a time."""
    results = []
    for x_C in x_BTC.flatten(0, 1):
        probabilities_E = (mixture.router.weight @ x_C).softmax(dim=0)
        chosen = probabilities_E.argsort(descending=True)[: mixture.experts_per_token].tolist()
        total = sum(probabilities_E[expert] for expert in chosen)
        result_C = torch.zeros_like(x_C)
        for expert in chosen:
            gate_F, up_F = (mixture.gate_up[expert] @ x_C).chunk(2)
            y_C = mixture.down_proj[expert] @ (F.silu(gate_F) * up_F)
            result_C = result_C + probabilities_E[expert] / total * y_C
        results.append(result_C)
    return torch.stack(results).view_as(x_BTC)


def assert_near(result: Tensor, exact: Tensor) -> None:
    """As near as bf16 comes."""
    assert (result.float() - exact).norm() <= 0.02 * exact.norm()


def send_all_to(mixture: MixtureOfExperts, expert: int) -> None:
    """Makes one expert the first choice of every token whose first channel is positive."""
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[expert, 0] = 5.0


@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_it_is_what_the_definition_says(per_token: int) -> None:
    mixture, x_BTC = build_wild(4, per_token), draw(3, 7, WIDTH).requires_grad_()
    inputs, direction_BTC = [x_BTC, *mixture.parameters()], draw(3, 7, WIDTH, seed=2)
    expected_BTC = mix_token_by_token(mixture, x_BTC)
    expected_gradients = torch.autograd.grad(expected_BTC, inputs, direction_BTC, materialize_grads=True)
    result_BTC, stats = mixture(x_BTC)
    torch.testing.assert_close(result_BTC, expected_BTC)
    assert stats.tokens_E.sum() == 21 * per_token
    torch.testing.assert_close(
        torch.autograd.grad(result_BTC, inputs, direction_BTC, materialize_grads=True), expected_gradients
    )


@needs_grouped
@pytest.mark.parametrize("per_token", [2, 4])
def test_the_grouped_matmul_is_the_loop_over_experts(per_token: int) -> None:
    mixture, x_BTC = build_wild(8, per_token), draw(3, 7, WIDTH).requires_grad_()
    exact_BTC = mixture(x_BTC)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result_BTC = mixture(x_BTC)[0]
    assert has_grouped_gemm(x_BTC.bfloat16(), mixture.gate_up)
    assert not has_grouped_gemm(x_BTC, mixture.gate_up)
    inputs = [x_BTC, *mixture.parameters()]
    assert_near(result_BTC, exact_BTC)
    for loss in (lambda y: y.float().square().sum(), lambda y: y.float().sum()):  # the second's gradient is a view
        gradients = torch.autograd.grad(loss(result_BTC), inputs, retain_graph=True)
        for gradient, exact in zip(
            gradients, torch.autograd.grad(loss(exact_BTC), inputs, retain_graph=True), strict=True
        ):
            assert gradient.dtype == torch.float32
            assert_near(gradient, exact)


def test_sizes_that_no_kernel_takes_work_too() -> None:
    mixture, x_BTC = build_wild(hidden=10, width=6), draw(2, 7, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result_BTC = mixture(x_BTC)[0]
    assert_near(result_BTC, mix_token_by_token(mixture, x_BTC))
    assert not has_grouped_gemm(x_BTC.bfloat16(), mixture.gate_up)


def test_one_expert_is_a_plain_swiglu() -> None:
    mixture, x_BTC = build_wild(experts=1, per_token=1), draw(2, 5, WIDTH)
    gate_BTF, up_BTF = F.linear(x_BTC, mixture.gate_up[0]).chunk(2, dim=-1)
    torch.testing.assert_close(mixture(x_BTC)[0], F.linear(F.silu(gate_BTF) * up_BTF, mixture.down_proj[0]))


def test_a_token_gets_the_same_whoever_else_is_there() -> None:
    mixture, x_BTC = build_wild(experts=8), draw(4, 32, WIDTH)
    together_BTC = mixture(x_BTC)[0]
    crowd_BTC = torch.cat([x_BTC[:1, :1].expand(1, 32, WIDTH), x_BTC])  # all of them want the first token's experts
    torch.testing.assert_close(mixture(crowd_BTC)[0][1:], together_BTC)
    torch.testing.assert_close(mixture(x_BTC[2:3, 5:6])[0], together_BTC[2:3, 5:6])


@pytest.mark.parametrize("is_autocast", [False, pytest.param(True, marks=needs_grouped)])
def test_experts_that_nobody_visits_learn_nothing(is_autocast: bool) -> None:
    mixture, x_BTC = build_wild(4, 1), draw(2, 9, WIDTH).abs()
    send_all_to(mixture, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        result_BTC, stats = mixture(x_BTC)
    assert stats.tokens_E.tolist() == [0, 0, 18, 0]
    result_BTC.float().square().sum().backward()
    for matrix in (mixture.gate_up, mixture.down_proj):
        assert [bool(gradient.any()) for gradient in matrix.grad] == [False, False, True, False]
        assert matrix.grad.isfinite().all()


def test_tokens_are_counted_at_each_expert_they_visit() -> None:
    mixture, x_BTC = build_wild(experts=4, per_token=2), draw(3, 5, WIDTH)
    chosen_NK = F.linear(x_BTC, mixture.router.weight).flatten(0, 1).topk(2).indices
    expected = [int((chosen_NK == expert).sum()) for expert in range(4)]
    assert mixture(x_BTC)[1].tokens_E.tolist() == expected


def test_the_balance_loss_is_one_when_even_and_the_number_of_experts_when_collapsed() -> None:
    mixture = build_wild(experts=4, per_token=1)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[:, :4] = 100 * torch.eye(4)
    even_BTC = torch.eye(4, WIDTH).repeat(1, 3, 1)  # every expert is the choice of as many tokens
    torch.testing.assert_close(mixture(even_BTC)[1].aux_loss, torch.tensor(1.0))
    collapsed_BTC = torch.eye(1, WIDTH).repeat(1, 12, 1)
    torch.testing.assert_close(mixture(collapsed_BTC)[1].aux_loss, torch.tensor(4.0))


def test_the_z_loss_is_the_mean_squared_log_partition() -> None:
    mixture, x_BTC = build_wild(), draw(2, 6, WIDTH)
    logits_NE = F.linear(x_BTC, mixture.router.weight).flatten(0, 1)
    torch.testing.assert_close(mixture(x_BTC)[1].z_loss, logits_NE.exp().sum(dim=1).log().square().mean())


def test_the_balance_loss_teaches_the_router_to_share() -> None:
    mixture, x_BTC = build_wild(experts=4, per_token=1), draw(8, 32, WIDTH) + 0.5
    with torch.no_grad():
        mixture.router.weight[0] += 0.3
    optimizer = torch.optim.SGD([mixture.router.weight], lr=0.3)

    def measure_busiest() -> float:
        return float(mixture(x_BTC)[1].tokens_E.max()) / (256 / 4)

    before = measure_busiest()
    for _ in range(60):
        optimizer.zero_grad()
        mixture(x_BTC)[1].aux_loss.backward()
        optimizer.step()
    assert before > 1.8
    assert measure_busiest() < 1.3


def test_the_router_keeps_full_precision_under_autocast() -> None:
    mixture, x_BTC = build_wild(), draw(2, 16, WIDTH)
    exact = mixture(x_BTC)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result_BTC, stats = mixture(x_BTC)
    assert result_BTC.dtype == torch.bfloat16
    torch.testing.assert_close(stats, exact)


@needs_grouped
@ignores_compiler
def test_it_compiles_whole() -> None:
    mixture, x_BTC = build_wild(), draw(2, 16, WIDTH).requires_grad_()
    compiled = torch.compile(mixture, backend="aot_eager", fullgraph=True)
    gradients = []
    for run in (mixture, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result_BTC, stats = run(x_BTC)
        loss = result_BTC.float().square().sum() + stats.aux_loss + stats.z_loss
        gradients.append(torch.autograd.grad(loss, [x_BTC, *mixture.parameters()]))
    for plain, traced in zip(*gradients, strict=True):
        assert_near(traced, plain)


@ignores_compiler
def test_it_compiles_in_full_precision_too() -> None:
    mixture, x_BTC = build_wild(), draw(2, 16, WIDTH)
    compiled = torch.compile(mixture, backend="aot_eager")
    torch.testing.assert_close(compiled(x_BTC), mixture(x_BTC))


@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_the_balance_loss_is_one_when_all_are_as_busy(per_token: int) -> None:
    experts_NK = (torch.arange(6)[:, None] + torch.arange(per_token)) % 3
    counts_GS = torch.ones(2, 3, dtype=torch.bool)
    stats = make_stats(torch.zeros(6, 3), torch.full((6, 3), 1 / 3), experts_NK, counts_GS)
    assert stats.aux_loss.item() == pytest.approx(1.0)


def test_each_sequence_is_balanced_by_itself_and_weighs_as_much_as_it_has_tokens() -> None:
    mixture, x_BTC = build_wild(), draw(5, 12, WIDTH)
    counts_BT = torch.arange(12) < torch.tensor([[12], [7], [1], [0], [12]])
    whole = mixture(x_BTC, counts_BT)[1]
    parts = [mixture(x_BTC[row, :count][None])[1].aux_loss for row, count in enumerate(counts_BT.sum(dim=1).tolist())]
    weights = counts_BT.sum(dim=1) / counts_BT.sum()
    torch.testing.assert_close(whole.aux_loss, (torch.stack(parts) * weights).sum())
    assert whole.tokens_E.sum() == 32 * mixture.experts_per_token


def test_a_batch_can_be_balanced_as_one() -> None:
    """Two sequences, each of which uses one expert alone, are balanced together and unbalanced apart."""
    mixture = build_wild(experts=2, per_token=1)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[:, :2] = 100 * torch.eye(2)
    x_BTC = torch.eye(2, WIDTH)[:, None].expand(2, 6, WIDTH)
    assert mixture(x_BTC)[1].aux_loss.item() == pytest.approx(2.0)
    mixture.router_balance = "batch"
    assert mixture(x_BTC)[1].aux_loss.item() == pytest.approx(1.0)
