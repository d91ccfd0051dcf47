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
