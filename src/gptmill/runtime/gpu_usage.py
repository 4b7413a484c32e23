"""Utilisation, memory, power, temperature and throttling of NVIDIA GPUs, by NVML.

NVML numbers GPUs by PCI bus and torch by CUDA_VISIBLE_DEVICES, so that a GPU is found by its UUID or bus address.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

MILLI = 1e-3
GIGA = 1e9
# Bits of NVML's clock event reasons. Idle clocks, clocks set by the user and the software power cap are normal.
SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE, HW_SLOWDOWN = 0x20, 0x40, 0x80, 0x08
TEMPERATURE_SENSOR = 0  # NVML_TEMPERATURE_GPU, the only one
# NVML's error codes: invalid argument, not supported, no permission, function not found. A GPU that cannot measure one
# quantity (MIG, vGPU, a laptop) may measure the others.
UNSUPPORTED = frozenset((2, 3, 4, 13))
FUNCTION_NOT_FOUND = 13
COMBINED: dict[str, Callable[[list[float]], float]] = {"gpu_utilization": min, "gpu_power_watts": sum}
"""How the values of several GPUs become one; the others by their maximum."""


@dataclass(frozen=True)
class GpuAddress:
    """What torch and NVML both know of a GPU; empty where this torch does not tell."""

    uuid: str = ""
    pci_bus_id: str = ""


@dataclass
class Gpu:
    """A GPU as NVML sees it, and what it cannot measure."""

    handle: Any
    unsupported: set[str] = field(default_factory=set)
    energy: tuple[float, float] | None = None
    """Seconds and joules of the last reading of its energy counter."""


def find_gpus(device: torch.device) -> list[GpuAddress]:
    """The NVIDIA GPUs of this machine that the run trains on; none on a CPU, with MPS or with ROCm."""
    if device.type != "cuda" or torch.version.hip is not None:
        return []
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return [_find_address(device)]
    count = min(int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count())
    return [_find_address(torch.device("cuda", index)) for index in range(count)]


def open_gpu_meter(addresses: list[GpuAddress], library: Any = None) -> Callable[[], dict[str, float]]:
    """Initialises NVML and finds the GPUs; raises NVMLError, or ImportError if its Python binding is absent."""
    nvml = import_module("pynvml") if library is None else library  # few machines need it
    nvml.nvmlInit()
    gpus = [Gpu(_find_handle(nvml, address)) for address in addresses]
    return lambda: combine([measure_gpu(nvml, gpu) for gpu in gpus])


def combine(samples: list[dict[str, float]]) -> dict[str, float]:
    """One sample for several GPUs: the least busy, the fullest, the hottest, and the power of all."""
    names = {name: None for sample in samples for name in sample}
    return {
        name: float(COMBINED.get(name, max)([sample[name] for sample in samples if name in sample])) for name in names
    }


def measure_gpu(nvml: Any, gpu: Gpu) -> dict[str, float]:
    """What this GPU can measure; raises NVMLError if it does not answer."""
    handle, sample = gpu.handle, {}
    readings: dict[str, Callable[[], float]] = {
        "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "gpu_memory_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIGA,
        "gpu_power_watts": lambda: _measure_power(nvml, gpu),
        "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, TEMPERATURE_SENSOR),
    }
    for name, measure in readings.items():
        value = _read_if_supported(nvml, gpu, name, measure)
        if value is not None:
            sample[name] = float(value)
    reasons = _read_if_supported(nvml, gpu, "throttling", lambda: _read_clock_reasons(nvml, handle))
    if reasons is not None:
        is_hot = bool(reasons & (SW_THERMAL | HW_THERMAL))
        # The general slowdown bit accompanies the thermal one; without it, the power supply is the cause.
        is_short_of_power = bool(reasons & HW_POWER_BRAKE) or bool(reasons & HW_SLOWDOWN and not is_hot)
        sample |= {"gpu_throttled_thermal": float(is_hot), "gpu_throttled_power": float(is_short_of_power)}
    return sample


def _read_if_supported(nvml: Any, gpu: Gpu, name: str, measure: Callable[[], Any]) -> Any:
    if name in gpu.unsupported:
        return None
    try:
        return measure()
    except nvml.NVMLError as error:
        if error.value not in UNSUPPORTED:
            raise
        gpu.unsupported.add(name)
        return None


def _measure_power(nvml: Any, gpu: Gpu) -> float:
    """Mean watts since the last sample, by the GPU's energy counter; where it has none, the watts of this moment."""
    joules = _read_if_supported(
        nvml, gpu, "energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) * MILLI
    )
    before, now = gpu.energy, time.monotonic()
    if joules is not None:
        gpu.energy = now, joules
        if before is not None and now > before[0] and joules > before[1]:
            return float((joules - before[1]) / (now - before[0]))
    return float(nvml.nvmlDeviceGetPowerUsage(gpu.handle) * MILLI)


def _read_clock_reasons(nvml: Any, handle: Any) -> int:
    """Why the clocks are low, as bits. Drivers before 535 know it by the old name only."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError as error:
        if error.value != FUNCTION_NOT_FOUND:
            raise
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _find_address(device: torch.device) -> GpuAddress:
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, slot = parts
    bus_id = "" if None in parts else f"{domain:08X}:{bus:02X}:{slot:02X}.0"
    return GpuAddress(uuid, bus_id)


def _find_handle(nvml: Any, address: GpuAddress) -> Any:
    """By UUID; by bus address where NVML does not know that UUID, as for a slice of a GPU (MIG)."""
    if address.uuid:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{address.uuid.removeprefix('GPU-')}")
        except nvml.NVMLError:
            if not address.pci_bus_id:
                raise
    return nvml.nvmlDeviceGetHandleByPciBusId(address.pci_bus_id)
