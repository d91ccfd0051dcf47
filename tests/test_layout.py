"""Layouts keep every byte, alias and stride; shards are equal and hold nothing twice; other tensors are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.device import CpuDevice
from offload.errors import PlanError
from offload.host.pages import HostMemory
from offload.host.store import HostStore, copy_range
from offload.plan.layout import ALIGNMENT_BYTES, SHARD_ALIGNMENT_BYTES, Layout, overlapping_groups, pack
from offload.plan.topology import STREAMED_BUFFER_BYTES, held_tensors, split_component
from offload.stream.views import views_of
from tests.models import LARGE_BYTES, MODELS, Block, build, stack

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
NUM_SHARDS = st.integers(1, 4)


@dataclass(frozen=True)
class View:
    """A tensor as numbers, so that it can be made on any device."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def span(self) -> range:
        """The storage's bytes from the first to the last that the tensor looks at."""
        if 0 in self.shape:
            return range(0)
        reach = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return range(self.offset * self.dtype.itemsize, (self.offset + reach) * self.dtype.itemsize)


@dataclass(frozen=True)
class Source:
    """Tensors over a few storages, as a model might hold them; `repeats` are indices of objects that come once more."""

    views: tuple[View, ...]
    repeats: tuple[int, ...]

    def tensors(self, device: str = "cpu") -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        storages = {}
        for number in {view.storage: None for view in self.views}:
            size = max(view.span.stop for view in self.views if view.storage == number) + number
            content = torch.randint(256, (max(size, 1),), dtype=torch.uint8, generator=generator)
            storages[number] = content.to(device).untyped_storage()
        made = [
            torch.empty(0, dtype=view.dtype, device=device).set_(
                storages[view.storage], view.offset, view.shape, view.stride
            )
            for view in self.views
        ]
        return [
            (f"tensor{index}", tensor) for index, tensor in enumerate([*made, *(made[index] for index in self.repeats)])
        ]


@st.composite
def views(draw: st.DrawFn) -> View:
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 1, 2, 3, 5, 17)), max_size=3)))
    contiguous = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    order = draw(st.permutations(contiguous))
    stride = tuple(draw(st.sampled_from((order, tuple(draw(st.integers(0, 9)) for _ in shape)))))
    return View(draw(st.integers(0, 2)), draw(st.sampled_from(DTYPES)), shape, stride, draw(st.integers(0, 40)))


@st.composite
def sources(draw: st.DrawFn) -> Source:
    found = tuple(draw(st.lists(views(), min_size=1, max_size=7)))
    return Source(found, tuple(draw(st.lists(st.integers(0, len(found) - 1), max_size=2))))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits, so that NaN equals NaN and no copy tidies up a bool."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(bits[tensor.element_size()])


def rebuilt(layout: Layout, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return views_of(layout, torch.cat(list(shards)))


def shards_by_store(
    blocks: Sequence[Sequence[tuple[str, torch.Tensor]]], num_shards: int
) -> list[tuple[torch.Tensor, ...]]:
    """Every rank's shards of all blocks, from one store for each rank."""
    packed = [pack(block) for block in blocks]
    stores = [
        HostStore(
            HostMemory(CpuDevice(), pin=False), [layout for layout, _ in packed], rank=rank, num_shards=num_shards
        )
        for rank in range(num_shards)
    ]
    for store in stores:
        for index, (_, storages) in enumerate(packed):
            store.fill(index, storages)
        store.seal()
    return [store.shards for store in stores]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(sources(), min_size=1, max_size=3), NUM_SHARDS)
def test_shards_put_together_give_back_every_bit(blocks: list[Source], num_shards: int) -> None:
    by_rank = shards_by_store([block.tensors() for block in blocks], num_shards)
    for index, block in enumerate(blocks):
        named = block.tensors()
        layout, _ = pack(named)
        views = rebuilt(layout, [shards[index] for shards in by_rank])
        for (_, original), view in zip(named, views, strict=True):
            assert (view.dtype, view.shape, view.stride()) == (original.dtype, original.shape, original.stride())
            assert torch.equal(raw(view), raw(original))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(sources(), NUM_SHARDS)
