"""Hardware tiers: what one GPU of a given memory trains, and with which settings, by estimate."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.hardware import GIB, HARDWARE_PRESETS, USABLE_SHARE, fit_micro_batch
from gptmill.config.recipes import layer_config
from gptmill.config.run import RunConfig
from gptmill.config.sizes import list_sizes, load_size
from gptmill.models.gpt import pad_vocab
from gptmill.models.parameters import count_parameters
from gptmill.runtime.gpu_catalog import REPORTED_SHARE
from gptmill.training.memory_estimate import estimate_run_memory
from gptmill.training.presets import ASSUMED_VOCAB_SIZE

EXAMPLES = {
    "8gb": "RTX 3070, RTX 4060",
    "12gb": "RTX 3060, RTX 4070",
    "16gb": "RTX 4080, RTX 5080",
    "24gb": "RTX 4090, A10, L4",
    "48gb": "A6000, L40S",
    "80gb": "A100 80GB, H100",
    "141gb": "H200",
}


@dataclass(frozen=True)
class HardwareTier:
    """A preset on a GPU that has just the memory of its name, in bf16 with AdamW and fused kernels."""

    name: str
    examples: str
    config: RunConfig
    """With the micro-batch that fits."""
    micro_batches: int
    parameters: int
    needed_bytes: int
    largest_size: str
    """The largest of the named sizes that trains at all: one window at a time, blocks recomputed."""


def list_tiers() -> list[HardwareTier]:
    """All tiers, the smallest first."""
    needs = _list_needs()
    return [_make_tier(name, needs) for name in HARDWARE_PRESETS]


def _make_tier(name: str, needs: dict[str, int]) -> HardwareTier:
    memory_bytes = round(int(name.removesuffix("gb")) * GIB * REPORTED_SHARE)
    preset = HARDWARE_PRESETS[name]

    def estimate(mini_batch_size: int) -> int:
        return _estimate(layer_config(preset), mini_batch_size)

    config = layer_config(fit_micro_batch(preset, estimate, memory_bytes))
    windows, context = config.training.mini_batch_size, config.model.context_length
    fitting = [size for size, needed_bytes in needs.items() if needed_bytes <= USABLE_SHARE * memory_bytes]
    return HardwareTier(
        name=name,
        examples=EXAMPLES[name],
        config=config,
        micro_batches=config.training.total_batch_size // (windows * context),
        parameters=count_parameters(config.model, pad_vocab(ASSUMED_VOCAB_SIZE)).total,
        needed_bytes=estimate(windows),
        largest_size=fitting[-1],
    )


def _list_needs() -> dict[str, int]:
    """The bytes that each named size takes at least, the smallest model first."""
    needs = {}
    for name in list_sizes():
        size = load_size(name)
        least = {"mini_batch_size": 1, "total_batch_size": size["context_length"], "gradient_checkpointing": "full"}
        needs[name] = _estimate(layer_config(size, least), 1)
    return dict(sorted(needs.items(), key=lambda item: item[1]))


def _estimate(config: RunConfig, mini_batch_size: int) -> int:
    vocab_size = pad_vocab(ASSUMED_VOCAB_SIZE)
    return estimate_run_memory(config, vocab_size, mini_batch_size, "bf16", has_kernels=True).total
