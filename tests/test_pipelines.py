"""Pipelines open, are sketched, and draw the same bits each time; what cannot work is refused in one sentence."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel, FluxPipeline, WanPipeline
from safetensors.torch import load_file, save_file

import offload.pipelines
from offload.config import DTYPES, ModelSettings, Settings
from offload.errors import SettingsError
from offload.pipelines import (
    PictureRequest,
    check_request,
    make_picture,
    num_steps,
    open_pipeline,
    pipeline_class,
    requests_of,
    sketch_pipeline,
)

SMALL = {"num_inference_steps": 2, "height": 16, "width": 16}
FLUX = PictureRequest(0, "a red fox", 3, **SMALL)
WAN = PictureRequest(0, "a red fox", 3, **SMALL, extra={"num_frames": 5})
DIGIT = PictureRequest(0, "7", 3, num_inference_steps=2)
TENSORS = "diffusion_pytorch_model.safetensors"

Damage = Callable[[Path], object]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["demo", "flux", "wan"])
def case(request: pytest.FixtureRequest, tiny_flux: Path, tiny_wan: Path) -> tuple[ModelSettings, PictureRequest]:
    return {
        "demo": (ModelSettings(name="demo"), DIGIT),
        "flux": (ModelSettings(name="diffusers", path=str(tiny_flux)), FLUX),
        "wan": (ModelSettings(name="diffusers", path=str(tiny_wan)), WAN),
    }[request.param]


@pytest.fixture(scope="module")
def labelled() -> DiTPipeline:
    """A pipeline that is asked for classes, by number or name, and reports no steps."""
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_elementwise_affine=False,
    )
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    # A DiT in training drops labels at random.
    pipeline = DiTPipeline(transformer.eval(), vae.eval(), DDIMScheduler(), id2label={3: "fox, red fox"})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def no_step(step: int) -> None:
    del step


def modules(components: dict[str, object]) -> dict[str, torch.nn.Module]:
    return {name: each for name, each in components.items() if isinstance(each, torch.nn.Module)}


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


@pytest.mark.parametrize("dtype", DTYPES)
def test_sketch_equals_the_opened_pipeline(case: tuple[ModelSettings, PictureRequest], dtype: str) -> None:
    model = replace(case[0], dtype=dtype)
    sketch, pipeline = sketch_pipeline(model), open_pipeline(model)
    assert sketch.class_name == type(pipeline).__name__
    assert set(sketch.components) == set(modules(pipeline.components))
    for name, opened in modules(pipeline.components).items():
        sketched = sketch.components[name]
        assert type(sketched) is type(opened)
        assert [(key, each.shape, each.dtype, each.stride()) for key, each in tensors(sketched).items()] == [
            (key, each.shape, each.dtype, each.stride()) for key, each in tensors(opened).items()
        ]
        assert all(each.is_meta for each in tensors(sketched).values())
        assert all(each.device.type == "cpu" for each in tensors(opened).values())
        # Tied weights are tied in both.
        assert [key for key, _ in sketched.named_parameters()] == [key for key, _ in opened.named_parameters()]
        assert not any(each.training for each in (*sketched.modules(), *opened.modules()))


def test_the_weights_are_those_of_the_directory(tiny_flux: Path) -> None:
    pipeline = open_pipeline(ModelSettings(name="diffusers", path=str(tiny_flux), dtype="bfloat16"))
    for name, saved in load_file(tiny_flux / "transformer" / TENSORS).items():
        assert torch.equal(pipeline.transformer.get_parameter(name), saved.bfloat16())


def test_the_seed_decides_the_picture(case: tuple[ModelSettings, PictureRequest]) -> None:
    model, request = case
    first, second = open_pipeline(model), open_pipeline(model)
    sha256 = make_picture(first, request, no_step).sha256
    assert make_picture(second, request, no_step).sha256 == sha256
    assert make_picture(first, replace(request, seed=4), no_step).sha256 != sha256
    assert make_picture(first, request, no_step).sha256 == sha256


def test_every_step_is_reported(case: tuple[ModelSettings, PictureRequest]) -> None:
    model, request = case
    pipeline = open_pipeline(model)
    steps: list[int] = []
    make_picture(pipeline, replace(request, num_inference_steps=3), steps.append)
    assert steps == [0, 1, 2]
    assert num_steps(pipeline, request) == 2
    assert num_steps(pipeline, replace(request, num_inference_steps=None)) > 2


def test_a_video_has_its_frames(tiny_wan: Path) -> None:
    picture = make_picture(open_pipeline(ModelSettings(name="diffusers", path=str(tiny_wan))), WAN, no_step)
    assert [frame.size for frame in picture.frames] == [(16, 16)] * 5
    assert pickle.loads(pickle.dumps(picture)).sha256 == picture.sha256


def test_classes_are_asked_for_by_number_or_name(labelled: DiTPipeline) -> None:
    request = PictureRequest(0, "3", 0, num_inference_steps=1)
    check_request(DiTPipeline, request)
    picture = make_picture(labelled, request, no_step)
    assert len(picture.frames) == 1
    assert make_picture(labelled, replace(request, prompt="red fox"), no_step).sha256 == picture.sha256
    with pytest.raises(SettingsError, match=r"^prompts=blue fox cannot be used: DiTPipeline knows no such label\.$"):
        make_picture(labelled, replace(request, prompt="blue fox"), no_step)


def test_opening_prints_nothing(tiny_flux: Path) -> None:
    """In a fresh process, where the libraries are imported too."""
    script = (
        "import sys, offload.pipelines as p; from offload.config import ModelSettings;"
        "assert not {'diffusers', 'transformers'} & set(sys.modules);"
        "model = ModelSettings(name='diffusers', path=sys.argv[1]); p.sketch_pipeline(model);"
        "p.make_picture(p.open_pipeline(model), p.PictureRequest(0, 'fox', 0, 1, 16, 16), int)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny_flux)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_nth_prompt_has_the_nth_seed() -> None:
    settings = Settings(prompts=("1", "2", "3"), seed=10, num_inference_steps=4, pipeline_kwargs={"num_frames": 5})
    requests = requests_of(settings)
    assert [(each.index, each.prompt, each.seed) for each in requests] == [(0, "1", 10), (1, "2", 11), (2, "3", 12)]
    assert requests[0].options == {"num_inference_steps": 4, "num_frames": 5}


def test_classes_are_known_without_weights(case: tuple[ModelSettings, PictureRequest]) -> None:
    model, request = case
    assert pipeline_class(model).__name__ == sketch_pipeline(model).class_name
    check_request(pipeline_class(model), request)


@pytest.mark.parametrize(
    ("pipeline", "request_", "start"),
    [
        (
            DiTPipeline,
            replace(DIGIT, negative_prompt="8"),
            "negative_prompt=8 cannot be used: DiTPipeline takes no neg",
        ),
        (
            DiTPipeline,
            replace(DIGIT, height=64),
            "height=64 cannot be used: DiTPipeline takes no height, only guidance_sc",
        ),
        (
            FluxPipeline,
            replace(FLUX, extra={"num_frame": 5}),
            "pipeline_kwargs.num_frame=5 cannot be used: FluxPipeline t",
        ),
        (
            WanPipeline,
            replace(WAN, extra={"height": 5}),
            "pipeline_kwargs.height=5 cannot be used: it has a setting of it",
        ),
        (
            WanPipeline,
            replace(WAN, extra={"generator": 5}),
            "pipeline_kwargs.generator=5 cannot be used: it is the same",
        ),
        (torch.nn.Module, FLUX, "prompts=a red fox cannot be used: Module takes no prompt"),
    ],
)
def test_what_a_call_does_not_take_is_refused(pipeline: type, request_: PictureRequest, start: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_request(pipeline, request_)
    assert str(refused.value).startswith(start)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def drop_a_weight(file: Path) -> None:
    weights = load_file(file)
    del weights[min(weights)]
    save_file(weights, file, metadata={"format": "pt"})


# What is done to a directory, and what of it the sketch already tells.
SEEN_BY_THE_SKETCH: dict[str, tuple[Damage, str]] = {
    "folder": (lambda root: shutil.rmtree(root / "transformer"), "the folder of its transformer is missing"),
    "weights": (lambda root: (root / "vae" / TENSORS).unlink(), "its vae has no safetensors"),
    "config": (lambda root: (root / "vae/config.json").unlink(), "vae/config.json is missing"),
    "json": (lambda root: (root / "vae/config.json").write_text("{"), "vae/config.json is not valid JSON"),
    "index": (lambda root: (root / "model_index.json").write_bytes(b"\xff"), "model_index.json is not valid JSON"),
    "list": (lambda root: (root / "model_index.json").write_text("[]"), "model_index.json is not a JSON object"),
    "no name": (lambda root: edit(root / "model_index.json", _class_name=None), "names no _class_name of diffusers"),
    "class": (lambda root: edit(root / "model_index.json", vae=["diffusers", "No"]), "unknown class, diffusers.No"),
    "library": (lambda root: edit(root / "model_index.json", vae=["no", "No"]), "unknown class, no.No"),
    "value": (lambda root: edit(root / "transformer/config.json", num_layers="two"), "its transformer cannot be built"),
    "field": (lambda root: edit(root / "text_encoder/config.json", hidden_size="two"), "its text_encoder cannot be"),
    "quantized": (lambda root: edit(root / "vae/config.json", quantization_config={}), "its vae is quantized"),
}
SEEN_WHEN_OPENED: dict[str, tuple[Damage, str]] = {
    "pipeline": (lambda root: edit(root / "model_index.json", _class_name="No"), "has no pipeline No"),
    "not one": (lambda root: edit(root / "model_index.json", _class_name="DDIMScheduler"), "no pipeline DDIMScheduler"),
    "component": (lambda root: edit(root / "model_index.json", vae=[None, None]), "it does not open: "),
    "scheduler": (lambda root: (root / "scheduler/scheduler_config.json").unlink(), "its scheduler does not load: "),
    "tokenizer": (lambda root: (root / "tokenizer/tokenizer.json").write_text("{"), "its tokenizer does not load: "),
    "cut": (lambda root: (root / "vae" / TENSORS).write_bytes(b"12345678"), "its vae does not load: "),
    "shape": (lambda root: edit(root / "vae/config.json", latent_channels=8), "its vae does not load: Cannot load"),
    "lost": (lambda root: drop_a_weight(root / "vae" / TENSORS), "its vae lacks 1 weights, such as decoder."),
    "lost text": (lambda root: drop_a_weight(root / "text_encoder/model.safetensors"), "its text_encoder lacks 1 weig"),
}


def refusal(do: Callable[[ModelSettings], object], root: Path) -> str:
    with pytest.raises(SettingsError) as refused:
        do(ModelSettings(name="diffusers", path=str(root)))
    assert refused.value.field == "model.path"
    assert str(root) in str(refused.value)
    return refused.value.allowed


@pytest.mark.parametrize("name", [*SEEN_BY_THE_SKETCH, *SEEN_WHEN_OPENED])
def test_a_bad_directory_gives_one_sentence(name: str, tiny_flux: Path, tmp_path: Path) -> None:
    damage, words = {**SEEN_BY_THE_SKETCH, **SEEN_WHEN_OPENED}[name]
    root = shutil.copytree(tiny_flux, tmp_path / "flux")
    damage(root)
    refusals = [refusal(open_pipeline, root)]
    if name in SEEN_BY_THE_SKETCH:
        refusals.append(refusal(sketch_pipeline, root))
    for sentence in refusals:
        assert "\n" not in sentence and ". " not in sentence and not sentence.endswith(".")
    assert words in refusals[-1]


def test_a_variant_is_used_where_a_component_has_it(tiny_flux: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_flux, tmp_path / "flux")
    model = ModelSettings(name="diffusers", path=str(root), variant="bf16")
    for do in (open_pipeline, sketch_pipeline):
        with pytest.raises(SettingsError, match=r"model\.variant=bf16"):
            do(model)
    (root / "transformer" / TENSORS).rename(root / "transformer" / "diffusion_pytorch_model.bf16.safetensors")
    assert make_picture(open_pipeline(model), FLUX, no_step).frames


def test_the_package_exports_exactly_its_functions() -> None:
    public = {name for name, value in vars(offload.pipelines).items() if isinstance(value, type | FunctionType)}
    assert set(offload.pipelines.__all__) == public
