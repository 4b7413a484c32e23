"""Options of gptmill compress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.errors import ConfigError, Problem
from gptmill.config.plugins import PluginConfig
from gptmill.config.requests import LoadingOptions
from gptmill.config.trust import TrustOptions

Method = Literal["int8", "int8-dynamic", "int4", "prune", "prune-2:4"]
QUANTIZING: tuple[Method, ...] = ("int8", "int8-dynamic", "int4")
GROUP_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class CompressRequest:
    """Compression"""

    method: Method = "int8"
    """int8 and int4: weight-only; int8-dynamic: activations too; prune: by magnitude; prune-2:4: two of every four."""
    out: str | None = None
    """Name or folder of the compressed run (default: RUN-METHOD)."""
    group_size: int = 32
    """int4: weights that share a scale and a zero point: 16, 32, 64, 128 or 256."""
    sparsity: float = 0.5
    """prune: share of the weights of each matrix to set to zero."""
    recover_steps: int = 0
    """prune, prune-2:4: train for so many steps afterwards, with the pruned weights kept at zero."""
    recover_lr: float | None = None
    """recover_steps: peak learning rate (default: a third of the run's max_lr)."""
    eval: bool = True
    """Measure the validation loss before and after."""
    eval_tokens: int | None = None
    """Validation tokens to measure it on (default: the run's eval_tokens)."""
    data_dir: str | None = None
    """Folder of tokenized shards to evaluate and recover on (default: the run's corpus)."""
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    trusting: TrustOptions = field(default_factory=TrustOptions)


def check_request(request: CompressRequest) -> None:
    """Raises ConfigError with every problem found."""
    is_pruning, lr = request.method not in QUANTIZING, request.recover_lr
    sizes = ", ".join(map(str, GROUP_SIZES))
    rules = {
        "out": (request.out != "", "must not be empty"),
        "group_size": (request.group_size in GROUP_SIZES, f"must be one of {sizes}"),
        "sparsity": (0 < request.sparsity < 1, "must be greater than 0 and less than 1"),
        "recover_steps": (request.recover_steps >= 0, "must not be negative"),
        "recover_lr": (lr is None or 0 < lr < math.inf, "must be finite and greater than 0"),
        "eval_tokens": (request.eval_tokens is None or request.eval_tokens >= 1, "must be at least 1"),
    }
    problems = [
        Problem(f"--{name} {getattr(request, name)}", rule) for name, (holds, rule) in rules.items() if not holds
    ]
    if request.recover_steps and not is_pruning:
        fix = f"the integers of --method {request.method} cannot be trained; use prune or prune-2:4, or leave it out"
        problems.append(Problem(f"--recover_steps {request.recover_steps}", fix))
    if lr is not None and not request.recover_steps:
        problems.append(Problem(f"--recover_lr {lr:g}", "applies only with --recover_steps; leave it out"))
    if problems:
        raise ConfigError(problems)
