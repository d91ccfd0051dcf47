"""Builds what streams: from a component's split to a ring of blocks with their shards, and from rings to a pace.

Building allocates everything and moves nothing; `StreamedComponent.consume` then takes the weights, one block at a
time, so that a host never holds more than one block twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.config import OffloadConfig
from offload.device import Device
from offload.host.pages import HostMemory
from offload.host.store import HostStore
from offload.mesh import Mesh
from offload.plan.layout import Layout, pack
from offload.plan.resolve import ResolvedComponent
from offload.plan.topology import named
from offload.stream.pace import FreePace, LockstepPace, Pace
from offload.stream.ring import Ring, StreamBlock
from offload.stream.slots import Slots
from offload.stream.staging import StagingRing
from offload.stream.streamer import Streamer
from offload.stream.tags import TAG_BYTES, TagCheck, tag_number, write_tag
from offload.stream.transport import AllGatherTransport, LocalTransport, Transport


class StreamedComponent:
    """One component's blocks: their plan, their store, and the rings that they travel in.

    Attributes:
        layouts: of each block, by full name, in the model's order.
        remainder: the component's other tensors, which stay on the device.
        blocks: all of them, in the model's order, once built.
        streaming, residents: the rings of those that travel in every pass and of those that stay; None where empty.
    """

    def __init__(self, component: ResolvedComponent) -> None:
        self.path = component.path
        self.module = component.module
        self.modules = component.blocks
        split = component.split()
        self.remainder = split.remainder
        self._held = split.by_block
        packed = [pack(named(held)) for held in self._held]
        self.layouts: dict[str, Layout] = dict(
            zip(component.block_names, (layout for layout, _ in packed), strict=True)
        )
        self._storages = [storages for _, storages in packed]
        resident = {id(module) for module in component.resident_blocks}
        self._stays = [id(module) in resident for module in component.blocks]
        self._num_taken = 0

    def build(self, first_number: int, device: Device, memory: HostMemory, *, rank: int, num_shards: int) -> list[Ring]:
        """Makes the host store and the rings, numbered from `first_number`. The weights stay where they are."""
        layouts, tag_bytes = list(self.layouts.values()), TAG_BYTES if num_shards > 1 else 0
        self._store = HostStore(memory, layouts, rank=rank, num_shards=num_shards, tag_bytes=tag_bytes)
        self.blocks = [
            StreamBlock(name, layout, held, shard, shard.numel() - tag_bytes, device)
            for (name, layout), held, shard in zip(self.layouts.items(), self._held, self._store.shards, strict=True)
        ]
        staying = [block for block, stays in zip(self.blocks, self._stays, strict=True) if stays]
        moving = [block for block, stays in zip(self.blocks, self._stays, strict=True) if not stays]
        self.residents = Ring(first_number, self.path, staying) if staying else None
        number = first_number + (self.residents is not None)
        self.streaming = Ring(number, self.path, moving) if moving else None
        for block in self.blocks if tag_bytes else ():
            number = tag_number(block.ring.number, block.index)
            write_tag(number, block.layout.digest, block.shard[block.data_bytes :])
        return self.rings

    @property
    def rings(self) -> list[Ring]:
        return [ring for ring in (self.residents, self.streaming) if ring is not None]

    def consume(self) -> None:
        """Fills the shards from the model's own tensors and makes those away, block by block."""
        for index, block in enumerate(self.blocks):
            self._store.fill(index, self._storages.pop(0))
            self._num_taken += 1
            block.binding.unbind()
        self._store.seal()

    def restore(self, transport: Transport) -> None:
        """Gives the model plain host tensors again, as far as they were taken."""
        for block in self.blocks[: self._num_taken]:
            block.binding.release(transport.collect(block))
            block.shard = block.kept_shard = torch.empty(0, dtype=torch.uint8)

    @property
    def host_bytes(self) -> int:
        return sum(shard.numel() for shard in self._store.shards)

    @property
    def streamed_bytes(self) -> int:
        return sum(block.layout.num_bytes for block in self.streaming.blocks) if self.streaming else 0


def build_transport(
    config: OffloadConfig, device: Device, mesh: Mesh, rings: Sequence[Ring], copy_stream: Any
) -> Transport:
    """The transport that the config names, with its staging and its check of tags."""
    if config.transport == "local":
        return LocalTransport(device, copy_stream)
    largest = max(block.shard.numel() for ring in rings for block in ring.blocks)
    staging = StagingRing(device, num_shards=config.staging_shards, shard_bytes=largest)
    names = {tag_number(ring.number, block.index): block.name for ring in rings for block in ring.blocks}
    tags = TagCheck(device, mesh.shard, names, max(len(ring.blocks) for ring in rings))
    return AllGatherTransport(device, copy_stream, device.stream(), mesh.shard, staging, tags)


def build_pace(config: OffloadConfig, device: Device, mesh: Mesh, transport: Transport, rings: Sequence[Ring]) -> Pace:
    """Two slots of the largest block's size, and the pace that the transport needs."""
    largest = max(block.layout.padded_bytes(config.dp_size) for ring in rings for block in ring.blocks)
    streamer = Streamer(device, Slots(device, largest), transport)
    if config.transport == "local":
        return FreePace(streamer)
    return LockstepPace(streamer, rings, mesh.control)
