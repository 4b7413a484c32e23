"""Moments on the device's own timeline: the host runs ahead of a GPU, so its clock would measure the wrong thing."""

from __future__ import annotations

import time

import torch


class Moment:
    """When the device comes to this point of its work; on a device without a timeline of its own, now."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._host_seconds = time.perf_counter()
        if self._event is not None:
            self._event.record()

    @property
    def is_on_device(self) -> bool:
        """Whether the host may run ahead of it."""
        return self._event is not None

    def wait(self) -> None:
        """Returns once the device is there, whatever it has been given to do after."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_after(self, earlier: Moment) -> float:
        """The time between two moments that have both come."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._host_seconds - earlier._host_seconds
