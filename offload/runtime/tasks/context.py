"""What every task gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.config import OffloadConfig, Settings
from offload.device import Device
from offload.mesh import Mesh
from offload.runtime.console import RankConsole


@dataclass(frozen=True)
class RankContext:
    """One rank, ready to work. `started` is when that was, in seconds of perf_counter."""

    settings: Settings
    config: OffloadConfig
    device: Device
    mesh: Mesh
    output_dir: Path
    console: RankConsole
    started: float

    @property
    def is_zero(self) -> bool:
        return self.mesh.info.rank == 0
