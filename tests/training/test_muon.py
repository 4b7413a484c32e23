"""Muon: matrices of the blocks move by orthogonal updates, fused ones by their parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gptmill.config.optimizer import Muon as MuonConfig
from gptmill.config.optimizer import OptimizerConfig
from gptmill.training.optimizers import build_optimizer, muon
from gptmill.training.optimizers.muon import Muon, orthogonalise
from gptmill.training.optimizers.param_groups import list_packed_splits, uses_muon

LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1


def make_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonalise_by_hand(matrix: Tensor) -> Tensor:
    """The polynomial on the singular values, which is what the iteration does to them."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / matrix.double().norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


class Experts(nn.Module):
    """A stack of fused matrices, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3, bias=False)
        self.gate_up = nn.Parameter(make_normal(3, 8, 6))
        self.packed_splits = {"gate_up": (4, 4)}


class Block(nn.Module):
    """Attention's fused matrix with grouped keys, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.qkv = nn.Linear(6, 12)
        self.mlp = Experts()
        self.value_gate = nn.Parameter(torch.ones(2))
        self.packed_splits = {"qkv.weight": (6, 3, 3)}


class Model(nn.Module):
    """Names as in a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(20, 6)
        self.value_embeddings = nn.ModuleList([nn.Embedding(20, 6)])
        self.blocks = nn.ModuleList([Block(), Block()])
        self.extra_blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(6, 20, bias=False)


@pytest.mark.parametrize("shape", [(48, 32), (64, 16), (16, 64), (96, 128)])
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    # A square matrix of noise has values so near to 0 that no five rounds lift them.
    for scale in (1e-4, 1.0, 1e4):
        update = orthogonalise(make_normal(3, *shape) * scale)
        values = torch.linalg.svdvals(update)
        assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
def test_the_iteration_keeps_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = make_normal(*shape)
    found = orthogonalise(matrix[None])[0].double()
    torch.testing.assert_close(found, orthogonalise_by_hand(matrix), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(12, 12), (24, 6), (6, 24)])
def test_steps_are_those_of_the_recipe(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(make_normal(*shape))
    optimizer = Muon([{"params": [weight], "weight_decay": DECAY}], LR, MOMENTUM, {})
    expected, momentum = weight.detach().double(), torch.zeros(shape, dtype=torch.float64)
    for step in range(1, 4):
        weight.grad = make_normal(*shape, seed=step)
        gradient = weight.grad.double()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        update = orthogonalise_by_hand(MOMENTUM * momentum + (1 - MOMENTUM) * gradient)
        expected = expected * (1 - LR * DECAY) - LR * math.sqrt(max(1, shape[0] / shape[1])) * update
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"].double(), momentum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 16), (32, 8), (8, 32)])
def test_it_agrees_with_torchs_muon_as_far_as_bf16_goes(shape: tuple[int, int]) -> None:
    ours, theirs = nn.Parameter(make_normal(*shape)), nn.Parameter(make_normal(*shape))
    optimizers = [
        Muon([{"params": [ours], "weight_decay": DECAY}], LR, MOMENTUM, {}),
        torch.optim.Muon([theirs], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="original"),
    ]
    for step in range(1, 4):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = make_normal(*shape, seed=step)
            optimizer.step()
    moved = (theirs - make_normal(*shape)).norm()
    assert ((ours - theirs).norm() / moved).item() < 0.03


def test_matrices_of_blocks_are_muons_and_nothing_else_is() -> None:
    model = Model()
    chosen = {name for name, parameter in model.named_parameters() if uses_muon(name, parameter)}
    places = ("blocks.0", "blocks.1", "extra_blocks.0")
    assert chosen == {f"{place}.{name}" for place in places for name in ("qkv.weight", "mlp.gate_up")}
    optimizer = build_optimizer(model, OptimizerConfig(MuonConfig(), weight_decay=DECAY), torch.device("cpu"))
    held = {p for group in optimizer.members[0].param_groups for p in group["params"]}
    assert held == {model.get_parameter(name) for name in chosen}
    decays = {p: group["weight_decay"] for group in optimizer.members[1].param_groups for p in group["params"]}
    assert decays[model.get_parameter("blocks.0.mlp.router.weight")] == DECAY
    assert decays[model.get_parameter("blocks.0.value_gate")] == 0


def test_modules_tell_which_matrices_are_fused() -> None:
    fused = list_packed_splits(Model())
    assert fused["blocks.1.qkv.weight"] == (6, 3, 3)
    assert fused["extra_blocks.0.mlp.gate_up"] == (4, 4)
    assert len(fused) == 6
    assert list_packed_splits(nn.Linear(2, 2)) == {}


def take_one_step(weight: Tensor, gradient: Tensor, rows: tuple[int, ...] | None) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    Muon([parameter], LR, MOMENTUM, {} if rows is None else {parameter: rows}).step()
    return parameter.detach()


def test_fused_matrices_move_as_their_parts_would() -> None:
    weight, gradient = make_normal(12, 6), make_normal(12, 6, seed=1)
    fused = take_one_step(weight, gradient, (6, 3, 3))
    parts = [
        take_one_step(part, its_gradient, None)
        for part, its_gradient in zip(weight.split((6, 3, 3)), gradient.split((6, 3, 3)), strict=True)
    ]
    torch.testing.assert_close(fused, torch.cat(parts), rtol=1e-5, atol=1e-6)
    assert (fused - take_one_step(weight, gradient, None)).abs().max() > 1e-3


def test_stacks_of_matrices_move_one_by_one() -> None:
    weight, gradient = make_normal(3, 8, 6), make_normal(3, 8, 6, seed=1)
    stacked = take_one_step(weight, gradient, (4, 4))
    for expert in range(3):
        alone = take_one_step(weight[expert], gradient[expert], (4, 4))
        torch.testing.assert_close(stacked[expert], alone, rtol=1e-5, atol=1e-6)


def test_small_batches_move_weights_as_one_large_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[Tensor]:
        weights = [nn.Parameter(make_normal(6, 4, seed=seed)) for seed in range(5)]
        optimizer = Muon(weights, LR, MOMENTUM, {})
        for weight in weights:
            weight.grad = make_normal(6, 4, seed=9)
        optimizer.step()
        return [weight.detach() for weight in weights]

    together = train()
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 50)
    torch.testing.assert_close(train(), together, rtol=1e-5, atol=1e-6)
