"""Where each tensor of a block lies in one flat byte buffer.

A block's tensors are packed by *storage*, not by name: bytes that several tensors look at (ties, views, aliases) travel
once, and every tensor keeps its dtype, shape and strides. The arithmetic is pure and works on meta tensors.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.errors import PlanError

ALIGNMENT_BYTES = 256  # the device allocator's own promise is no weaker, so kernels choose the same paths
SHARD_ALIGNMENT_BYTES = 16  # the widest load of a copy kernel


@dataclass(frozen=True)
class TensorPlace:
    """One tensor as a view of the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True)
class Region:
    """A run of bytes of one source storage, and where it lies in the buffer."""

    storage: int
    start_bytes: int
    num_bytes: int
    offset_bytes: int


@dataclass(frozen=True)
class Layout:
    """The buffer of one block.

    Attributes:
        tensors: a place for each tensor, in the order in which they were packed.
        regions: what is copied from the source storages, by ascending offset.
        num_bytes: length of the buffer before it is padded for sharding.
    """

    tensors: tuple[TensorPlace, ...]
    regions: tuple[Region, ...]
    num_bytes: int

    def shard_bytes(self, num_shards: int) -> int:
        """Bytes of each of `num_shards` equal parts; the last ones may reach past `num_bytes`."""
        return _round_up(-(-self.num_bytes // num_shards), SHARD_ALIGNMENT_BYTES if num_shards > 1 else 1)

    def padded_bytes(self, num_shards: int) -> int:
        """Bytes of all shards together."""
        return self.shard_bytes(num_shards) * num_shards

    @property
    def digest(self) -> str:
        """Equal for equal layouts, on every rank."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True)
class _Span:
    """The bytes of its storage that a tensor can touch, and the size of its elements."""

    storage: int
    start: int
    stop: int
    itemsize: int


def pack(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[Layout, tuple[torch.UntypedStorage, ...]]:
    """Lays out tensors in one buffer.

    Returns:
        The layout, and the source storages that `Region.storage` counts.

    Raises:
        PlanError: a tensor is not a plain strided tensor; names it and its type.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    spans = [_span_of(name, tensor, storages) for name, tensor in named]
    numbers = {key: number for number, key in enumerate(storages)}
    regions = _lay_regions(replace(span, storage=numbers[span.storage]) for span in spans)
    places = tuple(
        _place(name, tensor, numbers[span.storage], span, regions)
        for (name, tensor), span in zip(named, spans, strict=True)
    )
    num_bytes = max((region.offset_bytes + region.num_bytes for region in regions), default=0)
    return Layout(places, regions, num_bytes), tuple(storages.values())


def overlapping_groups(named: Sequence[tuple[str, torch.Tensor]]) -> list[list[int]]:
    """Groups the tensors that share bytes: indices into `named`, each exactly once."""
    layout, _ = pack(named)
    groups: dict[int, list[int]] = {}
    starts = [region.offset_bytes for region in layout.regions]
    for index, (place, (_, tensor)) in enumerate(zip(layout.tensors, named, strict=True)):
        region = bisect_right(starts, place.offset_bytes) if tensor.numel() else -1 - index
        groups.setdefault(region, []).append(index)
    return list(groups.values())


def _span_of(name: str, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> _Span:
    _require_plain(name, tensor)
    storage = tensor.untyped_storage()
    storages.setdefault(id(storage), storage)  # kept alive, so the id stays its own
    start = int(tensor.storage_offset()) * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 0 if tensor.numel() == 0 else 1 + sum((n - 1) * int(stride) for n, stride in steps)
    return _Span(id(storage), start, start + reach * tensor.element_size(), tensor.element_size())


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise PlanError(f"{name} is a {type(tensor).__name__}; only plain tensors and parameters can be streamed")
    if tensor.layout is not torch.strided:
        raise PlanError(f"{name} has layout {tensor.layout}; only strided tensors can be streamed")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise PlanError(f"{name} is quantised, conjugated or negated by a flag; its bytes alone do not tell its values")


def _lay_regions(spans: Iterable[_Span]) -> tuple[Region, ...]:
    """Merges overlapping spans and gives each merged run an aligned place, in storage order.

    A run starts on an aligned byte, or as far behind one as its views need to stay on multiples of their element size.
    """
    merged: list[_Span] = []
    for span in sorted((s for s in spans if s.stop > s.start), key=lambda s: (s.storage, s.start)):
        last = merged[-1] if merged else None
        if last is not None and last.storage == span.storage and span.start < last.stop:
            merged[-1] = replace(last, stop=max(last.stop, span.stop), itemsize=max(last.itemsize, span.itemsize))
        else:
            merged.append(span)
    regions, end = [], 0
    for span in merged:
        offset = _round_up(end, ALIGNMENT_BYTES) + span.start % span.itemsize
        regions.append(Region(span.storage, span.start, span.stop - span.start, offset))
        end = offset + span.stop - span.start
    return tuple(regions)


def _place(name: str, tensor: torch.Tensor, storage: int, span: _Span, regions: tuple[Region, ...]) -> TensorPlace:
    offset = 0
    if span.stop > span.start:
        home = regions[bisect_right(regions, (storage, span.start), key=lambda r: (r.storage, r.start_bytes)) - 1]
        offset = home.offset_bytes + span.start - home.start_bytes
    return TensorPlace(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
