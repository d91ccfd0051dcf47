"""Who decides which block comes next.

A rank that streams from its own host memory goes where its model goes: `FreePace` jumps to whatever block is entered.
Ranks that rebuild blocks together must issue the same all-gathers in the same order, whatever each of them computes:
`LockstepPace` lets them agree on every *pass*, and each rank then walks the whole ring. Blocks that its own model
skips, or passes that only others need, go by unused. So a rank cannot fall out of step by skipping, repeating or
reordering blocks, or by having nothing to do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import PeerFailedError
from offload.mesh import RankGroup
from offload.stream.ring import Ring, StreamBlock
from offload.stream.streamer import Streamer


@dataclass(frozen=True)
class Progress:
    """How far a rank has come, for others to compare.

    Attributes:
        num_fills: slots that were filled so far; equal schedules give equal numbers.
        is_waiting: whether it waits for the others to agree on a pass.
        where: what it does, for people.
    """

    num_fills: int
    is_waiting: bool
    where: str

    def to_text(self) -> str:
        return f"{self.num_fills} {int(self.is_waiting)} {self.where}"

    @classmethod
    def from_text(cls, text: str) -> Progress:
        num_fills, is_waiting, where = text.split(" ", 2)
        return cls(int(num_fills), is_waiting == "1", where)


class Pace(ABC):
    """Opens and closes the visits of blocks."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def enter(self, block: StreamBlock) -> None:
        """Called before the block's forward: afterwards its weights are bound."""
        self._streamer.require_idle(block)  # before any block is skipped, which would free the slot that is being read
        self._reach(block)
        self._streamer.take(block)

    def leave(self, block: StreamBlock) -> None:
        """Called after the block's forward, also when it raised or when `enter` did."""
        if self._streamer.block_in_use is block:
            self._streamer.release(block)

    def settle(self) -> None:
        """Closes a visit that was left open: an interrupt from the keyboard passes the hooks by."""
        block = self._streamer.block_in_use
        if block is not None:
            self.leave(block)
            block.ring.visitor = None  # the component's own hook was passed by as well

    @abstractmethod
    def _reach(self, block: StreamBlock) -> None:
        """Makes `block` the next one."""

    def join_others(self) -> None:
        """Takes part in the passes of other ranks until no rank wants another one."""

    def report_failure(self) -> None:
        """Tells the other ranks that this one stops, at the next point where they listen."""

    def progress(self) -> Progress | None:
        """Where this rank is, if others depend on it."""
        return None

    def verify(self) -> None:
        """Checks that every pass so far was put together alike on all ranks; called before a result is used.

        Raises:
            RankMismatchError: it was not; on every rank.
        """
        self._streamer.verify(completely=True)


class FreePace(Pace):
    """The pace of one rank that streams for itself."""

    def _reach(self, block: StreamBlock) -> None:
        if block.was_lent() or not self._streamer.holds(block):
            self._streamer.start_at(block)
        while not self._streamer.is_next(block):
            self._streamer.skip()


class LockstepPace(Pace):
    """The pace of ranks that stream together.

    Before each pass every rank says which ring it wants, or none; the lowest-numbered wanted ring is walked by all.
    Ranks that wanted another one ask again afterwards.
    """

    _NO_RING = -1

    def __init__(self, streamer: Streamer, rings: Sequence[Ring], control: RankGroup) -> None:
        super().__init__(streamer)
        self._rings = tuple(rings)
        self._control = control
        self._ring: Ring | None = None  # whose pass is under way
        self._position = 0  # of the next block in that pass
        self._is_waiting = False

    def leave(self, block: StreamBlock) -> None:
        if self._streamer.block_in_use is block:
            self._streamer.release(block)
            self._position += 1

    def _reach(self, block: StreamBlock) -> None:
        if self._ring is not block.ring or self._position > block.index:
            self._finish_pass()
            while self._agree_on_pass(block.ring.number) is not block.ring:
                self._finish_pass()
        self._skip_to(block.index)

    def join_others(self) -> None:
        self._finish_pass()
        while self._agree_on_pass(self._NO_RING) is not None:
            self._finish_pass()

    def report_failure(self) -> None:
        self._finish_pass()
        self._exchange(self._NO_RING, failed=True)

    def _agree_on_pass(self, wanted: int) -> Ring | None:
        """One small exchange on the host.

        Raises:
            PeerFailedError: a rank reported a failure instead.
            RankMismatchError: an earlier pass was not the same on all ranks.
        """
        self._streamer.verify(completely=False)
        votes = self._exchange(wanted, failed=False)
        failed = [rank for rank, (_, failure) in enumerate(votes) if failure]
        if failed:
            raise PeerFailedError(
                f"rank {', '.join(map(str, failed))} of the shard group failed; no rank continues this work"
            )
        rings = [ring for ring, _ in votes if ring != self._NO_RING]
        if not rings:
            return None
        ring = self._rings[min(rings)]
        if ring is not self._ring:
            self._streamer.start_at(ring.blocks[0])
        self._ring, self._position = ring, 0
        return ring

    def _exchange(self, wanted: int, *, failed: bool) -> list[list[int]]:
        self._is_waiting = True
        try:
            return self._control.exchange([wanted, int(failed)])
        finally:
            self._is_waiting = False

    def progress(self) -> Progress:
        """Where this rank is. Other threads may ask."""
        block = self._streamer.block_in_use
        where = "waiting for the other ranks" if self._is_waiting else f"in {block.name}" if block else "between passes"
        return Progress(self._streamer.num_fills, self._is_waiting, where)

    def _finish_pass(self) -> None:
        self.settle()
        if self._ring is not None:
            self._skip_to(len(self._ring.blocks))

    def _skip_to(self, index: int) -> None:
        while self._position < index:
            self._streamer.skip()
            self._position += 1
