"""What streams: blocks, in the cyclic order in which a pass visits them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.device import Device
from offload.errors import WeightAwayError
from offload.plan.layout import Layout
from offload.plan.topology import HeldTensor
from offload.stream.binding import Binding


class Visitor(Protocol):
    """Opens and closes visits of blocks."""

    def enter(self, block: StreamBlock) -> None: ...
    def leave(self, block: StreamBlock) -> None: ...


class StreamBlock:
    """One block: where its bytes rest, how they lie in a slot, and which tensors look at them there.

    Attributes:
        shard: this rank's part of the block on the host, uint8; with several ranks, and its tag behind it.
        data_bytes: of the shard, without the tag.
        kept_shard: the first bytes of the shard that are on the device, uint8; often none.
    """

    ring: Ring
    index: int

    def __init__(
        self,
        name: str,
        layout: Layout,
        held: Sequence[HeldTensor],
        shard: torch.Tensor,
        data_bytes: int,
        device: Device,
    ) -> None:
        self.name = name
        self.layout = layout
        self.shard = shard
        self.data_bytes = data_bytes
        self.kept_shard = shard[:0]
        self.binding = Binding(held, layout, device.torch, self._lend)
        self._device = device
        self._loans: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def successor(self) -> StreamBlock:
        """The block after this one; after the last comes the first again."""
        return self.ring.blocks[(self.index + 1) % len(self.ring.blocks)]

    def was_lent(self) -> bool:
        """Whether someone may have written to the bytes at rest since this was last asked, or still can."""
        lent = bool(self._loans)
        self._loans = [loan for loan in self._loans if loan() is not None]
        return lent

    def _lend(self, number: int) -> torch.Tensor:
        """A weight for someone who uses it outside its block's forward.

        While the component runs, the user is the component itself: some read their first block's embedder again at
        the end. The block is visited once for it, and the weight stays on the device from then on. At other times it is
        read where it rests, if this rank has all of it.

        Raises:
            WeightAwayError: this rank has only a shard, and the others would not take part in a visit.
        """
        visitor = self.ring.visitor
        if visitor is None and self.shard.numel() == self.layout.num_bytes:
            self._device.synchronize()  # copies of these bytes may be on their way, and the borrower may write to them
            weight = self.binding.at_rest(number, self.shard)
            self._loans.append(weakref.ref(weight.untyped_storage()))
            return weight
        if visitor is None:
            raise WeightAwayError(
                f"{self.binding.name(number)} is whole on no rank while {self.ring.name} is not running; "
                f"disable the offload to use it"
            )
        visitor.enter(self)
        try:
            return self.binding.keep(number)
        finally:
            visitor.leave(self)


@dataclass
class Traffic:
    """Bytes that this rank moved."""

    h2d_bytes: int = 0
    allgather_bytes: int = 0


class Ring:
    """The streaming blocks of one component, in visiting order.

    Attributes:
        number: the ring's place among all rings, the same on every rank.
        traffic: what travelled for the ring's blocks.
        visitor: who opens visits while the component's forward runs; None outside.
    """

    def __init__(self, number: int, name: str, blocks: Sequence[StreamBlock]) -> None:
        self.number = number
        self.name = name
        self.blocks = tuple(blocks)
        self.visitor: Visitor | None = None
        self.traffic = Traffic()
        for index, block in enumerate(self.blocks):
            block.ring, block.index = self, index
