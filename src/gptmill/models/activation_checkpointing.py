"""Activation checkpointing (gradient checkpointing): the backward pass recomputes a block instead of keeping its
activations. It trades time for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gptmill.config.run import ActivationCheckpointing

# Results that selective checkpointing keeps, by the names of torch's operations: GEMMs of every kind, and attention.
# Norms, activations and residual sums cost next to nothing to recompute.
KEPT = frozenset(
    (
        "mm addmm bmm baddbmm _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention flex_attention"
    ).split()
)


def run_block(block: nn.Module, mode: ActivationCheckpointing, *arguments: Any) -> Any:
    """What `block` returns for these arguments. Recomputation draws the same random numbers, dropout's for one."""
    return _call(block, mode if block.training else "none", arguments)


def run_forward(block: nn.Module, mode: ActivationCheckpointing, *arguments: Any) -> Any:
    """The same without the block's hooks, to be called within them."""
    return _call(type(block).forward, mode if block.training else "none", (block, *arguments))


def _call(block: Callable[..., Any], mode: ActivationCheckpointing, arguments: Sequence[Any]) -> Any:
    if mode == "none" or not torch.is_grad_enabled():
        return block(*arguments)
    if mode == "full":
        return checkpoint(block, *arguments, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _choose)
    return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts)


def _choose(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    name = getattr(operation, "overloadpacket", operation).__name__
    return CheckpointPolicy.MUST_SAVE if name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
