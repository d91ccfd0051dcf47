"""Keeps the slots filled with the blocks that come next, and hands each block its slot when its turn comes."""

from __future__ import annotations

from collections import deque

from offload.device import Device
from offload.errors import SlotError
from offload.stream.ring import StreamBlock
from offload.stream.slots import Slot, SlotPhase, Slots
from offload.stream.transport import Transport


class Streamer:
    """The queue of filled slots, oldest first, and what will be filled after them."""

    def __init__(self, device: Device, slots: Slots, transport: Transport) -> None:
        self._device = device
        self._slots = slots
        self._transport = transport
        self._queue: deque[Slot] = deque()
        self._upcoming: StreamBlock | None = None

    def holds(self, block: StreamBlock) -> bool:
        """Whether `block` is in a slot or on its way into one."""
        return any(slot.block is block for slot in self._queue)

    def is_next(self, block: StreamBlock) -> bool:
        return bool(self._queue) and self._queue[0].block is block

    def start_at(self, block: StreamBlock) -> None:
        """Forgets what was on its way and continues from `block`."""
        while self._queue:
            self._queue.popleft().free()
        self._transport.restart(block)
        self._upcoming = block
        self._refill()

    def skip(self) -> None:
        """Lets the next block pass unused. Its slot's next writer follows it on the same stream."""
        self._queue.popleft().free()
        self._refill()

    def take(self, block: StreamBlock) -> None:
        """Binds `block` to its slot; from here on the compute stream may read it."""
        slot = self._queue[0]
        slot.take(block)
        slot.ready.wait(self._device.current_stream())
        block.binding.bind(slot.buffer)

    def release(self, block: StreamBlock) -> None:
        """Ends the visit that `take` began; the slot's next block comes as soon as the compute stream is done."""
        slot = self._queue.popleft()
        block.binding.unbind()
        slot.last_use.record(self._device.current_stream())
        slot.free()
        self._refill()

    @property
    def num_fills(self) -> int:
        return self._slots.num_fills

    @property
    def block_in_use(self) -> StreamBlock | None:
        """The block between `take` and `release`."""
        return self._queue[0].block if self._queue and self._queue[0].phase is SlotPhase.IN_USE else None

    def require_idle(self, block: StreamBlock) -> None:
        """Refuses a visit of `block` inside another visit.

        Raises:
            SlotError: names both blocks.
        """
        busy = self.block_in_use
        if busy is not None:
            raise SlotError(f"{block.name} was used inside {busy.name}; blocks cannot be nested")

    def verify(self, *, completely: bool) -> None:
        """As `Transport.verify`."""
        self._transport.verify(completely=completely)

    def _refill(self) -> None:
        assert self._upcoming is not None, "a streamer starts at a block"
        while self._slots.next_free() is not None:
            slot = self._slots.fill(self._upcoming)
            self._transport.fill(self._upcoming, slot)
            self._queue.append(slot)
            self._upcoming = self._upcoming.successor
        self._transport.stage_ahead(self._upcoming)
