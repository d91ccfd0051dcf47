"""Finds work that only luck would order: pairs of accesses to the same bytes, on different streams, without an event
between them.

`RecordingDevice` runs the real code on the CPU, where everything happens in the order of issue, and writes down what a
device with real streams would be told: every operation with its stream and the bytes that it reads and writes, every
event's record and wait, every synchronisation. `conflicts` then asks of the record what such a device may do with it:

- Work on one stream runs in the order of issue, and work on different streams in any order, unless an event says
  otherwise. The host's own order says nothing about the streams, except that nothing starts before it is issued.
- The host runs ahead of all streams. It waits for a stream only where PyTorch does: in a copy between host and device
  that is not `non_blocking`, in whatever answers with elements instead of tensors, and in `synchronize`.
- Host pages that a backend gives back must not be on their way to the device any more.
- Device memory belongs to the stream on which it was allocated, as in PyTorch's caching allocator: what is freed can be
  handed out again at once, to work that comes later on that stream. So an allocation and a release both count as a
  write to the whole buffer, on that stream. An address that is used again is another buffer, so that the true life of
  activations makes no conflicts, and a buffer that is dropped while another stream still works on it does.

Events do nothing on a CPU, so the same record also tells what would happen without one of them: `conflicts` can leave
out the calls of any *site*, a place in the code that calls `record`, `wait` or `synchronize`.
"""

from __future__ import annotations

import ast
import sys
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.device import CpuDevice, Device, HostEvent, HostStream
from offload.host.pages import HostPages

ROOT = Path(__file__).parent.parent
ROOMS = ("stream", "host", "backends", "hooks.py")
"""Where under `offload/` the code lives that orders streams."""
ORDERING_CALLS = ("record", "wait", "synchronize")

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that have bytes; the others stand for one that has."""

ANSWERS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
"""Operations whose results are numbers on the host, which waits for them."""

HOST, COMPUTE = 0, 1
"""Numbers of the host and of the stream that is current outside every `on`."""


@dataclass(frozen=True, order=True)
class Site:
    """A call in the code that orders streams, by where it ends.

    Attributes:
        call: the function that is called, as it is written there.
    """

    file: str
    line: int
    column: int
    call: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.call}"


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int
    writes: bool


@dataclass(frozen=True, slots=True)
class Work:
    """An operation on a stream.

    Attributes:
        where: what issued it.
        host_waits: the host goes on only when it is done.
    """

    stream: int
    name: str
    where: str
    accesses: tuple[Access, ...]
    host_waits: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    event: int
    stream: int
    site: Site


@dataclass(frozen=True, slots=True)
class Wait:
    event: int
    stream: int
    site: Site


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits for an event, or (None) for all streams."""

    event: int | None
    site: Site


@dataclass(frozen=True, slots=True)
class End:
    """A buffer is gone."""

    buffer: int


Entry = Work | Record | Wait | Synchronize | End


@dataclass
class Trace:
    """What a device was told, in the order of issue.

    Attributes:
        streams: what each stream is, by number.
        buffers: what each buffer is, by number.
    """

    entries: list[Entry] = field(default_factory=list)
    streams: list[str] = field(default_factory=lambda: ["the host", "the compute stream"])
    buffers: list[str] = field(default_factory=list)

    def sites(self) -> set[Site]:
        return {entry.site for entry in self.entries if isinstance(entry, Record | Wait | Synchronize)}


@dataclass(frozen=True)
class Conflict:
    """Two accesses to the same bytes that nothing orders."""

    first: str
    second: str
    bytes: str

    def __str__(self) -> str:
        return f"nothing orders these on {self.bytes}:\n    {self.first}\n    {self.second}"


Clock = dict[int, int]


def conflicts(trace: Trace, *, without: Site | None = None, streams: Mapping[int, int] | None = None) -> list[Conflict]:
    """Every kind of conflict in a trace once, in the order in which they show.

    Args:
        without: a site whose calls are left out, as if they were not in the code.
        streams: other streams for the work and the events of some streams.
    """
    return _Judge(trace, without, streams or {}).run()


