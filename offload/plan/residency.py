"""Which blocks of a component stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors import SettingsError


def resident_indices(num_blocks: int, chosen: int | Sequence[int] | str, placement: str) -> tuple[int, ...]:
    """The indices of the blocks that stay, ascending.

    A number of blocks is spread evenly, so that the link has work while each of them computes; `head` takes the first
    ones instead, which leaves the link idle meanwhile.

    Args:
        chosen: how many, which ones, or "all".

    Raises:
        SettingsError: there are no such blocks.
    """
    if chosen == "all":
        return tuple(range(num_blocks))
    if isinstance(chosen, int):
        if chosen > num_blocks:
            raise SettingsError("residency.blocks", chosen, f"the denoiser has {num_blocks} blocks")
        if placement == "head":
            return tuple(range(chosen))
        return tuple((2 * number + 1) * num_blocks // (2 * chosen) for number in range(chosen))
    listed = [int(index) for index in chosen]
    if any(not 0 <= index < num_blocks for index in listed):
        raise SettingsError("residency.blocks", listed, f"the denoiser's blocks are 0 to {num_blocks - 1}")
    return tuple(sorted(set(listed)))
