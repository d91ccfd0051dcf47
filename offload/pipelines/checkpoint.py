"""A pipeline's directory: what it names, which classes these are, and whether it is complete.

Whatever is wrong with a directory comes out as one sentence about `model.path`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from offload.config import ModelSettings
from offload.errors import SettingsError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# What diffusers, transformers and their readers raise about a broken checkpoint.
LOADING_ERRORS = (OSError, RuntimeError, SafetensorError, StrictDataclassError, TypeError, ValueError)


def pipeline_class(model: ModelSettings) -> type[DiffusionPipeline]:
    """The pipeline's class, by its `model_index.json`; nothing else is read."""
    if model.name == "demo":
        from offload.pipelines.digits import DigitsPipeline

        return DigitsPipeline
    root = root_of(model)
    name = read_index(root)["_class_name"]
    with quiet_imports():
        import diffusers

        found = getattr(diffusers, name, None)
        if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
            raise SettingsError("model.path", root, f"diffusers {diffusers.__version__} has no pipeline {name}")
    return found


def root_of(model: ModelSettings) -> Path:
    if model.name == "demo" or model.path is None:
        from offload.pipelines.digits import DEMO_WEIGHTS

        return DEMO_WEIGHTS
    return Path(model.path)


def read_index(root: Path) -> dict[str, Any]:
    index = _read_json(root, "model_index.json")
    if not isinstance(index.get("_class_name"), str):
        raise SettingsError("model.path", root, "model_index.json names no _class_name of diffusers")
    return index


def _read_json(root: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((root / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError("model.path", root, f"{name} is missing") from error
    except ValueError as error:  # what is no JSON, and what is no UTF-8
        raise SettingsError("model.path", root, f"{name} is not valid JSON") from error
    if not isinstance(content, dict):
        raise SettingsError("model.path", root, f"{name} is not a JSON object")
    return content


def component_classes(root: Path, model: ModelSettings) -> dict[str, type]:
    """The class of every component that the pipeline has, resolved as diffusers does, its folder checked."""
    _check_variant(root, model.variant)
    with quiet_imports():
        from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj

        classes = {}
        for name, value in read_index(root).items():
            # What is not a pair of names is a setting of the pipeline, and a pair of nulls an absent component.
            if not (isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)):
                continue
            try:
                classes[name] = simple_get_class_obj(*value)
            except (AttributeError, ImportError, RuntimeError, ValueError) as error:
                unknown = f"its {name} is of an unknown class, {'.'.join(value)}"
                raise SettingsError("model.path", root, unknown) from error
            _check_folder(root, name, classes[name])
    return classes


def _check_folder(root: Path, name: str, cls: type) -> None:
    if not (root / name).is_dir():
        raise SettingsError("model.path", root, f"the folder of its {name} is missing")
    if not issubclass(cls, nn.Module):
        return
    if _read_json(root, f"{name}/config.json").get("quantization_config") is not None:
        raise SettingsError("model.path", root, f"its {name} is quantized, and only plain weights are offloaded")
    if not any((root / name).glob("*.safetensors")):
        raise SettingsError("model.path", root, f"its {name} has no safetensors")


def _check_variant(root: Path, variant: str | None) -> None:
    if variant is not None and not any(has_variant(folder, variant) for folder in root.iterdir()):
        raise SettingsError("model.variant", variant, f"no weights in {root} are of that variant")


def has_variant(folder: Path, variant: str) -> bool:
    return any(folder.glob(f"*.{variant}*.safetensors"))


@contextmanager
def one_sentence(root: Path, what: str) -> Iterator[None]:
    """What the libraries say about a broken checkpoint, cut down to its first sentence."""
    try:
        yield
    except LOADING_ERRORS as error:
        why = " ".join(re.split(r"[.!?:]?\s*\n|[.!?]\s|[.!?]$", str(error).strip())[0].split())
        raise SettingsError("model.path", root, f"{what}: {why or type(error).__name__}") from error


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Without what transformers says about optional packages while its classes are imported."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