def test_regions_are_aligned_and_shards_equal(source: Source, num_shards: int) -> None:
    layout, _ = pack(source.tensors())
    stop = 0
    for region in layout.regions:
        inside = [
            place
            for place in layout.tensors
            if 0 not in place.shape
            and region.offset_bytes <= place.offset_bytes < region.offset_bytes + region.num_bytes
        ]
        first = -(-stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert first <= region.offset_bytes < first + max(place.dtype.itemsize for place in inside)
        assert all(place.offset_bytes % place.dtype.itemsize == 0 for place in inside)
        assert len(inside) > 1 or region.offset_bytes == first, "a tensor that shares no bytes starts on an aligned one"
        stop = region.offset_bytes + region.num_bytes
    assert layout.num_bytes == stop
    shard_bytes = layout.shard_bytes(num_shards)
    assert {shard.numel() for shards in shards_by_store([source.tensors()], num_shards) for shard in shards} == {
        shard_bytes
    }
    assert layout.padded_bytes(num_shards) == num_shards * shard_bytes
    assert 0 <= layout.padded_bytes(num_shards) - layout.num_bytes < num_shards * SHARD_ALIGNMENT_BYTES
    assert num_shards == 1 or shard_bytes % SHARD_ALIGNMENT_BYTES == 0


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(sources())
def test_shared_bytes_travel_once_and_stay_shared(source: Source) -> None:
    named = source.tensors()
    layout, _ = pack(named)
    looked_at = {(view.storage, byte) for view in source.views for byte in view.span}
    assert sum(region.num_bytes for region in layout.regions) == len(looked_at)
    everything = [*source.views, *(source.views[index] for index in source.repeats)]
    for one, other in combinations(range(len(everything)), 2):
        a, b = everything[one], everything[other]
        if (
            a.storage == b.storage
            and a.span
            and b.span
            and max(a.span.start, b.span.start) < min(a.span.stop, b.span.stop)
        ):
            distance = layout.tensors[one].offset_bytes - layout.tensors[other].offset_bytes
            assert distance == a.span.start - b.span.start


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(sources())
def test_groups_are_the_tensors_whose_bytes_overlap(source: Source) -> None:
    everything = [*source.views, *(source.views[index] for index in source.repeats)]
    expected = [{index} for index in range(len(everything))]
    for one, other in combinations(range(len(everything)), 2):
        a, b = everything[one], everything[other]
        overlap = a.storage == b.storage and max(a.span.start, b.span.start) < min(a.span.stop, b.span.stop)
        if overlap and not any({one, other} <= group for group in expected):
            joined = [group for group in expected if one in group or other in group]
            expected = [group for group in expected if group not in joined] + [set().union(*joined)]
    groups = overlapping_groups(source.tensors())
    assert sorted(map(sorted, groups)) == sorted(map(sorted, expected))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(sources(), st.data())
def test_any_range_is_that_range_of_the_whole(source: Source, data: st.DataObject) -> None:
    layout, storages = pack(source.tensors())
    whole, reach = torch.full((layout.num_bytes + 64,), 0xFF, dtype=torch.uint8), layout.num_bytes + 64
    copy_range(layout, storages, 0, whole)
    start = data.draw(st.integers(0, reach))
    part = torch.full((data.draw(st.integers(0, reach - start)),), 0xFF, dtype=torch.uint8)
    copy_range(layout, storages, start, part)
    assert torch.equal(part, whole[start : start + len(part)])
    covered = torch.zeros(reach, dtype=torch.bool)
    for region in layout.regions:
        covered[region.offset_bytes : region.offset_bytes + region.num_bytes] = True
    assert not whole[~covered].any(), "bytes of no region must be zero, or two ranks' padding differs"


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(sources())
def test_meta_tensors_have_the_same_layout(source: Source) -> None:
    layout, _ = pack(source.tensors())
    sketched, _ = pack(source.tensors("meta"))
    assert sketched == layout and sketched.digest == layout.digest


def test_digest_tells_layouts_apart() -> None:
    def digest(tensor: torch.Tensor, name: str = "w") -> str:
        return pack([(name, tensor)])[0].digest

    square = torch.zeros(4, 4)
    others = [digest(square, "v"), digest(square.t()[:, :3]), digest(square.view(2, 8)), digest(square.int())]
    assert digest(torch.ones(4, 4)) == digest(square)
    assert digest(square) not in others and len(set(others)) == len(others)


def test_no_tensors_make_an_empty_layout() -> None:
    layout, storages = pack([])
    assert (layout.num_bytes, layout.shard_bytes(3), layout.padded_bytes(3), storages) == (0, 0, 0, ())


@pytest.mark.parametrize("name", MODELS)
def test_case_01_every_tensor_has_one_owner(name: str) -> None:
    model = build(name)
    blocks = list({id(block): block for block in model.blocks}.values())
    split = split_component(model, blocks, prefix="transformer")
    owned = [held for part in (*split.by_block, split.remainder) for held in part]
    assert sorted(held.name for held in owned) == sorted(held.name for held in held_tensors(model, "transformer"))
    for block, part in zip(blocks, split.by_block, strict=True):
        inside = {id(tensor) for tensor in (*block.parameters(), *block.buffers())}
        assert {id(held.tensor) for held in part} <= inside
    for one, other in combinations((*split.by_block, split.remainder), 2):
        layout, _ = pack([(held.name, held.tensor) for held in (*one, *other)])
        apart = (
            pack([(h.name, h.tensor) for h in one])[0].regions + pack([(h.name, h.tensor) for h in other])[0].regions
        )
        assert len(layout.regions) == len(apart), "two owners share bytes"


def test_only_large_buffers_travel() -> None:
    model = build("mixed")
    travelling = {held.name for part in split_component(model, model.blocks).by_block for held in part}
    assert LARGE_BYTES == STREAMED_BUFFER_BYTES
    assert "blocks.0.many_codes" in travelling and "blocks.0.norm.weight" in travelling
    assert not travelling & {f"blocks.0.{name}" for name in ("few_codes", "order", "mask")}


def test_shared_tensors_stay_and_others_travel() -> None:
    model = build("tied_to_each_other")
    travelling = {held.name for part in split_component(model, model.blocks).by_block for held in part}
    stay = {
        "blocks.0.linear.weight",
        "blocks.4.linear.weight",
        "blocks.3.linear.weight",
        "head.weight",
        "blocks.1.norm.weight",
        "blocks.1.norm.bias",
        "blocks.2.norm.weight",
        "blocks.2.norm.bias",
    }
    in_blocks = {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith("blocks.")}
    assert travelling == in_blocks - stay


def test_neighbours_in_one_storage_travel_apart() -> None:
    """Weights cut one after another from a flat storage share no byte, however oddly they are aligned."""
    model = stack(3)
    flat = torch.randn(sum(parameter.numel() for parameter in model.parameters()) + 1)
    start = 1
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    model.blocks[0].shift.data = torch.randn(15)
    model.blocks[1].shift.data = flat[1:16]
    split = split_component(model, model.blocks)
    for block, part in zip(model.blocks, split.by_block, strict=True):
        missing = {name for name, _ in block.named_parameters()} - {held.name.split(".", 2)[2] for held in part}
        assert missing <= {"shift"}


class Wrapped(torch.Tensor):
    """Stands for the wrappers of quantisation libraries."""


def wrapped() -> nn.Module:
    block = Block()
    block.linear.weight = nn.Parameter(torch.randn(16, 16).as_subclass(Wrapped))
    return block


def uninitialised() -> nn.Module:
    block = Block()
    block.linear = nn.LazyLinear(16)
    return block


def with_buffer(tensor: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        block = Block()
        block.register_buffer("odd", tensor())
        return block

    return make


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (wrapped, r"blocks\.1\.linear\.weight"),
    "uninitialised": (uninitialised, r"blocks\.1\.linear\.weight"),
    "sparse": (with_buffer(lambda: torch.eye(3).to_sparse()), r"blocks\.1\.odd"),
    "sparse_csr": (with_buffer(lambda: torch.eye(3).to_sparse_csr()), r"blocks\.1\.odd"),
    "quantised": (
        with_buffer(lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)),
        r"blocks\.1\.odd",
    ),
    "conjugated": (with_buffer(lambda: torch.ones(3, dtype=torch.complex64).conj()), r"blocks\.1\.odd"),
    "negated": (with_buffer(lambda: torch.ones(3, dtype=torch.complex64).conj().imag), r"blocks\.1\.odd"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules|Sparse CSR|.*quantize_per_tensor")
@pytest.mark.parametrize("kind", REFUSED)
def test_case_29_what_cannot_be_packed_is_named(kind: str) -> None:
    """A tensor that is more than bytes, dtype, shape and strides would come back as another one."""
    make, name = REFUSED[kind]
    model = stack(3)
    model.blocks[1] = make()
    with pytest.raises(PlanError, match=name):
        split_component(model, model.blocks)
