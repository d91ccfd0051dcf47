"""Sketch a pipeline on the meta device from its configs alone: all of its shapes, and none of its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.config import ModelSettings
from offload.pipelines.checkpoint import component_classes, one_sentence, read_index, root_of


@dataclass(frozen=True)
class PipelineSketch:
    """The modules of a pipeline, with every parameter and buffer on the meta device."""

    class_name: str
    components: dict[str, nn.Module]


def sketch_pipeline(model: ModelSettings) -> PipelineSketch:
    """What `open_pipeline` would open, module by module, without reading a weight.

    Raises:
        SettingsError: as `open_pipeline`, as far as the configs and the names of the files tell.
    """
    root = root_of(model)
    components = {
        name: _sketch(cls, root, name, getattr(torch, model.dtype))
        for name, cls in component_classes(root, model).items()
        if issubclass(cls, nn.Module)
    }
    return PipelineSketch(read_index(root)["_class_name"], components)


def _sketch(cls: Any, root: Path, name: str, dtype: torch.dtype) -> nn.Module:
    from diffusers import ModelMixin

    sketch = _sketch_diffusers if issubclass(cls, ModelMixin) else _sketch_transformers
    with one_sentence(root, f"its {name} cannot be built"):
        # A few classes make buffers with numpy, which knows no meta device.
        return sketch(cls, root / name, dtype).to("meta").eval()


def _sketch_diffusers(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    config = cls.load_config(folder, local_files_only=True)
    with _default_dtype(dtype), torch.device("meta"):
        module = cls.from_config(config)
    # The loader casts all that a checkpoint holds, whatever dtype the class made it with.
    for name, tensor in module.state_dict(keep_vars=True).items():
        kept = any(part in name.split(".") for part in cls._keep_in_fp32_modules or ())
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept else dtype)
    return module


def _sketch_transformers(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
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
