"""AdamW with moments of 8 bits, of torchao (after Dettmers et al. 2021, arXiv:2110.02861)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import nn

from gptmill.config.errors import UserError
from gptmill.config.optimizer import AdamW8bit, OptimizerConfig
from gptmill.training.optimizers.found_inf import read_found_inf
from gptmill.training.optimizers.param_groups import list_decay_groups


def build_adamw8bit(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torchao's AdamW for these parameters. Small ones keep moments of 32 bits: there is nothing to save."""
    chosen = config.optimizer
    assert isinstance(chosen, AdamW8bit)
    groups = list_decay_groups(parameters, config.max_lr, config.weight_decay)
    built: torch.optim.Optimizer = _load_class()(groups, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps)
    return built


def _load_class() -> Callable[..., torch.optim.Optimizer]:
    # It complains of every extension that was built for another machine; none of them is used here.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from torchao import optim
    except ImportError:
        raise UserError("optimizer adamw8bit needs torchao; install it with: pip install 'gptmill[quant]'") from None

    class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc]
        """Honours found_inf by asking the device, which makes the host wait: its kernels know no such flag."""

        def step(self, closure: Callable[[], float] | None = None) -> None:
            """Updates, unless found_inf holds."""
            is_bad = read_found_inf(self)
            if is_bad is not None and is_bad.item():
                return
            # It compiles one kernel for each shape, which takes minutes on a CPU and saves them seconds.
            is_compiled = self.param_groups[0]["params"][0].device.type != "cpu"
            with nullcontext() if is_compiled else torch.compiler.set_stance("force_eager"):
                super().step(closure)

    return AdamW8bit
