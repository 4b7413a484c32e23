"""CUDA graphs of the decode step: one launch per token instead of hundreds of kernel launches.

A graph holds for one number of cache positions. A text that grows takes the next of a few: powers of two, up to the
context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gptmill.inference.decoding import DecodingState
from gptmill.models.gpt import GPT
from gptmill.models.language_model import LanguageModel
from gptmill.models.mixture_of_experts import MixtureOfExperts, has_grouped_gemm

SMALLEST_VIEW = 128
WARM_UPS = 2

Step = Callable[[int], None]
"""A decode step over this many positions of the KV cache."""


class GraphedSteps:
    """Captures the step once for each number of positions, and replays it from then on."""

    def __init__(self, step: Step, state: DecodingState) -> None:
        self._step = step
        self._state = state
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, num_positions: int) -> None:
        graph = self._graphs.get(num_positions)
        if graph is None:
            graph = self._graphs[num_positions] = self._capture(num_positions)
        graph.replay()

    def _capture(self, num_positions: int) -> torch.cuda.CUDAGraph:
        """Captures after some real steps, which load kernels and choose algorithms; their effect is undone.

        Only the state needs that: what they leave in the KV cache is at positions that are written again.
        """
        names = ("tokens_B", "positions_B", "step_1", "seen_BV")
        tensors = [tensor for name in names if (tensor := getattr(self._state, name)) is not None]
        saved = [tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(num_positions)
                for tensor, value in zip(tensors, saved, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(num_positions)
        return graph


def choose_view(num_tokens: int, capacity: int) -> int:
    """The number of positions of the KV cache to attend to: the next power of two, so that there are only a few."""
    return min(capacity, max(SMALLEST_VIEW, 1 << (num_tokens - 1).bit_length()))


def can_capture(model: LanguageModel) -> bool:
    """Whether a decode step of the model never waits for the GPU; of a plug-in's parts nobody knows that.

    A model in training is left alone: its kernels may still be autotuned, and autocast keeps casts of its weights.
    """
    is_loaded = type(model) is GPT and next(model.parameters()).is_cuda
    if not is_loaded or model.config.own_parts or torch.is_autocast_enabled("cuda"):
        return False
    assert isinstance(model, GPT)
    experts = [block.mlp for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)]
    weights = [weight for mlp in experts for weight in (mlp.gate_up, mlp.down_proj)]
    return all(has_grouped_gemm(weight, weight) for weight in weights)
