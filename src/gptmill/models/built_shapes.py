"""The shapes of all parameters of a model whose parts only a plug-in knows, found by building it."""

from __future__ import annotations

from functools import lru_cache

import torch

from gptmill.config.model import ModelConfig
from gptmill.models.gpt import GPT
from gptmill.models.initialisation import SkipInit
from gptmill.models.own_model import OwnModel


@lru_cache(maxsize=8)
def list_shapes(config: ModelConfig, padded_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes by name. The model is built on the meta device, which allocates nothing, where the plug-in can."""
    model_class = OwnModel if "architecture" in config.own_parts else GPT
    try:
        with torch.device("meta"), SkipInit():
            model = model_class(config, padded_vocab_size)
    except (NotImplementedError, RuntimeError):  # it computes with its weights
        with torch.random.fork_rng(devices=[]):
            model = model_class(config, padded_vocab_size)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
