"""AdamW with 8-bit moments, by torchao (after Dettmers et al. 2021, arXiv:2110.02861)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import nn

from gptmill.config.errors import UserError
from gptmill.config.optimizer import AdamW8bit, OptimizerConfig
from gptmill.training.optimizers.found_inf import read_found_inf
from gptmill.training.optimizers.param_groups import make_param_groups


def build_adamw8bit(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torchao's AdamW8bit. Small parameters keep 32-bit moments, where 8 bits would save nothing."""
    chosen = config.optimizer
    assert isinstance(chosen, AdamW8bit)
    groups = make_param_groups(parameters, config.max_lr, config.weight_decay)
    built: torch.optim.Optimizer = _load_class()(groups, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps)
    return built


def _load_class() -> Callable[..., torch.optim.Optimizer]:
    # torchao logs a warning for every extension that it cannot load; none of them is needed here.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from torchao import optim
    except ImportError:
        raise UserError("optimizer adamw8bit needs torchao; install it with: pip install 'gptmill[quant]'") from None

    class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc]
        """Honours found_inf by reading it on the host, since torchao's kernels do not: that synchronises every step."""

        def step(self, closure: Callable[[], float] | None = None) -> None:
            found_inf = read_found_inf(self)
            if found_inf is not None and found_inf.item():
                return
            # torchao compiles a kernel per shape, which takes minutes on a CPU and saves seconds there.
            devices = {parameter.device.type for group in self.param_groups for parameter in group["params"]}
            is_compiled = devices != {"cpu"}
            with nullcontext() if is_compiled else torch.compiler.set_stance("force_eager"):
                super().step(closure)

    return AdamW8bit
