"""An offloaded model computes the bits of the plain one, keeps within its memory, and is plain again afterwards."""

# ruff: noqa: F401, F811 - tests take the imported fixture `ranks` as an argument

from __future__ import annotations

import copy
import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.backends import OffloadBackend
from offload.errors import OffloadError, WeightAwayError
from offload.plan.layout import SHARD_ALIGNMENT_BYTES, pack
from offload.plan.topology import named, split_component
from tests.models import (
    WIDTH,
    Block,
    Denoiser,
    Pipeline,
    TextEncoder,
    Vae,
    build,
    bytes_of,
    differing,
    inputs,
    make,
    same,
    tensors_of,
)
from tests.ranks import Place, RankPool, joined, poisoned_slots, ranks, recorded_gathers

TAG_BYTES = 16
"""What a shard may carry beside weights."""
BOOKKEEPING_BYTES = 1024
"""What a stream may hold on the device beside weights; less than any block of these models."""
RINGS = ("stack1", "stack2", "stack3", "stack5", "stack7")
MODES = (torch.no_grad, torch.inference_mode)


@dataclass(frozen=True)
class Setting:
    """A world and how it offloads."""

    strategy: str
    num_ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = "".join(f"-{name}{value}" for name, value in self.options.items())
        return f"{self.strategy}-{self.num_ranks}{options}"


EVERY_STRATEGY = [
    Setting(strategy, num_ranks)
    for strategy in ("none", "model_level", "layer_wise", "dlo")
    for num_ranks in (1, 2, 3, 4)
]
SETTINGS = [
    Setting("none"),
    Setting("model_level"),
    Setting("layer_wise"),
    Setting("dlo", 2),
    Setting("dlo", 3),
    Setting("dlo", 4, {"dp_size": 2}),
]
in_every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)
in_streaming_settings = pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if s.strategy in ("layer_wise", "dlo")], ids=str
)


