"""What sits on modules: a few lines that call the pace or the turns.

They are plain `torch.nn` hooks with `always_call`, so a visit that was opened is closed whatever happens inside the
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.errors import GradientsError, WeightAwayError
from offload.stream.binding import AwayTensor
from offload.stream.pace import Pace
from offload.stream.ring import Ring, StreamBlock
from offload.stream.turns import Turns


class DistributedLayerwiseOffloadHook:
    """On a block: its weights arrive before forward and leave after it, while the following blocks are on their way."""

    def __init__(self, block: StreamBlock, pace: Pace) -> None:
        self._block = block
        self._pace = pace

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and self._block.binding.requires_grad:
            raise GradientsError(
                f"{self._block.name} cannot record gradients, because its weights leave after forward; "
                f"call it under torch.no_grad() or torch.inference_mode()"
            )
        self._pace.enter(self._block)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        binding = self._block.binding
        output, num_returned = binding.without_views(output)
        num_kept = binding.num_views_kept() - num_returned
        written = binding.first_written()
        self._pace.leave(self._block)
        if written and output is not None:
            raise WeightAwayError(
                f"{written} was written to by forward, which does not last; disable the offload first"
            )
        if num_kept > 0 and output is not None:
            raise WeightAwayError(
                f"{self._block.name} kept a view of a weight after its forward, when the next block takes its place; "
                f"keep a clone instead"
            )
        return output


class ComponentHook:
    """On a component: its turn on the device begins with its forward, and its blocks may be visited until the forward
    ends.
    """

    def __init__(self, path: str, turns: Turns, rings: Sequence[Ring] = (), pace: Pace | None = None) -> None:
        self._path = path
        self._turns = turns
        self._rings = tuple(rings)
        self._pace = pace

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._pace is not None:
            self._pace.settle()
        self._turns.take(self._path)
        for ring in self._rings:
            ring.visitor = self._pace
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for ring in self._rings:
            ring.visitor = None
        return output


class Refusals:
    """On a component whose weights travel: what would change some of them and not others is refused whole.

    Every module of the component gets it, because a part can be cast or loaded by itself too.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._path = path
        self._device = device

    def apply(self, module: nn.Module, function: Callable[..., torch.Tensor], recurse: bool = True) -> nn.Module:
        """Stands in for `nn.Module._apply`, which `to`, `half`, `cuda` and the like go through."""
        for dtype in {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}:
            probe = torch.empty(0, dtype=dtype, device=self._device)
            changed = function(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise self._refusal("moved or cast")
        return module

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Runs before `load_state_dict`, which may be about weights that do not travel."""
        tensors = (*module.named_parameters(), *module.named_buffers())
        if any(isinstance(tensor, AwayTensor) and f"{prefix}{name}" in state for name, tensor in tensors):
            raise self._refusal("loaded")

    def _refusal(self, what: str) -> WeightAwayError:
        return WeightAwayError(f"{self._path} cannot be {what} while it is offloaded; disable the offload first")


class HookRegistry:
    """Attaches hooks, and takes all of them off again."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._refusing: list[nn.Module] = []

    def refuse_changes(self, component: nn.Module, refusals: Refusals) -> None:
        for module in component.modules():
            module.__dict__["_apply"] = partial(refusals.apply, module)
            self._refusing.append(module)
            self._handles.append(module.register_load_state_dict_pre_hook(refusals.load))

    def attach(self, module: nn.Module, hook: DistributedLayerwiseOffloadHook | ComponentHook) -> None:
        hook.initialize_hook(module)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return hook.pre_forward(module, *args, **kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return hook.post_forward(module, output)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        while self._refusing:
            self._refusing.pop().__dict__.pop("_apply", None)
