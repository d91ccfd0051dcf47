"""The two device buffers that blocks take turns in."""

from __future__ import annotations

from enum import Enum

import torch

from offload.device import Device
from offload.errors import SlotError
from offload.stream.ring import StreamBlock

NUM_SLOTS = 2


class SlotPhase(Enum):
    """What a slot's memory holds."""

    FREE = "nothing that anyone may read"
    FILLED = "a block that is there, or will be once the ready event has passed"
    IN_USE = "a block whose forward is being issued"


class Slot:
    """One buffer, the block it holds, and the two events that order its writers and readers.

    Attributes:
        ready: recorded when the block's bytes are all there.
        last_use: recorded on the compute stream when the block's forward has been issued.
        generation: counts fills.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.buffer: torch.Tensor = device.empty(num_bytes)
        self.ready = device.event()
        self.last_use = device.event()
        self.phase = SlotPhase.FREE
        self.block: StreamBlock | None = None
        self.generation = 0

    def fill(self, block: StreamBlock) -> None:
        self._expect(SlotPhase.FREE, block)
        self.block, self.phase = block, SlotPhase.FILLED
        self.generation += 1

    def take(self, block: StreamBlock) -> None:
        self._expect(SlotPhase.FILLED, block)
        if self.block is not block:
            raise SlotError(f"{block.name} was about to read a slot that holds {self.block and self.block.name}")
        self.phase = SlotPhase.IN_USE

    def free(self) -> None:
        self.block, self.phase = None, SlotPhase.FREE

    def _expect(self, phase: SlotPhase, block: StreamBlock) -> None:
        if self.phase is not phase:
            raise SlotError(
                f"{block.name} needs a slot that is {phase.name}, and it is {self.phase.name}"
                f"{f' with {self.block.name}' if self.block else ''}"
            )


class Slots:
    """Chooses slots by a running counter, so that rings of any length, odd or even, alternate correctly."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._slots = tuple(Slot(device, num_bytes) for _ in range(NUM_SLOTS))
        self.num_fills = 0

    def next_free(self) -> Slot | None:
        """The slot whose turn it is, or None while a block still occupies it."""
        slot = self._slots[self.num_fills % NUM_SLOTS]
        return slot if slot.phase is SlotPhase.FREE else None

    def fill(self, block: StreamBlock) -> Slot:
        """Gives `block` the slot whose turn it is."""
        slot = self._slots[self.num_fills % NUM_SLOTS]
        slot.fill(block)
        self.num_fills += 1
        return slot
