"""ModelConfig: which parts a model is composed of. Defaults are GPT-2 124M.

Where a part comes in variants, its field is a union of dataclasses: `--feed_forward moe` chooses one by its tag, and
the variant's own fields stand beside it, flat like all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gptmill.config.windows import parse_windows

HIDDEN_MULTIPLE = 64  # widths that fit the hardware's tiles


@dataclass(frozen=True)
class LayerNorm:
    """Mean and variance"""

    tag: ClassVar[str] = "layernorm"
    norm_bias: bool = True
    """layernorm: give norms a bias."""


@dataclass(frozen=True)
class RmsNorm:
    """Variance alone, without a bias"""

    tag: ClassVar[str] = "rmsnorm"


@dataclass(frozen=True)
class LearnedPositions:
    """An embedding for each place, added to the token's"""

    tag: ClassVar[str] = "learned"


@dataclass(frozen=True)
class NoScaling:
    """Rotations as they are"""

    tag: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearScaling:
    """All rotations slowed down alike"""

    tag: ClassVar[str] = "linear"
    rope_factor: float = 8.0
    """rope_scaling linear, llama3: how much slower positions turn."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow rotations slowed down, fast ones left as they are, as Llama 3.1 does"""

    tag: ClassVar[str] = "llama3"
    rope_factor: float = 8.0
    """rope_scaling linear, llama3: how much slower positions turn."""
    rope_original_context: int = 8192
    """rope_scaling llama3: the context length that the unscaled rotations were made for."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions: queries and keys are turned by an angle that grows with their place"""

    tag: ClassVar[str] = "rope"
    rope_base: float = 10_000.0
    """rope: base of the geometric series of wavelengths."""
    rope_scaling: NoScaling | LinearScaling | Llama3Scaling = NoScaling()
    """rope: none; linear: positions divided by rope_factor; llama3: only the slow rotations."""


@dataclass(frozen=True)
class NoPositions:
    """Only the causal mask tells the order"""

    tag: ClassVar[str] = "none"


@dataclass(frozen=True)
class Gelu:
    """Two matrices with GELU (tanh) between them, as GPT-2 has it"""

    tag: ClassVar[str] = "gelu"
    ffn_size: int | None = None
    """Hidden width (default: 4 x embd_size; with gates 2/3 of it; of each expert that over experts_per_token)."""


@dataclass(frozen=True)
class Relu2:
    """Two matrices with the square of ReLU between them"""

    tag: ClassVar[str] = "relu2"
    ffn_size: int | None = None
    """Hidden width (default: 4 x embd_size; with gates 2/3 of it; of each expert that over experts_per_token)."""


@dataclass(frozen=True)
class SwiGlu:
    """Three matrices: SiLU of one branch gates the other"""

    tag: ClassVar[str] = "swiglu"
    ffn_size: int | None = None
    """Hidden width (default: 4 x embd_size; with gates 2/3 of it; of each expert that over experts_per_token)."""


@dataclass(frozen=True)
class Moe:
    """A mixture of SwiGLU experts, some of them for each token; none is ever dropped"""

    tag: ClassVar[str] = "moe"
    num_experts: int = 8
    """moe: experts in each layer."""
    experts_per_token: int = 2
    """moe: how many of them each token goes to."""
    ffn_size: int | None = None
    """Hidden width (default: 4 x embd_size; with gates 2/3 of it; of each expert that over experts_per_token)."""
    router_aux_loss: float = 0.01
    """moe: weight of the loss that spreads tokens evenly over experts."""
    router_z_loss: float = 0.001
    """moe: weight of the loss that keeps the router's logits small."""


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    num_layers: int = 12
    """Transformer blocks."""
    embd_size: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Attention heads; must divide embd_size, unless head_size is given."""
    context_length: int = 1024
    """Tokens in one window, the longest text that the model sees at once."""
    dropout: float = 0.0
    """Dropout probability on embeddings, attention and residual branches."""
    norm: LayerNorm | RmsNorm = LayerNorm()
    """Norm in front of each part: layernorm or rmsnorm."""
    norm_eps: float = 1e-5
    """What norms add to the variance."""
    bias: bool = True
    """Give the linear layers biases."""
    positions: LearnedPositions | Rope | NoPositions = LearnedPositions()
    """How a token's place is told: learned, rope or none."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by a group of query heads (default: num_heads, nothing shared)."""
    head_size: int | None = None
    """Width of an attention head (default: embd_size / num_heads)."""
    qk_norm: bool = False
    """Normalise queries and keys (RMSNorm per head) before they meet."""
    attention_windows: str | None = None
    """How far back each layer sees, repeated over the layers, such as 256,256,full (default: all of the context)."""
    feed_forward: Gelu | Relu2 | SwiGlu | Moe = Gelu()
    """The other half of a block: gelu, relu2, swiglu, or moe, a mixture of experts."""
    tied_head: bool = True
    """Use the token embedding as the output head too."""
    logit_softcap: float | None = None
    """Squeeze logits smoothly into plus and minus this (default: as they are)."""
    value_embeddings: int = 0
    """Token embeddings that are added to the values of the first and the last so many layers."""
    zero_init: bool = False
    """Start the projections into the residual stream at zero: every block is the identity at first."""
    mtp_heads: int = 0
    """Further tokens ahead that are predicted while training, each by a block of its own; sampling ignores them."""

    @property
    def head_width(self) -> int:
        return self.head_size or self.embd_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def hidden_size(self) -> int:
        """Width inside the feed-forward part, or inside each expert, chosen so that a token meets as many weights."""
        if self.feed_forward.ffn_size is not None:
            return self.feed_forward.ffn_size
        if isinstance(self.feed_forward, Gelu | Relu2):
            return 4 * self.embd_size
        share = self.feed_forward.experts_per_token if isinstance(self.feed_forward, Moe) else 1
        return HIDDEN_MULTIPLE * math.ceil(8 * self.embd_size / 3 / share / HIDDEN_MULTIPLE)

    def list_windows(self) -> tuple[int | None, ...]:
        """How far back each layer sees, its own place counted; None for all of the context."""
        if self.attention_windows is None:
            return (None,) * self.num_layers
        pattern = parse_windows(self.attention_windows)
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))
