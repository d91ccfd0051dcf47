"""strategy=layer_wise and strategy=dlo: denoiser blocks stream, encoders are staged whole, the rest stays on the
device.

Both are one backend. `layer_wise` is the one-rank case: a whole block is its own only shard, and the transport is a
plain copy.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from offload.backends.base import OffloadBackend, OffloadFigures
from offload.config import OffloadConfig
from offload.device import Device
from offload.errors import PeerFailedError
from offload.hooks import ComponentHook, DistributedLayerwiseOffloadHook, HookRegistry, Refusals
from offload.host.pages import HostMemory
from offload.mesh import Mesh
from offload.plan.resolve import ResolvedOffloadPlan, plan_digest, resolve_offload_plan
from offload.plan.topology import held_tensors
from offload.stream.assembly import StreamedComponent, build_pace, build_transport
from offload.stream.pace import Pace
from offload.stream.transport import Traffic, Transport
from offload.stream.turns import Turns

log = logging.getLogger(__name__)


class DistributedLayerwiseOffloadBackend(OffloadBackend):
    """Streams the denoisers' blocks through two slots that all of them share."""

    def __init__(self, config: OffloadConfig, device: Device, mesh: Mesh | None = None) -> None:
        super().__init__(config, device, mesh)
        self._memory = HostMemory(device, config.pin_cpu_memory)
        self._hooks = HookRegistry()
        self._turns = Turns(device, self._memory)
        self._encoders: dict[str, nn.Module] = {}
        self._streamed: list[StreamedComponent] = []
        self._transport: Transport | None = None
        self._pace: Pace | None = None

    def _enable(self, pipeline: Any) -> None:
        control = self.mesh.control
        with control.together("resolving the offload plan"):
            plan = resolve_offload_plan(pipeline, self.config)
            self._streamed = [StreamedComponent(dit) for dit in plan.dits if dit.stacks]
        layouts = {name: layout for part in self._streamed for name, layout in part.layouts.items()}
        control.require_equal("offload plan", plan_digest(self.config, layouts))
        with control.together("preparing the offload"):
            self._prepare(plan)
        self._consume()

    def _prepare(self, plan: ResolvedOffloadPlan) -> None:
        """Everything that can fail for want of memory; no block's weights move yet."""
        self._cleanup.add(self._let_go)
        self._stage(plan)
        layouts = [layout for part in self._streamed for layout in part.layouts.values()]
        rings = [
            part.build(number, self.device, self._memory, rank=self.mesh.shard.rank, num_shards=self.config.dp_size)
            for number, part in enumerate(self._streamed)
        ]
        self._transport = build_transport(self.config, self.device, self.mesh, layouts)
        self._pace = build_pace(self.config, self.device, self.mesh, self._transport, rings)
        for part in self._streamed:
            self._place(part.remainder, part.module)
        whole = [component for component in plan.dits if not component.stacks]
        for component in (*whole, *plan.vaes, *plan.residents):
            self._place(held_tensors(component.module, component.path), component.module)

    def _stage(self, plan: ResolvedOffloadPlan) -> None:
        """Encoders visit the device while they work, and leave when a denoiser starts."""
        self._encoders = {encoder.path: encoder.module for encoder in plan.encoders}
        self._cleanup.add(self._turns.restore)
        for path, module in self._encoders.items():
            self._turns.add(path, module)

    def _consume(self) -> None:
        assert self._pace is not None and self._transport is not None
        for part in self._streamed:
            self._cleanup.add(lambda part=part, transport=self._transport: part.restore(transport))
            part.consume()
        self._cleanup.add(self._meet_others)
        self._cleanup.add(self._hooks.remove)
        for part in self._streamed:
            for module, block in zip(part.modules, part.ring.blocks, strict=True):
                self._hooks.attach(module, DistributedLayerwiseOffloadHook(block, self._pace))
            self._hooks.attach(part.module, ComponentHook(part.path, self._turns, part.ring, self._pace))
            self._hooks.refuse_changes(part.module, Refusals(part.path, self.device.torch))
        for path, module in self._encoders.items():
            self._hooks.attach(module, ComponentHook(path, self._turns))
            self._hooks.refuse_changes(module, Refusals(path, self.device.torch))

    def _meet_others(self) -> None:
        """Weights come back by collectives, so first every rank finishes what any rank began."""
        while True:
            try:
                return self.join_others()
            except PeerFailedError as failure:
                log.warning("while disabling: %s", failure)

    def _let_go(self) -> None:
        """The last step: device memory first, then the host's. What was restored keeps its own pages alive."""
        self._streamed, self._transport, self._pace = [], None, None
        self._memory.close()
        self.device.empty_cache()

    def shutdown(self) -> None:
        super().shutdown()
        self._hooks.remove()
        self._let_go()

    def join_others(self) -> None:
        if self._pace is not None:
            self._pace.join_others()

    def report_failure(self) -> None:
        if self._pace is not None:
            self._pace.report_failure()

    def figures(self) -> OffloadFigures:
        traffic = self._transport.traffic if self._transport else Traffic()
        return OffloadFigures(
            host_weight_bytes=sum(part.host_bytes for part in self._streamed),
            staged_bytes=self._turns.num_bytes,
            pinned_bytes=self._memory.pinned_bytes,
            h2d_bytes=traffic.h2d_bytes + self._turns.h2d_bytes,
            allgather_bytes=traffic.allgather_bytes,
            streamed_block_bytes=sum(part.block_bytes for part in self._streamed),
        )


class LayerWiseOffloadBackend(DistributedLayerwiseOffloadBackend):
    """The one-rank stream."""
