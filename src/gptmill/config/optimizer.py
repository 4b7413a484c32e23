"""OptimizerConfig: how gradients become updates, and how large these are over a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class AdamW:
    """AdamW, fused into one kernel"""

    tag: ClassVar[str] = "adamw"
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment (lion: of its momentum, 0.99 unless given)."""
    eps: float = 1e-8
    """What AdamW adds to the root of the second moment."""


@dataclass(frozen=True)
class Muon:
    """Momentum made orthogonal, for the matrices of the blocks; AdamW for all else"""

    tag: ClassVar[str] = "muon"
    matrix_lr: float = 0.02
    """muon: learning rate of matrices at the end of warm-up; max_lr is that of all else."""
    muon_momentum: float = 0.95
    """muon: decay rate of the matrices' momentum."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment (lion: of its momentum, 0.99 unless given)."""
    eps: float = 1e-8
    """What AdamW adds to the root of the second moment."""


@dataclass(frozen=True)
class Lion:
    """The sign of a momentum: half of AdamW's memory, and a learning rate several times lower"""

    tag: ClassVar[str] = "lion"
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.99
    """Decay rate of the second moment (lion: of its momentum, 0.99 unless given)."""


@dataclass(frozen=True)
class AdamW8bit:
    """AdamW with moments of 8 bits"""

    tag: ClassVar[str] = "adamw8bit"
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment (lion: of its momentum, 0.99 unless given)."""
    eps: float = 1e-8
    """What AdamW adds to the root of the second moment."""


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from max_lr down to min_lr"""

    tag: ClassVar[str] = "cosine"
    min_lr: float = 1e-4
    """Learning rate at the last step, of every schedule but constant."""


@dataclass(frozen=True)
class Linear:
    """A straight line from max_lr down to min_lr"""

    tag: ClassVar[str] = "linear"
    min_lr: float = 1e-4
    """Learning rate at the last step, of every schedule but constant."""


@dataclass(frozen=True)
class Wsd:
    """Warm-up, a long stable stretch at max_lr, then a straight decay to min_lr"""

    tag: ClassVar[str] = "wsd"
    min_lr: float = 1e-4
    """Learning rate at the last step, of every schedule but constant."""
    decay_fraction: float = 0.2
    """wsd: share of the steps, counted from the end, in which the rate decays."""


@dataclass(frozen=True)
class Constant:
    """max_lr throughout"""

    tag: ClassVar[str] = "constant"


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate"""

    optimizer: AdamW | Muon | Lion | AdamW8bit = AdamW()
    """adamw; muon: orthogonal updates for matrices; lion; adamw8bit: small moments (needs the quant extra)."""
    max_lr: float = 1e-3
    """Learning rate at the end of warm-up."""
    schedule: Cosine | Linear | Wsd | Constant = Cosine()
    """Course of the rate after warm-up: cosine, linear, wsd (stable, then decay) or constant."""
    warmup_steps: int = 715
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings; biases, norms and other vectors have none."""
    grad_clip: float | None = 1.0
    """Largest gradient norm; larger gradients are scaled down to it ("none" turns clipping off)."""
    ema_decay: float | None = None
    """Keep a moving average of the weights, such as 0.999: it is evaluated and saved beside them (default: none)."""