def run(ranks: RankPool, setting: Setting, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return ranks(setting.num_ranks).run(function, setting, *arguments)


def place_of(setting: Setting) -> Any:
    return joined(setting.strategy, **setting.options)


def watch(module: nn.Module, plain: nn.Module) -> None:
    """Makes every block of `module` compare its weights with those of `plain` when its forward begins."""

    def check(block: nn.Module, twin: nn.Module) -> Callable[..., None]:
        def before(*_: Any) -> None:
            assert not differing(block, twin), f"wrong in the visit: {differing(block, twin)}"

        return before

    for block, twin in dict(zip(module.blocks, plain.blocks, strict=True)).items():
        block.register_forward_pre_hook(check(block, twin))


@torch.no_grad()
def check_parity(setting: Setting, names: Sequence[str], num_forwards: int = 3) -> None:
    with place_of(setting) as place, poisoned_slots():
        for name in names:
            model, plain = build(name), build(name)
            backend = place.enable(Pipeline(transformer=model))
            watch(model, plain)
            for index, x in enumerate(inputs(num_forwards, seed=place.mesh.world.rank)):
                with MODES[index % len(MODES)]():
                    assert same(model(x), plain(x)), f"{name}, forward {index}"
            backend.disable()
            assert not differing(model, plain), f"{name} after disable: {differing(model, plain)}"


@pytest.mark.parametrize("setting", EVERY_STRATEGY, ids=str)
def test_case_06_odd_rings(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_parity, RINGS)


def test_two_groups_of_two_ranks(ranks: RankPool) -> None:
    run(ranks, Setting("dlo", 4, {"dp_size": 2}), check_parity, RINGS)


@in_every_setting
def test_case_01_tensors_outside_blocks(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_parity, ["stack4"], 1)


@in_every_setting
def test_case_02_buffers(ranks: RankPool, setting: Setting) -> None:
    assert run(ranks, setting, count_forwards) == [[3, 3, 3, 3, 3, 3]] * setting.num_ranks


@torch.no_grad()
def count_forwards(setting: Setting) -> list[int]:
    with place_of(setting) as place, poisoned_slots():
        model, plain = build("rotary"), build("rotary")
        backend = place.enable(Pipeline(transformer=model))
        watch(model, plain)
        for x in inputs(3):
            with torch.inference_mode():
                assert same(model(x), plain(x))
        backend.disable()
        assert not differing(model, plain)
        assert model.state_dict().keys() == plain.state_dict().keys()
        return [int(count) for block in model.blocks for count in (block.counter, block.replaced)]


@in_every_setting
def test_case_09_further_requests(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_parity, ["stack4"], 7)


@in_every_setting
def test_case_14_column_major_float8(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_parity, ["float8"])


@pytest.mark.parametrize("setting", [*SETTINGS, Setting("dlo", 4)], ids=str)
def test_case_22_uneven_blocks(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_parity, ["uneven", "uneven_repeated"])


@pytest.mark.parametrize("num_shards", [2, 3, 4, 9])
def test_staging_of_any_length(ranks: RankPool, num_shards: int) -> None:
    """Unlike blocks make the staging wrap at other places in each pass."""
    run(
        ranks,
        Setting("dlo", 3, {"staging_shards": num_shards}),
        check_parity,
        ["uneven_repeated", "different_blocks"],
        7,
    )


@in_every_setting
def test_case_23_mixed_dtypes(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_parity, ["mixed", "different_blocks"])


@in_every_setting
def test_ties_and_strides(ranks: RankPool, setting: Setting) -> None:
    run(
        ranks,
        setting,
        check_parity,
        ["tied_in_block", "tied_to_each_other", "all_tied_block", "same_block_twice", "strided"],
    )


@in_every_setting
def test_nothing_and_scalars(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_parity, ["edge", "empty_block"])


@torch.no_grad()
def check_gathers(setting: Setting, name: str) -> None:
    with place_of(setting) as place, recorded_gathers() as issued:
        model = build(name)
        layouts = [pack(named(held))[0] for held in split_component(model, model.blocks).by_block]
        backend = place.enable(Pipeline(transformer=model))
        for x in inputs(3):
            model(x)
        gathers = [gather for gather in issued if gather.fills_slot]
        # Two slots alternate, and the gathers run two blocks ahead of the three passes.
        assert [gather.num_bytes for gather in gathers] == [
            layouts[index % len(layouts)].padded_bytes(setting.num_ranks) for index in range(3 * len(layouts) + 2)
        ]
        first, second = gathers[0].address, gathers[1].address
        assert first != second
        assert [gather.address for gather in gathers] == [(first, second)[i % 2] for i in range(len(gathers))]
        assert {gather.dtype for gather in gathers} == {torch.uint8}
        assert backend.figures().allgather_bytes >= sum(gather.num_bytes for gather in gathers)


@pytest.mark.parametrize("name", ["uneven", "float8", "mixed"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_case_22_gathers_write_bytes_straight_into_the_slots(ranks: RankPool, num_ranks: int, name: str) -> None:
    run(ranks, Setting("dlo", num_ranks), check_gathers, name)


@torch.no_grad()
def check_two_denoisers(setting: Setting) -> int:
    """Two denoisers of different blocks, alternating within and between requests; the peak of device memory."""
    with place_of(setting) as place, poisoned_slots():
        models, plains = [[build(name, seed) for seed, name in enumerate(("stack4", "uneven"))] for _ in range(2)]
        backend = place.enable(Pipeline(transformer=models[0], transformer_2=models[1]))
        for model, plain in zip(models, plains, strict=True):
            watch(model, plain)
        for which, x in zip([0, 0, 1, 1, 0, 1, 0, 0, 1], inputs(9, seed=place.mesh.world.rank), strict=True):
            assert same(models[which](x), plains[which](x))
        peak_bytes = place.device.peak_bytes()
        backend.disable()
        assert not [
            differing(model, plain) for model, plain in zip(models, plains, strict=True) if differing(model, plain)
        ]
        return peak_bytes


@in_every_setting
def test_case_26_two_denoisers(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_two_denoisers)


@in_streaming_settings
def test_case_26_two_denoisers_share_slots_and_staging(ranks: RankPool, setting: Setting) -> None:
    models = [build(name, seed) for seed, name in enumerate(("stack4", "uneven"))]
    expected = expected_peak_bytes(models, setting)
    for peak_bytes in run(ranks, setting, check_two_denoisers):
        assert expected <= peak_bytes <= expected + BOOKKEEPING_BYTES


@torch.no_grad()
def check_whole_pipeline(setting: Setting) -> None:
    with place_of(setting) as place, poisoned_slots():
        pipeline, plain = [
            Pipeline(
                text_encoder=make(TextEncoder, 1),
                transformer=build("stack3"),
                vae=make(Vae, 2),
                tokenizer=object(),
                safety_checker=None,
            )
            for _ in range(2)
        ]
        backend = place.enable(pipeline)
        for ids in ([1, 2, 3], [4, 5, 6]):
            with torch.inference_mode():
                embedded, expected = pipeline.text_encoder(ids), plain.text_encoder(ids)
                assert same(embedded, expected)
                for _ in range(2):
                    embedded, expected = pipeline.transformer(embedded), plain.transformer(expected)
                assert same(pipeline.vae.decode(embedded), plain.vae.decode(expected))
        backend.disable()
        for name in ("text_encoder", "transformer", "vae"):
            assert not differing(getattr(pipeline, name), getattr(plain, name)), name


@in_every_setting
def test_case_15_and_16_encoder_and_vae(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_whole_pipeline)


def held_bytes(place: Place) -> int:
    place.device.reset_peak()
    return place.device.peak_bytes()


@pytest.mark.parametrize("strategy", ["model_level", "layer_wise", "dlo"])
def test_the_encoder_is_on_the_device_only_for_its_turn(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined(strategy) as place:
        pipeline = Pipeline(text_encoder=make(TextEncoder), transformer=build("stack3"))
        place.enable(pipeline)
        resting = held_bytes(place)
        pipeline.text_encoder([1])
        encoder_bytes = pack(list(pipeline.text_encoder.named_parameters()))[0].num_bytes
        assert held_bytes(place) == resting + encoder_bytes
        pipeline.transformer(inputs(1)[0])
        denoiser_bytes = (
            pack(list(pipeline.transformer.named_parameters()))[0].num_bytes if strategy == "model_level" else 0
        )
        assert held_bytes(place) == resting + denoiser_bytes


def resident_bytes(tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
    """Of tensors that lie on the device each in its own memory."""
    return sum(region.num_bytes for region in pack(tensors)[0].regions)


def expected_peak_bytes(models: Sequence[nn.Module], setting: Setting, staging_shards: int = 4) -> int:
    """Two slots of the largest block, staging of so many of its shards, and what does not stream."""
    num_shards = setting.options.get("dp_size", setting.num_ranks if setting.strategy == "dlo" else 1)
    splits = [split_component(model, model.blocks) for model in models]
    layouts = [pack(named(held))[0] for split in splits for held in split.by_block]
    slots = 2 * max(layout.padded_bytes(num_shards) for layout in layouts)
    largest_shard = max(layout.shard_bytes(num_shards) for layout in layouts)
    staging = staging_shards * (-(-largest_shard // 256) * 256) if num_shards > 1 else 0
    return slots + staging + sum(resident_bytes(named(split.remainder)) for split in splits)


@torch.no_grad()
def measure_memory(setting: Setting, num_blocks: int) -> tuple[int, int, int]:
    """Peak on the device, weights on the host, and all blocks' bytes."""
    with place_of(setting) as place:
        model = build(f"stack{num_blocks}")
        backend = place.enable(Pipeline(transformer=model))
        for x in inputs(3):
            model(x)
        figures = backend.figures()
        return place.device.peak_bytes(), figures.host_weight_bytes, figures.streamed_block_bytes


@in_streaming_settings
def test_device_memory_does_not_grow_with_the_number_of_blocks(ranks: RankPool, setting: Setting) -> None:
    expected = expected_peak_bytes([build("stack4")], setting)
    for num_blocks in (2, 8):
        for peak_bytes, _, _ in run(ranks, setting, measure_memory, num_blocks):
            assert expected <= peak_bytes <= expected + BOOKKEEPING_BYTES


@in_streaming_settings
def test_each_rank_holds_its_share_of_the_host_weights(ranks: RankPool, setting: Setting) -> None:
    num_shards = setting.options.get("dp_size", setting.num_ranks if setting.strategy == "dlo" else 1)
    num_blocks, model = 8, build("stack8")
    expected = sum(pack(named(held))[0].num_bytes for held in split_component(model, model.blocks).by_block)
    for _, host_bytes, streamed_bytes in run(ranks, setting, measure_memory, num_blocks):
        assert streamed_bytes == expected > 0
        assert (
            streamed_bytes / num_shards
            <= host_bytes
            <= streamed_bytes / num_shards + num_blocks * (SHARD_ALIGNMENT_BYTES + TAG_BYTES)
        )


@torch.no_grad()
def check_restored(setting: Setting) -> None:
    with place_of(setting) as place, poisoned_slots():
        for name in ("stack3", "tied_in_block", "tied_to_each_other", "strided", "float8", "rotary", "mixed"):
            model, plain = build(name), build(name)
            before, state = tensors_of(model), plain.state_dict()
            backend = place.enable(Pipeline(transformer=model))
            for _ in range(2):
                model(inputs(1)[0])
                plain(inputs(1)[0])
            backend.disable()
            assert not backend.is_enabled()
            after = tensors_of(model)
            assert list(after) == list(before) and not differing(model, plain), name
            changed = [key for key in before if after[key] is not before[key] and not key.endswith("replaced")]
            assert not changed, f"{name}: other objects in place of {changed}"
            assert {type(tensor) for tensor in after.values()} <= {nn.Parameter, torch.Tensor}
            assert list(model.state_dict()) == list(state) and type(model.state_dict()) is type(state)
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            stored = io.BytesIO()
            torch.save(model.state_dict(), stored)
            stored.seek(0)
            loaded = build(name, seed=1)
            loaded.load_state_dict(torch.load(stored), assign=True)  # nothing can be copied into an expanded weight
            assert not [key for key in state if bytes_of(loaded.state_dict()[key]) != bytes_of(state[key])]
            assert not differing(copy.deepcopy(model), copy.deepcopy(plain))


@in_every_setting
def test_disable_gives_back_the_plain_model(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_restored)


@in_streaming_settings
def test_restored_ties_share_their_bytes(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_ties)


@torch.no_grad()
def check_ties(setting: Setting) -> None:
    with place_of(setting) as place:
        model = build("tied_in_block")
        place.enable(Pipeline(transformer=model)).disable()
        for block in model.blocks:
            assert block.up.weight is block.down.weight
            block.down.weight.data[2:5] = 7.0
            assert torch.equal(block.rows, torch.full((3, WIDTH), 7.0))


def left_bytes(place: Place) -> int:
    """What is held once gloo's threads have let go of the tensors of their last collective."""
    deadline = time.monotonic() + 1
    while held_bytes(place) and time.monotonic() < deadline:
        time.sleep(0.001)
    return held_bytes(place)


@torch.no_grad()
def check_cycles(setting: Setting) -> None:
    with place_of(setting) as place, poisoned_slots():
        model, plain = build("different_blocks"), build("different_blocks")
        pipeline = Pipeline(transformer=model, text_encoder=make(TextEncoder), vae=make(Vae))
        held = []
        for x in inputs(20):
            backend = place.enable(pipeline)
            pipeline.text_encoder([1])
            assert same(model(x), plain(x))
            num_hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
            held.append((held_bytes(place), num_hooks))
            backend.disable()
            assert not differing(model, plain)
            del backend
            assert left_bytes(place) == 0, f"{left_bytes(place)} bytes are left on the device"
        assert len(set(held)) == 1, f"grew: {held}"


@pytest.mark.parametrize(
    "setting", [Setting("none"), Setting("model_level"), Setting("layer_wise"), Setting("dlo", 2)], ids=str
)
def test_case_21_twenty_cycles_leave_nothing_behind(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_cycles)


@pytest.mark.parametrize(
    "setting", [Setting("none"), Setting("model_level"), Setting("layer_wise"), Setting("dlo", 2)], ids=str
)
def test_one_backend_can_be_enabled_again(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_second_life)


@torch.no_grad()
def check_second_life(setting: Setting) -> None:
    with place_of(setting) as place, poisoned_slots():
        model, plain = build("stack3"), build("stack3")
        pipeline = Pipeline(transformer=model, text_encoder=make(TextEncoder))
        backend = place.enable(pipeline)
        for x in inputs(3):
            assert same(model(x), plain(x)) and backend.is_enabled()
            backend.disable()
            backend.disable()
            assert not differing(model, plain) and not backend.is_enabled()
            backend.enable(pipeline)
        figures = backend.figures()
        assert same(model(x), plain(x))
        assert (
            figures.host_weight_bytes
            == place.enable(Pipeline(transformer=build("stack3"), text_encoder=make(TextEncoder)))
            .figures()
            .host_weight_bytes
        )


@in_every_setting
def test_case_21_a_second_enable_warns_and_changes_nothing(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_second_enable)


@torch.no_grad()
def check_second_enable(setting: Setting) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("offload").addHandler(handler)
    try:
        with place_of(setting) as place, poisoned_slots():
            model, plain = build("stack3"), build("stack3")
            pipeline = Pipeline(transformer=model)
            backend = place.enable(pipeline)
            assert same(model(inputs(1)[0]), plain(inputs(1)[0])) and not records
            before, figures, held = tensors_of(model), backend.figures(), held_bytes(place)
            hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
            backend.enable(pipeline)
            assert [record.levelname for record in records] == ["WARNING"] and "already" in records[0].getMessage()
            assert (backend.figures(), held_bytes(place)) == (figures, held)
            assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
            assert all(tensor is before[name] for name, tensor in tensors_of(model).items())
            assert same(model(inputs(1)[0]), plain(inputs(1)[0]))
            backend.disable()
            assert not differing(model, plain)
    finally:
        logging.getLogger("offload").removeHandler(handler)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> tuple[Denoiser, Denoiser, OffloadBackend]:
    """A model that this very process streams, its plain twin, and the backend."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    model, plain = build("stack3"), build("stack3")
    with joined("layer_wise") as place:
        backend = place.enable(Pipeline(transformer=model))
    return model, plain, backend


NAME = r"transformer\.blocks\.1\."
USES: dict[str, Callable[[nn.Module], Any]] = {
    "linear": lambda model: F.linear(inputs(1)[0], model.blocks[1].linear.weight),
    "add": lambda model: model.blocks[1].shift + 1,
    "add_in_place": lambda model: model.blocks[1].shift.add_(1) + 0,
    "add_from_the_right": lambda model: torch.ones(WIDTH) + model.blocks[1].shift,
    "out": lambda model: torch.add(torch.ones(WIDTH), 1, out=model.blocks[1].shift) + 0,
    "clone": lambda model: model.blocks[1].linear.weight.clone(),
    "data": lambda model: model.blocks[1].linear.weight.data + 1,
    "detach": lambda model: model.blocks[1].linear.weight.detach(),
    "index": lambda model: model.blocks[1].linear.weight[0],
    "assign": lambda model: model.blocks[1].linear.weight.__setitem__(0, 1.0),
    "copy_from": lambda model: torch.zeros(WIDTH).copy_(model.blocks[1].shift),
    "copy_to": lambda model: model.blocks[1].shift.copy_(torch.zeros(WIDTH)) + 0,
    "view": lambda model: model.blocks[1].linear.weight.view(-1),
    "equal": lambda model: torch.tensor(torch.equal(model.blocks[1].shift, torch.zeros(WIDTH))),
    "item": lambda model: torch.tensor(model.blocks[1].shift.sum().item()),
    "deepcopy": lambda model: copy.deepcopy(model.blocks[1].linear.weight),
    "state_dict": lambda model: model.blocks[1].state_dict()["linear.weight"],
    "forward_of_a_part": lambda model: model.blocks[1].linear(inputs(1)[0]),
    "forward_past_the_hooks": lambda model: model.blocks[1].forward(inputs(1)[0]),
}


@torch.no_grad()
def check_away(setting: Setting) -> None:
    with place_of(setting) as place:
        model, plain = build("stack3"), build("stack3")
        place.enable(Pipeline(transformer=model))
        for mode in MODES:
            for use in USES.values():
                with mode(), pytest.raises(WeightAwayError, match=NAME):
                    use(model)
            assert same(model(inputs(1)[0]), plain(inputs(1)[0]))


@pytest.mark.parametrize("setting", [Setting("dlo", 2), Setting("dlo", 4, {"dp_size": 2})], ids=str)
def test_using_a_weight_that_is_whole_on_no_rank_raises_and_names_it(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_away)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("num_forwards", [0, 1])
def test_using_a_weight_outside_its_visit_is_right_or_refused(
    streamed: tuple[Denoiser, Denoiser, OffloadBackend], use: str, mode: Any, num_forwards: int
) -> None:
    """Also what is written must then be there, in the next forward and after disable."""
    model, plain, backend = streamed
    for x in inputs(num_forwards):
        model(x)
    with mode():
        try:
            result = USES[use](model)
        except WeightAwayError as error:
            assert "transformer.blocks.1." in str(error)
        else:
            expected = USES[use](plain)
            assert result is expected is None or bytes_of(result) == bytes_of(expected)
        assert same(model(inputs(1)[0]), plain(inputs(1)[0]))
    backend.disable()
    assert not differing(model, plain)


def test_a_weight_that_is_away_answers_questions_about_itself(
    streamed: tuple[Denoiser, Denoiser, OffloadBackend],
) -> None:
    model, plain, _ = streamed
    for (name, away), (plain_name, tensor) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == plain_name and isinstance(away, nn.Parameter)
        assert (away.shape, away.stride(), away.dtype, away.device) == (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )
        assert (away.numel(), away.nbytes, away.is_contiguous()) == (
            tensor.numel(),
            tensor.nbytes,
            tensor.is_contiguous(),
        )
    assert "blocks.1.linear.weight" in repr(model.blocks[1].linear.weight)


@pytest.mark.parametrize("use", ["numpy", "tolist", "storage"])
def test_bytes_of_a_weight_that_is_away_are_right_or_cannot_be_had(
    streamed: tuple[Denoiser, Denoiser, OffloadBackend], use: str
) -> None:
    uses = {
        "numpy": lambda weight: weight.detach().numpy().tolist(),
        "tolist": lambda weight: weight.tolist(),
        "storage": lambda weight: weight.untyped_storage().tolist(),
    }
    model, plain, _ = streamed
    try:
        found = uses[use](model.blocks[1].linear.weight)
    except RuntimeError:
        return
    assert found == uses[use](plain.blocks[1].linear.weight)


@torch.no_grad()
def check_gradients(setting: Setting) -> None:
    """Weights that leave cannot be recorded: the forward is refused, unless nothing asks for gradients."""
    with place_of(setting) as place, poisoned_slots():
        for wanted in (True, False):
            model, plain = [build("stack3").requires_grad_(wanted) for _ in range(2)]
            place.enable(Pipeline(transformer=model))
            with torch.enable_grad():
                try:
                    assert same(model(inputs(1)[0]), plain(inputs(1)[0]))
                except OffloadError as error:
                    assert wanted and "torch.no_grad()" in str(error)
                else:
                    assert not wanted
            assert same(model(inputs(1)[0]), plain(inputs(1)[0]))


@in_streaming_settings
def test_recording_gradients_is_refused(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_gradients)


CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "meta": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("cast", CASTS)
def test_case_12_a_cast_of_the_model_is_refused_whole(
    streamed: tuple[Denoiser, Denoiser, OffloadBackend], cast: str
) -> None:
    model, plain, backend = streamed
    with pytest.raises(WeightAwayError, match="disable the offload first"):
        CASTS[cast](model)
    assert not [
        name
        for name, tensor in tensors_of(model).items()
        if tensor.dtype is not tensors_of(plain)[name].dtype or tensor.device != tensors_of(plain)[name].device
    ]
    assert same(model(inputs(1)[0]), plain(inputs(1)[0]))
    backend.disable()
    assert not differing(model, plain)
    assert CASTS[cast](model) is model and not differing(model, CASTS[cast](plain)) if cast != "meta" else True


@pytest.mark.parametrize("part", ["blocks.1", "blocks", "blocks.1.linear"])
def test_case_12_a_cast_of_a_part_is_refused_or_lasts(
    streamed: tuple[Denoiser, Denoiser, OffloadBackend], part: str
) -> None:
    model, plain, backend = streamed
    try:
        model.get_submodule(part).double()
    except WeightAwayError:
        pass
    else:
        plain.get_submodule(part).double()
    for block, twin in zip(model.blocks, plain.blocks, strict=True):
        x = inputs(1)[0].to(twin.norm.weight.dtype)
        try:
            expected = twin(x)
        except RuntimeError:  # half a block was cast
            with pytest.raises(RuntimeError):
                block(x)
        else:
            assert same(block(x), expected)
    backend.disable()
    assert not differing(model, plain)


@pytest.mark.parametrize(
    "move", [lambda model: model.cpu(), lambda model: model.to("cpu"), lambda model: model.float()]
)
@pytest.mark.parametrize("mode", MODES)
def test_case_12_a_move_to_where_it_is_changes_nothing(
    streamed: tuple[Denoiser, Denoiser, OffloadBackend], move: Callable[[nn.Module], object], mode: Any
) -> None:
    model, plain, backend = streamed
    with mode():
        move(model)
        assert same(model(inputs(1)[0]), plain(inputs(1)[0]))
    backend.disable()
    assert not differing(model, plain)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("part", ["", "blocks.1"])
def test_case_11_loading_while_offloaded_is_refused_or_lasts(
    streamed: tuple[Denoiser, Denoiser, OffloadBackend], part: str, assign: bool
) -> None:
    model, plain, backend = streamed
    state = build("stack3", seed=1).get_submodule(part).state_dict()
    try:
        model.get_submodule(part).load_state_dict(state, assign=assign)
    except RuntimeError as error:
        assert "disable the offload" in str(error)
    else:
        plain.get_submodule(part).load_state_dict(state, assign=assign)
    assert same(model(inputs(1)[0]), plain(inputs(1)[0]))
    backend.disable()
    assert not differing(model, plain)


def test_case_11_a_saved_state_is_whole_and_stays_right(streamed: tuple[Denoiser, Denoiser, OffloadBackend]) -> None:
    """One rank has all weights, so it saves them as a plain model does; the copy does not follow the slots."""
    model, plain, backend = streamed
    model(inputs(1)[0])
    state, expected = model.state_dict(), plain.state_dict()
    model(inputs(1)[0])
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    loaded = build("stack3", seed=1)
    loaded.load_state_dict(torch.load(stored))
    assert list(state) == list(expected) and not differing(loaded, plain)
    backend.disable()
    assert not [key for key in expected if bytes_of(state[key]) != bytes_of(expected[key])]


class LowRank(nn.Module):
    """A Linear with a correction of rank two."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@torch.no_grad()
def check_low_rank(setting: Setting) -> None:
    with place_of(setting) as place, poisoned_slots():
        model, plain = build("stack4"), build("stack4")
        backend = place.enable(Pipeline(transformer=model))
        x = inputs(1)[0]
        with torch.random.fork_rng(devices=[]):
            for each in (model, plain):
                torch.manual_seed(3)
                for index in (0, 2):
                    each.blocks[index].linear = LowRank(each.blocks[index].linear)
        assert same(model(x), plain(x)) and not same(model(x), build("stack4")(x))
        adapters = {
            name: tensor + 1 for name, tensor in plain.state_dict().items() if ".up." in name or ".down." in name
        }
        for each in (model, plain):
            each.load_state_dict(adapters, strict=False)
        assert same(model(x), plain(x))
        for each in (model, plain):
            for index in (0, 2):
                each.blocks[index].linear = each.blocks[index].linear.base
        assert same(model(x), plain(x)) and same(model(x), build("stack4")(x))
        backend.disable()
        assert not differing(model, plain)


@in_every_setting
def test_case_13_low_rank_adapters_after_enable(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_low_rank)


class Generous(Block):
    """Returns a weight and a view of another one beside its activations."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), {"row": self.linear.weight[1], "shift": [self.shift]}


class Collector(Denoiser):
    """Reads what its blocks returned after all of them have run."""

    def forward(self, x: torch.Tensor, visits: Sequence[int] | None = None) -> torch.Tensor:
        returned = []
        for block in self.blocks:
            x, more = block(x)
            returned.append(more)
        return x + sum(more["row"].sum() + more["shift"][0].sum() for more in returned)


@torch.no_grad()
def check_returned_weights(setting: Setting) -> None:
    with place_of(setting) as place, poisoned_slots():
        model, plain = [make(lambda: Collector([Generous() for _ in range(4)])) for _ in range(2)]
        place.enable(Pipeline(transformer=model))
        for mode, x in zip(MODES, inputs(2), strict=True):
            with mode():
                try:
                    result = model(x)
                except OffloadError:
                    continue
                assert same(result, plain(x))


@in_streaming_settings
def test_case_28_weights_that_a_block_returns_are_right_or_an_error(ranks: RankPool, setting: Setting) -> None:
    run(ranks, setting, check_returned_weights)


class Hoarder(Block):
    """Keeps a view of its weight, where nobody sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.linear.weight.detach()[0]]
        return super().forward(x)


def test_case_28_a_view_that_a_block_keeps_is_right_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    model, plain = [make(lambda: Denoiser([Hoarder() for _ in range(4)])) for _ in range(2)]
    with joined("layer_wise") as place, poisoned_slots():
        place.enable(Pipeline(transformer=model))
        for x in inputs(2):
            plain(x)
            try:
                model(x)
            except OffloadError as error:
                assert "transformer.blocks" in str(error)
            else:
                assert not [
                    index
                    for index, block in enumerate(model.blocks)
                    if not torch.equal(block.kept[0], plain.blocks[index].kept[0])
                ]


STAGING = [("model_level", "text_encoder"), ("layer_wise", "text_encoder"), ("model_level", "transformer")]
CHANGES: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "double": lambda module, other: module.double(),
    "load": lambda module, other: module.load_state_dict(other.state_dict()),
    "assign": lambda module, other: module.load_state_dict(other.state_dict(), assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("strategy", "component"), STAGING)
def test_case_12_a_change_to_a_staged_component_is_refused_or_lasts(
    strategy: str, component: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    kinds = {"text_encoder": lambda: make(TextEncoder), "transformer": lambda: build("stack3")}
    others = {"text_encoder": make(TextEncoder, 1), "transformer": build("stack3", 1)}
    pipeline, plain = [Pipeline(**{name: kind() for name, kind in kinds.items()}) for _ in range(2)]
    with joined(strategy) as place:
        backend = place.enable(pipeline)
        try:
            CHANGES[change](pipeline.components[component], others[component])
        except OffloadError as error:
            assert "disable the offload" in str(error)
        else:
            CHANGES[change](plain.components[component], others[component])
        for _ in range(2):
            x = inputs(1)[0].to(plain.transformer.stem.weight.dtype)
            assert same(pipeline.text_encoder([1, 2]), plain.text_encoder([1, 2]))
            assert same(pipeline.transformer(x), plain.transformer(x))
        backend.disable()
        for name in kinds:
            assert not differing(pipeline.components[name], plain.components[name])
