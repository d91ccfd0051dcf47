"""Rank zero's view: which rank does what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Work = TypeVar("Work")


def share_out(work: Sequence[Work], num_ranks: int) -> list[list[Work]]:
    """Deals `work` out like cards, so that no rank has two pieces more than another."""
    return [list(work[rank::num_ranks]) for rank in range(num_ranks)]
