"""Components that take turns on the device: whoever is used loads, everyone else leaves."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import nn

from offload.device import Device
from offload.host.pages import HostMemory
from offload.stream.stager import BoundedAllocatorCache, VisitingStager


class Visitor(Protocol):
    """What comes to the device for a turn and leaves after it."""

    def load(self) -> None: ...
    def offload(self) -> None: ...
    def restore(self) -> None: ...


class Turns:
    """The components of a pipeline that come and go, by path. Any other can take a turn too: these leave."""

    def __init__(self, device: Device, memory: HostMemory) -> None:
        self._device = device
        self._memory = memory
        self._copy_stream = device.stream()
        self._cache = BoundedAllocatorCache(device)
        self._stagers: dict[str, VisitingStager] = {}
        self._visitors: dict[str, Visitor] = {}

    def add_visitor(self, path: str, visitor: Visitor) -> None:
        """Gives the component at `path` something to bring along."""
        self._visitors[path] = visitor

    def add(self, path: str, module: nn.Module) -> None:
        """Stages a component from now on."""
        self._visitors[path] = self._stagers[path] = VisitingStager(
            module,
            self._device,
            self._memory,
            partial(self.take, path),
            copy_stream=self._copy_stream,
            cache_retention=self._cache,
        )

    def take(self, path: str) -> None:
        """Makes `path` the component on the device."""
        for other, visitor in self._visitors.items():
            if other != path:
                visitor.offload()
        if path in self._visitors:
            self._visitors[path].load()

    def restore(self) -> None:
        """Ends the turns: every component gets plain host tensors."""
        for visitor in self._visitors.values():
            visitor.restore()
        self._visitors.clear()
        self._stagers.clear()

    @property
    def num_bytes(self) -> int:
        return sum(stager.num_bytes for stager in self._stagers.values())

    @property
    def h2d_bytes(self) -> int:
        return sum(stager.h2d_bytes for stager in self._stagers.values())
