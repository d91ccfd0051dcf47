"""Ends a rank that waits too long for another one, and says which.

Ranks post where they are on a board that lives outside all of them. A rank that has not moved for the time limit looks
there: who waits is not to blame, and of the others the one that is furthest behind is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from offload.backends import OffloadBackend
from offload.mesh import NoticeBoard
from offload.stream.pace import Progress

_LOOKS_PER_LIMIT = 20


class Watchdog(threading.Thread):
    """Watches one rank from a thread of its own, since the rank itself is stuck when it matters.

    Args:
        say: shows the one line about who did not come.
        give_up: ends the process; a rank that is stuck in a collective can end in no other way.
    """

    def __init__(
        self,
        backend: OffloadBackend,
        board: NoticeBoard,
        limit_seconds: float,
        say: Callable[[str], None],
        give_up: Callable[[int], None] = os._exit,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._backend = backend
        self._board = board
        self._limit_seconds = limit_seconds
        self._say = say
        self._give_up = give_up
        self._ended = threading.Event()

    def run(self) -> None:
        last, since = None, time.monotonic()
        while not self._ended.wait(self._limit_seconds / _LOOKS_PER_LIMIT):
            progress = self._backend.progress()
            if progress is None:
                continue
            if progress != last:
                last, since = progress, time.monotonic()
                self._board.post(progress.to_text())
            elif time.monotonic() - since > self._limit_seconds:
                self._look_around(progress)

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _look_around(self, mine: Progress) -> None:
        others = {rank: Progress.from_text(text) for rank, text in self._board.read().items()}
        rank, late = min(others.items(), key=lambda item: (item[1].is_waiting, item[1].num_fills))
        if rank == self._board.rank or late.is_waiting:
            return  # whoever waits for this rank will say so
        self._say(f"rank {rank} did not come for {self._limit_seconds:g} s; it was last seen {late.where}")
        self._give_up(1)
