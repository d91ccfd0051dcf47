"""What a stager and the allocator's cache policy promise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.device import CpuDevice
from offload.stream.stager import BoundedAllocatorCache, PinnedModuleStager
from tests.models import build, bytes_of, differing, inputs, same


class CountingDevice(CpuDevice):
    """Counts emptied caches, runs out of memory when told to, and has the memory figures that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.num_emptied = 0
        self.num_failures = 0
        self.figures: tuple[tuple[int, int], tuple[int, int]] | None = None

    def empty(self, num_bytes: int) -> torch.Tensor:
        if self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError("no memory")
        return super().empty(num_bytes)

    def empty_cache(self) -> None:
        self.num_emptied += 1

    def memory(self) -> tuple[int, int] | None:
        return self.figures and self.figures[0]

    def reserved_bytes(self) -> tuple[int, int] | None:
        return self.figures and self.figures[1]


@pytest.mark.parametrize("name", ["stack3", "tied_in_block", "strided", "float8", "mixed", "rotary"])
def test_tensors_keep_their_form_through_every_move(name: str) -> None:
    model, plain = build(name), build(name)
    form = {key: (t.shape, t.stride(), t.dtype) for key, t in model.state_dict().items()}
    stager = PinnedModuleStager(model, CpuDevice())
    for move in (stager.load, stager.load, stager.offload, stager.offload, stager.load, stager.offload):
        move()
        assert not differing(model, plain)
        assert {key: (t.shape, t.stride(), t.dtype) for key, t in model.state_dict().items()} == form
        with torch.no_grad():
            assert same(model(inputs(1)[0]), plain(inputs(1)[0]))  # both, because some count their forwards
    assert not stager.loaded


def test_aliases_stay_aliases() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    stager = PinnedModuleStager([first, second], CpuDevice())
    stager.load()
    assert second.weight is first.weight and stager.loaded
    stager.offload()
    assert second.weight is first.weight and not stager.loaded


def test_offload_brings_back_the_master_and_no_copy() -> None:
    module = nn.Linear(4, 4)
    before = bytes_of(module.weight)
    stager = PinnedModuleStager(module, CpuDevice())
    resting = module.weight.data_ptr()
    stager.load()
    assert module.weight.data_ptr() != resting
    module.weight.data.zero_()
    stager.offload()
    assert module.weight.data_ptr() == resting and bytes_of(module.weight) == before


def test_out_of_memory_empties_the_cache_and_tries_once_more() -> None:
    device, module = CountingDevice(), nn.Linear(4, 4)
    stager = PinnedModuleStager(module, device, cache_retention=BoundedAllocatorCache(device))
    device.num_failures = 1
    stager.load()
    assert stager.loaded and device.num_emptied == 1
    stager.offload()
    device.num_failures = 2
    resting = module.weight.data_ptr()
    with pytest.raises(torch.OutOfMemoryError):
        stager.load()
    assert not stager.loaded and module.weight.data_ptr() == resting


@pytest.mark.parametrize(
    ("free", "held", "used", "force", "releases"),
    [
        (500, 200, 200, False, False),
        (500, 450, 200, False, False),  # a quarter of 1000 is cached: still within the bound
        (500, 451, 200, False, True),
        (50, 100, 100, False, False),
        (49, 100, 100, False, True),
        (500, 200, 200, True, True),
    ],
)
def test_the_cache_is_emptied_past_either_bound(free: int, held: int, used: int, force: bool, releases: bool) -> None:
    device = CountingDevice()
    device.figures = (free, 1000), (held, used)
    assert BoundedAllocatorCache(device).release_if_needed(force=force) is releases
    assert device.num_emptied == int(releases)


def test_without_figures_the_cache_is_emptied() -> None:
    device = CountingDevice()
    assert BoundedAllocatorCache(device).release_if_needed()
    assert device.num_emptied == 1


def test_the_retention_policy_decides_what_offload_does() -> None:
    device = CountingDevice()
    device.figures = (500, 1000), (200, 200)
    stager = PinnedModuleStager(nn.Linear(4, 4), device)
    for policy, emptied in ((None, 1), (BoundedAllocatorCache(device), 0)):
        device.num_emptied = 0
        stager.set_cache_retention(policy)
        stager.load()
        stager.offload()
        assert device.num_emptied == emptied
