"""The way in: `torchrun --nproc-per-node 4 launch.py …` where a process is a rank, or `python launch.py nproc=4 …`,
which starts the ranks itself. Every setting is a Hydra override; `--help` lists them.
"""

from __future__ import annotations

import os
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from offload import schema
from offload.errors import PlanError, SettingsError
from offload.runtime.exits import refuse

# An absolute path, because a relative one would name a package wherever this file is imported.
CONF = str(Path(__file__).resolve().parent / "conf")


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def run(config: DictConfig) -> None:
    try:
        settings = schema.to_settings(config)
        if "RANK" in os.environ:
            from offload.runtime.worker import run_rank

            run_rank(settings)
        else:
            from offload.runtime.launcher import launch

            launch(settings)
    except (SettingsError, PlanError) as error:
        refuse(schema.sentence_of(error))


def main() -> None:
    schema.register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand errors over as they are; Hydra's own report of a typo is a page long
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        refuse(schema.sentence_of(error))


if __name__ == "__main__":
    main()
