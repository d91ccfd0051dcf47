"""The accelerator behind one small object: streams, events, memory, host registration.

The streaming code asks only this object for them, so the same code runs on CUDA, on any accelerator that
`torch.accelerator` knows, and on a CPU, where streams are in order and events only tell the time.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from offload.errors import SettingsError


class Stream(Protocol):
    """An in-order queue of device work."""


class Event(Protocol):
    """A point in a stream. Recording again moves it; a wait means the last record before the wait."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class PinningUnavailable(RuntimeError):
    """Host pages could not be registered with the device."""


class Device(ABC):
    """What the offloader needs of a device.

    Attributes:
        torch: the `torch.device` that tensors are placed on.
        gains_by_pinning: whether copies from page-locked host memory are faster, so that it is worth trying.
    """

    gains_by_pinning = True

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    @property
    def name(self) -> str:
        """What the device is, for people."""
        return self.torch.type

    @abstractmethod
    def stream(self) -> Any:
        """A new stream."""

    @abstractmethod
    def event(self, *, timing: bool = False) -> Event:
        """A new event; with `timing`, `elapsed_time` gives milliseconds between two of them once both have passed."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream that the caller's operations go to."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Sends the operations issued inside to `stream`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until all streams are idle."""

    @abstractmethod
    def empty(self, num_bytes: int) -> torch.Tensor:
        """An uninitialised uint8 tensor of `num_bytes` on the device."""

    @abstractmethod
    def host_empty(self, num_bytes: int) -> torch.Tensor:
        """A small uint8 tensor on the host that copies from the device need not wait for."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most device memory that tensors held at one time since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None:
        """Gives the allocator's unused memory back to the device."""

    def memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the device, or None where it cannot say."""
        return None

    def reserved_bytes(self) -> tuple[int, int] | None:
        """Bytes that the allocator holds and bytes that tensors hold, or None where it cannot say."""
        return None

    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-locks host memory so that copies from it run beside the host.

        Raises:
            PinningUnavailable: the device or the system refused.
        """
        raise PinningUnavailable(f"{self.torch.type} registers no host memory")

    def unregister_host(self, address: int) -> None:
        raise PinningUnavailable(f"{self.torch.type} registers no host memory")


class AcceleratorDevice(Device):
    """A device that `torch.accelerator` drives."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.accelerator.set_device_index(device.index)

    def stream(self) -> torch.Stream:
        return torch.Stream(device=self.torch)

    def event(self, *, timing: bool = False) -> Event:
        return torch.Event(device=self.torch, enable_timing=timing)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.torch)

    def on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch)

    def host_empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def peak_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self.torch)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.torch)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def reserved_bytes(self) -> tuple[int, int] | None:
        return torch.accelerator.memory_reserved(self.torch), torch.accelerator.memory_allocated(self.torch)


class CudaDevice(AcceleratorDevice):
    """CUDA (and ROCm, which answers to the same names)."""

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def memory(self) -> tuple[int, int] | None:
        return torch.cuda.mem_get_info(self.torch)

    def register_host(self, address: int, num_bytes: int) -> None:
        error = _cudart().cudaHostRegister(address, num_bytes, 0)
        if int(error):
            self._read_pending_error()
            raise PinningUnavailable(f"cudaHostRegister of {num_bytes} bytes failed: {error}")

    def _read_pending_error(self) -> None:
        """The runtime keeps a failed call's error for the next launch check, which would blame an innocent kernel."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch)

    def unregister_host(self, address: int) -> None:
        torch.cuda.check_error(int(_cudart().cudaHostUnregister(address)))


def _cudart() -> Any:
    return torch.cuda.cudart()


class HostStream:
    """A CPU runs everything in the order of issue, so a stream is only a name."""


class HostEvent:
    """Remembers when it was recorded."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Whatever was recorded has already happened."""

    def synchronize(self) -> None:
        """Nor is there anything to wait for on the host."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("both events must be recorded before they are compared")
        return (end_event._seconds - self._seconds) * 1e3


class CpuDevice(Device):
    """The host as its own device; `peak_bytes` counts what `empty` handed out, since the allocator does not tell.

    Attributes:
        held_bytes: what `empty` handed out and is still in use.
    """

    gains_by_pinning = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._only_stream = HostStream()
        self.held_bytes = 0
        self._peak_bytes = 0

    def stream(self) -> HostStream:
        return HostStream()

    def event(self, *, timing: bool = False) -> Event:
        return HostEvent()

    def current_stream(self) -> HostStream:
        return self._only_stream

    def on(self, stream: HostStream) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self.held_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        weakref.finalize(tensor.untyped_storage(), self._release, num_bytes)
        return tensor

    def host_empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self.held_bytes


def open_device(name: str, local_rank: int = 0) -> Device:
    """The device of a rank; ranks beyond the number of devices share them in turn.

    Args:
        name: "auto" (the accelerator if there is one), "cpu", or an accelerator's type, such as "cuda".

    Raises:
        SettingsError: there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and accelerator is None):
        return CpuDevice()
    if accelerator is None or name not in ("auto", accelerator.type):
        found = f"cpu and {accelerator.type}" if accelerator else "cpu"
        raise SettingsError("device", name, f"this machine has {found}")
    device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
    return CudaDevice(device) if device.type == "cuda" else AcceleratorDevice(device)


def device_count(device: Device) -> int:
    """How many devices of this kind the machine has; a CPU serves any number of ranks, so it counts as none."""
    return 0 if device.torch.type == "cpu" else torch.accelerator.device_count()
