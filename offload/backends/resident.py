"""strategy=none: everything stays on the device."""

from __future__ import annotations

from typing import Any

from offload.backends.base import OffloadBackend, OffloadFigures
from offload.plan.resolve import resolve_offload_plan
from offload.plan.topology import held_tensors


class ResidentBackend(OffloadBackend):
    """Places every component on the device."""

    def _enable(self, pipeline: Any) -> None:
        for component in resolve_offload_plan(pipeline, self.config).components:
            self._place(held_tensors(component.module, component.path), component.module)

    def figures(self) -> OffloadFigures:
        return OffloadFigures()
