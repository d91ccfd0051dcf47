"""What fills a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch

from offload.device import Device
from offload.mesh import RankGroup
from offload.stream.ring import StreamBlock
from offload.stream.slots import Slot
from offload.stream.staging import Span, SpanPhase, StagingRing
from offload.stream.tags import TagCheck


class Transport(ABC):
    """Moves blocks into slots, on streams of its own. Nothing here waits on the host."""

    def __init__(self, device: Device, copy_stream: Any) -> None:
        self._device = device
        self._copy = copy_stream

    def _bring(self, block: StreamBlock, out: torch.Tensor) -> None:
        """This rank's shard into `out`, on the current stream: what is kept on the device from there, else by H2D."""
        num_kept = block.kept_shard.numel()
        if num_kept:
            out[:num_kept].copy_(block.kept_shard, non_blocking=True)
        if num_kept < out.numel():
            out[num_kept:].copy_(block.shard[num_kept:], non_blocking=True)
        block.ring.traffic.h2d_bytes += block.shard.numel() - num_kept

    @abstractmethod
    def fill(self, block: StreamBlock, slot: Slot) -> None:
        """Issues everything that brings `block` into `slot`, and records the slot's ready event behind it."""

    @abstractmethod
    def collect(self, block: StreamBlock) -> torch.Tensor:
        """The whole block on the host, uint8. Ranks that share weights collect the same blocks in the same order."""

    def stage_ahead(self, block: StreamBlock) -> None:
        """Starts the journey of `block`, the next to be filled, and its successors as far as there is room."""

    def restart(self, block: StreamBlock) -> None:
        """Drops what was staged; the next fill will be of `block`, and then of its successors."""

    def verify(self, *, completely: bool) -> None:
        """Checks that ranks which share weights filled their slots alike, up to a pass ago or `completely`.

        Raises:
            RankMismatchError: they did not; on every rank.
        """


class LocalTransport(Transport):
    """One H2D copy straight into the slot, of a block that this rank holds whole."""

    def fill(self, block: StreamBlock, slot: Slot) -> None:
        with self._device.on(self._copy):
            slot.last_use.wait(self._copy)
            self._bring(block, slot.buffer[: block.shard.numel()])
            slot.ready.record(self._copy)

    def collect(self, block: StreamBlock) -> torch.Tensor:
        return block.shard


class AllGatherTransport(Transport):
    """H2D of this rank's shard into staging, then an all-gather of all shards into the slot.

    The H2D waits only for its staging bytes and the all-gather only for its shard and its slot, so copies run ahead of
    gathers.
    """

    def __init__(
        self,
        device: Device,
        copy_stream: Any,
        comm_stream: Any,
        shard_group: RankGroup,
        staging: StagingRing,
        tags: TagCheck,
    ) -> None:
        super().__init__(device, copy_stream)
        self._comm = comm_stream
        self._group = shard_group
        self._staging = staging
        self._tags = tags
        self._staged: deque[tuple[StreamBlock, Span]] = deque()

    def stage_ahead(self, block: StreamBlock) -> None:
        upcoming = self._staged[-1][0].successor if self._staged else block
        while self._stage(upcoming):
            upcoming = upcoming.successor

    def fill(self, block: StreamBlock, slot: Slot) -> None:
        if not self._staged:
            self._stage(block)
        staged, span = self._staged.popleft()
        if staged is not block:
            raise RuntimeError(f"{staged.name} is staged where {block.name} should be")
        out = slot.buffer[: block.data_bytes * self._group.size]
        with self._device.on(self._comm):
            span.arrived.wait(self._comm)
            slot.last_use.wait(self._comm)
            self._group.all_gather(out, span.tensor[: block.data_bytes])
            self._tags.note(span.tensor[block.data_bytes :])
            span.gathered.record(self._comm)
            slot.ready.record(self._comm)
        span.phase = SpanPhase.GATHERED
        block.ring.traffic.allgather_bytes += out.numel()

    def collect(self, block: StreamBlock) -> torch.Tensor:
        shard = block.shard[: block.data_bytes].to(self._device.torch)
        whole = self._device.empty(shard.numel() * self._group.size)
        self._group.all_gather(whole, shard)
        return torch.empty(whole.numel(), dtype=torch.uint8).copy_(whole)

    def restart(self, block: StreamBlock) -> None:
        self._staged.clear()
        self._staging.forget_waiting()
        self._tags.restart(len(block.ring.blocks))

    def verify(self, *, completely: bool) -> None:
        self._tags.verify(completely=completely)

    def _stage(self, block: StreamBlock) -> bool:
        span = self._staging.reserve(block.shard.numel(), self._copy)
        if span is None:
            return False
        with self._device.on(self._copy):
            self._bring(block, span.tensor)
            span.arrived.record(self._copy)
        self._staged.append((block, span))
        return True