class _Judge:
    """Vector clocks: each stream's clock says how far along every stream the work must be before its next piece."""

    def __init__(self, trace: Trace, without: Site | None, streams: Mapping[int, int]) -> None:
        self._trace = trace
        self._without = without
        self._moved = streams
        self._clocks: dict[int, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        # Of each buffer the last access to each range by each stream: the earlier ones come before it.
        self._accesses: dict[int, dict[tuple[int, int, int, bool], tuple[int, Work]]] = {}
        self._found: dict[Conflict, None] = {}

    def run(self) -> list[Conflict]:
        for entry in self._trace.entries:
            if isinstance(entry, Work):
                self._work(entry)
            elif isinstance(entry, End):
                self._accesses.pop(entry.buffer, None)
            elif entry.site == self._without:
                continue
            elif isinstance(entry, Record):
                self._events[entry.event] = dict(self._clock(entry.stream))
            elif isinstance(entry, Wait):
                _join(self._clock(entry.stream), self._events.get(entry.event, {}))
            else:
                clocks = list(self._clocks.values()) if entry.event is None else [self._events.get(entry.event, {})]
                for clock in clocks:
                    _join(self._clocks[HOST], clock)
        return list(self._found)

    def _clock(self, stream: int) -> Clock:
        """The stream's clock, and in it what the host has seen: nothing starts before it is issued."""
        clock = self._clocks.setdefault(self._moved.get(stream, stream), {})
        _join(clock, self._clocks[HOST])
        return clock

    def _work(self, work: Work) -> None:
        clock = self._clock(work.stream)
        stream = self._moved.get(work.stream, work.stream)
        clock[stream] = clock.get(stream, 0) + 1
        for access in work.accesses:
            self._access(work, access, stream, clock)
        if work.host_waits:
            _join(self._clocks[HOST], clock)

    def _access(self, work: Work, access: Access, stream: int, clock: Clock) -> None:
        accesses = self._accesses.setdefault(access.buffer, {})
        for (other, start, stop, writes), (time, earlier) in accesses.items():
            if (
                other != stream
                and (writes or access.writes)
                and start < access.stop
                and access.start < stop
                and time > clock.get(other, 0)
            ):
                overlap = max(start, access.start), min(stop, access.stop)
                self._report((earlier, writes), (work, access.writes), access.buffer, overlap)
        accesses[stream, access.start, access.stop, access.writes] = clock[stream], work

    def _report(
        self, first: tuple[Work, bool], second: tuple[Work, bool], buffer: int, overlap: tuple[int, int]
    ) -> None:
        lines = [
            f"{work.name} {'writes' if writes else 'reads'} on {self._trace.streams[work.stream]}, at {work.where}"
            for work, writes in (first, second)
        ]
        place = f"bytes {overlap[0]} to {overlap[1]} of {self._trace.buffers[buffer]}"
        self._found.setdefault(Conflict(*lines, place))


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time


@dataclass(eq=False)
class _Buffer:
    """Memory that lives now.

    Attributes:
        storage: gives the storage while it lives.
        home: the stream that it was allocated on, for device memory.
    """

    number: int
    start: int
    stop: int
    storage: Callable[[], torch.UntypedStorage | None]
    home: int | None


class Recorder:
    """Turns tensors into buffers and ranges, and keeps the trace."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.active = False
        self.stack = [COMPUTE]
        self._starts: list[int] = []
        self._live: dict[int, _Buffer] = {}

    @property
    def stream(self) -> int:
        return self.stack[-1]

    def add(self, entry: Entry) -> None:
        if self.active:
            self.trace.entries.append(entry)

    def knows(self, tensor: torch.Tensor) -> bool:
        return self._find(tensor) is not None

    def is_device(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in PLAIN:
            return False
        buffer = self._find(tensor)
        return buffer is not None and buffer.home is not None

    def add_stream(self) -> int:
        frame = _issuer()
        self.trace.streams.append(f"stream {len(self.trace.streams)} of {frame.f_code.co_name} ({_line(frame)})")
        return len(self.trace.streams) - 1

    def allocate(self, tensor: torch.Tensor, name: str, home: int | None) -> None:
        """Knows a new storage from now on."""
        storage = tensor.untyped_storage()
        if not storage.nbytes() or self.knows(tensor):
            return
        number = len(self.trace.buffers)
        kind = "host" if home is None else "device"
        self.trace.buffers.append(f"the {storage.nbytes()} {kind} bytes of {name}")
        start = storage.data_ptr()
        buffer = _Buffer(number, start, start + storage.nbytes(), weakref.ref(storage), home)
        self._live[start] = buffer
        insort(self._starts, start)
        weakref.finalize(storage, self._release, weakref.ref(buffer)).atexit = False
        if home is not None:
            self._touch_whole(buffer, "its allocation")

    def _release(self, reference: Callable[[], _Buffer | None]) -> None:
        buffer = reference()
        if buffer is None or self._live.get(buffer.start) is not buffer:
            return
        del self._live[buffer.start]
        self._starts.remove(buffer.start)
        if buffer.home is not None:
            self._touch_whole(buffer, "its release")
        self.add(End(buffer.number))

    def _touch_whole(self, buffer: _Buffer, name: str) -> None:
        assert buffer.home is not None
        whole = Access(buffer.number, 0, buffer.stop - buffer.start, True)
        self.add(Work(buffer.home, name, _line(_issuer()), (whole,)))

    def access(self, tensor: torch.Tensor, writes: bool) -> Access | None:
        """The bytes from a tensor's first element to its last."""
        if tensor.numel() == 0:
            return None
        if not self.knows(tensor):
            self.allocate(tensor, f"memory first used at {_line(_issuer())}", None)
        buffer = self._find(tensor)
        assert buffer is not None
        start = tensor.data_ptr() - buffer.start
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Access(buffer.number, start, start + (last + 1) * tensor.itemsize, writes)

    def _find(self, tensor: torch.Tensor) -> _Buffer | None:
        """The live buffer that holds the tensor's storage; another storage may look at the same host memory."""
        address = tensor.untyped_storage().data_ptr()
        index = bisect_right(self._starts, address) - 1
        buffer = self._live[self._starts[index]] if index >= 0 else None
        if buffer is None or address >= buffer.stop:
            return None
        if buffer.storage() is None:
            self._release(lambda: buffer)
            return None
        return buffer

    def work(
        self, name: str, stream: int, reads: list[torch.Tensor], writes: list[torch.Tensor], host_waits: bool
    ) -> None:
        pairs = [(tensor, False) for tensor in reads] + [(tensor, True) for tensor in writes]
        accesses = [self.access(tensor, writing) for tensor, writing in pairs]
        found = tuple(access for access in accesses if access is not None)
        if found:
            self.add(Work(stream, name, _line(_issuer()), found, host_waits))


@dataclass(frozen=True)
class _Effect:
    """What an operation's schema says about its arguments.

    Attributes:
        touches: false for views, which only make another tensor on the same bytes, and for questions about tensors.
        written: names of the arguments that it writes to.
    """

    touches: bool
    written: frozenset[str]


@cache
def _effect_of(function: Any) -> _Effect:
    schema = function._schema
    aliased = [a for a in schema.arguments if a.alias_info is not None]
    written = {a.name for a in aliased if a.alias_info.is_write}
    if schema.name.startswith("c10d::"):
        written = {a.name for a in schema.arguments if a.name.startswith("output")}  # its schema does not say so
    is_view = len(aliased) > len(written & {a.name for a in aliased}) or schema.name == "aten::set_"
    returns_tensors = any("Tensor" in str(result.type) for result in schema.returns)
    touches = not is_view and (returns_tensors or schema.name in ANSWERS or not schema.returns)
    return _Effect(touches, frozenset(written))


class _Operations(TorchDispatchMode):
    """Records every operation that reaches tensors with bytes."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        super().__init__()
        self._recorder = recorder
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a tensor without bytes: it calls again with tensors that have some
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        effect = _effect_of(func)
        if effect.touches:
            self._record(func, effect, args, kwargs, out)
        return out

    def _record(self, func: Any, effect: _Effect, args: Any, kwargs: Any, out: Any) -> None:
        recorder = self._recorder
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        reads, writes = [], []
        for name, value in given.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            (writes if name in effect.written else reads).extend(tensors)
        sides = {recorder.is_device(tensor) for tensor in (*reads, *writes)}
        target = given.get("device")
        on_device = True in sides or target == self._device
        stream = recorder.stream if on_device else HOST
        # The result of a copy is where it was sent, any other result where the operation ran.
        home = stream if on_device and target in (None, self._device) else None
        name = func._schema.name.rpartition("::")[2]
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.numel() and not recorder.knows(made):
                recorder.allocate(made, f"{name} at {_line(_issuer())}", home)
                writes.append(made)
                sides.add(home is not None)
        crosses = name in ("copy_", "_to_copy") and len(sides) > 1 and not given.get("non_blocking")
        recorder.work(name, stream, reads, writes, on_device and (crosses or func._schema.name in ANSWERS))


class _HostReads(TorchFunctionMode):
    """Records what the host reads without an operation: there is none where all memory is the CPU's."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.Tensor.cpu, torch.Tensor.tolist) or type(args[0]) not in PLAIN:
            return func(*args, **kwargs)
        on_device = self._recorder.is_device(args[0])
        self._recorder.work(func.__name__, self._recorder.stream if on_device else HOST, [args[0]], [], on_device)
        return _copy_on_host(args[0]) if on_device and func is torch.Tensor.cpu else func(*args, **kwargs)


def _copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return tensor.clone()


class RecordingStream(HostStream):
    def __init__(self, number: int) -> None:
        self.number = number


class RecordingEvent(HostEvent):
    """An event whose records and waits are written down, and those of nobody else."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        super().__init__()
        self._recorder = recorder
        self._number = number

    def record(self, stream: RecordingStream | None = None) -> None:
        super().record(stream)
        where = stream.number if stream is not None else self._recorder.stream
        self._recorder.add(Record(self._number, where, _site(sys._getframe(1))))

    def wait(self, stream: RecordingStream | None = None) -> None:
        where = stream.number if stream is not None else self._recorder.stream
        self._recorder.add(Wait(self._number, where, _site(sys._getframe(1))))

    def synchronize(self) -> None:
        self._recorder.add(Synchronize(self._number, _site(sys._getframe(1))))


class RecordingDevice(CpuDevice):
    """The host as a device that writes down what it is told while `recording`.

    Its tensors are on `cpu:0`, which PyTorch takes for another device than `cpu` where tensors are made or sent: so its
    memory can be told from the host's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.device("cpu", 0)
        self._recorder = Recorder()
        self._num_events = 0
        self._streams = [RecordingStream(HOST), RecordingStream(COMPUTE)]

    @property
    def trace(self) -> Trace:
        return self._recorder.trace

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        recorder = self._recorder
        close = HostPages.close

        def closed(pages: HostPages, device: Device) -> None:
            """A copy from pages that are no longer registered fails, so closing has to wait as a write has."""
            recorder.work("the end of its registration", HOST, [], [pages.tensor], False)
            close(pages, device)

        recorder.active = True
        try:
            with pytest.MonkeyPatch.context() as patch, _HostReads(recorder), _Operations(recorder, self.torch):
                patch.setattr(HostPages, "close", closed)
                yield self.trace
        finally:
            recorder.active = False  # buffers that outlive the recording are nobody's concern

    def stream(self) -> RecordingStream:
        self._streams.append(RecordingStream(self._recorder.add_stream()))
        return self._streams[-1]

    def event(self, *, timing: bool = False) -> RecordingEvent:
        self._num_events += 1
        return RecordingEvent(self._recorder, self._num_events)

    def current_stream(self) -> RecordingStream:
        return self._streams[self._recorder.stream]

    @contextmanager
    def on(self, stream: RecordingStream) -> Iterator[RecordingStream]:
        self._recorder.stack.append(stream.number)
        try:
            yield stream
        finally:
            self._recorder.stack.pop()

    def synchronize(self) -> None:
        self._recorder.add(Synchronize(None, _site(sys._getframe(1))))

    def empty(self, num_bytes: int) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            tensor = super().empty(num_bytes)
        frame = _issuer()
        self._recorder.allocate(tensor, f"{frame.f_code.co_qualname} ({_line(frame)})", self._recorder.stream)
        return tensor


def _issuer() -> FrameType:
    """The frame of `offload/` that is running, or else that of whoever runs."""
    here = sys._getframe(1)
    outside = None
    frame: FrameType | None = here
    while frame is not None:
        kind = _kind(frame.f_code)
        if kind == "offload":
            return frame
        if kind == "other" and outside is None:
            outside = frame
        frame = frame.f_back
    return outside or here  # a thread of PyTorch's own may be the last to drop a buffer


@cache
def _kind(code: CodeType) -> str:
    file = code.co_filename
    if file.startswith(str(ROOT / "offload")):
        return "device" if file.endswith("offload/device.py") else "offload"
    return "machinery" if file == __file__ or "/torch/" in file or "/lib/python" in file else "other"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _site(frame: FrameType) -> Site:
    return _site_of(frame.f_code, frame.f_lasti)


@cache
def _site_of(code: CodeType, instruction: int) -> Site:
    _, line, _, column = list(code.co_positions())[instruction // 2]
    for site in calls_in(Path(code.co_filename)):
        if (site.line, site.column) == (line, column):
            return site
    raise AssertionError(f"{code.co_filename}:{line} calls an event in a way that its source does not show")


@cache
def calls_in(file: Path) -> tuple[Site, ...]:
    """The calls of a file that order streams."""
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
    return tuple(
        Site(name, node.end_lineno or 0, node.end_col_offset or 0, ast.unparse(node.func))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ORDERING_CALLS
    )


def written_sites() -> list[Site]:
    """All sites of the code that orders streams."""
    rooms = [ROOT / "offload" / room for room in ROOMS]
    files = [file for room in rooms for file in ([room] if room.is_file() else sorted(room.rglob("*.py")))]
    return sorted(site for file in files for site in calls_in(file))
