"""The commands that users type: both ways in, the files they leave, and how they end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from tests.ranks import QUICK_NAMES

ROOT = Path(__file__).parent.parent
PYTHON_WAY = [sys.executable, str(ROOT / "launch.py")]
REFUSAL_SECONDS = 15
SHORT = ("prompts=[3,1,4]", "num_inference_steps=4")


def torchrun_way(num_ranks: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        str(ROOT / "launch.py"),
    ]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float


def run(command: list[str], *overrides: str, cwd: Path) -> Ended:
    environment = {**os.environ, **QUICK_NAMES, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
    started = time.monotonic()
    done = subprocess.run(
        [*command, *overrides], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def report_of(directory: Path) -> dict:
    return json.loads((directory / "report.json").read_text())


def hashes(directory: Path) -> list[str]:
    return [image["sha256"] for image in report_of(directory)["images"]]


WAYS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "torchrun-4-dlo": (torchrun_way(4), ("strategy=dlo",)),
    "torchrun-4-dlo-pairs": (torchrun_way(4), ("strategy=dlo", "dp_size=2")),
    "python-2-dlo": (PYTHON_WAY, ("nproc=2", "strategy=dlo")),
    "python-1-layer_wise": (PYTHON_WAY, ("nproc=1", "strategy=layer_wise")),
    "torchrun-2-model_level": (torchrun_way(2), ("strategy=model_level",)),
    "python-1-none": (PYTHON_WAY, ("nproc=1", "strategy=none")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Ended]]:
    """Each way, run once, where it is first asked for."""
    done: dict[str, tuple[Path, Ended]] = {}

    def get(name: str) -> tuple[Path, Ended]:
        if name not in done:
            base = tmp_path_factory.mktemp(name)
            command, overrides = WAYS[name]
            ended = run(command, *overrides, *SHORT, cwd=base)
            assert ended.code == 0, ended.err
            (directory,) = base.glob("outputs/*/*")
            done[name] = directory, ended
        return done[name]

    return get


@pytest.mark.parametrize("name", WAYS)
def test_every_way_draws_the_same_pictures(runs: Callable, name: str) -> None:
    directory, _ = runs(name)
    assert hashes(directory) == hashes(runs("python-1-none")[0])
    assert len(set(hashes(directory))) == 3


@pytest.mark.parametrize("name", WAYS)
def test_a_run_leaves_one_directory_with_everything(runs: Callable, name: str) -> None:
    directory, ended = runs(name)
    report = report_of(directory)
    assert [image["file"] for image in report["images"]] == ["images/0000.png", "images/0001.png", "images/0002.png"]
    for image in report["images"]:
        with Image.open(directory / image["file"]) as picture:
            assert picture.size == (128, 128)
    with Image.open(directory / "contact_sheet.png") as sheet:
        assert sheet.width > 2 * 128
    assert len(list((directory / "logs").iterdir())) == report["world_size"]
    assert str(directory) in re.sub(r"\s", "", ended.out)


def test_the_report_says_what_was_asked_for_and_measured(runs: Callable) -> None:
    report = report_of(runs("torchrun-4-dlo-pairs")[0])
    assert set(report) == {
        "strategy", "transport", "world_size", "dp_size", "device", "model", "wall_seconds", "step_seconds", "images",
        "ranks",
    }  # fmt: skip
    asked = {key: report[key] for key in ("strategy", "transport", "world_size", "dp_size", "device", "model")}
    assert asked == {
        "strategy": "dlo", "transport": "allgather", "world_size": 4, "dp_size": 2, "device": "cpu", "model": "demo",
    }  # fmt: skip
    assert report["step_seconds"]["count"] == 3 * 4
    assert 0 < report["step_seconds"]["median"] <= report["step_seconds"]["p95"] < report["wall_seconds"]
    assert [(image["prompt"], image["seed"], image["rank"]) for image in report["images"]] == [
        ("3", 0, 0), ("1", 1, 1), ("4", 2, 2),
    ]  # fmt: skip
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]


def test_each_of_four_ranks_keeps_a_quarter_of_the_blocks(runs: Callable) -> None:
    for rank in report_of(runs("torchrun-4-dlo")[0])["ranks"]:
        assert 0 < rank["host_weight_bytes"] <= rank["streamed_block_bytes"] / 4 * 1.01
        assert rank["h2d_bytes"] * 4 == pytest.approx(rank["allgather_bytes"], rel=0.2)


def test_the_console_is_quiet_but_for_the_table(runs: Callable) -> None:
    _, ended = runs("python-2-dlo")
    assert ended.err == ""
    assert len(ended.out.strip().splitlines()) == 9


@pytest.mark.parametrize(
    ("command", "overrides", "sentence"),
    [
        (PYTHON_WAY, ("strategy=foo",), "strategy=foo"),
        (PYTHON_WAY, ("nproc=4", "dp_size=3"), "dp_size=3"),
        (PYTHON_WAY, ("model=diffusers", "model.path=/nowhere"), "model.path=/nowhere"),
        (PYTHON_WAY, ("num_inference_steps=0",), "num_inference_steps=0"),
        (PYTHON_WAY, ("num_infrence_steps=5",), "the nearest is num_inference_steps"),
        (PYTHON_WAY, ("+num_infrence_steps=5",), "the nearest is num_inference_steps"),
        (PYTHON_WAY, ("height=64",), "DigitsPipeline takes no height"),
        (PYTHON_WAY, ("device=tpu",), "device=tpu"),
        (PYTHON_WAY, ("prompts=[x]",), "the demo draws the digits 0 to 9"),
        (PYTHON_WAY, ("output_dir=/proc/none",), "output_dir=/proc/none"),
    ],
)
def test_bad_input_is_one_sentence(
    command: list[str], overrides: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    ended = run(command, *overrides, cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1
    assert sentence in ended.err
    assert ended.seconds < REFUSAL_SECONDS


def test_a_model_without_blocks_is_one_sentence(tmp_path: Path, blockless: Path) -> None:
    ended = run(PYTHON_WAY, "strategy=dlo", "model=diffusers", f"model.path={blockless}", "prompts=[1]", cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.count("\n") == 1 and "list of blocks" in ended.err
    assert ended.seconds < REFUSAL_SECONDS


def test_torchrun_ranks_refuse_with_one_sentence_of_their_own(tmp_path: Path) -> None:
    ended = run(torchrun_way(2), "dp_size=3", cwd=tmp_path)
    assert ended.code != 0  # torchrun turns every failure into its own code, with its own summary
    assert ended.err.count("error: dp_size=3") == 1
    assert ended.err.count("exitcode  : 2") == 1 or "exitcode: 2" in ended.err
    assert not list(tmp_path.iterdir())


def test_help_explains_every_group(tmp_path: Path) -> None:
    ended = run(PYTHON_WAY, "--help", cwd=tmp_path)
    assert ended.code == 0
    for group in ("strategy", "transport", "model", "task"):
        assert f"{group}: " in ended.out
