"""What training, evaluation and inference need of any model, GPT or one of the user's own.

Shape suffixes: B batch, T sequence, V vocabulary, L layers, E experts, G domains.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from gptmill.config.model import ModelConfig
from gptmill.config.run import ActivationCheckpointing
from gptmill.models.losses import LossConfig


class Losses(NamedTuple):
    """Sums over the valid targets, by whose count the caller divides; `experts_LE` counts tokens."""

    objective: Tensor
    """What training minimises; in evaluation mode, the cross-entropy."""
    cross_entropy: Tensor
    per_domain_G: Tensor | None
    experts_LE: Tensor | None

    def detach(self) -> Losses:
        """The same values without their autograd graph."""
        per_domain_G = None if self.per_domain_G is None else self.per_domain_G.detach()
        return Losses(self.objective.detach(), self.cross_entropy.detach(), per_domain_G, self.experts_LE)


class LanguageModel(nn.Module):
    """Tokens and targets in, summed losses out; `logits` gives the next-token logits."""

    config: ModelConfig
    vocab_size: int
    """How many tokens there are; further rows of the embedding and columns of the logits are padding."""
    loss_config: LossConfig
    inference_methods: ClassVar[tuple[str, ...]] = ("logits",)
    """Methods besides `forward` that begin a forward pass."""

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None, domains_B: Tensor | None = None
    ) -> Losses:
        """The losses of predicting the targets."""
        raise NotImplementedError

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """The next-token logits at every position."""
        raise NotImplementedError

    @property
    def softmax_size(self) -> int | None:
        """How many of the logits take part in the loss's softmax; None if all do, even those of the padding."""
        return None if self.config.padded_softmax else self.vocab_size

    def set_activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        """Chooses what training keeps of a block for the backward pass."""
        raise NotImplementedError

    def compile_parts(self, **options: Any) -> None:
        """Compiles the model with torch.compile's options."""
        raise NotImplementedError

    def compile_in_place(self, **options: Any) -> None:
        """The same for a model whose blocks have hooks, which run outside of the compiled code."""
        raise NotImplementedError

    def list_blocks(self) -> list[nn.Module]:
        """The repeated parts that hold most of the weights: sharded weights are gathered for one of them at a time."""
        raise NotImplementedError

    def isolate_blocks(self) -> None:
        """Lets no block hand on its parameters: where weights are sharded, their memory is freed behind it."""
