"""Every optimizer holds each parameter once, decays the matrices alone, and can be left out, primed and resumed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gptmill.config.errors import UserError
from gptmill.config.model import Moe
from gptmill.config.optimizer import AdamW, Lion, Muon, OptimizerConfig
from gptmill.config.run import ModelConfig
from gptmill.models.gpt import build_gpt
from gptmill.runtime.world import World
from gptmill.training.ema import EmaWeights
from gptmill.training.optimizers import OptimizerContainer, build_optimizer
from gptmill.training.optimizers.sharded import ShardedOptimizer
from gptmill.training.schedules import make_lr

CPU = torch.device("cpu")
CONFIG = OptimizerConfig(AdamW(beta1=0.8, beta2=0.9, eps=1e-6), max_lr=3e-4, weight_decay=0.25)
CHOICES = [CONFIG.optimizer, Muon(matrix_lr=0.02), Lion()]
every_optimizer = pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: chosen.tag)


def build_model() -> nn.Module:
    return build_gpt(ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=8), 64, seed=0)


def build_both(chosen: AdamW | Muon | Lion = CONFIG.optimizer) -> tuple[nn.Module, OptimizerContainer]:
    model = build_model()
    return model, build_optimizer(model, OptimizerConfig(chosen, max_lr=3e-4, weight_decay=0.25), CPU)


def fill_gradients(model: nn.Module, step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


def copy_all(model: nn.Module, optimizer: OptimizerContainer) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **optimizer.state_tensors()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.equal(expected[name]), name


@every_optimizer
def test_matrices_are_decayed_and_vectors_are_not(chosen: AdamW | Muon | Lion) -> None:
    model, optimizer = build_both(chosen)
    groups = [group for member in optimizer.members for group in member.param_groups]
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_matrix = not name.endswith("bias") and "norm" not in name
        assert (parameter.dim() == 2) == is_matrix, name
        assert decays[id(parameter)] == (0.25 if is_matrix else 0.0), name


@every_optimizer
def test_every_parameter_is_held_exactly_once(chosen: AdamW | Muon | Lion) -> None:
    model, optimizer = build_both(chosen)
    held = [id(p) for member in optimizer.members for group in member.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_a_parameter_that_nobody_updates_is_noticed() -> None:
    model = build_model()
    with pytest.raises(UserError, match="every parameter"):
        OptimizerContainer(model, "adamw", [torch.optim.AdamW(list(model.parameters())[1:])])


def test_adamw_is_torchs_own_bit_for_bit() -> None:
    model, optimizer = build_both()
    twin = build_model()
    parameters = list(twin.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.25},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=3e-4, betas=(0.8, 0.9), eps=1e-6, fused=True)
    config = OptimizerConfig(CONFIG.optimizer, max_lr=3e-4, weight_decay=0.25, warmup_steps=2)
    optimizer.init_state()
    for step in range(4):
        lr = make_lr(step, config, 10)
        fill_gradients(model, step)
        fill_gradients(twin, step)
        optimizer.set_lr(lr, config.max_lr)
        optimizer.step_unless(torch.tensor(False))
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.equal(other)


@every_optimizer
def test_a_step_without_gradient_shrinks_matrices_and_leaves_vectors(chosen: AdamW | Muon | Lion) -> None:
    model, optimizer = build_both(chosen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        rate = 0.02 if isinstance(chosen, Muon) and name.startswith("blocks.") else 3e-4
        expected = 2.0 * (1 - rate * 0.25) if parameter.dim() == 2 else 2.0
        assert parameter.detach().mean().item() == pytest.approx(expected, rel=1e-6), name


@every_optimizer
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_a_bad_step_changes_nothing(chosen: AdamW | Muon | Lion, poison: float) -> None:
    model, optimizer = build_both(chosen)
    fill_gradients(model, 0)
    optimizer.step()
    before = copy_all(model, optimizer)
    fill_gradients(model, 1, poison)
    optimizer.step_unless(torch.tensor(True))
    assert_same(copy_all(model, optimizer), before)
    fill_gradients(model, 2)
    optimizer.step_unless(torch.tensor(False))
    assert all(not tensor.equal(before[name]) for name, tensor in copy_all(model, optimizer).items())


@every_optimizer
def test_a_good_step_is_the_one_that_was_never_in_question(chosen: AdamW | Muon | Lion) -> None:
    (plain, one), (asked, other) = build_both(chosen), build_both(chosen)
    for step in range(3):
        fill_gradients(plain, step)
        fill_gradients(asked, step)
        one.step()
        other.step_unless(torch.tensor(False))
    assert_same(copy_all(asked, other), copy_all(plain, one))


@every_optimizer
def test_an_optimizer_that_is_primed_starts_like_one_that_is_not(chosen: AdamW | Muon | Lion) -> None:
    (plain, one), (primed, other) = build_both(chosen), build_both(chosen)
    weights = {name: parameter.detach().clone() for name, parameter in primed.named_parameters()}
    assert other.state_tensors() == {}
    other.init_state()
    assert_same({name: p.detach() for name, p in primed.named_parameters()}, weights)
    assert not any(tensor.any() for tensor in other.state_tensors().values())
    assert all(parameter.grad is None for parameter in primed.parameters())
    for step in range(2):
        fill_gradients(plain, step)
        fill_gradients(primed, step)
        one.step()
        other.step()
    assert_same(copy_all(primed, other), copy_all(plain, one))


@every_optimizer
def test_what_was_saved_goes_on_bit_for_bit(chosen: AdamW | Muon | Lion) -> None:
    model, optimizer = build_both(chosen)
    for step in range(2):
        fill_gradients(model, step)
        optimizer.step()
    saved = copy_all(model, optimizer)
    fill_gradients(model, 2)
    optimizer.step()

    resumed, again = build_both(chosen)
    again.init_state()
    resumed.load_state_dict({name: saved[name] for name in resumed.state_dict()})
    again.load_state({name: tensor for name, tensor in saved.items() if "/" in name})
    fill_gradients(resumed, 2)
    again.step()
    assert_same(copy_all(resumed, again), copy_all(model, optimizer))


def test_a_state_of_another_optimizer_is_refused() -> None:
    (_, one), (_, other) = build_both(Lion()), build_both()
    one.init_state()
    other.init_state()
    with pytest.raises(AssertionError, match="another optimizer"):
        other.load_state(one.state_tensors())


def test_state_is_named_after_parameters() -> None:
    _, optimizer = build_both(Muon())
    optimizer.init_state()
    names = optimizer.state_tensors().keys()
    assert "blocks.0.attention.qkv.weight/momentum_buffer" in names
    assert {f"token_embedding.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")} <= names


def test_rates_follow_one_schedule_from_peaks_of_their_own() -> None:
    _, optimizer = build_both(Muon(matrix_lr=0.02))
    optimizer.set_lr(1e-4, 3e-4)
    muon, adamw = optimizer.members
    assert [group["lr"] for group in muon.param_groups] == [pytest.approx(0.02 / 3)]
    assert [group["lr"] for group in adamw.param_groups] == [1e-4, 1e-4]
    optimizer.set_lr(3e-4, 3e-4)
    assert [group["lr"] for group in muon.param_groups] == [0.02]


@every_optimizer
def test_priming_keeps_the_rates(chosen: AdamW | Muon | Lion) -> None:
    _, optimizer = build_both(chosen)
    optimizer.set_lr(1.1e-4, 3e-4)
    rates = [group["lr"] for member in optimizer.members for group in member.param_groups]
    optimizer.init_state()
    assert [group["lr"] for member in optimizer.members for group in member.param_groups] == rates


@every_optimizer
def test_gradients_of_all_members_are_unscaled(chosen: AdamW | Muon | Lion) -> None:
    model, optimizer = build_both(chosen)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    fill_gradients(model, 0, factor=1024.0)
    scaled = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.unscale(scaler)
    for name, parameter in model.named_parameters():
        assert parameter.grad.equal(scaled[name] / 1024), name
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_line_tells_what_is_decayed() -> None:
    model, optimizer = build_both(Muon())
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks."))
    line = optimizer.describe()
    assert line.startswith(f"Muon with decay 0.25: 8 tensors, {matrices:,} parameters; AdamW with decay 0.25: 2 ")
    assert "AdamW without decay: 18 tensors" in line
    assert "\n" not in line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_optimizer
def test_on_cuda_the_device_decides_and_no_one_waits(chosen: AdamW | Muon | Lion) -> None:
    device = torch.device("cuda")
    model = build_model().to(device)
    optimizer = build_optimizer(model, OptimizerConfig(chosen, max_lr=3e-4, weight_decay=0.25), device)
    optimizer.init_state()
    average = EmaWeights.build(model, 0.9)
    flags = {False: torch.tensor(False, device=device), True: torch.tensor(True, device=device)}
    for is_bad, flag in flags.items():
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan) if is_bad else torch.randn_like(parameter)
        before = copy_all(model, optimizer) | {f"{name}/ema": t.clone() for name, t in average.tensors().items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.set_lr(1e-4, 3e-4)
            optimizer.step_unless(flag)
            average.update(model, flag)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after = copy_all(model, optimizer) | {f"{name}/ema": t.clone() for name, t in average.tensors().items()}
        assert [tensor.equal(before[name]) for name, tensor in after.items()] == [is_bad] * len(before)


@pytest.mark.parametrize("is_bad", [True, False])
def test_an_optimizer_that_does_not_know_found_inf_skips_updates_too(is_bad: bool) -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    optimizer = OptimizerContainer(layer, "own", [torch.optim.SGD(layer.parameters(), lr=0.1)])
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step_unless(torch.tensor(is_bad))
    assert torch.equal(layer.weight, before) == is_bad


def test_state_that_no_checkpoint_can_hold_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = 1

    layer = nn.Linear(2, 2)
    optimizer = OptimizerContainer(layer, "counting", [Counting(layer.parameters(), lr=0.1)])
    with pytest.raises(UserError, match="keeps 'count' as int; keep all of its state in tensors"):
        optimizer.init_state()


def test_experts_are_decayed() -> None:
    config = ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=8, feed_forward=Moe())
    model = build_gpt(config, 64, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig(optimizer=Lion(), weight_decay=0.25), torch.device("cpu"))
    decays = {
        parameter: group["weight_decay"]
        for member in optimizer.members
        for group in member.param_groups
        for parameter in group["params"]
    }
    named = dict(model.named_parameters())
    assert decays[named["blocks.0.mlp.gate_up"]] == decays[named["blocks.0.mlp.down_proj"]] == 0.25
    assert decays[named["blocks.0.mlp_norm.weight"]] == 0.0


def test_a_rank_of_zero1_never_holds_more_than_its_share_of_the_state() -> None:
    model = build_gpt(ModelConfig(num_layers=4, embd_size=32, num_heads=2, context_length=16), 64, seed=0)
    whole = build_optimizer(model, CONFIG, CPU)
    whole.init_state()
    state_bytes = sum(tensor.nbytes for tensor in whole.state_tensors().values())
    for rank in range(4):
        world = World(rank, 4, CPU, strategy="zero1")
        optimizer = build_optimizer(model, CONFIG, CPU, world)
        assert isinstance(optimizer, ShardedOptimizer)
        held = []

        def step_and_weigh(optimizer: ShardedOptimizer = optimizer, held: list[int] = held) -> None:
            OptimizerContainer.step(optimizer)
            held.append(sum(tensor.nbytes for tensor in optimizer.own_state().values()))

        object.__setattr__(optimizer, "step", step_and_weigh)
        optimizer.init_state()
        assert len(held) == 4
        assert max(held) < 1.2 * state_bytes / 4
        assert optimizer.own_state().keys() < optimizer.state_tensors().keys() == whole.state_tensors().keys()
