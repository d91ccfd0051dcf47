"""A small real pipeline: the handwritten digits 0 to 9, drawn by a stock class-conditional DiT in pixel space.

It has the layout that offloading is about (a stack of equal transformer blocks, read once per step) at a size that any
machine runs in seconds. Its trained weights travel with the package; `scripts/train_demo` makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, DiTTransformer2DModel, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from offload.errors import SettingsError

DEMO_WEIGHTS = Path(__file__).parent / "demo_weights"
DIGITS = tuple("0123456789")
MAGNIFICATION = 16
OUTPUT_TYPES = ("pil", "np")

StepCallback = Callable[["DigitsPipeline", int, torch.Tensor, dict[str, Any]], dict[str, Any]]


def labels_of(prompt: str | int | Sequence[str | int]) -> list[int]:
    """The class labels that the prompts name: one for each prompt."""
    prompts = list(prompt) if isinstance(prompt, (list, tuple)) else [prompt]
    if not prompts:
        raise SettingsError("prompts", prompt, "the demo draws the digits 0 to 9")
    for each in prompts:
        if str(each) not in DIGITS:
            raise SettingsError("prompts", each, "the demo draws the digits 0 to 9")
    return [DIGITS.index(str(each)) for each in prompts]


def to_pil(picture: np.ndarray) -> Image.Image:
    """A native picture, (height, width, 1) in [0, 1], as a magnified grayscale one.

    The nearest neighbour is kept, so `array[::16, ::16]` of the result is the native picture.
    """
    native = Image.fromarray((picture[..., 0] * 255).round().astype(np.uint8))
    return native.resize((native.width * MAGNIFICATION, native.height * MAGNIFICATION), Image.Resampling.NEAREST)


class DigitsPipeline(DiffusionPipeline):
    """Draws digits: `DigitsPipeline.from_pretrained(DEMO_WEIGHTS)("7").images[0]`."""

    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer: DiTTransformer2DModel, scheduler: DDIMScheduler) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @staticmethod
    def check_prompt(prompt: str) -> None:
        """Refuses a prompt before anything runs."""
        labels_of(prompt)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | int | Sequence[str | int],
        num_inference_steps: int = 25,
        guidance_scale: float = 2.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[list[Image.Image] | np.ndarray]:
        """Draw one picture for each prompt, all in one batch.

        With B prompts, "pil" gives B pictures of 128x128 in mode "L", and "np" gives a float32 array (B, 8, 8, 1) in
        [0, 1]. A guidance scale above 1 doubles the batch that the transformer sees. The callback is called as
        `callback(pipeline, step, timestep, {"latents": (B, 1, 8, 8)})` and may return other latents.
        """
        labels = labels_of(prompt)
        if output_type not in OUTPUT_TYPES:
            raise SettingsError("output_type", output_type, f"allowed are {', '.join(OUTPUT_TYPES)}")
        device, config = self._execution_device, self.transformer.config
        guided = guidance_scale > 1

        class_labels = torch.tensor(labels, device=device)  # (B,)
        if guided:
            # The label after the last class is the one that was trained as "no label".
            class_labels = torch.cat([class_labels, torch.full_like(class_labels, config.num_embeds_ada_norm)])

        # The picture itself stays in float32 whatever the dtype of the weights: in bfloat16 the small late steps would
        # round away.
        shape = (len(labels), config.in_channels, config.sample_size, config.sample_size)
        latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)

        self.scheduler.set_timesteps(num_inference_steps, device=device)
        for step, timestep in enumerate(self.scheduler.timesteps):
            model_input = torch.cat([latents, latents]) if guided else latents  # (B or 2B, 1, 8, 8)
            model_input = self.scheduler.scale_model_input(model_input, timestep).to(self.transformer.dtype)
            prediction = self.transformer(
                model_input, timestep=timestep.expand(len(model_input)), class_labels=class_labels, return_dict=False
            )[0].float()
            if guided:
                conditional, unconditional = prediction.chunk(2)
                prediction = unconditional + guidance_scale * (conditional - unconditional)
            # Guidance pushes many pixels past black and white. Where the scheduler clips them, the noise must follow:
            # what was clipped would stay in the picture as noise, and more of it with more steps.
            latents = self.scheduler.step(
                prediction, timestep, latents, use_clipped_model_output=True, return_dict=False
            )[0]

            if callback_on_step_end is not None:
                returned = callback_on_step_end(self, step, timestep, {"latents": latents})
                latents = returned.pop("latents", latents)

        images = (latents / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()  # (B, 8, 8, 1)
        if output_type == "pil":
            images = [to_pil(image) for image in images]
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)
