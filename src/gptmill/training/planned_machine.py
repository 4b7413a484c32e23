"""The machine of a planned run: a GPU by its name, or this machine."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.errors import UserError
from gptmill.config.prices import find_price
from gptmill.config.run import RunConfig
from gptmill.models.kernels.support import has_kernels
from gptmill.runtime.device import choose_device, describe_device, find_nvidia_gpus
from gptmill.runtime.gpu_catalog import find_gpu
from gptmill.runtime.host_usage import read_available_memory
from gptmill.runtime.memory import read_device_memory, read_host_memory
from gptmill.runtime.peak_rates import find_peak_rate
from gptmill.runtime.precision import choose_precision
from gptmill.training.plan import MachineRate

UNNAMED_GPU = "an NVIDIA GPU"


@dataclass(frozen=True)
class PlannedMachine:
    """What a run would train on."""

    name: str
    rate: MachineRate
    memory_bytes: int | None
    """Of one device; on a CPU that of the host. None if unknown."""
    is_gpu: bool
    is_here: bool
    price_per_hour: float | None
    """Dollars per device and hour; None if unknown."""
    is_price_given: bool = False
    available_bytes: int | None = None
    """What a run on this CPU can still take of its memory; None for other devices, and if unknown."""


def find_planned_machine(config: RunConfig, gpu: str | None, gpus: int, price: float | None) -> PlannedMachine:
    """The named GPU, else the device that the run would choose here; raises UserError where there is none."""
    if gpu is not None:
        found = find_gpu(gpu)
        precision = found.choose_precision(config.machine.precision)
        rate = MachineRate(gpus, precision, found.has_kernels, found.find_peak_rate(precision))
        usual = find_price(found.name)
        return PlannedMachine(
            found.name, rate, found.memory_bytes, True, False, usual if price is None else price, price is not None
        )
    try:
        device = choose_device(config.machine.device)
    except UserError:
        if config.machine.device != "cuda" or find_nvidia_gpus():
            raise
        return _assume_gpu(config, gpus, price)
    precision, name = choose_precision(config.machine.precision, device), describe_device(device)
    rate = MachineRate(gpus, precision, has_kernels(device), find_peak_rate(name, precision))
    is_gpu = device.type == "cuda"
    memory = read_device_memory(device) if is_gpu else read_host_memory()
    usual = find_price(name) if is_gpu else None
    available = read_available_memory() if device.type == "cpu" else None
    return PlannedMachine(
        name, rate, memory, is_gpu, True, usual if price is None else price, price is not None, available
    )


def _assume_gpu(config: RunConfig, gpus: int, price: float | None) -> PlannedMachine:
    """Some recent NVIDIA GPU, for a run that needs one where there is none."""
    wanted = config.machine.precision
    rate = MachineRate(gpus, "bf16" if wanted == "auto" else wanted, True, None)
    return PlannedMachine(UNNAMED_GPU, rate, None, True, False, price, price is not None)
