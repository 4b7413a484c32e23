"""Measures training steps of a few sizes on this device, on random tokens, within this process.

A process of its own for each would cost a short budget more than it gains; gptmill plan measures whole runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gptmill.config.recipes import layer_config
from gptmill.config.run import RunConfig
from gptmill.data.batches.batch import Batch
from gptmill.experiments.budget.candidate import CONTEXTS, MAX_MICRO_BATCH, Candidate
from gptmill.experiments.budget.family import FAMILY, SHAPES, Shape
from gptmill.experiments.budget.speed_model import MeasuredStep, SpeedModel, make_speed_model
from gptmill.models.flops import count_flops
from gptmill.models.gpt import pad_vocab
from gptmill.models.parameters import count_parameters
from gptmill.runtime.memory import is_out_of_memory
from gptmill.runtime.precision import choose_precision
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan
from gptmill.training.state import TrainState, build_state

PROBED = (Shape(2, 64), Shape(4, 128), Shape(6, 256), Shape(8, 512), Shape(12, 768), Shape(24, 1024))
VOCAB_SIZE, LARGE_VOCAB_SIZE = 1024, 8192
STEP_TOKENS, GPU_STEP_TOKENS = 1024, 16_384
GPU_CONTEXT = 512  # on a CPU, runs are too short for more than the least
WARM_UP_STEPS, MEASURED_STEPS = 2, 3
MAX_UPDATE_SHARE = 0.9  # of a step: measured times are noisy
GPU_WARM_UP_STEPS = 5  # the first ones are eager, then one is captured as a CUDA graph
PROBE_SHARE = 0.06  # of the budget
CANDIDATE_SHARE = 0.01  # of it, for each candidate, in all its turns
SLOWDOWN = 4  # from one size to the next, which has about eight times the weights: small steps are mostly overhead
USEFUL_STEPS = 100  # a model that cannot do so many in the budget is out of the question

Say = Callable[[str], None]
assert set(PROBED) <= set(SHAPES)


def measure_speed(given: Mapping[str, Any], budget_seconds: float, world: World, say: Say) -> SpeedModel:
    """Steps of ever larger models, until the next one could not be trained in the budget or costs too much to try.

    The smallest is measured with a small and with a large vocabulary, for what the LM head costs.
    """
    measured: list[MeasuredStep] = []
    is_gpu = world.device.type == "cuda"
    tokens, context = (GPU_STEP_TOKENS, GPU_CONTEXT) if is_gpu else (STEP_TOKENS, CONTEXTS[0])
    if is_gpu:
        # A process' first step loads libraries and compiles kernels, which says nothing about later ones.
        measure_step(_make_config(PROBED[0], given, tokens, context), world, 0.0)
    left, smallest = PROBE_SHARE * budget_seconds, _make_config(PROBED[0], given, tokens, context)

    def measure_smallest() -> None:
        sizes = (LARGE_VOCAB_SIZE, VOCAB_SIZE)
        measured.extend(measure_step(smallest, world, left / 4, vocab_size) for vocab_size in sizes)

    started = time.monotonic()
    measure_smallest()
    for shape in PROBED[1:]:
        next_seconds = measured[-1].seconds * SLOWDOWN
        is_affordable = time.monotonic() - started + next_seconds * (count_warm_up(world) + MEASURED_STEPS) < left
        if not is_affordable or USEFUL_STEPS * next_seconds > budget_seconds:
            break
        try:
            measured.append(measure_step(_make_config(shape, given, tokens, context), world, left))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            break
    measure_smallest()  # once more: a machine that is busy for a moment looks slow
    model = make_speed_model(measured)
    for point, shape in zip(model.points, PROBED, strict=False):
        seconds = model.find_seconds(tokens, point.token_flops)
        say(f"{shape.num_layers} layers of width {shape.embd_size}: {tokens / seconds:,.0f} tokens/s without head")
    return model


def measure_candidate(candidate: Candidate, given: Mapping[str, Any], limit_seconds: float, world: World) -> float:
    """The step time of a candidate itself; infinite if it does not fit into memory."""
    tokens = min(candidate.tokens_per_step, MAX_MICRO_BATCH)
    config = _make_config(candidate.shape, given, tokens, candidate.context_length, candidate.dropout)
    try:
        step = measure_step(config, world, limit_seconds, candidate.tokenizer.vocab_size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return math.inf
    return step.seconds * candidate.tokens_per_step / tokens


def count_warm_up(world: World) -> int:
    return GPU_WARM_UP_STEPS if world.device.type == "cuda" else WARM_UP_STEPS


def measure_step(config: RunConfig, world: World, limit_seconds: float, vocab_size: int = VOCAB_SIZE) -> MeasuredStep:
    """The fastest of a few training steps: forward, backward, clipping and update; of fewer if the time is up.

    What else runs on a machine comes in bursts, and only ever makes a step slower. On a GPU, steps are like those of a
    run only after the warm-up, so there is at least one of these; on a CPU all but the first are.
    """
    tokens, context = config.training.total_batch_size, config.model.context_length
    state = build_state(config, _make_plan(config, world, vocab_size), world)
    generator = torch.Generator().manual_seed(0)
    shape = (tokens // context, context)
    inputs, targets = (torch.randint(vocab_size, shape, generator=generator).to(world.device) for _ in range(2))
    batch = Batch(inputs, targets)

    def run_step() -> None:
        _run_micro_batch(state, batch, tokens)
        _update(state, world)

    seconds: list[float] = []
    update = 0.0
    warm_up = count_warm_up(world)
    least = warm_up + 1 if world.device.type == "cuda" else warm_up
    while len(seconds) < warm_up + MEASURED_STEPS and (len(seconds) < least or sum(seconds) < limit_seconds):
        if len(seconds) == warm_up - 1:  # in the last one, the update is timed alone, which costs a GPU some time
            backward = _measure_seconds(world, lambda: _run_micro_batch(state, batch, tokens))
            update = _measure_seconds(world, lambda: _update(state, world))
            seconds.append(backward + update)
        else:
            seconds.append(_measure_seconds(world, run_step))
    whole = min(seconds[warm_up:] if world.device.type == "cuda" else seconds[1:])
    block_flops = count_flops(config.model, 0, context)
    head_flops = count_flops(config.model, pad_vocab(vocab_size), context) - block_flops
    return MeasuredStep(tokens, block_flops, whole, min(update, MAX_UPDATE_SHARE * whole), head_flops)


def _measure_seconds(world: World, work: Callable[[], None]) -> float:
    _wait_for_device(world)
    started = time.monotonic()
    work()
    _wait_for_device(world)
    return time.monotonic() - started


def _wait_for_device(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _run_micro_batch(state: TrainState, batch: Batch, tokens: int) -> None:
    state.micro_batch_runner.begin_step()
    state.micro_batch_runner.run(batch, 1 / tokens)


def _update(state: TrainState, world: World) -> None:
    state.optimizer.set_lr(1e-3, 1e-3)
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step_unless(torch.zeros((), dtype=torch.bool, device=world.device))
    state.optimizer.zero_grad()


def _make_config(shape: Shape, given: Mapping[str, Any], tokens: int, context: int, dropout: float = 0.0) -> RunConfig:
    machine = {name: given[name] for name in ("precision", "device", "kernels", "attention_backend") if name in given}
    values = {**FAMILY, **shape.list_values(), "context_length": context, "total_batch_size": tokens}
    values["dropout"] = dropout
    return layer_config(values, {**machine, "mini_batch_size": tokens // context})


def _make_plan(config: RunConfig, world: World, vocab_size: int) -> TrainPlan:
    parameters = count_parameters(config.model, pad_vocab(vocab_size))
    windows = config.training.mini_batch_size
    return TrainPlan(
        vocab_size=vocab_size,
        padded_vocab_size=pad_vocab(vocab_size),
        parameters=parameters.total,
        tokens_per_step=config.training.total_batch_size,
        windows_per_step=windows,
        micro_batches=1,
        windows_per_epoch=windows,
        steps_per_epoch=1.0,
        max_steps=math.ceil(USEFUL_STEPS),
        precision=choose_precision(config.machine.precision, world.device),
        separator=None,
        context_warmup=(),
    )
