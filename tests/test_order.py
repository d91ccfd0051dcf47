"""On a device with real streams everything that has to wait does: over every transport, ring and walk."""

# ruff: noqa: F401, F811 - tests take the imported fixture `ranks` as an argument

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import nn

from offload.backends import enable_offload
from offload.config import STRATEGIES, OffloadConfig
from offload.host.pages import HostMemory
from offload.mesh import Mesh
from offload.stream.stager import PinnedModuleStager
from offload.stream.turns import Turns
from tests.models import Block, Denoiser, Pipeline, TextEncoder, Vae, build, inputs, make, stack, tensors_of
from tests.order import RecordingDevice, Trace, conflicts, written_sites
from tests.ranks import PEER_LIMIT_SECONDS, RankPool, ranks

WALKS: dict[str, Sequence[Sequence[int] | None]] = {
    "": (None, None, None),
    "skips": ((0, 1, 3), (0, 4), None, (), None),
    "repeats": ((0, 0, 1, 1, 1, 2, 4), (1, 2, 1, 2), (3, 3), None),
    "reorders": ((4, 3, 2, 1, 0), (2,), (1, 0, 3, 2), None),
}
"""The blocks that each pass visits; None stands for the whole ring."""


@dataclass(frozen=True)
class Scenario:
    """A world, how it offloads, and what it computes.

    Attributes:
        models: denoisers that share slots; a pass is one forward of each of them.
        options: of the offload config, beside the strategy and what follows from the number of ranks.
        fails: in some passes a block raises.
        alone: the pipeline has no other components.
        lends: the host writes to weights at rest between requests.
    """

    strategy: str
    num_ranks: int
    models: tuple[str, ...]
    walk: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    fails: bool = False
    alone: bool = False
    lends: bool = False

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        flags = [name for name in ("fails", "alone", "lends") if getattr(self, name)]
        parts = [self.strategy, str(self.num_ranks), "+".join(self.models), self.walk, *options, *flags]
        return "-".join(part for part in parts if part)


WAYS = [("layer_wise", 1), ("dlo", 2), ("dlo", 3)]
OPTIONS: list[dict[str, Any]] = [
    {"resident_blocks": 1, "shard_fraction": 0.5},
    {"staging_shards": 2},  # the least: a shard's bytes are soon the next one's
]
"""Further ways to offload; a part of the matrix runs in each of them."""


def _matrix() -> list[Scenario]:
    scenarios = [Scenario("model_level", 1, ("stack2",)), Scenario("model_level", 1, ("rotary", "uneven"))]
    for strategy, num_ranks in WAYS:
        way = partial(Scenario, strategy, num_ranks)
        scenarios += [way((f"stack{num_blocks}",)) for num_blocks in range(1, 8)]
        scenarios += [way((name,)) for name in ("uneven", "uneven_repeated", "empty_block", "rotary")]
        scenarios += [way(("stack5",), walk) for walk in WALKS if walk]
        scenarios += [way(("stack3", "uneven")), way(("stack2", "stack1"), fails=True), way(("bare",), alone=True)]
    for options in OPTIONS:
        for strategy, num_ranks in WAYS:
            if "staging_shards" in options and num_ranks == 1:
                continue
            way = partial(Scenario, strategy, num_ranks, options=options)
            scenarios += [way(("stack1",)), way(("uneven_repeated", "stack2")), way(("stack5",), "skips", fails=True)]
    return scenarios


BORROWING = Scenario("layer_wise", 1, ("bare",), lends=True)
STAGING = Scenario("stager", 1, ("stack2",))
SCENARIOS = [*_matrix(), BORROWING, STAGING]


class BareDenoiser(nn.Module):
    """Blocks and nothing else, so that all of it travels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class BlockError(Exception):
    """What goes wrong inside a block."""


def denoiser(name: str) -> Any:
    own: dict[str, Callable[[], nn.Module]] = {"bare": BareDenoiser, "stack6": partial(stack, 6)}
    return make(own[name]) if name in own else build(name)


def record(scenario: Scenario) -> Trace:
    """What this rank's device is told in a scenario: requests, plain weights again, and requests until the end."""
    if scenario == STAGING:
        return record_stager(scenario)
    device = RecordingDevice()
    config = OffloadConfig.for_world(
        STRATEGIES[scenario.strategy], None, "auto", scenario.num_ranks, **scenario.options
    )
    mesh = Mesh.alone() if scenario.num_ranks == 1 else Mesh.join(device, config.dp_size, PEER_LIMIT_SECONDS)
    paths = ("transformer", "transformer_2")
    denoisers = dict(zip(paths, map(denoiser, scenario.models), strict=False))
    others = {} if scenario.alone else {"text_encoder": make(TextEncoder), "vae": make(Vae)}
    pipeline = Pipeline(**denoisers, **others)
    try:
        with device.recording() as trace, torch.no_grad():
            for num_requests, end in ((2, methodcaller("disable")), (1, methodcaller("shutdown"))):
                backend = enable_offload(pipeline, config, device, mesh)
                if scenario.alone:
                    next(iter(denoisers.values())).blocks[0](inputs(1)[0])  # a visit before any turn
                for request in range(num_requests):
                    compute(scenario, pipeline, list(denoisers.values()), mesh.world.rank + request)
                    if scenario.lends:
                        change_lent_weights(denoisers.values())
                backend.join_others()
                end(backend)
                change_plain_weights(pipeline)
        return trace
    finally:
        mesh.close()


