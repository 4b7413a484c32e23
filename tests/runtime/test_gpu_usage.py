"""NVIDIA GPUs are found as torch numbers them, and what one cannot measure is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from gptmill.runtime import gpu_usage
from gptmill.runtime.gpu_usage import GpuAddress, combine, find_gpus, open_gpu_meter

HOT, POWER_BRAKE = pynvml.nvmlClocksEventReasonSwThermalSlowdown, pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
IDLE, POWER_CAP = pynvml.nvmlClocksEventReasonGpuIdle, pynvml.nvmlClocksEventReasonSwPowerCap
SLOWDOWN = pynvml.nvmlClocksEventReasonHwSlowdown
FIRST, SECOND = GpuAddress("aa", "00000000:01:00.0"), GpuAddress("bb", "00000000:02:00.0")


class FakeNvml:
    """Has the functions of pynvml that are used, and raises its errors; two GPUs, known by UUID and bus."""

    NVMLError = pynvml.NVMLError

    def __init__(self, **errors: int) -> None:
        self.errors = errors
        self.reasons = POWER_CAP | IDLE
        self.joules = 1000.0
        self.uuids = {"GPU-aa": 0, "GPU-bb": 1}
        self.buses = {FIRST.pci_bus_id: 0, SECOND.pci_bus_id: 1}

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            if name in self.errors:
                raise pynvml.NVMLError(self.errors[name])
            return self.answer(name, *arguments)

        return answer

    def answer(self, name: str, gpu: Any = 0, *_rest: Any) -> Any:
        tables = {"nvmlDeviceGetHandleByUUID": self.uuids, "nvmlDeviceGetHandleByPciBusId": self.buses}
        if name in tables:
            if gpu not in tables[name]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return tables[name][gpu]
        return {
            "nvmlInit": None,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97 - gpu),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=int(40e9)),
            "nvmlDeviceGetPowerUsage": 612_000,
            "nvmlDeviceGetTemperature": 61 + gpu,
            "nvmlDeviceGetTotalEnergyConsumption": self.joules * 1000,
            "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.reasons,
        }[name]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(gpu_usage.time, "monotonic", lambda: clock.now)
    return clock


def test_every_name_of_the_fake_is_one_of_the_library() -> None:
    names = [name for name in FakeNvml.answer.__code__.co_consts if isinstance(name, str) and name.startswith("nvml")]
    names += [name for consts in FakeNvml.answer.__code__.co_consts if isinstance(consts, tuple) for name in consts]
    assert len(names) >= 8
    assert all(hasattr(pynvml, name) for name in names if name.startswith("nvml"))


def test_a_gpu_reports_what_it_measures() -> None:
    assert open_gpu_meter([FIRST], FakeNvml())() == {
        "gpu_utilization": 0.97,
        "gpu_memory_gb": 40.0,
        "gpu_power_watts": 612.0,
        "gpu_temperature_celsius": 61.0,
        "gpu_throttled_thermal": 0.0,
        "gpu_throttled_power": 0.0,
    }


def test_power_is_the_mean_since_the_last_sample_by_the_energy_counter(clock: SimpleNamespace) -> None:
    nvml = FakeNvml()
    measure = open_gpu_meter([FIRST], nvml)
    assert measure()["gpu_power_watts"] == 612
    clock.now, nvml.joules = 12.0, 1900.0
    assert measure()["gpu_power_watts"] == pytest.approx(450)
    clock.now, nvml.joules = 13.0, 5.0  # the driver was reloaded
    assert measure()["gpu_power_watts"] == 612


def test_without_an_energy_counter_power_is_that_of_the_moment(clock: SimpleNamespace) -> None:
    nvml = FakeNvml(nvmlDeviceGetTotalEnergyConsumption=pynvml.NVML_ERROR_NOT_SUPPORTED)
    measure = open_gpu_meter([FIRST], nvml)
    for clock.now in (10.0, 11.0):
        assert measure()["gpu_power_watts"] == 612


@pytest.mark.parametrize(
    ("function", "gone"),
    [
        ("nvmlDeviceGetUtilizationRates", ["gpu_utilization"]),
        ("nvmlDeviceGetPowerUsage", ["gpu_power_watts"]),
        ("nvmlDeviceGetTemperature", ["gpu_temperature_celsius"]),
        ("nvmlDeviceGetCurrentClocksEventReasons", ["gpu_throttled_thermal", "gpu_throttled_power"]),
    ],
)
def test_what_a_gpu_does_not_support_is_left_out_and_not_asked_again(function: str, gone: list[str]) -> None:
    everything, nvml = open_gpu_meter([FIRST], FakeNvml())(), FakeNvml(**{function: pynvml.NVML_ERROR_NOT_SUPPORTED})
    measure = open_gpu_meter([FIRST], nvml)
    assert measure() == {name: value for name, value in everything.items() if name not in gone}
    nvml.errors.clear()
    if gone != ["gpu_power_watts"]:
        assert not measure().keys() & set(gone)


def test_an_old_driver_knows_the_clock_reasons_by_their_old_name() -> None:
    nvml = FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    nvml.reasons = HOT
    assert open_gpu_meter([FIRST], nvml)()["gpu_throttled_thermal"] == 1.0


@pytest.mark.parametrize(
    ("reasons", "thermal", "power"),
    [
        (IDLE | POWER_CAP, 0, 0),
        (HOT, 1, 0),
        (HOT | SLOWDOWN, 1, 0),
        (pynvml.nvmlClocksEventReasonHwThermalSlowdown | SLOWDOWN, 1, 0),
        (POWER_BRAKE | SLOWDOWN, 0, 1),
        (SLOWDOWN, 0, 1),
        (HOT | POWER_BRAKE, 1, 1),
    ],
)
def test_heat_and_power_slow_a_gpu_down_and_idling_does_not(reasons: int, thermal: int, power: int) -> None:
    nvml = FakeNvml()
    nvml.reasons = reasons
    sample = open_gpu_meter([FIRST], nvml)()
    assert (sample["gpu_throttled_thermal"], sample["gpu_throttled_power"]) == (thermal, power)


@pytest.mark.parametrize("error", ["GPU_IS_LOST", "UNKNOWN", "LIB_RM_VERSION_MISMATCH"])
def test_a_gpu_that_does_not_answer_is_an_error(error: str) -> None:
    nvml = FakeNvml()
    measure = open_gpu_meter([FIRST], nvml)
    measure()
    nvml.errors["nvmlDeviceGetTemperature"] = getattr(pynvml, f"NVML_ERROR_{error}")
    with pytest.raises(pynvml.NVMLError):
        measure()


def test_a_slice_of_a_gpu_is_found_by_its_bus() -> None:
    nvml = FakeNvml()
    assert open_gpu_meter([GpuAddress("cc", SECOND.pci_bus_id)], nvml)()["gpu_temperature_celsius"] == 62
    with pytest.raises(pynvml.NVMLError):
        open_gpu_meter([GpuAddress("cc")], nvml)


def test_several_gpus_give_the_least_busy_the_hottest_and_the_power_of_all() -> None:
    sample = open_gpu_meter([FIRST, SECOND], FakeNvml())()
    assert (sample["gpu_utilization"], sample["gpu_temperature_celsius"]) == (0.96, 62)
    assert sample["gpu_power_watts"] == 1224
    assert combine([{"gpu_power_watts": 300.0}, {}]) == {"gpu_power_watts": 300.0}


def test_the_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=3,1, say: torch's GPU 0 is NVML's GPU 3."""
    buses = {0: 0x1B, 1: 0x0A}

    def get_properties(device: torch.device) -> SimpleNamespace:
        bus = buses[device.index or 0]
        return SimpleNamespace(uuid=f"id-{bus}", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    device = torch.device("cuda", 1)
    assert find_gpus(device) == [GpuAddress("id-10", "00000000:0A:00.0")]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [gpu.uuid for gpu in find_gpus(device)] == ["id-27", "id-10"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert find_gpus(device) == []
    assert find_gpus(torch.device("mps")) == find_gpus(torch.device("cpu")) == []
