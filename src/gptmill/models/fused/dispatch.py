"""Dispatch: which implementation of the model a run trains with."""

from __future__ import annotations

import torch

from gptmill.config.run import KernelChoice, PrecisionName
from gptmill.models.fused.fused_gpt import FusedGPT, FusedHeadGPT
from gptmill.models.gpt import GPT
from gptmill.models.kernels.support import has_kernels
from gptmill.models.language_model import LanguageModel

# With small micro-batches a GPU waits for the host to launch the blocks' kernels, each of which does work in
# proportion to the tokens times the square of the width. Beside an H200 the host was the bottleneck at 0.5e10 (GPT-2
# 124M by 8 windows: 188 ms for 131 ms of kernels) and at 1.7e10 (enwik8: 1.05 M tokens/s, as a CUDA graph 1.29 M); at
# 1.9e10 (books-124m-modern) the GPU was limited by its power.
LEAST_WORK = 1.8e10
PRECISIONS = ("bf16", "fp8")

MODELS: dict[KernelChoice, type[GPT]] = {"none": GPT, "head": FusedHeadGPT, "auto": FusedGPT}
DESCRIPTIONS: dict[type[LanguageModel], str] = {FusedGPT: "all kernels", FusedHeadGPT: "the LM head's kernel"}


def is_small(tokens: int, width: int) -> bool:
    """Whether a GPU finishes the kernels of a micro-batch of so many tokens faster than the host launches them."""
    return tokens * width**2 < LEAST_WORK


def choose_kernels(
    wanted: KernelChoice, device: torch.device, precision: PrecisionName, *, host_keeps_up: bool, has_own_parts: bool
) -> KernelChoice:
    """The kernels that win on this device, of those that are wanted. Blocks with a plug-in's parts are not fused."""
    if wanted == "none" or precision not in PRECISIONS or not has_kernels(device):
        return "none"
    return wanted if host_keeps_up and not has_own_parts else "head"


def describe_kernels(model: LanguageModel) -> str:
    """For people; empty where the model uses none."""
    return next((text for kind, text in DESCRIPTIONS.items() if isinstance(model, kind)), "")