def compute(scenario: Scenario, pipeline: Any, denoisers: Sequence[Any], first: int) -> None:
    """One request; ranks that begin with different passes visit different blocks."""
    x = inputs(1)[0]
    if not scenario.alone:
        x = x + pipeline.text_encoder([1, 5, 2])
    walk = WALKS[scenario.walk]
    first %= len(walk)
    for number, visits in enumerate([*walk[first:], *walk[:first]]):
        for model in denoisers:
            with suppress(BlockError), failing(model.blocks[-1], scenario.fails and number == 1):
                x = model(x) if visits is None else model(x, visits)
    if not scenario.alone:
        pipeline.vae.decode(x)


@contextmanager
def failing(block: nn.Module, fails: bool) -> Iterator[None]:
    def fail(*_: Any) -> None:
        if fails:
            raise BlockError

    handle = block.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def change_plain_weights(pipeline: Any) -> None:
    """Writes to all weights that are back on the host: nothing may be on its way from there any more."""
    for component in pipeline.components.values():
        for tensor in tensors_of(component).values():
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.mul_(1.0)


def change_lent_weights(models: Iterable[Any]) -> None:
    """Writes to weights where they rest, right behind a request whose copies may still be on their way."""
    for model in models:
        for block in model.blocks:
            block.linear.weight.detach().mul_(1.0)


def record_stager(scenario: Scenario) -> Trace:
    """A stager by itself: its master is the host's again as soon as the module has left the device."""
    device, module = RecordingDevice(), denoiser(scenario.models[0])
    with device.recording() as trace, torch.no_grad():
        stager = PinnedModuleStager(module, device, pin_memory=False)
        for _ in range(2):
            stager.load()
            stager.offload()
            change_plain_weights(Pipeline(module=module))
    return trace


def record_on_all(ranks: RankPool, scenario: Scenario) -> list[Trace]:
    """What the device of every rank is told."""
    return [record(scenario)] if scenario.num_ranks == 1 else ranks(scenario.num_ranks).run(record, scenario)


def found(traces: Sequence[Trace], **changes: Any) -> str:
    """The conflicts of all ranks, as text; empty if there are none."""
    return "\n".join({str(conflict): None for trace in traces for conflict in conflicts(trace, **changes)})


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_whatever_has_to_wait_waits(ranks: RankPool, scenario: Scenario) -> None:
    traces = record_on_all(ranks, scenario)
    assert not found(traces)
    for trace in traces:
        assert trace.sites() <= set(written_sites()), "streams are ordered outside the rooms for it"


def test_several_components_share_a_stagers_turn() -> None:
    device = RecordingDevice()
    memory = HostMemory(device, False)
    x = inputs(1)[0]
    group = [make(lambda: stack(2)), make(lambda: stack(1))]
    visiting = {path: build("rotary", seed) for seed, path in enumerate(("one", "two"))}
    with device.recording() as trace, torch.no_grad():
        x = x.to(device.torch)
        stager = PinnedModuleStager(group, device, pin_memory=False)
        turns = Turns(device, memory)
        for path, module in visiting.items():
            turns.add(path, module)
        for _ in range(3):
            stager.load()
            x = group[1](group[0](x))
            turns.take("one")
            x = visiting["one"](x)
            stager.offload()
            x = visiting["two"](x)  # which asks for its turn
            x = group[0](x.cpu())  # on the host, from the master
        device.synchronize()
        stager.restore()
        turns.restore()
        change_plain_weights(Pipeline(**visiting, group=nn.ModuleList(group)))
    assert not found([trace])


class Bench:
    """A device with two streams, a buffer, and some work that tests of the checker put on them."""

    def __init__(self) -> None:
        self.device = RecordingDevice()
        self.buffer = self.device.empty(64)
        self.source = torch.ones(64, dtype=torch.uint8)
        self.one, self.two, self.three = (self.device.stream() for _ in range(3))

    def write(self, stream: Any, start: int = 0, stop: int = 64) -> None:
        with self.device.on(stream):
            self.buffer[start:stop].copy_(self.source[start:stop], non_blocking=True)

    def read(self, stream: Any, start: int = 0, stop: int = 64) -> torch.Tensor:
        with self.device.on(stream):
            return self.buffer[start:stop] + 1

    def order(self, first: Any, second: Any) -> None:
        event = self.device.event()
        event.record(first)
        event.wait(second)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.device.recording():
        yield bench


