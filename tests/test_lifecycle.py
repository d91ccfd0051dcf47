"""From enable to disable: failures on the way, pinned memory, other threads, addresses, the host's cost of a visit."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.backends import enable_offload
from offload.config import OffloadConfig, OffloadStrategy
from offload.device import CpuDevice, PinningUnavailable
from offload.errors import PlanError, WeightAwayError
from offload.host.pages import HostMemory, HostPages
from tests.models import Pipeline, TextEncoder, Vae, build, differing, inputs, make, same

STREAMING = OffloadConfig(strategy=OffloadStrategy.LAYER_WISE)
CONFIGS = {
    "none": OffloadConfig(strategy=OffloadStrategy.NONE),
    "model_level": OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL),
    "layer_wise": STREAMING,
    "residents": OffloadConfig(strategy=OffloadStrategy.LAYER_WISE, resident_blocks=1, shard_fraction=0.5),
}
MICROSECONDS_PER_VISIT = 150


def pipeline_of(name: str = "stack3") -> Pipeline:
    return Pipeline(transformer=build(name), text_encoder=make(TextEncoder), vae=make(Vae))


class FailingDevice(CpuDevice):
    """Runs out of memory at one allocation."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.num_allocations = 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        self.num_allocations += 1
        if self.num_allocations == self.fails_at:
            raise MemoryError("no device memory")
        return super().empty(num_bytes)


