"""Open a pipeline from its directory, or sketch it on the meta device from its configs alone.

The built-in demo is a directory like any other and takes the same way in. Whatever is wrong with a directory comes out
as one sentence about `model.path`, and what its configs can tell comes out of the sketch, before any rank starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from offload.config import ModelSettings
from offload.errors import SettingsError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin
    from transformers import PreTrainedModel

# What diffusers, transformers and their readers raise about a broken checkpoint.
LOADING_ERRORS = (OSError, RuntimeError, SafetensorError, StrictDataclassError, TypeError, ValueError)


@dataclass(frozen=True)
class PipelineSketch:
    """The modules of a pipeline, with every parameter and buffer on the meta device."""

    class_name: str
    components: dict[str, object]


def open_pipeline(model: ModelSettings) -> DiffusionPipeline:
    """The whole pipeline on the host: weights in `model.dtype`, modules in eval mode, progress bars off.

    Weights that the checkpoint has in this dtype are mapped from their files: ranks share the pages until they copy.

    Raises:
        SettingsError: the directory does not hold a complete pipeline with safetensors.
    """
    root, opener = _root(model), pipeline_class(model)
    with _no_progress_bars():
        # The components come one by one, because a pipeline as a whole would open with weights missing, and draw noise.
        # Those of a class inside diffusers' pipelines stay with the pipeline, which would warn about each.
        components = {name: _load(cls, root, name, model) for name, cls in _component_classes(root, model).items()
                      if not cls.__module__.startswith("diffusers.pipelines.")}
        with _one_sentence(root, "it does not open"):
            pipeline = opener.from_pretrained(str(root), **_loading(model), **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sketch_pipeline(model: ModelSettings) -> PipelineSketch:
    """What `open_pipeline` would open, module by module, without reading a weight.

    Raises:
        SettingsError: as `open_pipeline`, as far as the configs and the names of the files tell.
    """
    root = _root(model)
    components = {name: _sketch(cls, root, name, getattr(torch, model.dtype))
                  for name, cls in _component_classes(root, model).items() if issubclass(cls, nn.Module)}
    return PipelineSketch(_read_index(root)["_class_name"], components)


def pipeline_class(model: ModelSettings) -> type[DiffusionPipeline]:
    """The pipeline's class, by its `model_index.json`; nothing else is read."""
    if model.name == "demo":
        from offload.pipelines.digits import DigitsPipeline

        return DigitsPipeline
    root = _root(model)
    name = _read_index(root)["_class_name"]
    with _quiet_imports():
        import diffusers

        found = getattr(diffusers, name, None)
        if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
            raise SettingsError("model.path", root, f"diffusers {diffusers.__version__} has no pipeline {name}")
    return found


def _root(model: ModelSettings) -> Path:
    if model.name == "demo" or model.path is None:
        from offload.pipelines.digits import DEMO_WEIGHTS

        return DEMO_WEIGHTS
    return Path(model.path)


def _read_index(root: Path) -> dict[str, Any]:
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


def _component_classes(root: Path, model: ModelSettings) -> dict[str, type]:
    """The class of every component that the pipeline has, resolved as diffusers does, its folder checked."""
    _check_variant(root, model.variant)
    with _quiet_imports():
        from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj

        classes = {}
        for name, value in _read_index(root).items():
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
    if variant is not None and not any(_has_variant(folder, variant) for folder in root.iterdir()):
        raise SettingsError("model.variant", variant, f"no weights in {root} are of that variant")


def _has_variant(folder: Path, variant: str) -> bool:
    return any(folder.glob(f"*.{variant}*.safetensors"))


def _loading(model: ModelSettings) -> dict[str, Any]:
    """How both libraries are told to load weights."""
    return {"dtype": getattr(torch, model.dtype), "variant": model.variant, "use_safetensors": True,
            "local_files_only": True}


def _load(cls: type, root: Path, name: str, model: ModelSettings) -> object:
    """One component; of a module every weight must be in the checkpoint."""
    loading = _loading(model)
    if model.variant is not None and not _has_variant(root / name, model.variant):
        loading["variant"] = None  # a checkpoint may have the variant of its large components only
    with _one_sentence(root, f"its {name} does not load"):
        if not issubclass(cls, nn.Module):
            return cls.from_pretrained(root / name, local_files_only=True)
        module, info = cls.from_pretrained(root / name, output_loading_info=True, **loading)
    lacking = [weight for weight, _ in module.named_parameters() if weight in info["missing_keys"]]
    if lacking:
        raise SettingsError("model.path", root, f"its {name} lacks {len(lacking)} weights, such as {lacking[0]}")
    return module


def _sketch(cls: type[nn.Module], root: Path, name: str, dtype: torch.dtype) -> nn.Module:
    from diffusers import ModelMixin

    sketch = _sketch_diffusers if issubclass(cls, ModelMixin) else _sketch_transformers
    with _one_sentence(root, f"its {name} cannot be built"):
        # A few classes make buffers with numpy, which knows no meta device.
        return sketch(cls, root / name, dtype).to("meta").eval()


def _sketch_diffusers(cls: type[ModelMixin], folder: Path, dtype: torch.dtype) -> nn.Module:
    config = cls.load_config(folder, local_files_only=True)
    with _default_dtype(dtype), torch.device("meta"):
        module = cls.from_config(config)
    # The loader casts all that a checkpoint holds, whatever dtype the class made it with.
    for name, tensor in module.state_dict(keep_vars=True).items():
        kept = any(part in name.split(".") for part in cls._keep_in_fp32_modules or ())
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept else dtype)
    return module


def _sketch_transformers(cls: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> nn.Module:
    config = cls.config_class.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        module = cls._from_config(config, dtype=dtype)
    # The loader casts only what the class's plan names, by patterns with `*`.
    for pattern, kept in module._get_dtype_plan(dtype).items():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)
    return module


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _one_sentence(root: Path, what: str) -> Iterator[None]:
    """What the libraries say about a broken checkpoint, cut down to its first sentence."""
    try:
        yield
    except LOADING_ERRORS as error:
        why = " ".join(re.split(r"[.!?:]?\s*\n|[.!?]\s|[.!?]$", str(error).strip())[0].split())
        raise SettingsError("model.path", root, f"{what}: {why or type(error).__name__}") from error


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Without what transformers says about optional packages while its classes are imported."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [each for each in (diffusers_logging, transformers_logging) if each.is_progress_bar_enabled()]
    for each in shown:
        each.disable_progress_bar()
    try:
        yield
    finally:
        for each in shown:
            each.enable_progress_bar()
