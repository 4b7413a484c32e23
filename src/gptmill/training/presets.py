"""Presets: a model shape by name (--size), and settings for the memory of a GPU (--hardware)."""

from __future__ import annotations

import shlex
from typing import Any

import torch

from gptmill.config.errors import UserError
from gptmill.config.hardware import (
    HARDWARE_PRESETS,
    cap_micro_batch,
    choose_preset,
    fit_micro_batch,
    fit_total_batch,
)
from gptmill.config.recipes import layer_config, list_recipes, load_recipe
from gptmill.config.requests import PresetOptions
from gptmill.config.run import RunConfig, TrainingConfig
from gptmill.config.schema import merge_values
from gptmill.config.serialization import format_flags
from gptmill.config.sizes import load_size, load_size_training
from gptmill.models.gpt import pad_vocab
from gptmill.models.kernels.support import has_kernels
from gptmill.runtime.device import find_nvidia_gpus
from gptmill.runtime.memory import read_device_memory
from gptmill.training.memory_estimate import estimate_run_memory

ASSUMED_VOCAB_SIZE = 50_257  # GPT-2's: the corpus is not open yet
SIZE_FIELDS = {"num_layers", "embd_size", "num_heads", "context_length", "total_batch_size", "mini_batch_size"}


def check_size_is_chosen(
    recipe: str | None, flags: dict[str, Any], options: PresetOptions, verb: str = "train"
) -> None:
    """Raises UserError for a run of the default size, GPT-2 124M, on a CPU unless somebody asked for it."""
    if recipe is not None or options != PresetOptions() or flags.keys() & SIZE_FIELDS or _has_gpu(flags):
        return
    fitting = [name for name in list_recipes() if load_recipe(name).get("device") != "cuda"]
    command = shlex.join(["gptmill", verb, "demo", *format_flags(flags)])
    raise UserError(
        f"no recipe and no model size is given, and the default, GPT-2 124M in steps of "
        f"{TrainingConfig().total_batch_size:,} tokens, is too slow for a CPU; take a recipe that fits "
        f"({', '.join(fitting)}): {command}; or choose a size, such as --size tiny-gpt2 (gptmill config list shows all)"
    )


def _has_gpu(flags: dict[str, Any]) -> bool:
    """Whether the run is for a GPU; one that torch cannot use is for `choose_device` to report."""
    if flags.get("device", "auto") != "auto":
        return bool(flags["device"] != "cpu")
    return torch.cuda.is_available() or torch.backends.mps.is_available() or bool(find_nvidia_gpus())


def resolve_presets(recipe: str | None, flags: dict[str, Any], options: PresetOptions) -> dict[str, Any]:
    """The flags on top of the presets' values; raises UserError for an unknown preset."""
    size = load_size(options.size) if options.size else {}
    if options.hardware is None:
        training = load_size_training(options.size) if options.size and recipe is None else {}
        values = merge_values(RunConfig, {**training, **size}, flags)
        return values if "total_batch_size" in flags or not training else fit_total_batch(values)
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