def assert_untouched(pipeline: Pipeline) -> None:
    fresh = pipeline_of()
    for name, module in pipeline.components.items():
        assert not differing(module, fresh.components[name])
        assert not any(
            part._forward_hooks or part._forward_pre_hooks or "_apply" in vars(part) for part in module.modules()
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_failure_at_any_device_allocation_leaves_the_model_as_it_was(name: str) -> None:
    probe = FailingDevice(0)
    enable_offload(pipeline_of(), CONFIGS[name], probe)
    for fails_at in range(1, probe.num_allocations + 1):
        pipeline = pipeline_of()
        with pytest.raises(MemoryError, match="no device memory"):
            enable_offload(pipeline, CONFIGS[name], FailingDevice(fails_at))
        assert_untouched(pipeline)
        enable_offload(pipeline, CONFIGS[name], CpuDevice())
        with torch.no_grad():
            assert same(pipeline.transformer(inputs(1)[0]), build("stack3")(inputs(1)[0]))


@pytest.mark.parametrize("name", ["model_level", "layer_wise", "residents"])
def test_a_failure_at_any_host_allocation_leaves_the_model_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pages, calls = HostPages.__init__, [0, 0]

    def failing(self: HostPages, num_bytes: int) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise MemoryError("no host memory")
        make_pages(self, num_bytes)

    monkeypatch.setattr(HostPages, "__init__", failing)
    enable_offload(pipeline_of(), CONFIGS[name], CpuDevice())
    for fails_at in range(1, calls[0] + 1):
        calls[:] = [0, fails_at]
        pipeline = pipeline_of()
        with pytest.raises(MemoryError, match="no host memory"):
            enable_offload(pipeline, CONFIGS[name], CpuDevice())
        assert_untouched(pipeline)
        calls[:] = [0, 0]


class PinningDevice(CpuDevice):
    """Registers host memory, as far as `limit` calls."""

    gains_by_pinning = True

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.num_calls = 0
        self.registered: dict[int, int] = {}

    def register_host(self, address: int, num_bytes: int) -> None:
        self.num_calls += 1
        if self.num_calls > self.limit:
            raise PinningUnavailable("out of memory")
        self.registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        del self.registered[address]


def test_case_04_when_pinning_fails_memory_stays_pageable_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    device, pipeline = PinningDevice(limit=1), pipeline_of()
    with caplog.at_level(logging.WARNING):
        backend = enable_offload(pipeline, STREAMING, device)
    assert [record.message for record in caplog.records] == [
        "host weights stay pageable, copies will be slower: out of memory"
    ]
    assert device.num_calls == 2
    figures = backend.figures()
    assert 0 < figures.pinned_bytes < figures.host_weight_bytes + figures.staged_bytes
    with torch.no_grad():
        assert same(pipeline.transformer(inputs(1)[0]), build("stack3")(inputs(1)[0]))
    backend.disable()
    assert not device.registered
    assert_untouched(pipeline)


@pytest.mark.parametrize("num_bytes", [int(129.5 * 2**20), 2**27 + 1])
def test_case_03_pinned_bytes_are_exact(num_bytes: int) -> None:
    device = PinningDevice(limit=9)
    memory = HostMemory(device, pin=True)
    pages = memory.allocate(num_bytes)
    memory.pin(pages)
    assert pages.tensor.numel() == num_bytes and sum(device.registered.values()) == memory.pinned_bytes == num_bytes
    memory.close()
    assert not device.registered


def test_case_24_pinning_that_is_off_is_off() -> None:
    device, config = PinningDevice(limit=9), OffloadConfig(strategy=OffloadStrategy.LAYER_WISE, pin_cpu_memory=False)
    backend = enable_offload(pipeline_of(), config, device)
    assert backend.figures().pinned_bytes == device.num_calls == 0


def test_case_24_resident_blocks_are_reported() -> None:
    config = OffloadConfig(strategy=OffloadStrategy.LAYER_WISE, resident_blocks=2)
    figures = enable_offload(pipeline_of(), config, CpuDevice()).figures()
    assert figures.resident_bytes == 2 * figures.streamed_block_bytes  # of three equal blocks


def test_any_thread_may_run_the_model_in_any_inference_mode() -> None:
    pipeline, plain = pipeline_of(), build("stack3")
    with torch.inference_mode():
        backend = enable_offload(pipeline, STREAMING, CpuDevice())
    results: list[bool] = []

    def run(mode: Callable) -> None:
        with mode():
            results.extend(same(pipeline.transformer(x), plain(x)) for x in inputs(2))

    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        thread = threading.Thread(target=run, args=(mode,))
        thread.start()
        thread.join()
        run(mode)
    assert results == [True] * 12
    backend.disable()
    assert_untouched(pipeline)


@pytest.mark.parametrize(("name", "num_addresses"), [("stack2", 1), ("stack3", 2), ("stack5", 2), ("stack1", 2)])
@torch.no_grad()
def test_a_blocks_weights_have_one_address_in_an_even_ring_and_two_in_an_odd_one(name: str, num_addresses: int) -> None:
    pipeline = pipeline_of(name)
    enable_offload(pipeline, STREAMING, CpuDevice())
    seen: dict[nn.Module, set[int]] = {}
    for block in pipeline.transformer.blocks:
        block.linear.register_forward_pre_hook(
            lambda part, args: seen.setdefault(part, set()).add(part.weight.data_ptr())
        )
    for x in inputs(6):
        pipeline.transformer(x)
    assert {len(addresses) for addresses in seen.values()} == {num_addresses}


class TwelveTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwelveTensors() for _ in range(50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_a_visit_of_twelve_tensors_costs_the_host_little() -> None:
    model, x = Row(), torch.zeros(1)
    plain_seconds = pass_seconds(model, x)
    enable_offload(Pipeline(transformer=model), STREAMING, CpuDevice())
    visit_seconds = (pass_seconds(model, x) - plain_seconds) / len(model.blocks)
    print(f"host cost of a visit: {visit_seconds * 1e6:.0f} microseconds")
    assert visit_seconds < MICROSECONDS_PER_VISIT * 1e-6


def pass_seconds(model: nn.Module, x: torch.Tensor) -> float:
    """The median of several, on a machine that may have other work; the best of three medians."""

    def once() -> float:
        started = time.perf_counter()
        model(x)
        return time.perf_counter() - started

    return min(statistics.median(once() for _ in range(20)) for _ in range(3))


class Writer(nn.Module):
    """Changes a weight in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(2)
        return x * self.weight


@torch.no_grad()
def test_a_forward_that_writes_to_a_streamed_weight_is_refused_by_name() -> None:
    row = Row()
    row.blocks = nn.ModuleList([Writer(), Writer()])
    enable_offload(Pipeline(transformer=row), STREAMING, CpuDevice())
    with pytest.raises(WeightAwayError, match=r"transformer\.blocks\.0\.weight was written to by forward"):
        row(torch.ones(4))


@torch.no_grad()
def test_a_reference_from_before_never_reads_another_blocks_bytes() -> None:
    pipeline = pipeline_of()
    kept = [block.linear.weight for block in pipeline.transformer.blocks]
    enable_offload(pipeline, STREAMING, CpuDevice())
    pipeline.transformer(inputs(1)[0])
    for weight in kept:
        assert weight.isnan().all() and weight.shape == (16, 16)


@pytest.mark.parametrize("name", ["model_level", "layer_wise"])
def test_components_that_share_a_weight_are_refused_by_name(name: str) -> None:
    pipeline = pipeline_of()
    pipeline.vae.register_parameter("borrowed", pipeline.transformer.head.weight)
    with pytest.raises(PlanError, match=r"vae\.borrowed is the same tensor as transformer\.head\.weight"):
        enable_offload(pipeline, CONFIGS[name], CpuDevice())


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_component_with_two_names_is_one_component(name: str) -> None:
    pipeline = pipeline_of()
    pipeline.components["dit"] = pipeline.transformer
    backend = enable_offload(pipeline, CONFIGS[name], CpuDevice())
    assert same(pipeline.transformer(inputs(1)[0]), build("stack3")(inputs(1)[0]))
    backend.disable()
    del pipeline.components["dit"]
    assert_untouched(pipeline)
