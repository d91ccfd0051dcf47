"""Open a pipeline from its directory. The built-in demo is a directory like any other and takes the same way in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.config import ModelSettings
from offload.errors import SettingsError
from offload.pipelines.checkpoint import component_classes, has_variant, one_sentence, pipeline_class, root_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def open_pipeline(model: ModelSettings) -> DiffusionPipeline:
    """The whole pipeline on the host: weights in `model.dtype`, modules in eval mode, progress bars off.

    Weights that the checkpoint has in this dtype are mapped from their files: ranks share the pages until they copy.

    Raises:
        SettingsError: the directory does not hold a complete pipeline with safetensors.
    """
    root, opener = root_of(model), pipeline_class(model)
    with _no_progress_bars():
        # The components come one by one, because a pipeline as a whole would open with weights missing, and draw noise.
        # Those of a class inside diffusers' pipelines stay with the pipeline, which would warn about each.
        components = {
            name: _load(cls, root, name, model)
            for name, cls in component_classes(root, model).items()
            if not cls.__module__.startswith("diffusers.pipelines.")
        }
        with one_sentence(root, "it does not open"):
            pipeline = opener.from_pretrained(str(root), **_loading(model), **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _is_module(cls: type) -> bool:
    return issubclass(cls, nn.Module)


def _loading(model: ModelSettings) -> dict[str, Any]:
    """How both libraries are told to load weights."""
    return {
        "dtype": getattr(torch, model.dtype),
        "variant": model.variant,
        "use_safetensors": True,
        "local_files_only": True,
    }


def _load(cls: Any, root: Path, name: str, model: ModelSettings) -> object:
    """One component; of a module every weight must be in the checkpoint."""
    loading = _loading(model)
    if model.variant is not None and not has_variant(root / name, model.variant):
        loading["variant"] = None  # a checkpoint may have the variant of its large components only
    with one_sentence(root, f"its {name} does not load"):
        if not _is_module(cls):
            return cls.from_pretrained(root / name, local_files_only=True)
        module, info = cls.from_pretrained(root / name, output_loading_info=True, **loading)
    lacking = [weight for weight, _ in module.named_parameters() if weight in info["missing_keys"]]
    if lacking:
        raise SettingsError("model.path", root, f"its {name} lacks {len(lacking)} weights, such as {lacking[0]}")
    return module


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
