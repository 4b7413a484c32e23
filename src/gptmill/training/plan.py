"""TrainPlan: every quantity derived from the config, the corpus and the world, computed once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from gptmill.config.errors import UserError
from gptmill.config.parallel_relations import count_data_ranks
from gptmill.config.run import PrecisionName, RunConfig, TrainingConfig
from gptmill.config.validation import check_config
from gptmill.config.value_syntax import Stages, find_stage, parse_stages
from gptmill.data.batches.samplers import Sampler
from gptmill.data.tokenizers import Tokenizer
from gptmill.models.flops import count_flops
from gptmill.models.gpt import pad_vocab
from gptmill.models.kernels.support import has_kernels
from gptmill.models.parameters import count_parameters
from gptmill.runtime.device import describe_device
from gptmill.runtime.peak_rates import find_peak_rate
from gptmill.runtime.precision import choose_precision
from gptmill.runtime.world import World
from gptmill.training.memory_estimate import MemoryEstimate, estimate_run_memory

MAX_STEP_DAYS = 1.0  # nothing is logged, saved or stopped within a step
MIN_PASS_SECONDS = 2e-5  # of a micro-batch, however small
# FLOP/s that no single device of this kind reaches, where its own peak is unknown.
UNREACHED_FLOPS = {"cpu": 2e14, "mps": 2e14, "cuda": 2e16}
FP8_SPEEDUP = 2.0  # over the peak rate, which is that of bf16


@dataclass(frozen=True)
class TrainPlan:
    """Steps, batch sizes, tokens and FLOPs. With whole documents, a "window" is a group that fills one micro-batch."""

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
    """The token that starts a document, where attention is masked at document boundaries."""
    context_warmup: Stages
    batch_size_warmup: Stages = ()
    active_parameters: int = 0
    """Parameters used per token; fewer than all in a mixture of experts."""
    corpora: tuple[str, ...] = ()
    """Names of the corpora, if there are several."""
    ranks: int = 1
    flops_per_token: float = 0.0
    """FLOPs to train on one token at full context length."""
    stage_flops: tuple[float, ...] = ()
    """The same in each stage of the sequence-length warm-up."""
    memory: MemoryEstimate | None = None
    """What one rank needs, by estimate."""
    peak_flops_per_second: float | None = None
    """Peak of each rank's device in this precision; None if unknown."""
    context_length: int = 0

    def find_context_length(self, step: int) -> int:
        """Tokens of a sequence in a step; steps count from 1."""
        return find_stage(self.context_warmup, step) or self.context_length

    def count_micro_batches(self, step: int) -> int:
        """Micro-batches of each rank in a step; steps count from 1."""
        return self.micro_batches * self._find_tokens(step) // self.tokens_per_step

    def count_windows(self, step: int) -> int:
        """Windows of all ranks in a step; steps count from 1."""
        return self.windows_per_step * self._find_tokens(step) // self.tokens_per_step

    def count_tokens(self) -> int:
        """Tokens of all steps."""
        total = first = 0
        for stage in self.batch_size_warmup:
            last = min(stage.last_step, self.max_steps)
            total, first = total + stage.size * max(0, last - first), max(first, last)
        return total + self.tokens_per_step * (self.max_steps - first)

    def find_flops(self, step: int) -> float:
        """FLOPs per token of a step; steps count from 1."""
        stages = zip(self.context_warmup, self.stage_flops, strict=True)
        return next((flops for stage, flops in stages if step <= stage.last_step), self.flops_per_token)

    def count_flops(self) -> float:
        """FLOPs of all steps, each in its own batch size and context length."""
        ends = {stage.last_step for stage in (*self.batch_size_warmup, *self.context_warmup)}
        total, first = 0.0, 0
        for last in sorted({min(end, self.max_steps) for end in ends} | {self.max_steps}):
            total += (last - first) * self._find_tokens(last) * self.find_flops(last)
            first = last
        return total

    def find_last_step(self, steps_done: int, windows: int) -> int:
        """The last step that reads no more than `windows` windows after `steps_done` steps."""
        step = steps_done
        for stage in self.batch_size_warmup:
            left = max(0, stage.last_step - step)
            size = self.count_windows(step + 1)
            steps = min(left, windows // size)
            step, windows = step + steps, windows - steps * size
            if steps < left:
                return step
        return step + windows // self.windows_per_step

    def find_max_steps(self, training: TrainingConfig, steps_done: int = 0, windows_read: int = 0) -> int:
        """The last step of a run: as configured, or where its epochs end, which count windows in any batch size."""
        if steps := training.max_steps or training.num_epochs * (training.steps_per_epoch or 0):
            return steps
        return max(1, self.find_last_step(steps_done, training.num_epochs * self.windows_per_epoch - windows_read))

    def _find_tokens(self, step: int) -> int:
        return find_stage(self.batch_size_warmup, step) or self.tokens_per_step


class CorpusSize(NamedTuple):
    """What a plan needs to know about the data."""

    vocab_size: int
    samples_per_epoch: int
    samples_per_batch: int
    end_of_text: int


class MachineRate(NamedTuple):
    """What a plan needs to know about the devices."""

    ranks: int
    precision: PrecisionName
    has_kernels: bool
    peak_flops_per_second: float | None


def make_plan(
    config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, world: World, corpora: tuple[str, ...] = ()
) -> TrainPlan:
    """Derives the plan; raises UserError for a config that cannot be trained."""
    precision = choose_precision(config.machine.precision, world.device)
    peak = find_peak_rate(describe_device(world.device), precision)
    return derive_plan(
        config,
        CorpusSize(tokenizer.vocab_size, sampler.samples_per_epoch, sampler.samples_per_batch, tokenizer.end_of_text),
        MachineRate(world.size, precision, has_kernels(world.device), peak),
        corpora,
    )


def derive_plan(
    config: RunConfig, corpus: CorpusSize, machine: MachineRate, corpora: tuple[str, ...] = ()
) -> TrainPlan:
    """The same for data and devices that need not be here."""
    data_ranks = count_data_ranks(config.machine, machine.ranks)
    check_config(config, data_ranks)
    training, context_length = config.training, config.model.context_length
    micro_batches = training.total_batch_size // (training.mini_batch_size * context_length * data_ranks)
    windows_per_step = micro_batches * data_ranks * corpus.samples_per_batch
    windows_per_epoch = (training.steps_per_epoch or 0) * windows_per_step or corpus.samples_per_epoch
    padded_vocab_size = pad_vocab(corpus.vocab_size)
    parameters = count_parameters(config.model, padded_vocab_size)
    context_warmup = parse_stages(training.context_warmup, "") if training.context_warmup else ()
    plan = TrainPlan(
        vocab_size=corpus.vocab_size,
        padded_vocab_size=padded_vocab_size,
        parameters=parameters.total,
        active_parameters=parameters.active,
        tokens_per_step=training.total_batch_size,
        windows_per_step=windows_per_step,
        micro_batches=micro_batches,
        windows_per_epoch=windows_per_epoch,
        steps_per_epoch=windows_per_epoch / windows_per_step,
        max_steps=0,
        precision=machine.precision,
        separator=corpus.end_of_text if config.data.documents == "masked" else None,
        context_warmup=context_warmup,
        batch_size_warmup=parse_stages(training.batch_size_warmup, "") if training.batch_size_warmup else (),
        corpora=corpora if len(corpora) > 1 else (),
        ranks=machine.ranks,
        flops_per_token=count_flops(config.model, padded_vocab_size, context_length),
        stage_flops=tuple(count_flops(config.model, padded_vocab_size, stage.size) for stage in context_warmup),
        memory=estimate_run_memory(
            config,
            padded_vocab_size,
            training.mini_batch_size,
            machine.precision,
            has_kernels=machine.has_kernels,
            micro_batches=micro_batches,
        ),
        peak_flops_per_second=machine.peak_flops_per_second,
        context_length=context_length,
    )
    return replace(plan, max_steps=plan.find_max_steps(training))


def check_step_time(plan: TrainPlan, world: World) -> None:
    """Raises UserError for a batch that takes days even if the device never waits.

    Where a single micro-batch does, memory is short first, which the dry run finds.
    """
    tokens = max([plan.tokens_per_step, *(stage.size for stage in plan.batch_size_warmup)])
    peak = plan.peak_flops_per_second
    rate = world.size * (UNREACHED_FLOPS[world.device.type] if peak is None else FP8_SPEEDUP * peak)
    passes = plan.micro_batches * tokens // plan.tokens_per_step
    days = max(tokens * plan.flops_per_token / rate, passes * MIN_PASS_SECONDS) / 86_400
    if days > MAX_STEP_DAYS >= days / passes:
        raise UserError(
            f"total_batch_size = {plan.tokens_per_step}: a step of {tokens:,} tokens, in {passes:,} micro-batches of "
            f"{world.size} rank(s), takes at least {days:,.1f} days ({tokens * plan.flops_per_token:.2g} FLOPs on "
            f"{describe_device(world.device)}); use a smaller batch, so that a step ends within a day"
        )
