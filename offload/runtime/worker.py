"""One rank, from its start to its exit code."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch

from offload.config import Settings
from offload.device import open_device
from offload.errors import PeerFailedError, PlanError, SettingsError
from offload.mesh import Mesh, RankInfo
from offload.runtime.console import RankConsole
from offload.runtime.exits import end_with_parent, refuse
from offload.runtime.tasks.context import RankContext
from offload.runtime.tasks.generate import generate

log = logging.getLogger(__name__)

# What an earlier run may have left in the same directory.
_OUR_FILES = ("images/[0-9]*.png", "logs/rank*.log", "report.json", "contact_sheet.png")

TASKS: dict[str, Callable[[RankContext], None]] = {"generate": generate}


def run_rank(settings: Settings) -> None:
    """Does this process's part of the task that torchrun's environment makes it a rank of.

    Raises:
        SettingsError, PlanError: the user can mend it. Any other failure ends the process, with one line that says why.
    """
    started = time.perf_counter()
    end_with_parent()
    info = RankInfo.from_environment()
    config = settings.offload_config(info.world_size)
    torch.set_num_threads(settings.cpu_threads)
    try:
        device = open_device(settings.device, info.local_rank)
        mesh = Mesh.join(device, config.dp_size, settings.timeout_seconds)
        try:
            output_dir = _output_directory(settings, mesh)
            console = RankConsole(output_dir / "logs", info.rank)
            _run_task(RankContext(settings, config, device, mesh, output_dir, console, started))
            console.close()
        finally:
            mesh.close()
    except (SettingsError, PlanError):
        raise
    except Exception as error:
        if not isinstance(error, PeerFailedError):
            print(f"error: rank {info.rank} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def spawned_rank(settings: Settings) -> None:
    """`run_rank` for processes that the launcher started, which have no command line to report to."""
    try:
        run_rank(settings)
    except (SettingsError, PlanError) as error:
        refuse(str(error))


def _run_task(context: RankContext) -> None:
    try:
        TASKS[context.settings.task.name](context)
    except (SettingsError, PlanError):
        raise
    except Exception as error:
        log.exception("rank %d failed", context.mesh.info.rank)
        if not isinstance(error, PeerFailedError):
            context.console.failed(error)
        raise SystemExit(1) from error


def _output_directory(settings: Settings, mesh: Mesh) -> Path:
    """One directory for all ranks: rank zero decides, since a time is read differently by each."""
    chosen = _make_directory(settings) if mesh.info.rank == 0 else None
    return Path(mesh.world.gather(chosen)[0])


def _make_directory(settings: Settings) -> str:
    try:
        directory = Path(settings.output_dir) if settings.output_dir is not None else _new_directory()
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        for pattern in _OUR_FILES:
            for old in directory.glob(pattern):
                old.unlink()
    except OSError as error:
        where = settings.output_dir or Path("outputs").resolve()
        raise SettingsError("output_dir", where, f"nothing can be written there: {error.strerror}") from error
    return str(directory.resolve())


def _new_directory() -> Path:
    base = Path("outputs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    for number in itertools.count():
        directory = base.with_name(f"{base.name}-{number}" if number else base.name)
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            continue  # another run started in the same second
    raise AssertionError("numbers do not end")
