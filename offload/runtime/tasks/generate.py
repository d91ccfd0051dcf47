"""task=generate: prompts in, pictures and a report out."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from offload.backends import OffloadBackend, enable_offload
from offload.errors import PeerFailedError, PictureError
from offload.pipelines import (
    PictureRequest,
    check_request,
    make_picture,
    num_steps,
    open_pipeline,
    pipeline_class,
    requests_of,
)
from offload.plan.resolve import resolve_offload_plan
from offload.report.pictures import save_contact_sheet, save_picture
from offload.report.record import ImageRecord, RankRecord, RunReport, StepSeconds
from offload.report.tables import run_table
from offload.runtime.clock import StepClock
from offload.runtime.controller import share_out
from offload.runtime.tasks.context import RankContext
from offload.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def generate(context: RankContext) -> None:
    """Draws every prompt once, on one of the ranks, and lets rank zero write down what happened."""
    requests = requests_of(context.settings)
    for request in requests:
        check_request(pipeline_class(context.settings.model), request)
    with context.mesh.world.together("opening the pipeline"):
        pipeline = open_pipeline(context.settings.model)
        denoisers = [dit.module for dit in resolve_offload_plan(pipeline, context.config).dits]
    backend = enable_offload(pipeline, context.config, context.device, context.mesh)
    clock = StepClock(context.device, denoisers)
    board = context.mesh.board()
    watchdog = Watchdog(backend, board, context.settings.timeout_seconds, context.console.complain) if board else None
    if watchdog:
        watchdog.start()
    try:
        mine = share_out(requests, context.mesh.info.world_size)[context.mesh.info.rank]
        images = _Painter(context, pipeline, backend, clock).paint(mine)
        _report(context, backend, clock.seconds(), images)
    finally:
        if watchdog:
            watchdog.end()
        clock.close()
        backend.shutdown()


log = logging.getLogger(__name__)


class _Painter:
    """Draws this rank's pictures, and takes part in the passes that other ranks still need."""

    def __init__(
        self, context: RankContext, pipeline: DiffusionPipeline, backend: OffloadBackend, clock: StepClock
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._backend = backend
        self._clock = clock
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=context.console.screen,
            transient=True,
        )

    def paint(self, requests: list[PictureRequest]) -> list[ImageRecord]:
        world_size = self._context.mesh.info.world_size
        total = sum(num_steps(self._pipeline, request) for request in requests)
        with self._progress:
            task = self._progress.add_task(f"rank 0 of {world_size}" if world_size > 1 else "denoising", total=total)
            images = [self._paint_or_report(request, task) for request in requests]
            self._backend.join_others()
        return images

    def _paint_or_report(self, request: PictureRequest, task: TaskID) -> ImageRecord:
        try:
            return self._paint_one(request, task)
        except PeerFailedError:
            raise
        except Exception as error:
            self._tell_others()
            what = f"picture {request.index} ({request.prompt}): {type(error).__name__}: {error}"
            raise PictureError(what) from error

    def _tell_others(self) -> None:
        try:
            self._backend.report_failure()
        except Exception:  # they are gone, or what failed was the way to them
            log.exception("the other ranks could not be told")

    def _paint_one(self, request: PictureRequest, task: TaskID) -> ImageRecord:
        def on_step(step: int) -> None:
            self._clock.step_ended()
            self._progress.advance(task)

        picture = make_picture(self._pipeline, request, on_step)
        self._clock.picture_ended()
        self._backend.verify()
        file = Path("images") / f"{request.index:04d}.png"
        save_picture(picture.frames, self._context.output_dir / file)
        return ImageRecord(
            file=str(file),
            sha256=picture.sha256,
            prompt=request.prompt,
            seed=request.seed,
            rank=self._context.mesh.info.rank,
        )


def _report(
    context: RankContext, backend: OffloadBackend, step_seconds: list[float], images: list[ImageRecord]
) -> None:
    """Gathers every rank's figures; rank zero writes the report and the sheet, and shows the table."""
    rank = RankRecord(
        rank=context.mesh.info.rank, device_peak_bytes=context.device.peak_bytes(), **asdict(backend.figures())
    )
    gathered = context.mesh.world.gather((rank, step_seconds, images))
    if not context.is_zero:
        return
    settings, config = context.settings, context.config
    report = RunReport(
        strategy=config.strategy.short_name,
        transport=config.transport if config.strategy.streams else "none",
        world_size=context.mesh.info.world_size,
        dp_size=config.dp_size,
        device=context.device.name,
        model=settings.model.path or settings.model.name,
        wall_seconds=time.perf_counter() - context.started,
        step_seconds=StepSeconds.of([seconds for _, steps, _ in gathered for seconds in steps]),
        images=tuple(
            sorted((image for _, _, made in gathered for image in made), key=lambda image: int(Path(image.file).stem))
        ),
        ranks=tuple(record for record, _, _ in gathered),
    )
    report.write(context.output_dir / "report.json")
    save_contact_sheet(
        [context.output_dir / image.file for image in report.images], context.output_dir / "contact_sheet.png"
    )
    context.console.screen.print(run_table(report, context.output_dir))
