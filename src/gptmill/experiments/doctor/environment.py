"""Checks of environment variables that commonly break or slow down training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gptmill.experiments.doctor.finding import Finding, State

GROUP = "environment"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ALLOC_CONF = re.compile(r"\s*\w+\s*:\s*[^,:\[\]]+|\s*\w+\s*:\s*\[[^]]*\]")
WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


@dataclass(frozen=True)
class Rule:
    """When a variable's value is a problem, and which."""

    names: tuple[str, ...]
    is_bad: Callable[[str], bool]
    meaning: str
    state: State = "warning"


def _is_set(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is_invalid_alloc_conf(value: str) -> bool:
    return bool(value.strip()) and not re.fullmatch(rf"(?:{ALLOC_CONF.pattern})(?:,(?:{ALLOC_CONF.pattern}))*,?", value)


RULES = (
    Rule(("CUDA_VISIBLE_DEVICES",), lambda value: value.strip() in ("", "-1"), "it hides every GPU from torch"),
    Rule(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS"), lambda value: value.strip() == "1", "on a CPU, training uses one core"
    ),
    Rule(
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        _is_invalid_alloc_conf,
        "it is not of the form name:value,name:value, and torch stops at its first allocation on a GPU",
        "failed",
    ),
    Rule(
        ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
        _is_set,
        "--compile does nothing: torch.compile is switched off",
    ),
    Rule(("CUDA_LAUNCH_BLOCKING",), _is_set, "the host waits for every kernel: for debugging only, and slow"),
    Rule(("TRITON_INTERPRET",), _is_set, "Triton kernels run in an interpreter: for debugging only, and very slow"),
    Rule(("NVIDIA_TF32_OVERRIDE",), lambda value: value.strip() == "0", "matmuls of fp32 cannot use TF32: slow"),
    Rule(("WANDB_MODE",), lambda value: value not in WANDB_MODES, "wandb does not know this mode"),
    Rule(
        ("WANDB_MODE",),
        lambda value: value in ("disabled", "offline", "dryrun"),
        "runs are not uploaded by wandb",
        "ok",
    ),
)


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Every variable that is a problem; a single finding if there is none."""
    found = [*_apply_rules(environment), *_check_ranks(environment)]
    return found or [Finding(GROUP, "variables", "ok", "none that breaks or slows down training")]


def _apply_rules(environment: Mapping[str, str]) -> Iterable[Finding]:
    for rule in RULES:
        for name in rule.names:
            if name in environment and rule.is_bad(environment[name]):
                what = f"{name}={environment[name]}"
                yield Finding(GROUP, name, rule.state, what, rule.meaning, f"unset {name}")


def _check_ranks(environment: Mapping[str, str]) -> Iterable[Finding]:
    """Variables of torchrun, left over or set by hand: all of them make a rank, some of them an error."""
    given = [name for name in RANK_VARIABLES if name in environment]
    if "RANK" not in given:
        return
    what, fix = ", ".join(f"{name}={environment[name]}" for name in given), f"unset {' '.join(given)}"
    if missing := [name for name in RANK_VARIABLES if name not in given]:
        yield Finding(GROUP, "ranks", "failed", what, f"without {', '.join(missing)}, no rank can start", fix)
    else:
        meaning = "gptmill takes itself for a rank of torchrun, and waits for the others"
        yield Finding(GROUP, "ranks", "warning", what, meaning, fix)
