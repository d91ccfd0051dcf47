"""Real ranks for tests: processes that stay up for a module and run one function after another together.

A test takes the fixture `ranks` and says `ranks(3).run(function, *arguments)`: the function runs on ranks 0, 1 and 2 of
a world of three, and what it returns comes back in rank order. It must be defined at the top of a module, because the
processes are spawned. Inside it, `Mesh.join` works as under torchrun. Nothing of `torch.distributed` is replaced.

What a function raises is raised here, with every rank's own traceback. A run that takes too long ends its processes;
the next one gets fresh ones.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.backends import OffloadBackend, enable_offload
from offload.config import STRATEGIES, OffloadConfig
from offload.device import CpuDevice
from offload.mesh import Mesh, RankGroup
from offload.stream.slots import Slot

HOST = "127.0.0.1"
# The store looks up its peers' names, for its log; where a name server is slow that takes five seconds each.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
LIMIT_SECONDS = 60.0
PEER_LIMIT_SECONDS = 5.0
"""How long a rank waits for another, before the grace that groups add; in all it stays below the limit of a run."""


class RanksError(AssertionError):
    """A rank raised, died, or did not answer in time."""


@dataclass(frozen=True)
class Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What a function returned, or the traceback of what it raised."""

    value: Any = None
    raised: str | None = None


@dataclass(frozen=True)
class Rank:
    """One process and this end of the pipe to it."""

    process: BaseProcess
    pipe: Connection

    @classmethod
    def start(cls) -> Rank:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()  # so that this end sees the pipe break when the process dies
        return cls(process, here)

    def end(self) -> None:
        self.pipe.close()  # an idle process leaves by itself when its pipe breaks
        self.process.join(timeout=0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class RankPool:
    """As many processes as the largest world so far; smaller worlds are their first ones."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []

    def __call__(self, size: int) -> World:
        while len(self._ranks) < size:
            self._ranks.append(Rank.start())
        return World(self, self._ranks[:size])

    def close(self) -> None:
        while self._ranks:
            self._ranks.pop().end()


@dataclass(frozen=True)
class World:
    """Ranks that run functions together."""

    pool: RankPool
    ranks: list[Rank]

    def run(self, function: Callable[..., Any], *arguments: Any, limit_seconds: float = LIMIT_SECONDS) -> list[Any]:
        """What `function(*arguments)` returns on every rank.

        Raises:
            RanksError: it raised on a rank, or took longer than `limit_seconds` in all.
        """
        # The store lives on this side, as with torchrun's agent: its port is taken before anyone is told, and a rank
        # that dies takes no store with it.
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for number, rank in enumerate(self.ranks):
            rank.pipe.send(Job(function, arguments, self._environment(number, store.port)))
        answers = self._collect(time.monotonic() + limit_seconds)
        problems = [
            f"--- rank {number} of {len(self.ranks)} ---\n{answer.raised}"
            for number, answer in enumerate(answers)
            if answer.raised
        ]
        if problems:
            raise RanksError(f"{function.__name__} failed\n" + "\n".join(problems))
        return [answer.value for answer in answers]

    def _environment(self, number: int, port: int) -> dict[str, str]:
        size = str(len(self.ranks))
        return {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _collect(self, deadline: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        by_pipe = {rank.pipe: number for number, rank in enumerate(self.ranks)}
        while len(answers) < len(self.ranks):
            waiting = [pipe for pipe, number in by_pipe.items() if number not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            answers.update({by_pipe[pipe]: self._receive(by_pipe[pipe]) for pipe in ready})  # type: ignore[index]
        if len(answers) < len(self.ranks) or any(not rank.process.is_alive() for rank in self.ranks):
            self.pool.close()
        return [answers.get(number, Answer(raised="it did not answer in time")) for number in range(len(self.ranks))]

    def _receive(self, number: int) -> Answer:
        try:
            return self.ranks[number].pipe.recv()
        except EOFError:
            self.ranks[number].process.join()
            return Answer(raised=f"it died with exit code {self.ranks[number].process.exitcode}")


@dataclass(frozen=True)
class Place:
    """What a rank has to offload with."""

    config: OffloadConfig
    device: CpuDevice
    mesh: Mesh

    def enable(self, pipeline: Any) -> OffloadBackend:
        return enable_offload(pipeline, self.config, self.device, self.mesh)


@contextmanager
def joined(strategy: str, dp_size: int | None = None, transport: str = "auto", **rest: Any) -> Iterator[Place]:
    """Joins the other ranks of a run, once in each run."""
    device = CpuDevice()
    config = OffloadConfig.for_world(STRATEGIES[strategy], dp_size, transport, int(os.environ["WORLD_SIZE"]), **rest)
    mesh = Mesh.join(device, config.dp_size, PEER_LIMIT_SECONDS)
    try:
        yield Place(config, device, mesh)
    finally:
        mesh.close()


@contextmanager
def poisoned_slots() -> Iterator[None]:
    """Free slots hold 0xFF bytes, NaN in every float format, so a read at the wrong time cannot look right."""
    make, free = Slot.__init__, Slot.free

    def poisoned_make(self: Slot, *arguments: Any) -> None:
        make(self, *arguments)
        self.buffer.fill_(0xFF)

    def poisoned_free(self: Slot) -> None:
        free(self)
        self.buffer.fill_(0xFF)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "__init__", poisoned_make)
        patch.setattr(Slot, "free", poisoned_free)
        yield


@dataclass(frozen=True)
class Gather:
    """One all-gather on the device's group, by what it fills."""

    dtype: torch.dtype
    address: int
    num_bytes: int
    fills_slot: bool


@contextmanager
def recorded_gathers() -> Iterator[list[Gather]]:
    """Every all-gather on the device's group, while it works as ever."""
    gathers: list[Gather] = []
    slots: set[int] = set()
    make, gather = Slot.__init__, RankGroup.all_gather

    def recorded_make(self: Slot, *arguments: Any) -> None:
        make(self, *arguments)
        slots.add(self.buffer.data_ptr())

    def recorded_gather(self: RankGroup, whole: torch.Tensor, part: torch.Tensor) -> None:
        gathers.append(Gather(whole.dtype, whole.data_ptr(), whole.nbytes, whole.data_ptr() in slots))
        gather(self, whole, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "__init__", recorded_make)
        patch.setattr(RankGroup, "all_gather", recorded_gather)
        yield gathers


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK_NAMES.items():
            patch.setenv(name, value)
        yield pool
    pool.close()


def _serve(pipe: Connection) -> None:
    """The life of a rank: one job after another until the pipe breaks."""
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(job))


def _run(job: Job) -> Answer:
    os.environ.update(job.environment)
    try:
        return Answer(value=job.function(*job.arguments))
    except BaseException:
        return Answer(raised=traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # wakes the ranks that wait for this one
