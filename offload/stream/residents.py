"""What stays on the device while a component works: whole blocks, and a fraction of every other block's shard.

Both come and go together with the component's turn. A resident block arrives like any other, in a slot, in a pass of a
ring that holds the resident blocks only; the visit leaves a copy. So ranks that share weights load residents in step,
whoever asks for it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from offload.device import Device
from offload.plan.layout import SHARD_ALIGNMENT_BYTES
from offload.stream.pace import Pace
from offload.stream.ring import Ring


class ResidentPhase(Enum):
    """Where the residents are."""

    AT_REST = "on the host"
    LOADED = "on the device"


class ResidentLayers:
    """The residents of one component.

    Args:
        residents: the ring of whole resident blocks, or None.
        streaming: the ring of the others, or None.
        shard_fraction: of each of their shards, that stays on the device.
    """

    def __init__(
        self,
        device: Device,
        pace: Pace,
        copy_stream: Any,
        *,
        residents: Ring | None,
        streaming: Ring | None,
        shard_fraction: float,
    ) -> None:
        self._device = device
        self._pace = pace
        self._copy = copy_stream
        self._blocks = residents.blocks if residents else ()
        self._shards = {
            block: kept_bytes(block.shard.numel(), shard_fraction) for block in (streaming.blocks if streaming else ())
        }
        self._moved = device.event()
        self._phase = ResidentPhase.AT_REST
        self.h2d_bytes = 0  # of kept parts of shards; whole blocks travel in their ring and are counted there

    @property
    def loaded(self) -> bool:
        return self._phase is ResidentPhase.LOADED

    @property
    def num_bytes(self) -> int:
        """On the device, while loaded."""
        return sum(block.layout.num_bytes for block in self._blocks) + sum(self._shards.values())

    def load(self) -> None:
        """Brings the residents to the device. Twice is the same as once."""
        if self.loaded:
            return
        buffers = [self._device.empty(block.layout.num_bytes) for block in self._blocks]
        self._load_shards()
        for block, buffer in zip(self._blocks, buffers, strict=True):
            self._pace.enter(block)
            block.binding.copy_to(buffer)
            self._pace.leave(block)
        for block, buffer in zip(self._blocks, buffers, strict=True):
            block.binding.rest(buffer)
        self._phase = ResidentPhase.LOADED

    def offload(self) -> None:
        """Frees the residents' device memory, behind the work that still reads it."""
        if not self.loaded:
            return
        for block in self._blocks:
            block.binding.unbind()
        self._moved.record(self._copy)  # the copy stream still reads kept shards
        self._moved.wait(self._device.current_stream())
        for block in self._shards:
            block.kept_shard = block.shard[:0]
        self._phase = ResidentPhase.AT_REST

    def restore(self) -> None:
        self.offload()

    def _load_shards(self) -> None:
        kept = {block: self._device.empty(num_bytes) for block, num_bytes in self._shards.items() if num_bytes}
        self._moved.record(self._device.current_stream())  # the memory's last owner worked on the compute stream
        with self._device.on(self._copy):
            self._moved.wait(self._copy)
            for block, tensor in kept.items():
                tensor.copy_(block.shard[: tensor.numel()], non_blocking=True)
        for block, tensor in kept.items():
            block.kept_shard = tensor
            self.h2d_bytes += tensor.numel()


def kept_bytes(shard_bytes: int, fraction: float) -> int:
    """How much of a shard stays: whole at 1, and otherwise cut at an aligned byte."""
    if fraction >= 1:
        return shard_bytes
    return int(shard_bytes * fraction) // SHARD_ALIGNMENT_BYTES * SHARD_ALIGNMENT_BYTES
