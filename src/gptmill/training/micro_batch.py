"""A micro-batch, forward and backward: its gradients come on top of those that are there.

The host starts hundreds of kernels for each. Where they are small, a GPU is done with one before the next is started;
there the pass is recorded once, as a CUDA graph, and then started as a whole.
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
from gptmill.models.gpt import GPT, Losses
from gptmill.runtime.memory import is_out_of_memory
from gptmill.runtime.precision import AUTOCAST_DTYPES, make_autocast
from gptmill.runtime.world import World
from gptmill.training.cast_weights import CastWeightCache

WARM_UP = 3  # passes of a shape before it is recorded: libraries choose and allocate in their first ones
RECORDING_MODES = ("reduce-overhead", "max-autotune")

Replay = Callable[[], Losses]
Record = Callable[[Replay], Replay]


@dataclass(frozen=True)
class EagerPass:
    """As it is written."""

    forward: nn.Module
    scaler: torch.amp.GradScaler
    precision: PrecisionName
    device: torch.device

    def begin_step(self) -> None:
        """Called before the first micro-batch after an update."""

    def run(self, batch: Batch, scale: float) -> Losses:
        """The losses; `scale` is that of the objective whose gradients are taken."""
        objective, losses = self.measure(batch, scale, {})
        objective.backward()
        return losses

    def dry_run(self, batch: Batch) -> None:
        """A pass whose gradients mean nothing."""
        self.run(batch, 1.0)

    def measure(self, batch: Batch, scale: float | Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Losses]:
        """The scaled objective, which has gradients; and the losses, which have none. `weights` replace the model's."""
        inputs = (batch.tokens, batch.targets, batch.documents, batch.groups)
        with make_autocast(self.precision, self.device):
            losses = functional_call(self.forward, weights, inputs) if weights else self.forward(*inputs)
        return self.scaler.scale(losses.objective * scale), losses.detach()


class GraphedPass:
    """A pass that is recorded once its shape is known, and replayed for as long as gradients stay where they are."""

    def __init__(self, plain: EagerPass, model: GPT, record: Record | None = None) -> None:
        self.plain = plain
        self._weights = CastWeightCache(model, AUTOCAST_DTYPES.get(plain.precision))
        self._record = record or capture_graph
        self._recording: _Recording | None = None
        self._shape: torch.Size | None = None
        self._seen = 0

    def begin_step(self) -> None:
        self._weights.refresh()

    def dry_run(self, batch: Batch) -> None:
        """All that it does with a new shape, the recording too."""
        for _ in range(WARM_UP + 1):
            self.run(batch, 1.0)

    def run(self, batch: Batch, scale: float) -> Losses:
        """As PlainPass.run. The losses are there until the next one."""
        if batch.tokens.shape != self._shape:
            self._shape, self._seen, self._recording = batch.tokens.shape, 0, None
        gradients = [_obtain_gradient(parameter) for parameter in self._weights.parameters]
        if self._recording is None or not self._recording.is_into(gradients):
            if self._seen < WARM_UP:
                self._seen += 1
                return self._work(batch, scale)
            self._recording = None  # whose memory the next one can use
            self._recording = _Recording(self._work, self._record, batch, gradients)
        return self._recording.replay(batch, scale)

    def _work(self, batch: Batch, scale: float | Tensor) -> Losses:
        objective, losses = self.plain.measure(batch, scale, self._weights.copies)
        self._weights.add_gradients(objective)
        return losses


class _Recording:
    """A pass over batches that are copied to one place, into gradients at one place."""

    def __init__(
        self, work: Callable[[Batch, Tensor], Losses], record: Record, batch: Batch, gradients: Sequence[Tensor]
    ) -> None:
        groups = None if batch.groups is None else batch.groups.clone()
        self._batch = Batch(batch.tokens.clone(), batch.targets.clone(), groups=groups)
        self._scale = torch.zeros((), device=batch.tokens.device)
        self._gradients = gradients
        self._replay = record(lambda: work(self._batch, self._scale))

    def is_into(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are the gradients that it adds to."""
        return all(one is other for one, other in zip(gradients, self._gradients, strict=True))

    def replay(self, batch: Batch, scale: float) -> Losses:
        self._batch.tokens.copy_(batch.tokens)
        self._batch.targets.copy_(batch.targets)
        if self._batch.groups is not None and batch.groups is not None:
            self._batch.groups.copy_(batch.groups)
        self._scale.fill_(scale)
        return self._replay()


def _obtain_gradient(parameter: nn.Parameter) -> Tensor:
    """That of a parameter, which is 0 where it has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def capture_graph(work: Replay) -> Replay:
    """Has the device remember what it would do, without doing it; returns what makes it do so."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads, such as the one that reads ahead, may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = work()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"a micro-batch cannot be recorded as a CUDA graph: {reason}; use --cuda_graphs off") from error

    def replay() -> Losses:
        graph.replay()
        return results

    return replay


def check_cuda_graphs(config: RunConfig, world: World) -> None:
    """Raises UserError where passes are to be recorded and cannot be."""
    obstacle = _find_obstacle(config, world)
    if config.machine.cuda_graphs == "on" and obstacle:
        raise UserError(f"cuda_graphs on does not work {obstacle}; use --cuda_graphs auto")


def choose_cuda_graphs(config: RunConfig, world: World, *, is_small: bool) -> bool:
    """Whether to record passes: where it is asked for, and by default where they are small and can be."""
    machine = config.machine
    if machine.cuda_graphs == "off" or _find_obstacle(config, world):
        return False
    is_asked = machine.cuda_graphs == "on" or (machine.compile and machine.compile_mode in RECORDING_MODES)
    return is_asked or is_small


def _find_obstacle(config: RunConfig, world: World) -> str:
    """What stands against recording; empty if nothing does."""
    if world.device.type != "cuda":
        return "without an NVIDIA GPU"
    if world.size > 1 or world.is_distributed:
        return "under torchrun"
    if isinstance(config.model.feed_forward, Moe):
        return "with experts"
    if config.data.documents != "packed":
        return f"with documents {config.data.documents}"
    if config.machine.gradient_checkpointing != "none":
        return "with gradient_checkpointing"
    return ""
