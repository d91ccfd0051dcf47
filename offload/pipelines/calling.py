"""Call a pipeline for one picture, so that the same bits come out whichever rank makes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offload.errors import SettingsError
from offload.pipelines.request import PictureRequest, call_parameters

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


@dataclass(frozen=True)
class Picture:
    """What one call made: one frame for a picture, several for a video."""

    frames: tuple[Image, ...]

    @property
    def sha256(self) -> str:
        """Hex digest of mode, size and pixels of all frames: equal exactly when the pictures are."""
        digest = hashlib.sha256()
        for frame in self.frames:
            digest.update(f"{frame.mode} {frame.width} {frame.height}\n".encode())
            digest.update(frame.tobytes())
        return digest.hexdigest()


def make_picture(pipeline: Any, request: PictureRequest, on_step: Callable[[int], None]) -> Picture:
    """Make the picture; `on_step` hears the number of each denoising step, from 0, when that step ends.

    Raises:
        SettingsError: the prompt names no class of the pipeline, or the pipeline makes no pictures.
    """
    output = pipeline(**_arguments(pipeline, request, on_step))
    for name in ("images", "frames"):
        if hasattr(output, name):
            made = getattr(output, name)[0]
            return Picture(tuple(made) if isinstance(made, list | tuple) else (made,))
    raise SettingsError("model", type(pipeline).__name__, "it makes neither pictures nor videos")


def num_steps(pipeline: DiffusionPipeline, request: PictureRequest) -> int:
    """How many denoising steps the picture is asked to take."""
    if request.num_inference_steps is not None:
        return request.num_inference_steps
    return call_parameters(type(pipeline))["num_inference_steps"].default


def _arguments(pipeline: DiffusionPipeline, request: PictureRequest, on_step: Callable[[int], None]) -> dict[str, Any]:
    def after_step(_: DiffusionPipeline, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step(step)
        return tensors

    parameters = call_parameters(type(pipeline))
    # The noise is drawn on the host: a generator on the device would draw another picture on another kind of device.
    fixed = {
        "generator": torch.Generator().manual_seed(request.seed),
        "output_type": "pil",
        "callback_on_step_end": after_step,
    }
    subject = {"prompt": request.prompt} if "prompt" in parameters else {"class_labels": [_label(pipeline, request)]}
    return {**subject, **request.options, **{name: value for name, value in fixed.items() if name in parameters}}


def _label(pipeline: DiffusionPipeline, request: PictureRequest) -> int:
    """The class that the prompt names, by number or by name."""
    if request.prompt.isdecimal():
        return int(request.prompt)
    try:
        return pipeline.get_label_ids([request.prompt])[0]
    except ValueError as error:
        raise SettingsError("prompts", request.prompt, f"{type(pipeline).__name__} knows no such label") from error
