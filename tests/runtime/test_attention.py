"""One implementation of attention is left to choose from, or all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from gptmill.config.run import AttentionBackend
from gptmill.runtime.attention_backend import set_attention_backend


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
