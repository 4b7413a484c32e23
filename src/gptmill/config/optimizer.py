"""OptimizerConfig: optimizer, learning-rate schedule, weight decay, gradient clipping and weight averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class AdamW:
    """Fused AdamW."""

    tag: ClassVar[str] = "adamw"
    beta1: float = 0.9
    """Decay rate of the first moment (momentum)."""
    beta2: float = 0.95
    """Decay rate of the second moment (lion: of the momentum, default 0.99)."""
    eps: float = 1e-8
    """Epsilon of AdamW."""


@dataclass(frozen=True)
class Muon:
    """Muon for the weight matrices of the blocks, AdamW for all other parameters."""

    tag: ClassVar[str] = "muon"
    matrix_lr: float = 0.02
    """muon: peak learning rate of the matrices; max_lr is that of all other parameters."""
    muon_momentum: float = 0.95
    """muon: momentum of the matrices."""
    beta1: float = 0.9
    """Decay rate of the first moment (momentum)."""
    beta2: float = 0.95
    """Decay rate of the second moment (lion: of the momentum, default 0.99)."""
    eps: float = 1e-8
    """Epsilon of AdamW."""


@dataclass(frozen=True)
class Lion:
    """Lion: half of AdamW's optimizer state; needs a learning rate several times lower."""

    tag: ClassVar[str] = "lion"
    beta1: float = 0.9
    """Decay rate of the first moment (momentum)."""
    beta2: float = 0.99
    """Decay rate of the second moment (lion: of the momentum, default 0.99)."""


@dataclass(frozen=True)
class AdamW8bit:
    """AdamW with 8-bit optimizer state."""

    tag: ClassVar[str] = "adamw8bit"
    beta1: float = 0.9
    """Decay rate of the first moment (momentum)."""
    beta2: float = 0.95
    """Decay rate of the second moment (lion: of the momentum, default 0.99)."""
    eps: float = 1e-8
    """Epsilon of AdamW."""


@dataclass(frozen=True)
class Cosine:
    """Cosine decay from max_lr to min_lr."""

    tag: ClassVar[str] = "cosine"
    min_lr: float = 1e-4
    """Learning rate of the last update, in every schedule but constant."""


@dataclass(frozen=True)
class Linear:
    """Linear decay from max_lr to min_lr."""

    tag: ClassVar[str] = "linear"
    min_lr: float = 1e-4
    """Learning rate of the last update, in every schedule but constant."""


@dataclass(frozen=True)
class Wsd:
    """Warm-up, stable, decay (WSD): constant at max_lr, then linear decay to min_lr."""

    tag: ClassVar[str] = "wsd"
    min_lr: float = 1e-4
    """Learning rate of the last update, in every schedule but constant."""
    decay_fraction: float = 0.2
    """wsd: fraction of all steps spent in the final decay."""


@dataclass(frozen=True)
class Constant:
    """Constant at max_lr after warm-up."""

    tag: ClassVar[str] = "constant"


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate"""

    optimizer: AdamW | Muon | Lion | AdamW8bit = AdamW()
    """adamw, muon (matrices; AdamW for the rest), lion, or adamw8bit (8-bit state; needs the quant extra)."""
    max_lr: float = 1e-3
    """Peak learning rate, after warm-up."""
    schedule: Cosine | Linear | Wsd | Constant = Cosine()
    """Learning-rate schedule after warm-up: cosine, linear, wsd (warm-up, stable, decay) or constant."""
    warmup_steps: int = 715
    """Steps of linear learning-rate warm-up."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings; biases, norms and other vectors have none."""
    grad_clip: float | None = 1.0
    """Clip the global gradient norm to this value ("none" disables clipping)."""
    ema_decay: float | None = None
    """Keep an exponential moving average (EMA) of the weights, e.g. 0.999; evaluated and saved too (default: off)."""
