"""What a picture is made from, and whether a pipeline takes it: told by the signature of its call, without weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.config import Settings
from offload.errors import SettingsError

OPTIONAL_FIELDS = ("negative_prompt", "num_inference_steps", "height", "width", "guidance_scale")
FIELDS_OF_THEIR_OWN = ("prompt", *OPTIONAL_FIELDS)
# A call makes one picture, with the noise of its own seed, as PIL images: these are never the user's to give.
FIXED_ARGUMENTS = (
    "class_labels",
    "generator",
    "output_type",
    "return_dict",
    "callback_on_step_end",
    "num_images_per_prompt",
    "num_videos_per_prompt",
)


@dataclass(frozen=True)
class PictureRequest:
    """One picture (or one video). None leaves an argument to the pipeline's default."""

    index: int
    prompt: str
    seed: int
    num_inference_steps: int | None = None
    height: int | None = None
    width: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are set, by name, all but the prompt."""
        named = {name: getattr(self, name) for name in OPTIONAL_FIELDS}
        return {name: value for name, value in {**named, **self.extra}.items() if value is not None}


def requests_of(settings: Settings) -> list[PictureRequest]:
    """One request for each prompt; the n-th gets seed + n, so a picture does not depend on which rank makes it."""
    return [
        PictureRequest(
            index=index,
            prompt=prompt,
            seed=settings.seed + index,
            num_inference_steps=settings.num_inference_steps,
            height=settings.height,
            width=settings.width,
            guidance_scale=settings.guidance_scale,
            negative_prompt=settings.negative_prompt,
            extra=dict(settings.pipeline_kwargs),
        )
        for index, prompt in enumerate(settings.prompts or ())
    ]


def call_parameters(pipeline_class: type) -> dict[str, inspect.Parameter]:
    """What the pipeline's call takes, by name. `**kwargs` counts for nothing: pipelines drop what lands there."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(pipeline_class.__call__).parameters
    return {name: each for name, each in parameters.items() if name != "self" and each.kind not in variadic}


def check_request(pipeline_class: type, request: PictureRequest) -> None:
    """Refuse what the pipeline's call would not take.

    Raises:
        SettingsError: an argument that is set is unknown to the pipeline, set twice, or missing.
    """
    parameters = call_parameters(pipeline_class)
    _check_prompt(pipeline_class, parameters, request.prompt)
    _check_extra(request.extra)
    accepted = [name for name in parameters if name not in FIXED_ARGUMENTS]
    for name, value in request.options.items():
        if name not in accepted:
            takes = f"{pipeline_class.__name__} takes no {name}, only {', '.join(accepted)}"
            raise SettingsError(_setting_of(name), value, takes)
    given = (*request.options, *FIXED_ARGUMENTS, "prompt")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in given:
            raise SettingsError(_setting_of(name), "null", f"{pipeline_class.__name__} cannot be called without {name}")


def _check_prompt(pipeline_class: Any, parameters: Mapping[str, inspect.Parameter], prompt: str) -> None:
    if hasattr(pipeline_class, "check_prompt"):
        pipeline_class.check_prompt(prompt)
    if "prompt" in parameters:
        return
    if "class_labels" not in parameters:
        raise SettingsError("prompts", prompt, f"{pipeline_class.__name__} takes no prompt")
    if not prompt.isdecimal() and not hasattr(pipeline_class, "get_label_ids"):
        raise SettingsError("prompts", prompt, f"{pipeline_class.__name__} takes the number of a class")


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name in FIXED_ARGUMENTS:
            raise SettingsError(f"pipeline_kwargs.{name}", value, "it is the same for every picture")
        if name in FIELDS_OF_THEIR_OWN:
            raise SettingsError(f"pipeline_kwargs.{name}", value, f"it has a setting of its own, {_setting_of(name)}")


def _setting_of(argument: str) -> str:
    """The setting that an argument of the call comes from."""
    if argument == "prompt":
        return "prompts"
    return argument if argument in OPTIONAL_FIELDS else f"pipeline_kwargs.{argument}"
