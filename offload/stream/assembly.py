"""Builds what streams: from a component's split to a ring of blocks with their shards, and from rings to a pace.

Building allocates everything and moves nothing; `StreamedComponent.consume` then takes the weights, one block at a
time, so that a host never holds more than one block twice.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from offload.stream.transport import AllGatherTransport, LocalTransport, Transport


class StreamedComponent:
    """One component's blocks: their plan, their store and their ring.

    Attributes:
        layouts: of each block, by full name.
        remainder: the component's other tensors, which stay on the device.
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
        self._num_taken = 0

    def build(self, number: int, device: Device, memory: HostMemory, *, rank: int, num_shards: int) -> Ring:
        """Makes the host store and the ring. The weights stay where they are."""
        self._store = HostStore(memory, list(self.layouts.values()), rank=rank, num_shards=num_shards)
        self.ring = Ring(
            number,
            self.path,
            [
                StreamBlock(name, layout, held, shard, device.torch)
                for (name, layout), held, shard in zip(
                    self.layouts.items(), self._held, self._store.shards, strict=True
                )
            ],
        )
        return self.ring

    def consume(self) -> None:
        """Fills the shards from the model's own tensors and makes those away, block by block."""
        for block in self.ring.blocks:
            self._store.fill(block.index, self._storages.pop(0))
            self._num_taken += 1
            block.binding.unbind()
        self._store.seal()

    def restore(self, transport: Transport) -> None:
        """Gives the model plain host tensors again, as far as they were taken."""
        for block in self.ring.blocks[: self._num_taken]:
            block.binding.release(transport.collect(block))

    @property
    def host_bytes(self) -> int:
        return sum(shard.numel() for shard in self._store.shards)

    @property
    def block_bytes(self) -> int:
        return sum(layout.num_bytes for layout in self.layouts.values())


def build_transport(config: OffloadConfig, device: Device, mesh: Mesh, layouts: Sequence[Layout]) -> Transport:
    """The transport that the config names, with its streams and its staging."""
    copy_stream = device.stream()
    if config.transport == "local":
        return LocalTransport(device, copy_stream)
    largest = max(layout.shard_bytes(config.dp_size) for layout in layouts)
    staging = StagingRing(device, num_shards=config.staging_shards, shard_bytes=largest)
    return AllGatherTransport(device, copy_stream, device.stream(), mesh.shard, staging)


def build_pace(config: OffloadConfig, device: Device, mesh: Mesh, transport: Transport, rings: Sequence[Ring]) -> Pace:
    """Two slots of the largest block's size, and the pace that the transport needs."""
    largest = max(block.layout.padded_bytes(config.dp_size) for ring in rings for block in ring.blocks)
    streamer = Streamer(device, Slots(device, largest), transport)
    if config.transport == "local":
        return FreePace(streamer)
    return LockstepPace(streamer, rings, mesh.control)
