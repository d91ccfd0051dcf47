"""Hydra's side of the settings: the schema it composes against, the help it prints, and the way back to `Settings`.

The schema is derived from the classes in `offload.config`, so that a field, its default and its line of help stand
once. It is a set of mutable twins, because OmegaConf refuses overrides of frozen classes.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError

from offload.config import Settings
from offload.errors import SettingsError

_FREE_FORM = "pipeline_kwargs"


def register() -> None:
    """Makes the schema and the help text known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_twin(Settings))
    store.store(group="hydra/help", name="offload", node={"app_name": "launch.py", "template": help_text()})


def to_settings(config: DictConfig) -> Settings:
    """The frozen, validated settings behind a composed config.

    Raises:
        SettingsError: a value is not allowed, or a key is none of ours.
    """
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return _build(Settings, {str(key): value for key, value in values.items()}, "")


def setting_names() -> list[str]:
    """Every key that can be set, in dotted form."""
    return [name for name, _, _ in _describe(Settings)]


def _groups() -> list[str]:
    return [f.name for f in fields(Settings) if callable(f.default_factory) and is_dataclass(f.default_factory())]


def suggest(name: str) -> str:
    """What to say about an unknown key."""
    close = get_close_matches(name, [*_groups(), *setting_names()], n=1, cutoff=0.5)
    hint = f"the nearest is {close[0]}" if close else "launch.py --help lists them"
    return f"there is no such setting; {hint}"


def sentence_of(error: Exception) -> str:
    """One sentence for an error of Hydra, OmegaConf or ours."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).partition("/")
        return f"{group}={choice} cannot be used: allowed are {', '.join(error.options)}."
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{cause.full_key} cannot be set: {suggest(str(cause.full_key))}."
    if isinstance(cause, ValidationError):
        return f"{cause.full_key} cannot be used: {str(cause).splitlines()[0].rstrip('.')}."
    if isinstance(error, OverrideParseException):
        why = str(error).splitlines()[0].rstrip(".")
        return f"the override {error.override} cannot be read, it must be key=value: {why}."
    return str(error).splitlines()[0]


def help_text() -> str:
    """One line for each key: its name, default and meaning."""
    rows = [
        (name, "" if is_dataclass(default) else _yaml(default), text) for name, default, text in _describe(Settings)
    ]
    left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:<{left}}  {default:<{middle}}  {text}" for name, default, text in rows]
    return "\n".join(
        [
            "Runs a diffusion pipeline whose weights stream from host memory.",
            "",
            "  torchrun --nproc-per-node 4 launch.py strategy=dlo",
            "  python launch.py nproc=4 strategy=dlo",
            "",
            "Groups, each a choice of files in conf/:",
            "",
            "$APP_CONFIG_GROUPS",
            "Settings, each as key=value, with their defaults:",
            "",
            *lines,
            "",
        ]
    )


def _describe(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    for f in fields(cls):
        default = f.default_factory() if callable(f.default_factory) else f.default
        if is_dataclass(default):
            yield from _describe(type(default), f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", default, f.metadata["help"]


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _twin(cls: type) -> type:
    """A mutable dataclass with the same fields, in types that OmegaConf knows."""
    hints = typing.get_type_hints(cls)
    specs = []
    for f in fields(cls):
        if is_dataclass(hints[f.name]):
            twin = _twin(hints[f.name])
            specs.append((f.name, twin, field(default_factory=twin)))
        elif callable(f.default_factory):
            specs.append((f.name, Any, field(default=None)))  # Hydra closes mappings to keys they do not have yet
        else:
            specs.append((f.name, _omegaconf_type(hints[f.name]), field(default=f.default)))
    return make_dataclass(cls.__name__, specs)


def _omegaconf_type(hint: Any) -> Any:
    """Sequences become lists of anything, so that `prompts=[3, 5]` needs no quotes."""
    if isinstance(hint, types.UnionType):
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return typing.Optional[_omegaconf_type(inner)]  # noqa: UP045 - OmegaConf wants typing's own
    return list[Any] if typing.get_origin(hint) is tuple else hint


def _free_form(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise SettingsError(_FREE_FORM, value, "it is a mapping, such as {num_frames: 33}")
    return value or {}


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise SettingsError(f"{prefix}{key}", value, suggest(f"{prefix}{key}"))
        if key == _FREE_FORM:
            value = _free_form(value)
        if is_dataclass(hints[key]):
            value = _build(hints[key], value, f"{prefix}{key}.")
        if isinstance(value, list):
            value = tuple(str(item) if hints[key] == tuple[str, ...] | None else item for item in value)
        arguments[key] = value
    return cls(**arguments)
