"""Host memory for weights: pages of exactly the size asked for, page-locked where the device can.

PyTorch's pinned allocator rounds every request up to a power of two (20.4 GiB asked became 32), so the pages come
straight from the system and are registered with the device afterwards.
"""

from __future__ import annotations

import logging
import mmap
from enum import Enum

import torch

from offload.device import Device, PinningUnavailable

log = logging.getLogger(__name__)


class PageState(Enum):
    """What holds the bytes."""

    PAGEABLE = "ordinary memory"
    PINNED = "page-locked memory, registered with the device"
    CLOSED = "nothing: given back to the system"


class HostPages:
    """A run of anonymous pages as a uint8 tensor. They take memory only once they are written."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.state = PageState.PAGEABLE
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]

    def pin(self, device: Device) -> None:
        """Registers the pages.

        Raises:
            PinningUnavailable: they stay pageable.
        """
        if self.num_bytes and self.state is PageState.PAGEABLE:
            device.register_host(self.tensor.data_ptr(), self.num_bytes)
            self.state = PageState.PINNED

    def close(self, device: Device) -> None:
        """Unregisters the pages and lets go of them; they return to the system with the last tensor that views them."""
        if self.state is PageState.PINNED:
            device.unregister_host(self.tensor.data_ptr())
        self.state = PageState.CLOSED
        self.tensor = torch.empty(0, dtype=torch.uint8)


class HostMemory:
    """All host pages of one backend. After the first failure to pin, it warns once and pins no more."""

    def __init__(self, device: Device, pin: bool) -> None:
        self._device = device
        self._pins = pin and device.gains_by_pinning
        self._pages: list[HostPages] = []

    def allocate(self, num_bytes: int) -> HostPages:
        pages = HostPages(num_bytes)
        self._pages.append(pages)
        return pages

    def pin(self, pages: HostPages) -> None:
        """Pins filled pages, if pinning is wanted and possible."""
        if not self._pins:
            return
        try:
            pages.pin(self._device)
        except PinningUnavailable as reason:
            self._pins = False
            log.warning("host weights stay pageable, copies will be slower: %s", reason)

    @property
    def pinned_bytes(self) -> int:
        return sum(pages.num_bytes for pages in self._pages if pages.state is PageState.PINNED)

    def close(self) -> None:
        for pages in self._pages:
            pages.close(self._device)
        self._pages.clear()
