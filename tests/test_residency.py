"""Residency: what stays on the device changes no bit, and relieves the link by exactly its own bytes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from offload.backends import OffloadFigures
from offload.plan.residency import resident_indices
from offload.stream.residents import kept_bytes
from offload.stream.tags import TAG_BYTES
from tests.models import Pipeline, TextEncoder, Vae, build, inputs, make, same
from tests.ranks import RankPool, joined, poisoned_slots, ranks  # noqa: F401 - a fixture

NUM_BLOCKS = 5
BLOCKS = (0, 3, "all", (1, 4))
FRACTIONS = (0.0, 0.25, 0.5, 1.0)


@torch.no_grad()
def run_everything(blocks: Any, fraction: float, placement: str) -> tuple[OffloadFigures, OffloadFigures, int, int]:
    """Three requests with everything that moves residents between them; figures after the first and the last forward."""
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
        gaps = {b - a for a, b in zip(indices, indices[1:], strict=False)}
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert resident_indices(num_blocks, chosen, "head") == tuple(range(chosen))
