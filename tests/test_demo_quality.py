"""The demo model draws digits that a classifier of real digits reads, and is small enough to travel along."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from diffusers import DiTTransformer2DModel
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from offload.errors import SettingsError
from offload.pipelines.digits import DEMO_WEIGHTS, DIGITS, MAGNIFICATION, DigitsPipeline

PICTURES_PER_DIGIT = 20
READABLE_SHARE = 0.95
MAX_BYTES = 6_000_000


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads than cores make these small matrices many times slower, and other tests share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipeline() -> DigitsPipeline:
    pipeline = DigitsPipeline.from_pretrained(DEMO_WEIGHTS, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def native(picture: Image.Image) -> np.ndarray:
    """The picture before it was magnified: (8, 8), 0 to 255."""
    return np.asarray(picture)[::MAGNIFICATION, ::MAGNIFICATION]


def test_a_classifier_of_real_digits_reads_the_drawn_ones(pipeline: DigitsPipeline) -> None:
    real = load_digits()
    classifier = SVC(gamma=0.001).fit(real.data, real.target)
    prompts = [digit for digit in DIGITS for _ in range(PICTURES_PER_DIGIT)]

    drawn = pipeline(prompts, generator=torch.Generator().manual_seed(0)).images

    # The classifier knows the scale of the data set, 0 to 16.
    features = np.stack([native(picture).reshape(-1) for picture in drawn]) * (16 / 255)
    read = classifier.predict(features) == np.array(prompts, dtype=int)
    assert read.mean() >= READABLE_SHARE, dict(zip(DIGITS, read.reshape(len(DIGITS), -1).sum(1), strict=True))
    # Readable would also be one and the same picture for each digit.
    assert len(np.unique(features, axis=0)) == len(prompts)


def test_pictures_are_magnified_without_loss(pipeline: DigitsPipeline) -> None:
    def draw(output_type: str) -> Image.Image | np.ndarray:
        generator = torch.Generator().manual_seed(1)
        return pipeline("3", num_inference_steps=4, generator=generator, output_type=output_type).images[0]

    picture, array = draw("pil"), draw("np")

    assert (picture.mode, picture.size, array.shape) == ("L", (128, 128), (8, 8, 1))
    np.testing.assert_array_equal(native(picture), (array[..., 0] * 255).round())


def test_the_callback_sees_every_step_and_may_replace_the_latents(pipeline: DigitsPipeline) -> None:
    seen = []

    def blank(pipe: DigitsPipeline, step: int, timestep: torch.Tensor, kwargs: dict) -> dict:
        seen.append((step, int(timestep), tuple(kwargs["latents"].shape)))
        return {"latents": torch.full_like(kwargs["latents"], -1.0)}

    images = pipeline([4, 2], num_inference_steps=4, output_type="np", callback_on_step_end=blank).images

    assert seen == [(step, timestep, (2, 1, 8, 8)) for step, timestep in enumerate((999, 749, 499, 249))]
    assert not images.any()


@pytest.mark.parametrize("prompt", ["a cat", "10", "", -1, 2.0, True, None, ["1", "x"], []])
def test_a_prompt_that_is_no_digit_is_refused(pipeline: DigitsPipeline, prompt: object) -> None:
    with pytest.raises(SettingsError, match=r"^prompts=.*the demo draws the digits 0 to 9"):
        pipeline(prompt)


def test_an_unknown_output_type_is_refused(pipeline: DigitsPipeline) -> None:
    with pytest.raises(SettingsError, match=r"^output_type=latent"):
        pipeline("1", output_type="latent")


def test_the_shipped_weights_are_small_and_hold_no_code(pipeline: DigitsPipeline) -> None:
    files = [path for path in DEMO_WEIGHTS.rglob("*") if path.is_file()]

    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert type(pipeline.transformer) is DiTTransformer2DModel
    blocks = len(pipeline.transformer.transformer_blocks)
    assert blocks >= 9 and blocks % 2 == 1
    assert DigitsPipeline.from_pretrained(DEMO_WEIGHTS, dtype=torch.bfloat16).dtype == torch.bfloat16
