"""Rebinding of parameter storage: the one place where a tensor is made to look at other bytes.

A tensor that travels has two states, and its holders (the `_parameters` and `_buffers` of modules) show which:

- *bound*: holders point at the tensor that the model was built with, whose data is a view of a slot or of a buffer.
- *away*: holders point at an `AwayTensor`, which has the same shape, dtype, strides and the compute device, but no
  bytes. Whoever computes with it meanwhile gets the weight from its lender, or an error that names it: never other
  bytes. The original tensor itself is empty meanwhile, so a reference kept from outside cannot read what the slot holds
  next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from offload.device import Device
from offload.host.store import copy_range
from offload.plan.layout import Layout, pack
from offload.plan.topology import HeldTensor, named


class AwayTensor(torch.Tensor):
    """Stands for a weight that is not on the device: answers questions about itself, and sends computations to the
    lender.
    """

    _is_param: bool
    _name: str
    _lend: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, held: HeldTensor, device: torch.device, lend: Callable[[], torch.Tensor]) -> AwayTensor:
        like = held.tensor
        away = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        away._is_param = not held.is_buffer  # what isinstance(tensor, nn.Parameter) asks
        away._name = held.name
        away._lend = lend
        return away

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda away: away._lend(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AwayTensor({self._name}, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


class Binding:
    """The tensors of one layout, and the buffer that they look at.

    Args:
        lend: called with a tensor's number when someone computes with it while it is away; returns the weight or
        raises.
    """

    def __init__(
        self, held: Sequence[HeldTensor], layout: Layout, device: torch.device, lend: Callable[[int], torch.Tensor]
    ) -> None:
        self._held = tuple(held)
        self._layout = layout
        self._registries = [
            (holder.registry, holder.name, index) for index, h in enumerate(self._held) for holder in h.holders
        ]
        self._tensors = [h.tensor for h in self._held]
        self._views: dict[int, list[torch.Tensor]] = {}
        with torch.inference_mode(False):
            self._away: list[torch.Tensor] = [AwayTensor(h, device, partial(lend, i)) for i, h in enumerate(self._held)]
            self._nothing = [torch.empty(0, dtype=t.dtype, device=device) for t in self._tensors]

    def bind(self, buffer: torch.Tensor) -> None:
        """Makes the tensors look at `buffer` (uint8, at least the layout's bytes). Views of a buffer are made once."""
        views = self._views.get(buffer.data_ptr())
        if views is None:
            views = self._views[buffer.data_ptr()] = views_of(self._layout, buffer)
        for tensor, view in zip(self._tensors, views, strict=True):
            tensor.data = view
        for registry, name, index in self._registries:
            registry[name] = self._tensors[index]

    def unbind(self) -> None:
        """Makes the tensors away."""
        for registry, name, index in self._registries:
            registry[name] = self._away[index]
        for tensor, nothing in zip(self._tensors, self._nothing, strict=True):
            tensor.data = nothing

    def keep(self, number: int) -> torch.Tensor:
        """Leaves a copy of a bound tensor on the device: from now on its holders see that copy instead of an away
        tensor.
        """
        self._nothing[number] = self._tensors[number].data.clone()
        self._away[number] = self._tensors[number]
        return self._nothing[number]

    def tensor(self, number: int) -> torch.Tensor:
        return self._tensors[number]

    def name(self, number: int) -> str:
        return self._held[number].name

    def rest(self, buffer: torch.Tensor) -> None:
        """Binds to a buffer that is not one of the slots, and forgets all buffers, so that no view keeps one alive."""
        self.bind(buffer)
        self._views.clear()


def views_of(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The layout's tensors as views of `buffer`, a uint8 tensor that starts on an aligned address."""
    storage, base = buffer.untyped_storage(), buffer.storage_offset()
    views = []
    with torch.inference_mode(False):
        for place in layout.tensors:
            empty = torch.empty(0, dtype=place.dtype, device=buffer.device)
            offset = (base + place.offset_bytes) // place.dtype.itemsize
            views.append(empty.set_(storage, offset, place.shape, place.stride))
    return views


def place(held: Sequence[HeldTensor], device: Device | None) -> None:
    """Moves tensors for good, to a device or (None) to ordinary host memory. Aliases stay aliases."""
    layout, storages = pack(named(held))
    buffer = device.empty(layout.num_bytes) if device else torch.empty(layout.num_bytes, dtype=torch.uint8)
    copy_range(layout, storages, 0, buffer)
    for h, view in zip(held, views_of(layout, buffer), strict=True):
        h.tensor.data = view
