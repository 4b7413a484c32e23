"""What models are compiled with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gptmill.runtime.compiling import list_compile_options


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_the_options_are_known_to_this_torch_and_change_no_result() -> None:
    compiled = torch.compile(lambda x: (x + 1).sum(), options=list_compile_options())
    assert compiled(torch.ones(3)).item() == 6.0


def test_reductions_that_leave_gradients_unwritten_are_off() -> None:
    assert list_compile_options() == {"triton.mix_order_reduction": False}


def test_a_torch_without_them_has_nothing_to_switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.runtime.compiling.config", SimpleNamespace(triton=object()))
    assert list_compile_options() == {}
