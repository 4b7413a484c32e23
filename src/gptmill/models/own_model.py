"""A model of the user's own in the place of GPT: any module that maps tokens and targets to a loss or to logits.

Shape suffixes: B batch, T sequence, N = B x T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.config.run import ActivationCheckpointing
from gptmill.models.language_model import LanguageModel, Losses
from gptmill.models.losses import IGNORE_INDEX, LossConfig, compute_loss

ARCHITECTURES: dict[type, type[nn.Module]] = {}
"""The registered modules by the type of their options, the value of `ModelConfig.architecture`."""


class OwnModel(LanguageModel):
    """Makes summed losses of what the user's module returns: a mean loss, or logits."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, vocab_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size or padded_vocab_size
        self.loss_config = LossConfig()
        self.module = ARCHITECTURES[type(config.architecture)](config, padded_vocab_size)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None, domains_B: Tensor | None = None
    ) -> Losses:
        assert documents_BT is None, "document masks need the built-in architecture"
        result = self.module(tokens_BT, targets_BT)
        config = self.loss_config if self.training else self.loss_config.without_extras()
        targets_N = targets_BT.flatten()
        if result.dim() == 0:
            if not config.is_plain:
                raise UserError(
                    f"architecture {self.config.architecture.tag} computes its own loss, so label_smoothing and z_loss "
                    f"have no effect; remove them, or return logits"
                )
            total = result * (targets_N != IGNORE_INDEX).sum()
            return Losses(total, total, None, None)
        domains_N = None if domains_B is None else domains_B[:, None].expand_as(tokens_BT).flatten()
        # Sliced, since the module may need its own result again in the backward pass.
        logits_NV = self._check_logits(result, tokens_BT).flatten(0, 1)[:, : self.softmax_size]
        padded = self.config.padded_softmax
        sums = compute_loss(
            lambda logits: logits, logits_NV, targets_N, config, self.vocab_size, domains_N, padded_softmax=padded
        )
        return Losses(sums.objective, sums.cross_entropy, sums.per_domain_G, None)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Calls the module without targets; raises UserError if it returns no logits then."""
        try:
            result = self.module(tokens_BT, None)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise UserError(
                f"architecture {self.config.architecture.tag} has no logits: its forward failed without targets "
                f"({error!s:.200}); let it return logits where targets is None, or disable samples: --sample_tokens 0"
            ) from error
        return self._check_logits(result, tokens_BT)

    def set_activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        """The config's validation refuses any other mode."""
        assert mode == "none"

    def compile_parts(self, **options: Any) -> None:
        self.module.compile(**options)

    def compile_in_place(self, **options: Any) -> None:
        for block in self.list_blocks():
            block.compile(**options)

    def list_blocks(self) -> list[nn.Module]:
        """The members of the user's module lists."""
        lists = (module for module in self.modules() if isinstance(module, nn.ModuleList))
        return [block for blocks in lists for block in blocks]

    def _check_logits(self, result: Tensor, tokens_BT: Tensor) -> Tensor:
        if result.dim() != 3 or result.shape[:2] != tokens_BT.shape or result.shape[2] < self.vocab_size:
            raise UserError(
                f"architecture {self.config.architecture.tag} returned a tensor of shape {tuple(result.shape)}; return "
                f"a scalar loss, or logits of shape {(*tokens_BT.shape, self.vocab_size)}"
            )
        return result


def build_own_model(config: ModelConfig, padded_vocab_size: int, seed: int, vocab_size: int | None = None) -> OwnModel:
    """The user's model on the CPU, initialised as its constructor does, the same on every rank for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OwnModel(config, padded_vocab_size, vocab_size)
