"""What a run leaves in `report.json`: its keys are the field names of these classes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Denoising steps of all ranks; a step is one call of the denoiser for each guidance branch and the scheduler's
    update.
    """

    median: float | None
    p95: float | None
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> StepSeconds:
        if not seconds:
            return cls(median=None, p95=None, count=0)
        ordered = sorted(seconds)
        return cls(median=statistics.median(ordered), p95=ordered[-(-95 * len(ordered) // 100) - 1], count=len(ordered))


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """One picture; `sha256` is of its raw pixels, `file` is relative to the output directory."""

    file: str
    sha256: str
    prompt: str
    seed: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank held and moved, in bytes. `h2d_bytes` and `allgather_bytes` are totals of the run."""

    rank: int
    host_weight_bytes: int
    staged_bytes: int
    pinned_bytes: int
    resident_bytes: int
    device_peak_bytes: int
    h2d_bytes: int
    staged_h2d_bytes: int
    allgather_bytes: int
    streamed_block_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunReport:
    strategy: str
    transport: str
    world_size: int
    dp_size: int
    device: str
    model: str
    wall_seconds: float
    step_seconds: StepSeconds
    images: tuple[ImageRecord, ...]
    ranks: tuple[RankRecord, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
