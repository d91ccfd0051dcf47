"""Residency: what stays on the device changes no bit, and relieves the link by exactly its own bytes."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.backends import OffloadFigures
from offload.plan.residency import resident_indices
from offload.stream.residents import kept_bytes
from offload.stream.tags import TAG_BYTES
from tests.models import Pipeline, TextEncoder, Vae, build, bytes_of, inputs, make, same
from tests.ranks import RankPool, joined, poisoned_slots, ranks  # noqa: F401 - a fixture

NUM_BLOCKS = 5
BLOCKS = (0, 3, "all", (1, 4))
FRACTIONS = (0.0, 0.25, 0.5, 1.0)


@torch.no_grad()
def run_everything(blocks: Any, fraction: float, placement: str) -> tuple[OffloadFigures, OffloadFigures, int, int]:
    """Everything that moves residents, between requests; the figures after the first forward and after the third."""
    strategy = "dlo" if int(os.environ["WORLD_SIZE"]) > 1 else "layer_wise"
    residency = {"resident_blocks": blocks, "shard_fraction": fraction, "resident_placement": placement}
    with joined(strategy, **residency) as place, poisoned_slots():
        model, plain = build(f"stack{NUM_BLOCKS}"), build(f"stack{NUM_BLOCKS}")
        pipeline = Pipeline(transformer=model, text_encoder=make(TextEncoder), vae=make(Vae))
        backend = place.enable(pipeline)
        x = inputs(1)[0]
        assert same(model(x), plain(x))
        first = backend.figures()
        for again in inputs(2):
            assert same(model(again), plain(again))
        last = backend.figures()
        loaded_bytes = place.device.held_bytes
        backend.offload_resident_layers()
        rested_bytes = place.device.held_bytes
        assert same(model(x), plain(x))
        pipeline.text_encoder([1])
        assert same(model(x), plain(x))
        backend.offload_resident_layers()
        backend.load_resident_layers()
        assert same(model(x), plain(x))
        backend.disable()
        assert all(same(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        return first, last, loaded_bytes, rested_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_residents_change_no_bit_and_relieve_the_link_exactly(
    ranks: RankPool,  # noqa: F811
    num_ranks: int,
    blocks: Any,
    fraction: float,
) -> None:
    for first, last, loaded_bytes, rested_bytes in ranks(num_ranks).run(run_everything, blocks, fraction, "even"):
        stays = resident_indices(NUM_BLOCKS, blocks, "even")
        shard_bytes = first.host_weight_bytes // NUM_BLOCKS  # equal blocks, whose size needs no padding
        block_bytes = (shard_bytes - (TAG_BYTES if num_ranks > 1 else 0)) * num_ranks
        kept = kept_bytes(shard_bytes, fraction)
        num_streaming = NUM_BLOCKS - len(stays)
        assert last.resident_bytes == len(stays) * block_bytes + num_streaming * kept
        assert loaded_bytes - rested_bytes == last.resident_bytes
        assert last.h2d_bytes - first.h2d_bytes == 2 * num_streaming * (shard_bytes - kept)
        if fraction == 1 or num_streaming == 0:
            assert last.h2d_bytes == 0
        assert last.streamed_block_bytes == num_streaming * block_bytes


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_placement_changes_no_bit(ranks: RankPool, num_ranks: int) -> None:  # noqa: F811
    ranks(num_ranks).run(run_everything, 2, 0.5, "head")


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 57])
def test_a_number_of_blocks_is_spread_evenly(num_blocks: int) -> None:
    for chosen in range(num_blocks + 1):
        indices = resident_indices(num_blocks, chosen, "even")
        assert len(set(indices)) == chosen and all(0 <= index < num_blocks for index in indices)
        gaps = {b - a for a, b in itertools.pairwise(indices)}
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert resident_indices(num_blocks, chosen, "head") == tuple(range(chosen))


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True)
class Spec:
    """One weight of a random block: a view of some elements of its own storage, or of the previous weight's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    transposed: bool
    shares: bool


specs = st.builds(
    Spec,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
)


class RandomBlock(nn.Module):
    """Hands out the bytes of its weights."""

    def __init__(self, specs: Sequence[Spec], generator: torch.Generator) -> None:
        super().__init__()
        previous = None
        for number, spec in enumerate(specs):
            if spec.shares and previous is not None:
                weight = previous.detach()[..., :1] if previous.dim() else previous.detach()
            else:
                num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
                raw = torch.randint(0, 2, (num_bytes,), generator=generator, dtype=torch.uint8)
                weight = raw.view(spec.dtype).view(spec.shape)
            weight = weight.mT if spec.transposed and weight.dim() > 1 else weight
            previous = nn.Parameter(weight, requires_grad=False)
            self.register_parameter(f"weight{number}", previous)

    def forward(self, seen: list[bytes]) -> list[bytes]:
        return [*seen, *(bytes_of(weight) for weight in self.parameters())]


class RandomDenoiser(nn.Module):
    def __init__(self, blocks: Sequence[Sequence[Spec]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(RandomBlock(block, generator) for block in blocks)

    def forward(self, seen: list[bytes]) -> list[bytes]:
        for block in self.blocks:
            seen = block(seen)
        return seen


@torch.no_grad()
def bytes_arrive(blocks: Sequence[Sequence[Spec]], fraction: float) -> bool:
    strategy = "dlo" if int(os.environ["WORLD_SIZE"]) > 1 else "layer_wise"
    model = RandomDenoiser(blocks)
    expected = model([])
    with joined(strategy, shard_fraction=fraction) as place, poisoned_slots():
        backend = place.enable(Pipeline(transformer=model))
        arrived = [model([]) for _ in range(3)]
        backend.disable()
        return [*arrived, model([])] == [expected] * 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_byte_of_any_layout_arrives(ranks: RankPool, num_ranks: int) -> None:  # noqa: F811
    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.lists(specs, min_size=1, max_size=5), min_size=1, max_size=4),
        st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    )
    def check(blocks: list[list[Spec]], fraction: float) -> None:
        assert all(ranks(num_ranks).run(bytes_arrive, blocks, fraction))

    check()
