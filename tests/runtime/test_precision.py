"""Number formats: what auto means, what autocast computes in, and that every format learns on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gptmill.config.errors import UserError
from gptmill.config.run import ModelConfig, PrecisionName
from gptmill.models.gpt import build_gpt
from gptmill.runtime import precision as precision_module
from gptmill.runtime.precision import (
    build_scaler,
    choose_precision,
    describe_precision,
    make_autocast,
    require_fp8,
    set_matmul_precision,
    time_matmul,
)

CPU = torch.device("cpu")
ALL: list[PrecisionName] = ["fp32", "tf32", "bf16", "fp16", "fp8-emulated"]


def test_auto_is_fp32_on_the_cpu() -> None:
    assert choose_precision("auto", CPU) == "fp32"


@pytest.mark.parametrize("wanted", ALL)
def test_a_precision_that_was_asked_for_is_taken(wanted: PrecisionName) -> None:
    assert choose_precision(wanted, CPU if wanted != "tf32" else torch.device("cuda")) == wanted


def test_tf32_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(UserError, match="NVIDIA"):
        choose_precision("tf32", CPU)


def test_fp8_is_refused_on_the_cpu() -> None:
    with pytest.raises(UserError, match=r"8\.9 or more .* CPU, \d+ threads?; use bf16, or fp8-emulated"):
        choose_precision("fp8", CPU)


def test_fp8_is_refused_on_a_gpu_that_lacks_it() -> None:
    with pytest.raises(UserError, match=r"NVIDIA A100 \(cuda:0\), which has 8\.0; use bf16"):
        require_fp8("NVIDIA A100 (cuda:0)", (8, 0))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_fp8_is_taken_on_a_gpu_that_has_it(capability: tuple[int, int]) -> None:
    require_fp8("NVIDIA H200 (cuda:0)", capability)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", torch.float32),
        ("tf32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8", torch.bfloat16),
        ("fp8-emulated", torch.float32),
    ],
)
def test_autocast_computes_in_the_precision(precision: PrecisionName, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    with make_autocast(precision, CPU):
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("times_slower", [0.5, 2.0, 100.0])
def test_a_format_that_a_cpu_is_slow_in_is_told(monkeypatch: pytest.MonkeyPatch, times_slower: float) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: times_slower, torch.float16: times_slower}
    monkeypatch.setattr(precision_module, "time_matmul", seconds.__getitem__)
    formats: tuple[PrecisionName, ...] = ("bf16", "fp16")
    for precision in formats:
        described = describe_precision(precision, CPU)
        assert described.startswith(precision)
        assert ("use --precision fp32" in described) == (times_slower > 50)
        assert describe_precision(precision, torch.device("cuda")) == precision
    assert describe_precision("fp32", CPU) == "fp32"


def test_matmuls_are_timed() -> None:
    assert 0 < time_matmul(torch.float32) < 1


@pytest.mark.parametrize("precision", [*ALL, "fp8"])
def test_only_fp16_scales_its_loss(precision: PrecisionName) -> None:
    scaler = build_scaler(precision, CPU)
    assert scaler.is_enabled() == (precision == "fp16")
    scaled = scaler.scale(torch.ones(())).item()
    assert (scaled > 1) if precision == "fp16" else (scaled == 1)


@pytest.mark.parametrize(
    ("precision", "setting"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "high"), ("fp16", "high")]
)
def test_plain_fp32_keeps_its_matmuls_exact(precision: PrecisionName, setting: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        set_matmul_precision(precision)
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(precision: PrecisionName) -> None:
    model = build_gpt(ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=8), 64, seed=0)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), build_scaler(precision, CPU)
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(12):
        with make_autocast(precision, CPU):
            loss = F.cross_entropy(model.logits(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.isfinite().all() for parameter in model.parameters())
