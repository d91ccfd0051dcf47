"""Rebinding of parameter storage: the one place where a tensor is made to look at other bytes.

A tensor that travels has two states, and its holders (the `_parameters` and `_buffers` of modules) show which:

- *bound*: holders point at the tensor that the model was built with, whose data is a view of a slot or of a buffer.
- *away*: holders point at an `AwayTensor`, which has the same shape, dtype, strides and the compute device, but no
  bytes. Whoever computes with it meanwhile gets the weight from its lender, or an error that names it: never other
  bytes. The original tensor itself is one NaN meanwhile, so a reference kept from outside cannot read what the slot
  holds next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from offload.device import Device
from offload.errors import WeightAwayError
from offload.host.store import copy_range
from offload.plan.layout import Layout, pack
from offload.plan.topology import HeldTensor, named
from offload.stream.views import first_byte, plain_views, separate_views, views_of

_HINT = "disable the offload first"


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
        kwargs = kwargs or {}
        for argument, value in (*zip(func._schema.arguments, args, strict=False), *_by_name(func, kwargs)):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise WeightAwayError(f"{value._name} cannot be written to while it is offloaded; {_HINT}")
        args, kwargs = tree_map_only(cls, lambda away: away._lend(), (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise WeightAwayError(f"{self._name} cannot be copied with its module while it is offloaded; {_HINT}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise WeightAwayError(f"{self._name} cannot be stored with its module while it is offloaded; {_HINT}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AwayTensor({self._name}, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def _by_name(func: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]


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
        self._num_users = 0
        self._buffer: torch.Tensor | None = None
        with torch.inference_mode(False):
            self._away: list[torch.Tensor] = [AwayTensor(h, device, partial(lend, i)) for i, h in enumerate(self._held)]
            self._nothing = [_nothing_like(t, device) for t in self._tensors]
            self._versions = [tensor._version for tensor in self._tensors]

    def bind(self, buffer: torch.Tensor) -> None:
        """Makes the tensors look at `buffer` (uint8, at least the layout's bytes). Views of a buffer are made once."""
        views = self._views.get(buffer.data_ptr())
        if views is None:
            views = self._views[buffer.data_ptr()] = views_of(self._layout, buffer)
        self._bind_to(views)
        self._buffer = buffer
        self._num_users = _num_users(self._tensors)
        self._versions = [tensor._version for tensor in self._tensors]

    def first_written(self) -> str | None:
        """The name of a tensor that was written to since it was bound; what was written leaves with the slot."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return next((self.name(i) for i, (tensor, version) in enumerate(pairs) if tensor._version != version), None)

    def _bind_to(self, views: list[torch.Tensor]) -> None:
        for registry, name, index in self._registries:
            held = registry.get(name)
            if held is not self._away[index] and held is not self._tensors[index]:
                raise WeightAwayError(f"{self._held[index].name} was replaced while it was offloaded; {_HINT}")
            registry[name] = self._tensors[index]
        for tensor, view in zip(self._tensors, views, strict=True):
            tensor.data = view

    def copy_to(self, out: torch.Tensor) -> None:
        """Copies the bytes that the tensors look at now into `out`, a uint8 buffer of the layout's size."""
        assert self._buffer is not None, "only bound tensors have bytes"
        out.copy_(self._buffer[: out.numel()], non_blocking=True)

    def unbind(self) -> None:
        """Makes the tensors away."""
        self._buffer = None
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

    @property
    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self._tensors)

    def tensor(self, number: int) -> torch.Tensor:
        return self._tensors[number]

    def name(self, number: int) -> str:
        return self._held[number].name

    def release(self, whole: torch.Tensor) -> None:
        """Ends the travels: the tensors are plain again, on the bytes of `whole` (uint8, on the host).

        What someone put in the place of a tensor meanwhile stays there.
        """
        self._buffer = None
        self._views.clear()
        for tensor, view in zip(self._tensors, plain_views(self._layout, whole), strict=True):
            tensor.data = view
        for registry, name, index in self._registries:
            if registry.get(name) is self._away[index]:
                registry[name] = self._tensors[index]
        self._views.clear()  # of slots: the away tensors are part of reference cycles, which would keep the slots alive

    def at_rest(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        """A tensor as a view of the whole layout's bytes on the host, with a storage of its own."""
        return plain_views(self._layout, whole)[number]

    def without_views(self, output: Any) -> tuple[Any, int]:
        """`output` with a copy in place of each tensor that looks at the bound buffer, and how many there were."""
        if not self._tensors:
            return output, 0
        buffer = self._tensors[0].untyped_storage().data_ptr()
        found: dict[int, torch.Tensor] = {}

        def own(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() != buffer:
                return tensor
            return found.setdefault(id(tensor), tensor.clone())

        return tree_map_only(torch.Tensor, own, output), len(found)

    def num_views_kept(self) -> int:
        """How many tensors beside the bound ones look at the buffer: views that forward made and that still live."""
        return _num_users(self._tensors) - self._num_users

    def rest(self, buffer: torch.Tensor) -> None:
        """Binds to a buffer that is not one of the slots, and forgets all buffers, so that no view keeps one alive."""
        self.bind(buffer)
        self._views.clear()


def place(held: Sequence[HeldTensor], device: Device | None) -> None:
    """Moves tensors for good, to a device or (None) to ordinary host memory. Aliases stay aliases."""
    layout, storages = pack(named(held))
    buffers = []
    for region in layout.regions:
        first = first_byte(region)
        num_bytes = region.offset_bytes + region.num_bytes - first
        buffers.append(device.empty(num_bytes) if device else torch.empty(num_bytes, dtype=torch.uint8))
        copy_range(layout, storages, first, buffers[-1])
    for h, view in zip(held, separate_views(layout, buffers), strict=True):
        h.tensor.data = view


def _num_users(tensors: Sequence[torch.Tensor]) -> int:
    """How many tensors look at the storage that these share."""
    return torch._C._storage_Use_Count(tensors[0].untyped_storage()._cdata) if tensors else 0


def _nothing_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What a tensor looks at while it is away: one NaN for all elements, which a reference kept from before meets."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    filler = torch.full((1,), float("nan") if is_float else 0.0, device=device).to(tensor.dtype)
    return filler.expand(tensor.numel()).view(tensor.shape)
