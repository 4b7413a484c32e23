"""What --deterministic promises: the same bits every time, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from gptmill.config.run import ModelConfig
from gptmill.models.gpt import build_gpt
from gptmill.runtime.determinism import set_deterministic

NAMES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_all_of_it_is_switched_on() -> None:
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert [os.environ[name] for name in NAMES] == [":4096:8", "1"]


def test_what_was_not_asked_for_is_left_alone() -> None:
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    assert not any(name in os.environ for name in NAMES)


def test_a_later_run_of_the_same_process_may_be_fast_again() -> None:
    set_deterministic(True)
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_users_own_workspace_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def make_gradient(device: str, *, masked: bool) -> torch.Tensor:
    model = build_gpt(ModelConfig(2, 64, 2, 128, 0.1), 128, seed=0).to(device)
    torch.manual_seed(1)
    tokens = torch.randint(0, 128, (2, 64), device=device)
    documents = torch.zeros_like(tokens) if masked else None
    with torch.autocast(device, dtype=torch.bfloat16):
        model(tokens, tokens, documents_BT=documents).objective.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operation_of_a_model_has_an_algorithm_that_repeats_itself(device: str, masked: bool) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    set_deterministic(True)
    assert torch.equal(make_gradient(device, masked=masked), make_gradient(device, masked=masked))
