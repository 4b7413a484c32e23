"""TrainPlan: every number that follows from a config, a corpus and a world, derived once."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.errors import UserError
from gptmill.config.run import PrecisionName, RunConfig
from gptmill.config.validation import check_config
from gptmill.data.shards import SplitWindows, TokenShards
from gptmill.models.gpt import pad_vocab
from gptmill.models.parameters import count_parameters
from gptmill.runtime.precision import choose_precision
from gptmill.runtime.world import World


@dataclass(frozen=True)
class TrainPlan:
    """What will be done, in numbers."""

    vocab_size: int
    padded_vocab_size: int
    parameters: int
    tokens_per_step: int
    windows_per_step: int
    micro_batches: int
    steps_per_epoch: float
    max_steps: int
    precision: PrecisionName


def make_plan(config: RunConfig, shards: TokenShards, world: World) -> TrainPlan:
    """Raises UserError for a config or corpus with which training cannot be done."""
    check_config(config, world.size)
    training, context_length = config.training, config.model.context_length
    windows = shards.cut(shards.train, context_length)
    _check_long_enough(shards, windows, "train", "use more text")
    _check_long_enough(shards, shards.cut(shards.val, context_length), "val", "prepare it with a larger --val_fraction")
    windows_per_step = training.total_batch_size // context_length
    windows_per_epoch = (training.steps_per_epoch or 0) * windows_per_step or windows.num_windows
    max_steps = training.max_steps or max(1, training.num_epochs * windows_per_epoch // windows_per_step)
    padded_vocab_size = pad_vocab(shards.tokenizer.vocab_size)
    return TrainPlan(
        vocab_size=shards.tokenizer.vocab_size,
        padded_vocab_size=padded_vocab_size,
        parameters=count_parameters(config.model, padded_vocab_size).total,
        tokens_per_step=training.total_batch_size,
        windows_per_step=windows_per_step,
        micro_batches=windows_per_step // (training.mini_batch_size * world.size),
        steps_per_epoch=windows_per_epoch / windows_per_step,
        max_steps=max_steps,
        precision=choose_precision(config.machine.precision, world.device),
    )


def _check_long_enough(shards: TokenShards, windows: SplitWindows, name: str, advice: str) -> None:
    if windows.num_windows == 0:
        longest = max(len(array) for array in windows.arrays)
        raise UserError(
            f"the {name} split of {shards.folder} has {longest:,} tokens, less than one window of context_length + 1 = "
            f"{windows.context_length + 1:,}; {advice} or a smaller --context_length"
        )
