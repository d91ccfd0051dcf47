"""The short table at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from offload.report.record import RankRecord, RunReport


def run_table(report: RunReport, output_dir: Path) -> Table:
    """Two columns: what was asked for and how it went."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    steps = report.step_seconds
    transport = "" if report.transport == "none" else f", transport {report.transport}"
    for name, value in (
        ("strategy", f"{report.strategy}{transport}"),
        ("model", f"{report.model} on {report.device}"),
        (
            "ranks",
            f"{report.world_size}, {report.dp_size} of which share each weight"
            if report.dp_size > 1
            else f"{report.world_size}",
        ),
        (
            "step",
            "-"
            if steps.median is None
            else f"{_seconds(steps.median)} median, {_seconds(steps.p95 or 0)} p95, {steps.count} steps",
        ),
        ("host weights", _per_rank(report, lambda rank: rank.host_weight_bytes + rank.staged_bytes)),
        ("device peak", _per_rank(report, lambda rank: rank.device_peak_bytes)),
        ("moved", _moved(report)),
        ("wall", _seconds(report.wall_seconds)),
        ("pictures", f"{len(report.images)} in {output_dir}"),
    ):
        table.add_row(name, value)
    return table


def _moved(report: RunReport) -> str:
    h2d = _per_rank(report, lambda rank: rank.h2d_bytes, "H2D")
    return (
        h2d if report.dp_size == 1 else f"{h2d}, {_per_rank(report, lambda rank: rank.allgather_bytes, 'all-gathered')}"
    )


def _per_rank(report: RunReport, figure: Callable[[RankRecord], int], what: str = "") -> str:
    largest = max(figure(rank) for rank in report.ranks)
    return f"{binary(largest)}{' ' if what else ''}{what}{' per rank' if report.world_size > 1 else ''}"


def binary(num_bytes: float) -> str:
    """Bytes with a binary unit, three digits or so."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
