"""Settings: every choice composes, every key is explained, and what is wrong is refused in one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from offload import schema
from offload.config import STRATEGIES, OffloadConfig, OffloadStrategy, Settings
from offload.errors import SettingsError

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
CHOICES = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    schema.register()


def settings(*overrides: str) -> Settings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return schema.to_settings(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group: str, choice: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    path = [f"model.path={tmp_path}", "prompts=[a]"] if choice == "diffusers" else []
    assert getattr(settings(f"{group}={choice}", *path), group).name == choice


def test_the_defaults_are_the_demo_under_dlo() -> None:
    default = settings()
    assert (default.strategy.name, default.model.name, default.task.name, default.dp_size) == (
        "dlo",
        "demo",
        "generate",
        None,
    )
    assert default.prompts == tuple("0123456789")


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().seed = 3  # type: ignore[misc]


def test_every_key_is_in_the_help_and_in_the_reference() -> None:
    text, reference = schema.help_text(), (ROOT / "docs" / "configuration.md").read_text()
    names = schema.setting_names()
    assert len(names) == len(set(names)) > 20
    for name in names:
        assert f"  {name} " in text
        assert f"`{name}`" in reference


def test_prompts_may_be_numbers() -> None:
    assert settings("prompts=[3,7]").prompts == ("3", "7")


def test_pipeline_arguments_keep_their_types() -> None:
    assert settings("pipeline_kwargs={num_frames: 5, sizes: [1, 2]}").pipeline_kwargs == {
        "num_frames": 5,
        "sizes": [1, 2],
    }


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("num_inference_steps=0", "num_inference_steps=0 cannot be used: it must be at least 1."),
        ("dp_size=0", "dp_size=0 cannot be used: it must be at least 1."),
        ("nproc=-1", "nproc=-1 cannot be used: it must be at least 1."),
        ("guidance_scale=-1", "guidance_scale=-1.0 cannot be used: it must be at least 0."),
        ("seed=-1", "seed=-1 cannot be used: it must be at least 0."),
        ("transport.staging_shards=1", "transport.staging_shards=1 cannot be used: it must be at least 2."),
        ("model.dtype=int4", "model.dtype=int4 cannot be used: allowed are float32, bfloat16, float16."),
        ("strategy.name=foo", "strategy=foo cannot be used: allowed are none, model_level, layer_wise, dlo."),
        ("prompts=null", "prompts=null cannot be used: give at least one prompt."),
        ("prompts=[]", "prompts=[] cannot be used: give at least one prompt."),
        ("model=diffusers", "model.path=null cannot be used: model=diffusers needs the directory of a pipeline."),
        ("model.path=/", "model.path=/ cannot be used: model=demo has its own weights; use model=diffusers."),
        ("+stratgy=dlo", "stratgy=dlo cannot be used: there is no such setting; the nearest is strategy."),
        ("+model.pat=x", "model.pat=x cannot be used: there is no such setting; the nearest is model.path."),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(override)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("strategy", STRATEGIES.values())
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_open_choices_are_resolved_for_the_world(strategy: OffloadStrategy, world_size: int) -> None:
    config = OffloadConfig.for_world(strategy, None, "auto", world_size)
    shared = strategy is OffloadStrategy.DISTRIBUTED_LAYER_WISE and world_size > 1
    assert config.dp_size == (world_size if shared else 1)
    assert config.transport == ("allgather" if shared else "local")


@pytest.mark.parametrize(
    ("strategy", "dp_size", "transport", "world_size", "names"),
    [
        ("dlo", 3, "auto", 4, ("dp_size=3", "4")),
        ("dlo", 8, "auto", 4, ("dp_size=8", "4")),
        ("dlo", 2, "local", 4, ("dp_size=2", "transport=local")),
        ("dlo", 1, "allgather", 4, ("transport=allgather", "dp_size")),
        ("dlo", None, "allgather", 1, ("transport=allgather", "dp_size")),
        ("layer_wise", 2, "auto", 2, ("dp_size=2", "layer_wise")),
        ("model_level", 2, "auto", 2, ("dp_size=2", "model_level")),
        ("none", 4, "auto", 4, ("dp_size=4", "none")),
        ("layer_wise", None, "allgather", 2, ("transport=allgather", "dlo")),
    ],
)
def test_contradictions_are_refused(
    strategy: str, dp_size: int | None, transport: str, world_size: int, names: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as refused:
        OffloadConfig.for_world(STRATEGIES[strategy], dp_size, transport, world_size)
    assert all(name in str(refused.value) for name in names)


def test_the_schema_refuses_wrong_types() -> None:
    for override in ("height=abc", "seed=null", "nproc=1.5", "strategy.pin_memory=maybe"):
        with pytest.raises(Exception) as raised, initialize_config_dir(str(CONF), version_base="1.3"):
            compose("config", overrides=[override])
        sentence = schema.sentence_of(raised.value)
        assert sentence.startswith(override.split("=")[0]) and "\n" not in sentence


def test_the_schema_has_the_fields_of_the_settings() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config"))
    assert isinstance(composed, dict)
    assert set(composed) == {field.name for field in dataclasses.fields(Settings)}
