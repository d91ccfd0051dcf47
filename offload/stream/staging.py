"""Device memory that receives shards before their all-gather: one buffer, used as a ring of bytes.

Blocks differ in size, so the ring is measured in bytes and not in shards: while a large block is gathered, several
small shards can already be on their way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import torch

from offload.device import Device, Event
from offload.plan.layout import ALIGNMENT_BYTES


class SpanPhase(Enum):
    """What a span's bytes are for."""

    WAITING = "a shard that no all-gather has been issued for"
    GATHERED = "a shard whose all-gather has been issued; free once its event has passed"


@dataclass(eq=False)
class Span:
    """A shard's bytes in the ring.

    Attributes:
        arrived: recorded on the copy stream after the H2D.
        gathered: recorded on the comm stream after the all-gather that reads the span.
    """

    tensor: torch.Tensor
    start: int
    stop: int
    arrived: Event
    gathered: Event
    phase: SpanPhase = SpanPhase.WAITING

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop


class StagingRing:
    """Hands out spans in a circle."""

    def __init__(self, device: Device, *, num_shards: int, shard_bytes: int) -> None:
        self._device = device
        self._buffer = device.empty(num_shards * _aligned(shard_bytes))
        self._spans: deque[Span] = deque()
        self._head = 0

    def reserve(self, num_bytes: int, copy_stream: object) -> Span | None:
        """A span for the next shard, or None while shards that still wait for their all-gather lie there.

        The copy stream is made to wait for the all-gathers that last read these bytes.
        """
        start = self._head if self._head + num_bytes <= self._buffer.numel() else 0
        taken = [span for span in self._spans if span.overlaps(start, start + num_bytes)]
        if any(span.phase is SpanPhase.WAITING for span in taken):
            return None
        for span in taken:
            span.gathered.wait(copy_stream)
            self._spans.remove(span)
        span = Span(
            self._buffer[start : start + num_bytes],
            start,
            start + num_bytes,
            self._device.event(),
            self._device.event(),
        )
        self._spans.append(span)
        self._head = _aligned(span.stop)
        return span

    def forget_waiting(self) -> None:
        """Gives up the shards that no all-gather was issued for. Later copies follow them on the same stream."""
        self._spans = deque(span for span in self._spans if span.phase is SpanPhase.GATHERED)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
