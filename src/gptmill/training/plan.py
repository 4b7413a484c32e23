"""TrainPlan: every number that follows from a config, a corpus and a world, derived once."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.run import PrecisionName, RunConfig
from gptmill.config.stages import Stages, parse_stages
from gptmill.config.validation import check_config
from gptmill.data.batches.streams import Stream
from gptmill.data.tokenizers import Tokenizer
from gptmill.models.gpt import pad_vocab
from gptmill.models.parameters import count_parameters
from gptmill.runtime.precision import choose_precision
from gptmill.runtime.world import World


@dataclass(frozen=True)
class TrainPlan:
    """What will be done, in numbers. Of whole documents, "windows" are groups, each of them one micro-batch."""

    vocab_size: int
    padded_vocab_size: int
    parameters: int
    tokens_per_step: int
    windows_per_step: int
    micro_batches: int
    windows_per_epoch: int
    steps_per_epoch: float
    max_steps: int
    precision: PrecisionName
    separator: int | None
    """The token that opens documents, where they are kept apart."""
    context_stages: Stages


def make_plan(config: RunConfig, stream: Stream, tokenizer: Tokenizer, world: World) -> TrainPlan:
    """Raises UserError for a config with which training cannot be done."""
    check_config(config, world.size)
    training, context_length = config.training, config.model.context_length
    micro_batches = training.total_batch_size // (training.mini_batch_size * context_length * world.size)
    windows_per_step = micro_batches * world.size * stream.units_per_batch
    windows_per_epoch = (training.steps_per_epoch or 0) * windows_per_step or stream.units_per_epoch
    max_steps = training.max_steps or max(1, training.num_epochs * windows_per_epoch // windows_per_step)
    padded_vocab_size = pad_vocab(tokenizer.vocab_size)
    return TrainPlan(
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=padded_vocab_size,
        parameters=count_parameters(config.model, padded_vocab_size).total,
        tokens_per_step=training.total_batch_size,
        windows_per_step=windows_per_step,
        micro_batches=micro_batches,
        windows_per_epoch=windows_per_epoch,
        steps_per_epoch=windows_per_epoch / windows_per_step,
        max_steps=max_steps,
        precision=choose_precision(config.machine.precision, world.device),
        separator=tokenizer.end_of_text if config.data.documents == "masked" else None,
        context_stages=parse_stages(training.context_stages, "") if training.context_stages else (),
    )
