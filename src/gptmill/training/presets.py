"""Presets: a model shape by name (--size), and settings for the memory of a GPU (--hardware)."""

from __future__ import annotations

from typing import Any

import torch

from gptmill.config.errors import UserError
from gptmill.config.hardware import HARDWARE_PRESETS, cap_micro_batch, choose_preset, fit_micro_batch
from gptmill.config.recipes import layer_config, load_recipe
from gptmill.config.requests import PresetOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import merge_values
from gptmill.config.sizes import load_size
from gptmill.models.gpt import pad_vocab
from gptmill.models.kernels.support import has_kernels
from gptmill.runtime.memory import read_device_memory
from gptmill.training.memory_estimate import estimate_run_memory

ASSUMED_VOCAB_SIZE = 50_257  # GPT-2's: the corpus is not open yet


def resolve_presets(recipe: str | None, flags: dict[str, Any], options: PresetOptions) -> dict[str, Any]:
    """The flags on top of the presets' values; raises UserError for an unknown preset."""
    size = load_size(options.size) if options.size else {}
    if options.hardware is None:
        return merge_values(RunConfig, size, flags)
    memory = read_device_memory(torch.device("cuda")) if torch.cuda.is_available() else None
    if options.hardware == "auto" and memory is None:
        raise UserError(
            f"--hardware auto needs a GPU on this machine, and there is none; name one of {', '.join(HARDWARE_PRESETS)}"
        )
    tier = choose_preset(memory) if options.hardware == "auto" and memory is not None else str(options.hardware)
    values = merge_values(RunConfig, {**HARDWARE_PRESETS[tier], **size}, flags)
    if "mini_batch_size" not in flags:
        values = cap_micro_batch(values)
    if memory is None:
        return values
    config = layer_config(load_recipe(recipe) if recipe else {}, values)

    precision = "bf16" if config.machine.precision == "auto" else config.machine.precision
    kernels = has_kernels(torch.device("cuda"))

    def estimate(mini_batch_size: int) -> int:
        vocab_size = pad_vocab(ASSUMED_VOCAB_SIZE)
        return estimate_run_memory(config, vocab_size, mini_batch_size, precision, has_kernels=kernels).total

    return values if "mini_batch_size" in flags else fit_micro_batch(values, estimate, memory)
