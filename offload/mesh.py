"""The ranks: who they are, who shares weights with whom, and how they agree on the host.

Ranks that share host weights are neighbours: with 4 ranks and `dp_size` 2 the shard groups are (0, 1) and (2, 3).
Weights travel over a shard group's device backend; everything that is decided travels over gloo, so that waiting for
another rank never sits inside a device collective.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from offload.device import Device, device_count
from offload.errors import PeerFailedError, RankMismatchError

_GRACE_SECONDS = 30.0
"""Groups give up later than the watchdog, which can say more."""

_SECONDS_FOR_THREADS = 0.25

# PyTorch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@contextmanager
def _losing_peers() -> Iterator[None]:
    """Tells a rank that is gone from a fault of this one."""
    try:
        yield
    except RuntimeError as error:
        if "by peer" in str(error):  # gloo: connection closed, or reset, by peer
            raise PeerFailedError(f"another rank is gone: {error}") from error
        raise


@dataclass(frozen=True)
class RankInfo:
    """What torchrun's environment says of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> RankInfo:
        read = {
            name: int(os.environ.get(name.upper(), default))
            for name, default in (("rank", 0), ("world_size", 1), ("local_rank", 0), ("local_world_size", 1))
        }
        return cls(**read)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that act together: the group, this process's place in it, and its size. One rank needs no group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's `numbers`, in rank order. The ranks must pass equally many. CPU groups only."""
        if self.group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        theirs = torch.empty(self.size * len(numbers), dtype=torch.int64)
        with _losing_peers():
            _all_gather(theirs, mine, group=self.group)
        return theirs.view(self.size, -1).tolist()

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Fills `whole` with every rank's `part`, in rank order, on the current stream; both are contiguous."""
        assert self.group is not None, "one rank has nobody to gather from"
        with _losing_peers():
            _all_gather(whole, part, group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, on every rank. CPU groups only."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with _losing_peers():
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Succeeds on every rank or raises on every rank: the error itself where it happened.

        Raises:
            PeerFailedError: another rank failed while `doing` its part.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = [rank for rank, (failure,) in enumerate(self.exchange([int(error is not None)])) if failure]
        if error is not None:
            raise error
        if failed:
            raise PeerFailedError(f"rank {', '.join(map(str, failed))} failed while {doing}")

    def require_equal(self, what: str, text: str) -> None:
        """Checks that all ranks hold the same `text`.

        Raises:
            RankMismatchError: on every rank alike, naming the ranks that differ from rank 0.
        """
        digest = hashlib.sha256(text.encode()).digest()
        numbers = [int.from_bytes(digest[i : i + 8], "big", signed=True) for i in range(0, 32, 8)]
        rows = self.exchange(numbers)
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            raise RankMismatchError(f"the {what} of rank {', '.join(map(str, others))} differs from that of rank 0")


class NoticeBoard:
    """Short notes of the ranks of one shard group, kept by torchrun's agent, so that they outlive a stuck rank."""

    def __init__(self, info: RankInfo, shard: RankGroup) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        first = info.rank - shard.rank
        self._ranks = range(first, first + shard.size)
        self.rank = info.rank

    def post(self, text: str) -> None:
        self._store.set(self._key(self.rank), text)

    def read(self) -> dict[int, str]:
        """The last note of every rank that has left one."""
        return {rank: self._store.get(self._key(rank)).decode() for rank in self._ranks if self._has(rank)}

    def _has(self, rank: int) -> bool:
        return self._store.check([self._key(rank)])

    def _key(self, rank: int) -> str:
        return f"offload/notice/{rank}"


@dataclass(frozen=True)
class Mesh:
    """The groups of one process.

    Attributes:
        world: all ranks, on the host.
        shard: the ranks that share host weights with this one, on the device.
        control: the same ranks as `shard`, on the host.
    """

    info: RankInfo
    world: RankGroup
    shard: RankGroup
    control: RankGroup

    @classmethod
    def join(cls, device: Device, dp_size: int, timeout_seconds: float = 600.0) -> Mesh:
        """Joins the other ranks, as torchrun's environment names them."""
        info = RankInfo.from_environment()
        if info.world_size == 1:
            return cls.alone()
        _let_ranks_share_devices(device, info)
        timeout = timedelta(seconds=timeout_seconds + _GRACE_SECONDS)
        dist.init_process_group("gloo", timeout=timeout)
        world = RankGroup(info.rank, info.world_size, dist.group.WORLD)
        if dp_size == 1:
            return cls(info, world, RankGroup(0, 1), RankGroup(0, 1))
        backend = dist.get_default_backend_for_device(device.torch)
        return cls(info, world, _subgroup(info, dp_size, backend, timeout), _subgroup(info, dp_size, "gloo", timeout))

    @classmethod
    def alone(cls) -> Mesh:
        """A mesh of this process only."""
        one = RankGroup(0, 1)
        return cls(RankInfo(), one, one, one)

    def board(self) -> NoticeBoard | None:
        """A notice board of the ranks that share weights with this one; None if there are none."""
        return NoticeBoard(self.info, self.shard) if self.shard.size > 1 else None

    def close(self) -> None:
        """Leaves the groups. Every exit path calls this: a process that ends inside its groups can abort."""
        if dist.is_initialized():
            dist.destroy_process_group()
            # gloo's threads let go of the last collective's tensors a moment later and need the interpreter for it. One
            # that is being torn down ends such a thread, and that aborts the process.
            time.sleep(_SECONDS_FOR_THREADS)


def _subgroup(info: RankInfo, size: int, backend: str, timeout: timedelta) -> RankGroup:
    """This rank's group among consecutive groups of `size` ranks; every rank takes part in making each of them."""
    ranks = [list(range(first, first + size)) for first in range(0, info.world_size, size)]
    group, _groups = dist.new_subgroups_by_enumeration(ranks, backend=backend, timeout=timeout)
    return RankGroup(info.rank % size, size, cast(dist.ProcessGroup, group))


def _let_ranks_share_devices(device: Device, info: RankInfo) -> None:
    """NCCL refuses two ranks on one device unless each claims a host of its own and they meet over the loopback."""
    devices = device_count(device)
    if device.torch.type != "cuda" or info.local_world_size <= devices:
        return
    os.environ.setdefault("NCCL_HOSTID", f"rank{info.rank}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
