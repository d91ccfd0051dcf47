"""Backends assemble the parts: one for each strategy."""

from __future__ import annotations

from typing import Any

from offload.backends.base import OffloadBackend, OffloadFigures
from offload.backends.model_level import ModelLevelOffloadBackend
from offload.backends.resident import ResidentBackend
from offload.backends.streaming import DistributedLayerwiseOffloadBackend, LayerWiseOffloadBackend
from offload.config import OffloadConfig, OffloadStrategy
from offload.device import Device
from offload.mesh import Mesh

_BACKENDS: dict[OffloadStrategy, type[OffloadBackend]] = {
    OffloadStrategy.NONE: ResidentBackend,
    OffloadStrategy.MODEL_LEVEL: ModelLevelOffloadBackend,
    OffloadStrategy.LAYER_WISE: LayerWiseOffloadBackend,
    OffloadStrategy.DISTRIBUTED_LAYER_WISE: DistributedLayerwiseOffloadBackend,
}


def enable_offload(pipeline: Any, config: OffloadConfig, device: Device, mesh: Mesh | None = None) -> OffloadBackend:
    """Offloads `pipeline` as `config` says; afterwards it is called as before.

    Args:
        pipeline: a diffusers pipeline on the host, or any object with modules under `components`.
        mesh: the ranks; left out for one process.

    Raises:
        PlanError: the pipeline cannot be offloaded in this way; nothing has changed.
    """
    backend = _BACKENDS[config.strategy](config, device, mesh)
    backend.enable(pipeline)
    return backend


__all__ = [
    "DistributedLayerwiseOffloadBackend",
    "LayerWiseOffloadBackend",
    "ModelLevelOffloadBackend",
    "OffloadBackend",
    "OffloadFigures",
    "ResidentBackend",
    "enable_offload",
]
