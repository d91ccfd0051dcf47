"""Components that take turns on the device: whoever is used loads, everyone else leaves."""

from __future__ import annotations

from functools import partial

from torch import nn

from offload.device import Device
from offload.host.pages import HostMemory
from offload.stream.stager import BoundedAllocatorCache, VisitingStager


class Turns:
    """The staged components of a pipeline, by path. One without a stager can take a turn too: the others leave."""

    def __init__(self, device: Device, memory: HostMemory) -> None:
        self._device = device
        self._memory = memory
        self._copy_stream = device.stream()
        self._cache = BoundedAllocatorCache(device)
        self._stagers: dict[str, VisitingStager] = {}

    def add(self, path: str, module: nn.Module) -> None:
        """Stages a component from now on."""
        self._stagers[path] = VisitingStager(
            module,
            self._device,
            self._memory,
            partial(self.take, path),
            copy_stream=self._copy_stream,
            cache_retention=self._cache,
        )

    def take(self, path: str) -> None:
        """Makes `path` the component on the device."""
        for other, stager in self._stagers.items():
            if other != path:
                stager.offload()
        if path in self._stagers:
            self._stagers[path].load()

    def restore(self) -> None:
        """Ends the turns: every component gets plain host tensors."""
        for stager in self._stagers.values():
            stager.restore()

    @property
    def num_bytes(self) -> int:
        return sum(stager.num_bytes for stager in self._stagers.values())

    @property
    def h2d_bytes(self) -> int:
        return sum(stager.h2d_bytes for stager in self._stagers.values())
