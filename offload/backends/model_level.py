"""strategy=model_level: whole components take turns on the device."""

from __future__ import annotations

from typing import Any

from offload.backends.base import OffloadBackend, OffloadFigures
from offload.config import OffloadConfig
from offload.device import Device
from offload.hooks import ComponentHook, HookRegistry, Refusals
from offload.host.pages import HostMemory
from offload.mesh import Mesh
from offload.plan.resolve import resolve_offload_plan
from offload.plan.topology import held_tensors
from offload.stream.turns import Turns


class ModelLevelOffloadBackend(OffloadBackend):
    """Denoisers and encoders exclude one another; the VAE and the rest stay on the device."""

    def __init__(self, config: OffloadConfig, device: Device, mesh: Mesh | None = None) -> None:
        super().__init__(config, device, mesh)
        self._memory = HostMemory(device, config.pin_cpu_memory)
        self._hooks = HookRegistry()
        self._turns = Turns(device, self._memory)

    def _enable(self, pipeline: Any) -> None:
        plan = resolve_offload_plan(pipeline, self.config)
        taking_turns = plan.dits + plan.encoders
        self._cleanup.add(self._memory.close)
        self._cleanup.add(self._turns.restore)
        for component in taking_turns:
            self._turns.add(component.path, component.module)
        for component in plan.vaes + plan.residents:
            self._place(held_tensors(component.module, component.path), component.module)
        self._cleanup.add(self._hooks.remove)
        for component in taking_turns:
            self._hooks.attach(component.module, ComponentHook(component.path, self._turns))
            self._hooks.refuse_changes(component.module, Refusals(component.path, self.device.torch))

    def shutdown(self) -> None:
        super().shutdown()
        self._hooks.remove()
        self._memory.close()

    def figures(self) -> OffloadFigures:
        return OffloadFigures(
            host_weight_bytes=self._turns.num_bytes,
            pinned_bytes=self._memory.pinned_bytes,
            h2d_bytes=self._turns.h2d_bytes,
        )
