"""The host's share of streamed weights: one rank's shard of every block of a ring, in one run of pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.host.pages import HostMemory
from offload.plan.layout import ALIGNMENT_BYTES, Layout, Region


class HostStore:
    """This rank's shards of the blocks of one component, each with room for a tag behind it.

    Filling is separate from making, so that everything that can fail for want of memory has happened before a weight
    moves, and so that a caller can drop a block's original weights as soon as its shard is filled.
    """

    def __init__(
        self, memory: HostMemory, layouts: Sequence[Layout], *, rank: int, num_shards: int, tag_bytes: int = 0
    ) -> None:
        self._memory = memory
        self._rank = rank
        self._layouts = tuple(layouts)
        self._tag_bytes = tag_bytes
        sizes = [layout.shard_bytes(num_shards) + tag_bytes for layout in layouts]
        strides = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes[:-1]] + sizes[-1:]
        self._pages = memory.allocate(sum(strides))
        starts = [sum(strides[:index]) for index in range(len(strides))]
        self.shards = tuple(self._pages.tensor[start : start + size] for start, size in zip(starts, sizes, strict=True))

    def fill(self, index: int, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copies this rank's part of block `index` from the tensors' own storages."""
        shard = self.shards[index]
        shard = shard[: shard.numel() - self._tag_bytes]
        copy_range(self._layouts[index], storages, self._rank * shard.numel(), shard)

    def seal(self) -> None:
        """Pins the pages, after the last `fill`: by now they hold the weights, so nothing is touched twice."""
        self._memory.pin(self._pages)


def copy_range(layout: Layout, storages: Sequence[torch.UntypedStorage], start: int, out: torch.Tensor) -> None:
    """Fills `out` (uint8) with the layout's bytes from `start` on; bytes of no region become zero."""
    stop = start + out.numel()
    filled = 0
    for region in layout.regions:
        first, last = max(start, region.offset_bytes), min(stop, region.offset_bytes + region.num_bytes)
        if first < last:
            out[filled : first - start].zero_()
            out[first - start : last - start].copy_(_source_bytes(region, storages[region.storage], first, last))
            filled = last - start
    out[filled:].zero_()


def _source_bytes(region: Region, storage: torch.UntypedStorage, first: int, last: int) -> torch.Tensor:
    """The storage's bytes behind layout bytes [first, last), as uint8."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, region.start_bytes + first - region.offset_bytes, (last - first,), (1,))
