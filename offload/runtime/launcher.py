"""`python launch.py`: starts the ranks of one machine with torch's elastic agent, and ends as they end."""

from __future__ import annotations

import logging
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from offload.config import Settings
from offload.errors import USER_ERROR_EXIT_CODE
from offload.pipelines import check_request, pipeline_class, requests_of, sketch_pipeline
from offload.plan.resolve import resolve_offload_plan
from offload.runtime.worker import spawned_rank

_SIGNALLED = 128  # a shell's exit code for a command that a signal ended, less the signal's number


def launch(settings: Settings) -> None:
    """Checks all that can be checked without weights, runs the ranks, and exits with a code of their making."""
    try:
        check(settings)
        _run_ranks(settings)
    except (KeyboardInterrupt, SignalException) as interrupt:
        number = interrupt.sigval if isinstance(interrupt, SignalException) else signal.SIGINT
        print(f"interrupted by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(_SIGNALLED + number)


def _run_ranks(settings: Settings) -> None:
    _quieten_torch()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, spawned_rank)(settings)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            ended_by = signal.Signals(-failure.exitcode).name
            print(f"error: rank {failure.local_rank} was ended by {ended_by}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE if failure.exitcode == USER_ERROR_EXIT_CODE else 1)


def _quieten_torch() -> None:
    """The rank that failed has spoken already. Each of torch's loggers has a level of its own."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def check(settings: Settings) -> None:
    """What a rank would refuse, found before there are any.

    Raises:
        SettingsError, PlanError: as the ranks would.
    """
    config = settings.offload_config(settings.nproc)
    for request in requests_of(settings):
        check_request(pipeline_class(settings.model), request)
    resolve_offload_plan(sketch_pipeline(settings.model), config)
