"""What every backend promises, and the clean-up that all of them share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.config import OffloadConfig
from offload.device import Device
from offload.mesh import Mesh
from offload.plan.topology import HeldTensor, held_tensors
from offload.stream.binding import place
from offload.stream.pace import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OffloadFigures:
    """What a backend holds and has moved on this rank, in bytes.

    Attributes:
        host_weight_bytes: weights in host memory that the strategy keeps: shards of blocks, or masters of whole
        components. staged_bytes: masters of components that a streaming strategy stages whole beside its blocks.
        resident_bytes: blocks and parts of shards that are on the device while a denoiser works.
        h2d_bytes: what streaming copied to the device (under model_level, what staging did).
        staged_h2d_bytes: what staging and loading residents copied beside a stream.
        streamed_block_bytes: the bytes of all streaming blocks, before sharding.
    """

    host_weight_bytes: int = 0
    staged_bytes: int = 0
    pinned_bytes: int = 0
    resident_bytes: int = 0
    h2d_bytes: int = 0
    staged_h2d_bytes: int = 0
    allgather_bytes: int = 0
    streamed_block_bytes: int = 0


class Cleanup:
    """Undo steps, last first. Each runs whatever the others do; failures are logged and the first one is raised."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        self._steps.append(step)

    def run(self) -> None:
        first: Exception | None = None
        while self._steps:
            try:
                self._steps.pop()()
            except Exception as error:
                log.exception("a clean-up step failed")
                first = first or error
        if first:
            raise first


class OffloadBackend(ABC):
    """Places one pipeline's weights and keeps them where the strategy wants them.

    Attributes:
        enabled: whether a pipeline is offloaded right now.
    """

    def __init__(self, config: OffloadConfig, device: Device, mesh: Mesh | None = None) -> None:
        self.config = config
        self.device = device
        self.mesh = mesh or Mesh.alone()
        self.enabled = False
        self._cleanup = Cleanup()

    def enable(self, pipeline: Any) -> None:
        """Places the components and attaches the hooks. A second call warns and changes nothing.

        Raises:
            PlanError: the pipeline cannot be offloaded in this way. No failure leaves a hook or a moved tensor behind.
        """
        if self.enabled:
            log.warning("the pipeline is offloaded already; nothing changes")
            return
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._enable(pipeline)
            except BaseException:
                self._cleanup.run()
                raise
        self.device.synchronize()
        self.enabled = True

    def disable(self) -> None:
        """Takes hooks and device memory away and leaves plain host tensors. With several ranks, all of them call it."""
        if self.enabled:
            self.enabled = False
            self.device.synchronize()
            with torch.inference_mode(False), torch.no_grad():
                self._cleanup.run()

    def is_enabled(self) -> bool:
        return self.enabled

    def shutdown(self) -> None:
        """For process exit: gives resources back without restoring the weights."""
        self.enabled = False
        self.device.synchronize()

    @abstractmethod
    def _enable(self, pipeline: Any) -> None:
        """Does the work, adding to `_cleanup` what takes each step back."""

    @abstractmethod
    def figures(self) -> OffloadFigures: ...

    def join_others(self) -> None:
        """Takes part in what other ranks compute until no rank computes any more."""

    def report_failure(self) -> None:
        """Tells the other ranks that this one stops its work."""

    def progress(self) -> Progress | None:
        """How far this rank's stream has come, if other ranks depend on it. Other threads may ask."""
        return None

    def verify(self) -> None:
        """Checks, before a result is used, that ranks which share weights computed it from the same ones.

        Raises:
            RankMismatchError: they did not.
        """

    def _place(self, held: Sequence[HeldTensor], module: nn.Module) -> None:
        """Puts tensors of `module` on the device; the clean-up brings back whatever then stands in their places."""
        places = {holder.place for h in held for holder in h.holders}
        place(held, self.device)

        def bring_back() -> None:
            now = [h for h in held_tensors(module) if any(holder.place in places for holder in h.holders)]
            place(now, None)

        self._cleanup.add(bring_back)
