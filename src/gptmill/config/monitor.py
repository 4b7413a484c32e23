"""Options of the monitoring warnings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MonitorConfig:
    """Monitoring: when to warn; the run itself never changes ("none" disables a warning)"""

    warn_grad_norm: float | None = 5.0
    """Warn if the gradient norm stays above this after the learning-rate warm-up."""
    warn_grad_norm_rise: float | None = 5.0
    """Warn if the gradient norm stays above this many times its usual value."""
    warn_plateau_steps: int | None = 500
    """Warn if the training loss has not improved over this many steps and over a fifth of the run."""
    warn_not_learning: int | None = 100
    """Warn if the loss of a fresh model is that of its start so many steps after the learning-rate warm-up."""
    warn_overfitting: float | None = 0.02
    """Warn if the validation loss keeps this fraction above its best while the training loss falls."""
    warn_overfitting_gap: float | None = 0.3
    """Warn if the validation loss stays this fraction above the training loss after the first epoch."""
    warn_throughput: float | None = 0.7
    """Warn if tokens per second stay below this fraction of their usual value."""
    warn_eval_time: float | None = 3.0
    """Warn if two evaluations in a row take more than this many times their usual time."""
    warn_straggler: float | None = 1.3
    """Warn if a rank's own part of a step keeps taking this many times as long as that of the other ranks."""
    warn_data_wait: float | None = 0.1
    """Warn if training spends more than this fraction of its time waiting for data."""
    warn_mfu: float | None = 0.1
    """Warn if a busy GPU reaches less than this fraction of its peak FLOP/s (models of 10M parameters and more)."""
    warn_memory: float | None = 0.95
    """Warn if more than this fraction of the GPU's or the host's memory is in use."""
    warn_temperature: float | None = 85.0
    """Warn if a GPU stays at this many degrees Celsius or above."""
    warn_throttling: float | None = 0.1
    """Warn if heat or the power supply slows a GPU down for more than this fraction of the time."""
    warn_cpu: float | None = 0.7
    """Warn if a run on a CPU gets less than this fraction of its cores, or has too many or few threads for them."""
    warn_utilization: float | None = 0.7
    """Warn if a GPU is busy for less than this fraction of the time."""
