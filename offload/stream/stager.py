"""Whole components that visit the device: one pinned master on the host, one buffer on the device while the component
works.

Two classes, by what the modules see between visits. `PinnedModuleStager` leaves them bound to the master, as plain host
tensors. `VisitingStager` makes the weights away, so that they answer with the compute device, where a pipeline's inputs
have to go; any use of them, through whatever method, asks for the visit.

Weights do not change during inference, so leaving the device is only a rebinding to the master. Small buffers, which
forward may write to, are the exception: they are copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn

from offload.device import Device
from offload.host.pages import HostMemory
from offload.host.store import copy_range
from offload.plan.layout import pack
from offload.plan.topology import HeldTensor, held_tensors, is_small_buffer, named
from offload.stream.binding import Binding, place


class StagerPhase(Enum):
    """Where the weights are bound."""

    MASTER = "to the host master"
    LOADED = "to the device buffer"


class BoundedAllocatorCache:
    """Keeps the allocator's unused memory while it is little, and gives it back when it is not.

    Args:
        max_cached_fraction: of the device's memory, that may be held without use.
        min_free_fraction: of the device's memory, that has to be free.
    """

    def __init__(self, device: Device, *, max_cached_fraction: float = 0.25, min_free_fraction: float = 0.05) -> None:
        self.device = device
        self.max_cached_fraction = max_cached_fraction
        self.min_free_fraction = min_free_fraction

    def release_if_needed(self, *, force: bool = False) -> bool:
        """Empties the cache when a bound is passed, the figures cannot be had, or `force`; true when it did."""
        if not force and self._within_bounds():
            return False
        self.device.empty_cache()
        return True

    def _within_bounds(self) -> bool:
        memory, reserved = self.device.memory(), self.device.reserved_bytes()
        if memory is None or reserved is None:
            return False
        (free, total), (held, used) = memory, reserved
        return held - used <= self.max_cached_fraction * total and free >= self.min_free_fraction * total


class PinnedModuleStager:
    """Moves one or several modules to the device and back, as one group.

    Tensors that share storage keep their shapes, strides, offsets, dtypes and aliases through every move.
    """

    def __init__(
        self,
        module_or_modules: nn.Module | Iterable[nn.Module],
        device: Device,
        *,
        pin_memory: bool = True,
        copy_stream: Any = None,
        cache_retention: BoundedAllocatorCache | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        memory = memory or HostMemory(device, pin_memory)
        modules = [module_or_modules] if isinstance(module_or_modules, nn.Module) else list(module_or_modules)
        self._modules = nn.ModuleList(modules)
        held = [h for h in held_tensors(self._modules) if not is_small_buffer(h)]
        self._device = device
        self._copy = copy_stream if copy_stream is not None else device.stream()
        self._arrived = device.event()
        self._cache = cache_retention
        self._layout, storages = pack(named(held))
        self._binding = Binding(held, self._layout, device.torch, self._lend)
        self._master = memory.allocate(self._layout.num_bytes)
        copy_range(self._layout, storages, 0, self._master.tensor)
        self._rest()
        memory.pin(self._master)
        self._phase = StagerPhase.MASTER
        self.h2d_bytes = 0

    @property
    def loaded(self) -> bool:
        return self._phase is StagerPhase.LOADED

    @property
    def num_bytes(self) -> int:
        """Of the master, and of the device buffer while loaded."""
        return self._layout.num_bytes

    def set_cache_retention(self, cache_retention: BoundedAllocatorCache | None) -> None:
        """Decides whether `offload` empties the allocator's cache always (None) or only past the policy's bounds."""
        self._cache = cache_retention

    def load(self) -> None:
        """Copies the master to the device and binds the modules to the copy. Twice is the same as once."""
        if self.loaded:
            return
        try:
            buffer = self._device.empty(self._layout.num_bytes)
        except torch.OutOfMemoryError:
            self._release_cache(force=True)
            buffer = self._device.empty(self._layout.num_bytes)
        self._arrived.record(self._device.current_stream())  # the buffer's last owner worked on the compute stream
        with self._device.on(self._copy):
            self._arrived.wait(self._copy)
            buffer.copy_(self._master.tensor, non_blocking=True)
            self._arrived.record(self._copy)
        self._arrived.wait(self._device.current_stream())
        self._binding.rest(buffer)
        place(self._small_buffers(), self._device)
        self._phase = StagerPhase.LOADED
        self.h2d_bytes += buffer.numel()

    def offload(self) -> None:
        """Binds the modules to the master again and frees the device copy, behind the work that still reads it."""
        if not self.loaded:
            return
        self._arrived.synchronize()  # from here on the host may write to the master
        self._rest()
        place(self._small_buffers(), None)
        self._phase = StagerPhase.MASTER
        self._release_cache()

    def restore(self) -> None:
        """Ends the staging: plain host tensors, on the master's pages."""
        self.offload()
        self._binding.release(self._master.tensor)

    def _rest(self) -> None:
        self._binding.rest(self._master.tensor)

    def _lend(self, number: int) -> torch.Tensor:
        raise AssertionError("weights bound to their master are never away")

    def _small_buffers(self) -> list[HeldTensor]:
        """State that forward may write to, or put new tensors in the place of: it moves both ways and has no master."""
        return [h for h in held_tensors(self._modules) if is_small_buffer(h)]

    def _release_cache(self, *, force: bool = False) -> None:
        if self._cache is None or force:
            self._device.empty_cache()
        else:
            self._cache.release_if_needed()


class VisitingStager(PinnedModuleStager):
    """A stager whose weights are away between visits.

    Args:
        ask_for_visit: called when an away weight is used; must `load` this stager.
    """

    def __init__(
        self,
        module: nn.Module,
        device: Device,
        memory: HostMemory,
        ask_for_visit: Callable[[], None],
        *,
        copy_stream: Any,
        cache_retention: BoundedAllocatorCache,
    ) -> None:
        self._ask_for_visit = ask_for_visit
        super().__init__(module, device, memory=memory, copy_stream=copy_stream, cache_retention=cache_retention)

    def _rest(self) -> None:
        self._binding.unbind()

    def _lend(self, number: int) -> torch.Tensor:
        self._ask_for_visit()
        return self._binding.tensor(number)
