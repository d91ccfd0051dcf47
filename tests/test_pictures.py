"""Real pipelines, from prompt to pixels: every strategy on any ranks draws what the plain pipeline draws."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload.config import ModelSettings
from offload.pipelines import PictureRequest, make_picture, open_pipeline
from offload.runtime.controller import share_out
from tests.ranks import RankPool, joined, poisoned_slots, ranks  # noqa: F401 - a fixture

PROMPTS = ("a cat", "a dog", "a bird")
WAYS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "model_level": (1, "model_level", {}),
    "layer_wise": (1, "layer_wise", {}),
    "layer_wise-residents": (1, "layer_wise", {"resident_blocks": 1, "shard_fraction": 0.5}),
    "dlo-2": (2, "dlo", {}),
    "dlo-2-residents": (2, "dlo", {"resident_blocks": 1, "shard_fraction": 0.5}),
    "dlo-4": (4, "dlo", {}),
    "dlo-4-pairs": (4, "dlo", {"dp_size": 2}),
}


def ignore(step: int) -> None:
    """Nobody watches."""


def requests_for(name: str) -> list[PictureRequest]:
    extra = {"num_frames": 5} if name == "wan" else {}
    return [
        PictureRequest(index, prompt, seed=index, num_inference_steps=2, height=32, width=32, extra=extra)
        for index, prompt in enumerate(PROMPTS)
    ]


def draw(name: str, path: Path, strategy: str, options: dict[str, Any]) -> dict[int, str]:
    """This rank's pictures, by number."""
    with joined(strategy, **options) as place, poisoned_slots():
        pipeline = open_pipeline(ModelSettings(name="diffusers", path=str(path), dtype="float32"))
        backend = place.enable(pipeline)
        mine = share_out(requests_for(name), int(os.environ["WORLD_SIZE"]))[place.mesh.info.rank]
        drawn = {request.index: make_picture(pipeline, request, ignore).sha256 for request in mine}
        backend.join_others()
        backend.verify()
        backend.disable()
        for request in mine:
            assert make_picture(pipeline, request, ignore).sha256 == drawn[request.index], "plain again, and equal"
        return drawn


@pytest.fixture(scope="module")
def plain(ranks: RankPool, tiny_flux: Path, tiny_wan: Path) -> dict[str, dict[int, str]]:  # noqa: F811
    return {
        name: ranks(1).run(draw, name, path, "none", {})[0] for name, path in (("flux", tiny_flux), ("wan", tiny_wan))
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_every_way_draws_the_plain_pictures(
    ranks: RankPool,  # noqa: F811
    plain: dict[str, dict[int, str]],
    tiny_flux: Path,
    tiny_wan: Path,
    name: str,
    way: str,
) -> None:
    num_ranks, strategy, options = WAYS[way]
    path = {"flux": tiny_flux, "wan": tiny_wan}[name]
    drawn: dict[int, str] = {}
    for of_rank in ranks(num_ranks).run(draw, name, path, strategy, options):
        drawn.update(of_rank)
    assert drawn == plain[name] and len(set(drawn.values())) == len(PROMPTS)
