"""strategy=layer_wise and strategy=dlo: denoiser blocks stream, encoders are staged whole, the rest stays on the
device.

Both are one backend. `layer_wise` is the one-rank case: a whole block is its own only shard, and the transport is a
plain copy.
"""

from __future__ import annotations

import logging
from typing import Any

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
from offload.stream.pace import Pace, Progress
from offload.stream.residents import ResidentLayers
from offload.stream.ring import Ring
from offload.stream.transport import Transport
from offload.stream.turns import Turns

log = logging.getLogger(__name__)


class DistributedLayerwiseOffloadBackend(OffloadBackend):
    """Streams the denoisers' blocks through two slots that all of them share."""

    def __init__(self, config: OffloadConfig, device: Device, mesh: Mesh | None = None) -> None:
        super().__init__(config, device, mesh)
        self._memory = HostMemory(device, config.pin_cpu_memory)
        self._hooks = HookRegistry()
        self._turns = Turns(device, self._memory)
        self._residents: dict[str, ResidentLayers] = {}
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
        self._attach(plan)

    def _prepare(self, plan: ResolvedOffloadPlan) -> None:
        """Everything that can fail for want of memory; no block's weights move yet."""
        self._cleanup.add(self._let_go)
        self._cleanup.add(self._turns.restore)
        for component in (*plan.encoders, *plan.vaes):
            self._turns.add(component.path, component.module)
        rings: list[Ring] = []
        for part in self._streamed:
            rings += part.build(
                len(rings), self.device, self._memory, rank=self.mesh.shard.rank, num_shards=self.config.dp_size
            )
        copy_stream = self.device.stream()
        self._transport = build_transport(self.config, self.device, self.mesh, rings, copy_stream)
        self._pace = build_pace(self.config, self.device, self.mesh, self._transport, rings)
        for part in self._streamed:
            self._residents[part.path] = ResidentLayers(
                self.device, self._pace, copy_stream,
                residents=part.residents, streaming=part.streaming, shard_fraction=self.config.shard_fraction,
            )  # fmt: skip
            self._turns.add_visitor(part.path, self._residents[part.path])
            self._place(part.remainder, part.module)
        whole = [component for component in plan.dits if not component.stacks]
        for component in (*whole, *plan.residents):
            self._place(held_tensors(component.module, component.path), component.module)

    def _consume(self) -> None:
        """Takes the blocks' weights from the model. Coming back, all ranks meet before the first collective."""
        assert self._transport is not None
        for part in self._streamed:
            self._cleanup.add(lambda part=part, transport=self._transport: part.restore(transport))
            part.consume()
        self._cleanup.add(self.offload_resident_layers)
        self._cleanup.add(self._meet_others)

    def _attach(self, plan: ResolvedOffloadPlan) -> None:
        assert self._pace is not None
        self._cleanup.add(self._hooks.remove)
        for part in self._streamed:
            streaming = part.streaming.blocks if part.streaming else ()
            for module, block in zip(part.modules, part.blocks, strict=True):
                if block in streaming:
                    self._hooks.attach(module, DistributedLayerwiseOffloadHook(block, self._pace))
            self._hooks.attach(part.module, ComponentHook(part.path, self._turns, part.rings, self._pace))
            self._hooks.refuse_changes(part.module, Refusals(part.path, self.device.torch))
        for component in (*plan.encoders, *plan.vaes):
            self._hooks.attach(component.module, ComponentHook(component.path, self._turns))
            self._hooks.refuse_changes(component.module, Refusals(component.path, self.device.torch))

    def load_resident_layers(self) -> None:
        """Brings the residents to the device. Ranks that share weights do it together, or answer in `join_others`."""
        for residents in self._residents.values():
            residents.load()

    def offload_resident_layers(self) -> None:
        """Frees the residents' device memory, for instance for the VAE; the next forward of a denoiser loads them."""
        for residents in self._residents.values():
            residents.offload()

    def _meet_others(self) -> None:
        """Weights come back by collectives, so first every rank finishes what any rank began."""
        while True:
            try:
                return self.join_others()
            except PeerFailedError as failure:
                log.warning("while disabling: %s", failure)

    def _let_go(self) -> None:
        """The last step: device memory first, then the host's. What was restored keeps its own pages alive."""
        self._streamed, self._residents, self._transport, self._pace = [], {}, None, None
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

    def progress(self) -> Progress | None:
        return self._pace.progress() if self._pace is not None else None

    def verify(self) -> None:
        if self._pace is not None:
            self._pace.verify()

    def figures(self) -> OffloadFigures:
        streaming = [part.streaming.traffic for part in self._streamed if part.streaming]
        loading = [part.residents.traffic for part in self._streamed if part.residents]
        residents = self._residents.values()
        return OffloadFigures(
            host_weight_bytes=sum(part.host_bytes for part in self._streamed),
            staged_bytes=self._turns.num_bytes,
            pinned_bytes=self._memory.pinned_bytes,
            resident_bytes=sum(each.num_bytes for each in residents),
            h2d_bytes=sum(traffic.h2d_bytes for traffic in streaming),
            staged_h2d_bytes=self._turns.h2d_bytes
            + sum(traffic.h2d_bytes for traffic in loading)
            + sum(each.h2d_bytes for each in residents),
            allgather_bytes=sum(traffic.allgather_bytes for traffic in (*streaming, *loading)),
            streamed_block_bytes=sum(part.streamed_bytes for part in self._streamed),
        )


class LayerWiseOffloadBackend(DistributedLayerwiseOffloadBackend):
    """The one-rank stream."""
