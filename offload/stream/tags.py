"""The proof that ranks put the same block together: every shard carries a tag, and the tags of a pass are compared.

A tag rests behind its shard on the host, travels with it in the same copy, and is set aside on the device when the
shard is gathered. Once for every ring's length of gathers the ranks gather what they set aside. One row for each
gather, one column for each rank: a row with two different tags is a block that was put together from different blocks'
shards. (With gloo, such a gather raises nothing and mixes weights.) The host reads the table a pass later, when it has
long arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from offload.device import Device, Event
from offload.errors import RankMismatchError
from offload.mesh import RankGroup

TAG_BYTES = 16
_NUMBERS = TAG_BYTES // 8


def tag_number(ring_number: int, block_index: int) -> int:
    """The first number of a tag: which block it is."""
    return ring_number << 32 | block_index


def write_tag(number: int, digest: str, out: torch.Tensor) -> None:
    """Writes a tag to the host: the block's number, and the first bits of its layout's digest."""
    out.view(torch.int64).copy_(torch.tensor([number, int(digest[:15], 16)]))


class _Table(NamedTuple):
    """The tags that every rank contributed, on their way to the host: (ranks, gathers, 2) as int64."""

    host: torch.Tensor
    arrived: Event


class TagCheck:
    """Sets tags aside on the comm stream, and compares them a window of gathers at a time.

    Args:
        names: of all blocks, by the first number of their tags.
        longest_window: the most gathers that `restart` will be asked for.
    """

    def __init__(self, device: Device, group: RankGroup, names: Mapping[int, str], longest_window: int) -> None:
        self._device = device
        self._group = group
        self._names = names
        self._mine = device.empty(longest_window * TAG_BYTES)
        self._everyone = device.empty(group.size * longest_window * TAG_BYTES)
        self._tables: deque[_Table] = deque()
        self.restart(longest_window)

    def restart(self, num_gathers: int) -> None:
        """Begins a window of `num_gathers`; an unfinished one is dropped, on all ranks alike."""
        self._window_bytes = num_gathers * TAG_BYTES
        self._noted_bytes = 0

    def note(self, tag: torch.Tensor) -> None:
        """Sets aside the tag of the shard that was just gathered; called on the comm stream."""
        self._mine[self._noted_bytes : self._noted_bytes + TAG_BYTES].copy_(tag, non_blocking=True)
        self._noted_bytes += TAG_BYTES
        if self._noted_bytes == self._window_bytes:
            self._exchange()
            self._noted_bytes = 0

    def verify(self, *, completely: bool) -> None:
        """Compares the tables of all finished windows but the last, which may be on its way; `completely` takes it in.

        Raises:
            RankMismatchError: names the ranks and blocks; on every rank alike.
        """
        while len(self._tables) > (0 if completely else 1):
            table = self._tables.popleft()
            table.arrived.synchronize()
            ranks = table.host.view(torch.int64).view(self._group.size, -1, _NUMBERS)
            for row in ranks.transpose(0, 1).tolist():
                self._compare(row)

    def _exchange(self) -> None:
        everyone = self._everyone[: self._group.size * self._window_bytes]
        self._group.all_gather(everyone, self._mine[: self._window_bytes])
        table = _Table(self._device.host_empty(everyone.numel()), self._device.event())
        table.host.copy_(everyone, non_blocking=True)
        table.arrived.record(self._device.current_stream())
        self._tables.append(table)

    def _compare(self, tags: list[list[int]]) -> None:
        others = [rank for rank, tag in enumerate(tags) if tag != tags[0]]
        if others:
            names = ", ".join(f"rank {rank} gave {self._name(tags[rank])}" for rank in (0, others[0]))
            raise RankMismatchError(f"the ranks put one block together from shards of different ones: {names}")

    def _name(self, tag: list[int]) -> str:
        return self._names.get(tag[0], "something unknown")
