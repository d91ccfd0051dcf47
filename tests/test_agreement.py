"""When ranks do not do the same, or do nothing any more, everyone hears of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from offload.errors import RankMismatchError
from offload.stream.ring import StreamBlock
from offload.stream.transport import AllGatherTransport
from tests.models import Pipeline, build, inputs
from tests.ranks import QUICK_NAMES, RankPool, joined, ranks  # noqa: F401 - a fixture

ROOT = Path(__file__).parent.parent


@torch.no_grad()
def fall_out_of_step(when: int) -> tuple[str, int]:
    """Rank 1 gives another block's shard to one gather: what no pass of a model can do, and a fault of ours would."""
    with joined("dlo") as place:
        model = build("stack4")
        backend = place.enable(Pipeline(transformer=model))
        if place.mesh.info.rank == 1:
            stage, calls = AllGatherTransport._stage, itertools.count()

            def stage_another(self: AllGatherTransport, block: StreamBlock) -> bool:
                taken = block.successor if next(calls) == when else block
                if not stage(self, taken):
                    return False
                self._staged[-1] = (block, self._staged[-1][1])
                return True

            AllGatherTransport._stage = stage_another  # type: ignore[method-assign]
        try:
            for number, x in enumerate(inputs(4)):
                try:
                    model(x)
                    backend.verify()
                except RankMismatchError as error:
                    return str(error), number
        finally:
            if place.mesh.info.rank == 1:
                AllGatherTransport._stage = stage  # type: ignore[method-assign]
            backend.shutdown()
    return "", -1


@pytest.mark.parametrize("when", [0, 1, 5])
def test_case_05_ranks_that_mix_blocks_fail_by_name_before_a_result_is_used(ranks: RankPool, when: int) -> None:  # noqa: F811
    answers = ranks(2).run(fall_out_of_step, when)
    assert answers[0] == answers[1]
    sentence, number = answers[0]
    assert number == when // 4
    assert "rank 0 gave transformer.blocks." in sentence and "rank 1 gave transformer.blocks." in sentence


@dataclass(frozen=True)
class Ended:
    code: int
    err: str
    seconds: float
    processes_left: int


def processes_with(marker: str) -> int:
    count = 0
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            count += marker.encode() in environ.read_bytes()
    return count


def launch_faulty(fault: str, directory: Path, *overrides: str) -> Ended:
    """Three ranks under torchrun, of which rank 1 has the fault."""
    marker = f"OFFLOAD_TEST_MARKER={directory}"
    environment = {
        **os.environ,
        **QUICK_NAMES,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        marker.partition("=")[0]: str(directory),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    arguments = [fault, "strategy=dlo", f"output_dir={directory}", *overrides]
    started = time.monotonic()
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "faulty_launch.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stderr, time.monotonic() - started, processes_with(marker))


def test_case_18_the_death_of_a_rank_ends_all(tmp_path: Path) -> None:
    ended = launch_faulty("die", tmp_path, "timeout_seconds=10")
    assert ended.code != 0 and ended.processes_left == 0
    assert "exitcode  : 7" in ended.err
    assert ended.seconds < 60


def test_case_19_the_watchdog_names_the_rank_that_hangs(tmp_path: Path) -> None:
    ended = launch_faulty("hang", tmp_path, "timeout_seconds=5")
    assert ended.code != 0 and ended.processes_left == 0
    assert "error: rank 1 did not come for 5 s; it was last seen in transformer.transformer_blocks.2" in ended.err
    assert ended.seconds < 60


def test_case_20_an_error_on_one_rank_is_named_once_and_ends_all(tmp_path: Path) -> None:
    ended = launch_faulty("raise", tmp_path)
    assert ended.code != 0 and ended.processes_left == 0
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(
        "error: rank 1 failed: PictureError: picture 1 (1): ArithmeticError: told to fail (see "
    )
    assert "PeerFailedError: rank 1 of the shard group failed" in (tmp_path / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_all_with_one_line(tmp_path: Path, number: int, code: int) -> None:
    marker = f"OFFLOAD_TEST_MARKER={tmp_path}"
    environment = {**os.environ, **QUICK_NAMES, "CUDA_VISIBLE_DEVICES": "", marker.partition("=")[0]: str(tmp_path)}
    command = [sys.executable, str(ROOT / "launch.py"), "nproc=2", "num_inference_steps=1000", f"output_dir={tmp_path}"]
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "logs" / "rank1.log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert running.returncode == code
    assert err == f"interrupted by {signal.Signals(number).name}\n"
    assert processes_with(marker) == 0
