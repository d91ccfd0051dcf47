"""On a CUDA device: real streams, real NCCL, and spin kernels that turn every missing wait into a wrong result.

Several NCCL ranks run on one device here when there is only one.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.backends import enable_offload
from offload.config import STRATEGIES, OffloadConfig
from offload.device import CudaDevice
from offload.mesh import Mesh
from offload.stream.ring import StreamBlock
from offload.stream.streamer import Streamer
from tests.ranks import RankPool, ranks  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parent.parent
WIDTH = 1024
PASSES = 20
SPIN_CYCLES = 2_000_000  # about a millisecond, longer than any copy or matrix product here


class SpinningDevice(CudaDevice):
    """Holds up every piece of work on the copy and comm streams."""

    def on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return self._spin_on(super().on(stream))

    @contextmanager
    def _spin_on(self, entered: AbstractContextManager[Any]) -> Iterator[Any]:
        with entered as inside:
            torch.cuda._sleep(SPIN_CYCLES)
            yield inside


class Block(nn.Module):
    """A residual matrix product, optionally behind a spin."""

    def __init__(self, features: int, spin: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, features, bias=False)
        self.back = nn.Linear(features, WIDTH, bias=False)
        self.spin = spin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.spin:
            torch.cuda._sleep(SPIN_CYCLES)
        return x + self.back(torch.tanh(self.linear(x)))


class Denoiser(nn.Module):
    def __init__(self, num_blocks: int, spin: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(WIDTH * (1 + i % 2), spin) for i in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pipeline:
    def __init__(self, num_blocks: int, spin: bool) -> None:
        self.components = {"transformer": Denoiser(num_blocks, spin)}


@dataclass(frozen=True)
class Case:
    """What is held up, and what stays on the device."""

    num_blocks: int
    spin_copies: bool = False
    spin_compute: bool = False
    resident_blocks: int = 0
    shard_fraction: float = 0.0


def equal_passes(case: Case) -> list[bool]:
    """Whether each of several passes gives the bits of the model that stays on the device. Runs on every rank."""
    device = (SpinningDevice if case.spin_copies else CudaDevice)(torch.device("cuda", 0))
    num_ranks = int(os.environ["WORLD_SIZE"])
    mesh = Mesh.join(device, num_ranks, 60)
    config = OffloadConfig.for_world(
        STRATEGIES["dlo" if num_ranks > 1 else "layer_wise"], num_ranks, "auto", num_ranks,
        resident_blocks=case.resident_blocks, shard_fraction=case.shard_fraction,
    )  # fmt: skip
    try:
        pipeline = Pipeline(case.num_blocks, case.spin_compute)
        plain = copy.deepcopy(pipeline.components["transformer"]).to(device.torch)
        streamed = pipeline.components["transformer"]
        backend = enable_offload(pipeline, config, device, mesh)
        inputs = [torch.randn(64, WIDTH, device=device.torch) for _ in range(PASSES)]
        with torch.no_grad(), poisoned_after_use():
            outputs = [streamed(x) for x in inputs]
        backend.verify()
        with torch.no_grad():
            expected = [plain(x) for x in inputs]
        backend.shutdown()
        return [bool(torch.equal(a, b)) for a, b in zip(outputs, expected, strict=True)]
    finally:
        mesh.close()


@contextmanager
def poisoned_after_use() -> Iterator[None]:
    """Slots are overwritten on the compute stream as soon as a block's forward has been issued."""
    release = Streamer.release

    def poison_and_release(self: Streamer, block: StreamBlock) -> None:
        self._queue[0].buffer.fill_(0xFF)
        release(self, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streamer, "release", poison_and_release)
        yield


RESIDENCIES = {"streamed": {}, "resident": {"resident_blocks": 1, "shard_fraction": 0.5}}


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_case_07_slow_copies_give_equal_outputs(
    ranks: RankPool,  # noqa: F811
    num_ranks: int,
    num_blocks: int,
    residency: str,
) -> None:
    for passes in ranks(num_ranks).run(equal_passes, Case(num_blocks, spin_copies=True, **RESIDENCIES[residency])):
        assert passes == [True] * PASSES


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_case_08_slow_compute_gives_equal_outputs(
    ranks: RankPool,  # noqa: F811
    num_ranks: int,
    num_blocks: int,
    residency: str,
) -> None:
    for passes in ranks(num_ranks).run(equal_passes, Case(num_blocks, spin_compute=True, **RESIDENCIES[residency])):
        assert passes == [True] * PASSES


WAYS = {
    "none": ("nproc=1", "strategy=none"),
    "model_level": ("nproc=1", "strategy=model_level"),
    "layer_wise": ("nproc=1", "strategy=layer_wise"),
    "dlo-2": ("nproc=2", "strategy=dlo"),
    "dlo-4": ("nproc=4", "strategy=dlo"),
    "dlo-4-pairs": ("nproc=4", "strategy=dlo", "dp_size=2"),
    "layer_wise-resident": ("nproc=1", "strategy=layer_wise", "residency.blocks=3", "residency.shard_fraction=0.5"),
    "dlo-2-resident": ("nproc=2", "strategy=dlo", "residency.blocks=3", "residency.shard_fraction=0.5"),
}


@pytest.fixture(scope="module")
def models(tiny_flux: Path, tiny_wan: Path) -> dict[str, tuple[str, ...]]:
    tiny = ("model=diffusers", "prompts=[a cat,a dog,a bird]", "height=32", "width=32", "num_inference_steps=3")
    return {
        "demo": ("prompts=[3,1,4,1,5]",),
        "flux": (*tiny, f"model.path={tiny_flux}"),
        "wan": (*tiny, f"model.path={tiny_wan}", "pipeline_kwargs={num_frames: 5}"),
    }


@pytest.fixture(scope="module")
def draw(models: dict[str, tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """The report of a run on the device, made once for each choice."""
    done: dict[tuple[str, str], dict] = {}

    def get(model: str, way: str, **environment: str) -> dict:
        key = (model, way, *environment)
        if key not in done:
            directory = tmp_path_factory.mktemp("run")
            command = [sys.executable, str(ROOT / "launch.py"), "device=cuda", f"output_dir={directory}"]
            ended = subprocess.run(
                [*command, *models[model], *WAYS[way]],
                env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            logs = "\n".join(log.read_text() for log in sorted(directory.glob("logs/*")))
            assert ended.returncode == 0, ended.stderr + logs
            done[key] = json.loads((directory / "report.json").read_text())
        return done[key]

    return get


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["demo", "flux", "wan"])
def test_every_way_draws_the_same_pictures(draw: Callable[..., dict], model: str, way: str) -> None:
    expected = [image["sha256"] for image in draw(model, "none")["images"]]
    assert [image["sha256"] for image in draw(model, way)["images"]] == expected
    assert len(set(expected)) == len(expected)


def test_host_weights_are_pinned_to_the_byte(draw: Callable[..., dict]) -> None:
    for rank in draw("demo", "dlo-2")["ranks"]:
        assert rank["host_weight_bytes"] <= rank["pinned_bytes"] <= 1.01 * rank["host_weight_bytes"]


@pytest.mark.parametrize("way", ["layer_wise", "dlo-2", "layer_wise-resident", "dlo-2-resident"])
def test_the_sanitizer_finds_no_race(draw: Callable[..., dict], way: str) -> None:
    report = draw("demo", way, TORCH_CUDA_SANITIZER="1")
    assert [image["sha256"] for image in report["images"]] == [
        image["sha256"] for image in draw("demo", "none")["images"]
    ]
