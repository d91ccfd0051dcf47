from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_pipelines import save_blockless, save_tiny_flux, save_tiny_wan


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("pipelines") / "flux")


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("pipelines") / "wan")


@pytest.fixture(scope="session")
def blockless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blockless(tmp_path_factory.mktemp("pipelines") / "blockless")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists every record and wait of the streaming path, and whether leaving it out was noticed."""
    verdicts = {"passed": "caught", "failed": "NOT CAUGHT"}
    rows = [
        f"{verdict}  {report.nodeid.partition('[')[2].rstrip(']')}"
        for outcome, verdict in verdicts.items()
        for report in terminalreporter.getreports(outcome)
        if "test_leaving_it_out_is_noticed" in report.nodeid and report.when == "call"
    ]
    if rows:
        terminalreporter.section("mutation proof")
        terminalreporter.write_line("\n".join(rows))
