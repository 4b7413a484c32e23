"""One implementation of attention is left to choose from, or all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from gptmill.config.run import AttentionBackend
from gptmill.runtime.attention_backend import set_attention_backend, without_cudnn_plans


def list_left() -> set[str]:
    cuda = torch.backends.cuda
    states = {"cudnn": cuda.cudnn_sdp_enabled(), "flash": cuda.flash_sdp_enabled()}
    states |= {"efficient": cuda.mem_efficient_sdp_enabled(), "math": cuda.math_sdp_enabled()}
    return {name for name, is_on in states.items() if is_on}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    set_attention_backend("auto")


@pytest.mark.parametrize("backend", get_args(AttentionBackend))
def test_what_is_chosen_is_left_and_the_plain_formula(backend: AttentionBackend) -> None:
    set_attention_backend(backend)
    wanted = {"cudnn", "flash", "efficient"} if backend == "auto" else {backend}
    assert list_left() == wanted | {"math"}


@pytest.mark.parametrize(
    ("backend", "inside"),
    [("auto", {"flash", "efficient", "math"}), ("cudnn", {"cudnn", "math"}), ("flash", {"flash", "math"})],
)
def test_cudnn_steps_aside_for_other_fused_backends_alone(backend: AttentionBackend, inside: set[str]) -> None:
    set_attention_backend(backend)
    before = list_left()
    with without_cudnn_plans():
        assert list_left() == inside
    assert list_left() == before
