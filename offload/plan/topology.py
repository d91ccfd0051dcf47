"""Who holds which tensor, and which tensors of a component travel with which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.plan.layout import overlapping_groups

STREAMED_BUFFER_BYTES = 1 << 20
"""Buffers below this stay on the device: they are cheap there, and forward may write to them."""


@dataclass(frozen=True, eq=False)
class Holder:
    """A place in a module tree that holds a tensor."""

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def place(self) -> tuple[int, str]:
        """Where that is, to compare with."""
        return id(self.module), self.name

    @property
    def registry(self) -> dict[str, Any]:
        return self.module._buffers if self.is_buffer else self.module._parameters


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """One tensor object and every place that holds it; `name` is the first place's path."""

    name: str
    tensor: torch.Tensor
    holders: tuple[Holder, ...]

    @property
    def is_buffer(self) -> bool:
        return all(holder.is_buffer for holder in self.holders)


def held_tensors(module: nn.Module, prefix: str = "") -> list[HeldTensor]:
    """Every parameter and buffer under `module`, each object once, in registration order."""
    found: dict[int, tuple[str, torch.Tensor, list[Holder]]] = {}
    for path, child in module.named_modules(prefix=prefix):
        for is_buffer, registry in ((False, child._parameters), (True, child._buffers)):
            for name, tensor in registry.items():
                if tensor is not None:
                    full_name = f"{path}.{name}" if path else name
                    found.setdefault(id(tensor), (full_name, tensor, []))[2].append(Holder(child, name, is_buffer))
    return [HeldTensor(name, tensor, tuple(holders)) for name, tensor, holders in found.values()]


def is_small_buffer(held: HeldTensor) -> bool:
    """Whether forward may count on writing to it."""
    return held.is_buffer and held.tensor.numel() * held.tensor.element_size() < STREAMED_BUFFER_BYTES


def named(held: Sequence[HeldTensor]) -> list[tuple[str, torch.Tensor]]:
    """The form that `pack` takes."""
    return [(h.name, h.tensor) for h in held]


@dataclass(frozen=True)
class Split:
    """The tensors of a component: those of each block that travel, and the rest, which stays on the device."""

    by_block: tuple[tuple[HeldTensor, ...], ...]
    remainder: tuple[HeldTensor, ...]


def split_component(component: nn.Module, blocks: Sequence[nn.Module], prefix: str = "") -> Split:
    """Assigns every tensor of `component` to exactly one owner.

    A tensor travels with a block when that block alone holds it and no tensor outside the block shares its bytes; small
    buffers, and whatever two owners claim, stay.
    """
    held = held_tensors(component, prefix)
    owners = _block_of_module(blocks)
    owner_of = [_owner(h, owners) for h in held]
    for group in overlapping_groups(named(held)):
        if len({owner_of[i] for i in group}) > 1:
            for i in group:
                owner_of[i] = None
    by_block = [tuple(h for h, owner in zip(held, owner_of, strict=True) if owner == i) for i in range(len(blocks))]
    return Split(tuple(by_block), tuple(h for h, owner in zip(held, owner_of, strict=True) if owner is None))


def _block_of_module(blocks: Sequence[nn.Module]) -> dict[int, int | None]:
    owners: dict[int, int | None] = {}
    for index, block in enumerate(blocks):
        for module in block.modules():
            owners[id(module)] = None if id(module) in owners else index
    return owners


def _owner(held: HeldTensor, owners: dict[int, int | None]) -> int | None:
    if is_small_buffer(held):
        return None
    holders = {owners.get(id(holder.module)) for holder in held.holders}
    return holders.pop() if len(holders) == 1 else None
