"""Forward and backward of one micro-batch, eager or as a CUDA graph; gradients accumulate.

A pass launches hundreds of kernels. Where they are small, the GPU finishes one before the host has launched the next;
such a pass is captured once as a CUDA graph and then replayed with a single launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gptmill.config.errors import UserError
from gptmill.config.model import Moe
from gptmill.config.run import PrecisionName, RunConfig
from gptmill.data.batches.batch import Batch
from gptmill.models.gpt import GPT
from gptmill.models.language_model import Losses
from gptmill.runtime.memory import is_out_of_memory
from gptmill.runtime.precision import AUTOCAST_DTYPES, make_autocast
from gptmill.runtime.world import World
from gptmill.training.cast_weights import CastWeightCache

WARM_UP = 3  # eager passes before capture: libraries select algorithms and allocate workspaces in their first calls
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")

Replay = Callable[[], Losses]
Capture = Callable[[Replay], Replay]


@dataclass(frozen=True)
class EagerPass:
    """Launches every kernel from the host."""

    forward: nn.Module
    scaler: torch.amp.GradScaler
    precision: PrecisionName
    device: torch.device
    on_backward: Callable[[], None] = lambda: None
    """Called before each backward pass."""

    def begin_step(self) -> None:
        """Call before the first micro-batch of a step."""

    def run(self, batch: Batch, scale: float) -> Losses:
        """Adds the gradients of `scale` times the objective; returns the unscaled losses."""
        objective, losses = self.compute_losses(batch, scale, {})
        self.on_backward()
        objective.backward()
        return losses

    def dry_run(self, batch: Batch) -> None:
        """Runs a pass whose gradients are to be discarded."""
        self.run(batch, 1.0)

    def compute_losses(self, batch: Batch, scale: float | Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Losses]:
        """The scaled objective to differentiate, and the detached losses. `weights` replace those of the model."""
        inputs = (batch.tokens, batch.targets, batch.documents, batch.domains)
        with make_autocast(self.precision, self.device):
            losses = functional_call(self.forward, weights, inputs) if weights else self.forward(*inputs)
        return self.scaler.scale(losses.objective * scale), losses.detach()


class GraphedPass:
    """Captures a CUDA graph for a batch shape and replays it while the gradient tensors stay the same."""

    def __init__(self, eager: EagerPass, model: GPT, capture: Capture | None = None) -> None:
        self.eager = eager
        self._weights = CastWeightCache(model, AUTOCAST_DTYPES.get(eager.precision))
        self._capture = capture or capture_graph
        self._graph: _CapturedGraph | None = None
        self._shape: torch.Size | None = None
        self._warm_up_passes = 0

    def begin_step(self) -> None:
        self._weights.refresh()

    def dry_run(self, batch: Batch) -> None:
        """Runs the warm-up passes, the capture and one replay."""
        for _ in range(WARM_UP + 1):
            self.run(batch, 1.0)

    def run(self, batch: Batch, scale: float) -> Losses:
        """As EagerPass.run. The next call overwrites the returned losses."""
        if batch.tokens.shape != self._shape:
            self._shape, self._warm_up_passes, self._graph = batch.tokens.shape, 0, None
        gradients = [_init_gradient(parameter) for parameter in self._weights.parameters]
        if self._graph is None or not self._graph.writes_to(gradients):
            if self._warm_up_passes < WARM_UP:
                self._warm_up_passes += 1
                return self._run_eager(batch, scale)
            self._graph = None  # frees its memory for the next capture
            self._graph = _CapturedGraph(self._run_eager, self._capture, batch, gradients)
        return self._graph.replay(batch, scale)

    def _run_eager(self, batch: Batch, scale: float | Tensor) -> Losses:
        objective, losses = self.eager.compute_losses(batch, scale, self._weights.copies)
        self._weights.add_gradients(objective)
        return losses


class _CapturedGraph:
    """A captured pass with static tensors: batches are copied into its inputs, gradients added to fixed tensors."""

    def __init__(
        self, run: Callable[[Batch, Tensor], Losses], capture: Capture, batch: Batch, gradients: Sequence[Tensor]
    ) -> None:
        domains = None if batch.domains is None else batch.domains.clone()
        self._batch = Batch(batch.tokens.clone(), batch.targets.clone(), domains=domains)
        self._scale = torch.zeros((), device=batch.tokens.device)
        self._gradients = gradients
        self._replay = capture(lambda: run(self._batch, self._scale))

    def writes_to(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the graph accumulates into exactly these gradient tensors."""
        return all(one is other for one, other in zip(gradients, self._gradients, strict=True))

    def replay(self, batch: Batch, scale: float) -> Losses:
        self._batch.tokens.copy_(batch.tokens)
        self._batch.targets.copy_(batch.targets)
        if self._batch.domains is not None and batch.domains is not None:
            self._batch.domains.copy_(batch.domains)
        self._scale.fill_(scale)
        return self._replay()


def _init_gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient, created as zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def capture_graph(run: Replay) -> Replay:
    """Captures the kernels of `run` as a CUDA graph without executing them; returns the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads, such as the prefetching data loader, may use the device during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"a micro-batch cannot be captured as a CUDA graph: {reason}; use --cuda_graphs off") from error

    def replay() -> Losses:
        graph.replay()
        return results

    return replay


def check_cuda_graphs(config: RunConfig, world: World) -> None:
    """Raises UserError if CUDA graphs are requested but not supported here."""
    obstacle = _find_obstacle(config, world)
    if config.machine.cuda_graphs == "on" and obstacle:
        raise UserError(f"cuda_graphs on is not supported {obstacle}; use --cuda_graphs auto")


def choose_cuda_graphs(config: RunConfig, world: World, *, is_small: bool) -> bool:
    """Whether to capture micro-batches: if requested, and by default where they are small and capture is supported."""
    machine = config.machine
    if machine.cuda_graphs == "off" or _find_obstacle(config, world):
        return False
    is_requested = machine.cuda_graphs == "on" or (machine.compile and machine.compile_mode in CUDA_GRAPH_MODES)
    return is_requested or is_small


def _find_obstacle(config: RunConfig, world: World) -> str:
    """Why micro-batches cannot be captured; empty if they can."""
    if world.device.type != "cuda":
        return "without an NVIDIA GPU"
    if world.size > 1 or world.is_distributed:
        return "under torchrun"
    if isinstance(config.model.feed_forward, Moe):
        return "with experts"
    if config.model.own_parts:
        return f"with {' and '.join(config.model.own_parts)} of a plug-in"
    if config.data.documents != "packed":
        return f"with documents {config.data.documents}"
    if config.machine.gradient_checkpointing != "none":
        return "with gradient_checkpointing"
    return ""
