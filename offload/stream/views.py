"""Tensors cut from flat byte buffers, as a layout says."""

from __future__ import annotations

from bisect import bisect_right

import torch

from offload.plan.layout import ALIGNMENT_BYTES, Layout, Region, TensorPlace


def views_of(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The layout's tensors as views of `buffer`, a uint8 tensor that starts on an aligned address."""
    with torch.inference_mode(False):
        return [_view(place, buffer, 0) for place in layout.tensors]


def plain_views(layout: Layout, whole: torch.Tensor) -> list[torch.Tensor]:
    """The layout's tensors on the bytes of `whole`, a uint8 host tensor, as a model has them that was never packed.

    Tensors that shared bytes share a storage and the others do not, so that they can be saved. Nothing is copied.
    """
    homes = [(first_byte(region), _storage_over(whole, region)) for region in layout.regions]
    return _cut(layout, homes)


def separate_views(layout: Layout, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The layout's tensors where each region lies in a buffer of its own, which starts at its `first_byte`."""
    return _cut(layout, [(first_byte(region), buffer) for region, buffer in zip(layout.regions, buffers, strict=True)])


def first_byte(region: Region) -> int:
    """The aligned byte of the layout at or before the region's start: where a buffer of its own begins."""
    return region.offset_bytes - region.offset_bytes % ALIGNMENT_BYTES


def _cut(layout: Layout, homes: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    starts = [start for start, _ in homes]
    nothing = torch.empty(0, dtype=torch.uint8, device=homes[0][1].device if homes else "cpu")
    views = []
    with torch.inference_mode(False):
        for place in layout.tensors:
            start, buffer = (
                homes[bisect_right(starts, place.offset_bytes) - 1] if 0 not in place.shape else (0, nothing)
            )
            views.append(_view(place, buffer, start))
    return views


def _view(place: TensorPlace, buffer: torch.Tensor, first: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=place.dtype, device=buffer.device)
    offset = (buffer.storage_offset() + place.offset_bytes - first) // place.dtype.itemsize
    return empty.set_(buffer.untyped_storage(), offset if 0 not in place.shape else 0, place.shape, place.stride)


def _storage_over(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """A tensor with a storage of its own over the region's bytes; it keeps `whole` alive."""
    first = first_byte(region)
    count = region.offset_bytes + region.num_bytes - first
    return torch.frombuffer(whole.numpy(), dtype=torch.uint8, offset=first, count=count)
