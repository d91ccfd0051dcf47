"""On a device with real streams, every access that must wait for another one does: for every transport and walk."""

# ruff: noqa: F401, F811 - tests take the imported fixture `ranks` as an argument

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from offload.backends import OffloadBackend, enable_offload
from offload.config import STRATEGIES, OffloadConfig
from offload.host.pages import HostMemory
from offload.mesh import Mesh
from offload.stream.stager import BoundedAllocatorCache, PinnedModuleStager, VisitingStager
from offload.stream.staging import Span
from tests.models import Pipeline, TextEncoder, Vae, build, inputs, make, tensors_of
from tests.order import COMPUTE, RecordingDevice, RecordingEvent, RecordingStream, Trace, conflicts
from tests.ranks import PEER_LIMIT_SECONDS, RankPool, ranks

Walk = Sequence[Sequence[int] | None]
"""The blocks that each pass visits; None visits the whole ring."""

THREE_PASSES: Walk = (None, None, None)
SKIPS: Walk = ((0, 1, 3), (0, 4), None, (), None)
REPEATS: Walk = ((0, 0, 1, 1, 1, 2, 4), (1, 2, 1, 2), (3, 3), None)
REORDERS: Walk = ((4, 3, 2, 1, 0), (2,), (1, 0, 3, 2), None)


class BlockError(Exception):
    """What goes wrong inside a block."""


@dataclass(frozen=True)
class Scenario:
    """A world, how it offloads, and what it computes.

    Attributes:
        options: of the offload config, beside the strategy and what follows from the number of ranks.
        models: denoisers that share slots; each pass is one forward of each of them.
        fails: some passes end inside a block.
    """

    strategy: str
    num_ranks: int
    models: tuple[str, ...]
    walk: Walk = THREE_PASSES
    options: dict[str, Any] = field(default_factory=dict)
    fails: bool = False

    def __str__(self) -> str:
        walks = {id(SKIPS): "-skips", id(REPEATS): "-repeats", id(REORDERS): "-reorders"}
        options = "".join(f"-{name}={value}" for name, value in self.options.items())
        names = "+".join(self.models)
        fails = "-fails" if self.fails else ""
        return f"{self.strategy}-{self.num_ranks}-{names}{walks.get(id(self.walk), '')}{options}{fails}"


OPTIONS: list[dict[str, Any]] = [
    {},
]
"""Ways to offload, beside the strategy and the number of ranks: the matrix runs in each of them."""

WAYS = [("layer_wise", 1), ("dlo", 2), ("dlo", 3)]


def _matrix() -> list[Scenario]:
    scenarios = [Scenario("model_level", 1, ("stack2",))]
    for options in OPTIONS:
        for strategy, num_ranks in WAYS:
            way = partial(Scenario, strategy, num_ranks, options=options)
            rings = ("stack1", "stack2", "stack3", "stack4", "stack5", "stack7", "uneven", "uneven_repeated")
            scenarios += [way((name,)) for name in rings]
            scenarios += [way(("stack5",), walk) for walk in (SKIPS, REPEATS, REORDERS)]
            scenarios += [way(("stack3", "uneven")), way(("stack2", "stack1"), fails=True)]
            scenarios += [way(("rotary",)), way(("empty_block",))]
    # The least staging: a shard's bytes are soon the next one's.
    return scenarios + [
        Scenario("dlo", 2, (name,), options={"staging_shards": 2}) for name in ("stack3", "uneven_repeated")
    ]


SCENARIOS = _matrix()

_traces: dict[str, list[Trace]] = {}


def traces_of(ranks: RankPool, scenario: Scenario) -> list[Trace]:
    """What every rank's device was told, recorded once for all tests."""
    key = str(scenario)
    if key not in _traces:
        alone = scenario.num_ranks == 1
        _traces[key] = [record(scenario)] if alone else ranks(scenario.num_ranks).run(record, scenario)
    return _traces[key]


def record(scenario: Scenario) -> Trace:
    """Runs a scenario on this rank."""
    device = RecordingDevice()
    config = OffloadConfig.for_world(
        STRATEGIES[scenario.strategy], None, "auto", scenario.num_ranks, **scenario.options
    )
    mesh = Mesh.alone() if scenario.num_ranks == 1 else Mesh.join(device, config.dp_size, PEER_LIMIT_SECONDS)
    try:
        denoisers = {f"transformer{f'_{i + 1}' if i else ''}": build(name) for i, name in enumerate(scenario.models)}
        pipeline = Pipeline(text_encoder=make(TextEncoder), vae=make(Vae), **denoisers)
        with device.recording() as trace:
            for _ in range(2):
                backend = enable_offload(pipeline, config, device, mesh)
                compute(scenario, pipeline, list(denoisers.values()), backend, mesh.world.rank)
                backend.disable()
                change_all_weights(pipeline)
            enable_offload(pipeline, config, device, mesh).shutdown()
        return trace
    finally:
        mesh.close()


@torch.no_grad()
def compute(
    scenario: Scenario, pipeline: Pipeline, denoisers: list[nn.Module], backend: OffloadBackend, rank: int
) -> None:
    """Two requests; the ranks walk differently, and join each other at the end."""
    for request in range(2):
        x = inputs(1)[0] + pipeline.text_encoder([1, 5, 2])
        first = (rank + request) % len(scenario.walk)
        for number, visits in enumerate([*scenario.walk[first:], *scenario.walk[:first]]):
            for denoiser in denoisers:
                arguments = () if visits is None else (visits,)
                with failing_at_last(denoiser, scenario.fails and number == 1), suppress(BlockError):
                    x = denoiser(x, *arguments)
        pipeline.vae.decode(x)
        backend.join_others()


class failing_at_last:
    """Makes the last block of a denoiser fail when its forward begins, if `fails`."""

    def __init__(self, denoiser: nn.Module, fails: bool) -> None:
        self._block = denoiser.blocks[-1]
        self._fails = fails

    def __enter__(self) -> None:
        def fail(*_: Any) -> None:
            raise BlockError

        self._handle = self._block.register_forward_pre_hook(fail) if self._fails else None

    def __exit__(self, *_: Any) -> None:
        if self._handle:
            self._handle.remove()


@torch.no_grad()
def change_all_weights(pipeline: Pipeline) -> None:
    """Writes to the host memory that a model has after `disable`: nothing may be on its way from there any more."""
    for component in pipeline.components.values():
        for tensor in tensors_of(component).values():
            if tensor.is_floating_point():
                tensor.mul_(1.0)


def found(traces: Sequence[Trace]) -> list[str]:
    return [str(conflict) for trace in traces for conflict in conflicts(trace)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_everything_that_must_wait_waits(ranks: RankPool, scenario: Scenario) -> None:
    problems = found(traces_of(ranks, scenario))
    assert not problems, "\n".join(problems)
