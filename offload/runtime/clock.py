"""How long denoising steps take, measured on the device's own clock without holding up the host."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import nn

from offload.device import Device, Event


class StepClock:
    """Marks the first denoiser call of a picture and the end of every step; the seconds are read at the end."""

    def __init__(self, device: Device, denoisers: list[nn.Module]) -> None:
        self._device = device
        self._marks: list[list[Event]] = []
        self._running = False
        self._handles = [denoiser.register_forward_pre_hook(self._on_denoiser) for denoiser in denoisers]

    def step_ended(self) -> None:
        self._mark()

    def picture_ended(self) -> None:
        self._running = False

    def seconds(self) -> list[float]:
        """Of every step so far. Waits for the device."""
        self._device.synchronize()
        return [start.elapsed_time(end) / 1e3 for marks in self._marks for start, end in pairwise(marks)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_denoiser(self, module: nn.Module, args: Any) -> None:
        if not self._running:
            self._running = True
            self._marks.append([])
            self._mark()

    def _mark(self) -> None:
        event = self._device.event(timing=True)
        event.record(self._device.current_stream())
        self._marks[-1].append(event)