def test_a_missing_wait_is_found(bench: Bench) -> None:
    bench.write(bench.one)
    bench.read(bench.two)
    report = found([bench.device.trace])
    for part in ("copy_ writes on stream 2", "add reads on stream 3", "bytes 0 to 64 of the 64 device bytes of Bench"):
        assert part in report
    assert report.count("test_order.py:") == 5, "where the work, the streams and the buffer come from"


def test_a_wait_orders(bench: Bench) -> None:
    bench.write(bench.one)
    bench.order(bench.one, bench.two)
    bench.read(bench.two)
    bench.order(bench.two, bench.one)
    bench.write(bench.one)
    assert not found([bench.device.trace])


def test_order_passes_on_through_a_third_stream(bench: Bench) -> None:
    bench.write(bench.one)
    bench.order(bench.one, bench.three)
    bench.order(bench.three, bench.two)
    bench.read(bench.two)
    assert not found([bench.device.trace])


def test_a_wait_is_for_the_last_record_before_it(bench: Bench) -> None:
    event = bench.device.event()
    event.record(bench.one)
    bench.write(bench.one)
    event.wait(bench.two)
    event.record(bench.one)
    bench.read(bench.two)
    assert found([bench.device.trace])


def test_a_wait_for_nothing_orders_nothing(bench: Bench) -> None:
    bench.write(bench.one)
    bench.device.event().wait(bench.two)
    bench.read(bench.two)
    assert found([bench.device.trace])


def test_a_wait_is_for_one_stream(bench: Bench) -> None:
    bench.write(bench.one)
    bench.order(bench.one, bench.three)
    bench.read(bench.two)
    assert found([bench.device.trace])


def test_reads_need_no_order_and_neither_do_other_bytes(bench: Bench) -> None:
    bench.device.synchronize()
    bench.read(bench.one)
    bench.read(bench.two)
    bench.write(bench.three, 0, 0)
    assert not found([bench.device.trace])
    bench.device.synchronize()
    bench.write(bench.one, 0, 20)
    bench.write(bench.two, 20, 40)
    bench.read(bench.three, 40, 64)
    assert not found([bench.device.trace])
    bench.read(bench.three, 39, 64)
    assert found([bench.device.trace])


def test_the_host_waits_for_a_copy_that_blocks_and_no_other(bench: Bench) -> None:
    there = torch.empty(64, dtype=torch.uint8)
    with bench.device.on(bench.one):
        there.copy_(bench.buffer)
    there.fill_(0)
    assert not found([bench.device.trace])
    with bench.device.on(bench.one):
        there.copy_(bench.buffer, non_blocking=True)
    there.fill_(0)
    assert "fill_ writes on the host" in found([bench.device.trace])


def test_the_host_must_wait_for_the_event_behind_a_copy_that_it_reads(bench: Bench) -> None:
    there = torch.empty(64, dtype=torch.uint8)
    event = bench.device.event()
    for _ in range(2):
        with bench.device.on(bench.one):
            there.copy_(bench.buffer, non_blocking=True)
            event.record()
        event.synchronize()
        there.tolist()
    assert not found([bench.device.trace])
    with bench.device.on(bench.one):
        there.copy_(bench.buffer, non_blocking=True)
    there.tolist()
    assert "tolist reads on the host" in found([bench.device.trace])


@pytest.mark.parametrize("answer", [torch.Tensor.tolist, torch.Tensor.cpu, lambda tensor: tensor[0].item()])
def test_the_host_waits_for_what_it_reads(bench: Bench, answer: Callable[[torch.Tensor], Any]) -> None:
    bench.write(bench.one)
    with bench.device.on(bench.one):
        answer(bench.buffer)
    bench.read(bench.two)
    assert not found([bench.device.trace])


def test_work_that_starts_before_its_memory_is_handed_over_is_found() -> None:
    device = RecordingDevice()
    copy_stream = device.stream()
    with device.recording() as trace:
        buffer = device.empty(64)
        with device.on(copy_stream):
            buffer.zero_()
    assert "its allocation writes on the compute stream" in found([trace])


def test_memory_that_is_freed_while_another_stream_works_on_it_is_found() -> None:
    device = RecordingDevice()
    copy_stream = device.stream()
    with device.recording() as trace:
        buffer = device.empty(64)
        device.synchronize()
        with device.on(copy_stream):
            buffer.zero_()
        assert not found([trace])
        del buffer
    assert "its release writes on the compute stream" in found([trace])


def test_memory_that_is_used_again_makes_no_conflict() -> None:
    device = RecordingDevice()
    copy_stream = device.stream()
    addresses = []
    with device.recording() as trace:
        for stream in (copy_stream, device.current_stream()) * 50:
            with device.on(stream):
                buffer = torch.zeros(1 << 16, device=device.torch)
                addresses.append(buffer.data_ptr())
                del buffer
    assert len(set(addresses)) < len(addresses), "the allocator handed nothing out again"
    assert not found([trace])
