"""From a pipeline to the answer to "what goes where".

Pure: it moves no tensor, sets no attribute and asks no process group, and gives the same answer on meta tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from offload.config import OffloadConfig, OffloadStrategy
from offload.errors import PlanError
from offload.plan.layout import Layout
from offload.plan.residency import resident_indices
from offload.plan.topology import Split, held_tensors, split_component

_DIT_NAMES = ("transformer", "dit", "unet")
_ENCODER_NAMES = ("text_encoder", "image_encoder")
_VAE_NAMES = ("vae", "audio_vae")


@dataclass(frozen=True, eq=False)
class BlockStack:
    """An ordered run of blocks that one ring streams.

    Attributes:
        attrs: paths, inside the component, of the containers that contributed blocks.
        resident_indices: of the blocks that stay on the device; the others stream.
    """

    blocks: tuple[nn.Module, ...]
    names: tuple[str, ...]
    attrs: tuple[str, ...] = ()
    resident_indices: tuple[int, ...] = ()

    @property
    def resident(self) -> tuple[nn.Module, ...]:
        return tuple(self.blocks[index] for index in self.resident_indices)

    @property
    def streaming(self) -> tuple[nn.Module, ...]:
        return tuple(block for index, block in enumerate(self.blocks) if index not in self.resident_indices)


@dataclass(frozen=True, eq=False)
class ResolvedComponent:
    """One component; with stacks it streams, without it is placed or staged whole."""

    path: str
    module: nn.Module
    selected: bool
    stacks: tuple[BlockStack, ...] = ()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        return tuple(block for stack in self.stacks for block in stack.blocks)

    @property
    def resident_blocks(self) -> tuple[nn.Module, ...]:
        return tuple(block for stack in self.stacks for block in stack.resident)

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{name}" for stack in self.stacks for name in stack.names)

    def split(self) -> Split:
        """The component's tensors by owner."""
        return split_component(self.module, self.blocks, prefix=self.path)


@dataclass(frozen=True, eq=False)
class ResolvedOffloadPlan:
    """The components of a pipeline by role."""

    dits: tuple[ResolvedComponent, ...]
    encoders: tuple[ResolvedComponent, ...]
    vaes: tuple[ResolvedComponent, ...]
    residents: tuple[ResolvedComponent, ...]

    @property
    def components(self) -> tuple[ResolvedComponent, ...]:
        return self.dits + self.encoders + self.vaes + self.residents


def resolve_offload_plan(pipeline: Any, config: OffloadConfig) -> ResolvedOffloadPlan:
    """Finds the components of `pipeline` and the blocks that stream.

    Args:
        pipeline: an object with `components` (name to object), or a module whose children are the components.

    Raises:
        PlanError: there is nothing that the strategy could act on.
    """
    roles: dict[str, list[ResolvedComponent]] = {"dit": [], "encoder": [], "vae": [], "resident": []}
    for path, module in _components(pipeline).items():
        role = _role(path)
        streams = config.strategy.streams and role == "dit"
        stacks = _find_stacks(module, config) if streams else ()
        roles[role].append(ResolvedComponent(path, module, bool(stacks) if streams else role != "resident", stacks))
    plan = ResolvedOffloadPlan(*(tuple(found) for found in roles.values()))
    _require_something_to_do(pipeline, plan, config)
    _require_separate(plan, config)
    return plan


def plan_digest(config: OffloadConfig, layouts: Mapping[str, Layout]) -> str:
    """Equal on two ranks exactly when they would issue the same collectives over the same bytes."""
    rows = [repr(config), *(f"{name} {layout.digest}" for name, layout in layouts.items())]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _components(pipeline: Any) -> dict[str, nn.Module]:
    """The pipeline's modules by name; one that has two names counts under the first."""
    declared = getattr(pipeline, "components", None)
    found = declared.items() if isinstance(declared, Mapping) else pipeline.named_children()
    by_identity = {
        id(module): (name, module) for name, module in reversed(list(found)) if isinstance(module, nn.Module)
    }
    return dict(reversed(by_identity.values()))


def _role(path: str) -> str:
    for role, names in (("dit", _DIT_NAMES), ("encoder", _ENCODER_NAMES), ("vae", _VAE_NAMES)):
        if any(path == name or path.startswith(f"{name}_") for name in names):
            return role
    return "resident"


def _find_stacks(module: nn.Module, config: OffloadConfig) -> tuple[BlockStack, ...]:
    """The block containers of a DiT, as one stack in registration order; a block that appears twice counts once."""
    lists = list(_outermost_lists(module))
    hints = {*(getattr(module, "_repeated_blocks", None) or ()), *(getattr(module, "_no_split_modules", None) or ())}
    hinted = [(path, blocks) for path, blocks in lists if any(type(block).__name__ in hints for block in blocks)]
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for path, container in hinted or lists:
        for index, block in enumerate(container):
            if any(True for _ in block.parameters()):
                blocks.setdefault(id(block), (f"{path}.{index}", block))
    if not blocks:
        return ()
    names, modules = zip(*blocks.values(), strict=True)
    residents = resident_indices(len(modules), config.resident_blocks, config.resident_placement)
    return (BlockStack(modules, names, tuple(path for path, _ in hinted or lists), residents),)


def _outermost_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield child_path, child
        else:
            yield from _outermost_lists(child, child_path)


def _require_separate(plan: ResolvedOffloadPlan, config: OffloadConfig) -> None:
    """Components come and go by themselves, so a weight can belong to one of them only."""
    owners: dict[int, str] = {}
    for component in plan.components if config.strategy is not OffloadStrategy.NONE else ():
        for held in held_tensors(component.module, component.path):
            first = owners.setdefault(id(held.tensor), held.name)
            if first != held.name:
                raise PlanError(
                    f"{held.name} is the same tensor as {first}; components that share weights need strategy=none"
                )


def _require_something_to_do(pipeline: Any, plan: ResolvedOffloadPlan, config: OffloadConfig) -> None:
    name = type(pipeline).__name__
    if not plan.components:
        raise PlanError(f"{name} has no components to offload")
    if config.strategy.streams and not any(dit.stacks for dit in plan.dits):
        found = ", ".join(f"{dit.path} ({type(dit.module).__name__})" for dit in plan.dits) or "none"
        raise PlanError(
            f"strategy={config.strategy.short_name} needs a denoiser with a list of blocks, and there is none "
            f"(denoisers found: {found}); use strategy=model_level or none"
        )
