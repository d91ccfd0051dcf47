"""What sits on modules: a few lines that call the pace or the turns.

They are plain `torch.nn` hooks with `always_call`, so a visit that was opened is closed whatever happens inside the
forward.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

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
        self._pace.enter(self._block)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._pace.leave(self._block)
        return output


class ComponentHook:
    """On a component: its turn on the device begins with its forward, and its blocks may be visited until the forward
    ends.
    """

    def __init__(self, path: str, turns: Turns, ring: Ring | None = None, pace: Pace | None = None) -> None:
        self._path = path
        self._turns = turns
        self._ring = ring
        self._pace = pace

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._turns.take(self._path)
        if self._ring is not None:
            self._ring.visitor = self._pace
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self._ring is not None:
            self._ring.visitor = None
        return output


class HookRegistry:
    """Attaches hooks, and takes all of them off again."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

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
