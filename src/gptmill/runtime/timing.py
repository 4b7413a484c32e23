"""Timestamps on the device's timeline, by CUDA events: the host runs ahead of the GPU and cannot time it."""

from __future__ import annotations

import time

import torch


class DeviceTimestamp:
    """The time at which a GPU reaches this point of its stream; the current time on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._host_seconds = time.perf_counter()
        if self._event is not None:
            self._event.record()

    @property
    def is_on_device(self) -> bool:
        """Whether the host can run ahead of it."""
        return self._event is not None

    def wait(self) -> None:
        """Blocks until the device has reached this point, but not for work enqueued later."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_after(self, earlier: DeviceTimestamp) -> float:
        """Seconds between two timestamps that the device has reached."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._host_seconds - earlier._host_seconds
