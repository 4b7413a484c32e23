"""What models are compiled with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from gptmill.config.run import CompileMode
from gptmill.runtime.compiling import cache_custom_autograd, list_compile_options


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_the_options_are_known_to_this_torch_and_change_no_result() -> None:
    compiled = torch.compile(lambda x: (x + 1).sum(), options=list_compile_options())
    assert compiled(torch.ones(3)).item() == 6.0


def test_reductions_that_leave_gradients_unwritten_are_off() -> None:
    assert list_compile_options() == {"triton.mix_order_reduction": False}


@pytest.mark.parametrize("mode", get_args(CompileMode))
def test_no_mode_makes_graphs_of_its_own(mode: CompileMode) -> None:
    options = list_compile_options(mode)
    assert not options.get("triton.cudagraphs", False)
    assert options.get("max_autotune", False) == mode.startswith("max-autotune")


def test_a_torch_without_them_has_nothing_to_switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config", SimpleNamespace(triton=object()))
    assert list_compile_options() == {}


class Doubled(torch.autograd.Function):
    """Twice its input, with a gradient of its own."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_a_compiled_gradient_of_its_own_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    seen = []
    with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=False):
        cache_custom_autograd()
        for _ in range(2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            x = torch.ones(3, requires_grad=True)
            torch.compile(lambda x: Doubled.apply(x).sum(), options=list_compile_options())(x).backward()
            assert x.grad is not None
            assert x.grad.tolist() == [2.0, 2.0, 2.0]
            seen.append(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
    assert seen == [0, 1]
