"""What torch and the NVIDIA driver say about this machine, as plain values that a child process can print."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class GpuFacts:
    """One GPU that torch sees."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    error: str = ""
    """Why it cannot be used, where it cannot."""


@dataclass(frozen=True)
class MachineFacts:
    """Read without judgement; None or empty where there is nothing to read."""

    torch: str
    cuda_build: str | None
    """The version of CUDA that torch was built with."""
    hip_build: str | None = None
    architectures: tuple[str, ...] = ()
    """What torch's kernels were compiled for, such as sm_90."""
    gpus: tuple[GpuFacts, ...] = ()
    no_cuda: str = ""
    """Why torch can use no GPU."""
    nvidia_gpus: str = ""
    """The machine's NVIDIA GPUs according to the driver, not to torch."""
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""
    driver_error: str = ""
    device: str = ""
    """The device that training would use; empty if it would refuse to start."""
    refusal: str = ""
    """Why it would."""
    threads: int = 0
    host_bytes: int | None = None
    others: tuple[tuple[int, int, int], ...] = field(default=())
    """Processes on GPUs: index of the GPU, process id, bytes."""

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """From JSON, in which tuples are lists."""
        gpus = [GpuFacts(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in values["gpus"]]
        driver_cuda = values["driver_cuda"]
        changed = {
            "gpus": tuple(gpus),
            "architectures": tuple(values["architectures"]),
            "driver_cuda": None if driver_cuda is None else (driver_cuda[0], driver_cuda[1]),
            "others": tuple((index, process, size) for index, process, size in values["others"]),
        }
        return cls(**{**values, **changed})
