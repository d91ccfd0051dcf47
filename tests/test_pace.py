"""Ranks that stream together stay in step whatever each of them computes, and fail together."""

# ruff: noqa: F401, F811 - tests take the imported fixture `ranks` as an argument

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.backends import LayerWiseOffloadBackend, OffloadBackend
from offload.device import CpuDevice
from offload.errors import OffloadError, PeerFailedError, PlanError, RankMismatchError, SlotError
from offload.host import store
from offload.host.pages import HostMemory
from offload.plan.layout import pack
from offload.plan.topology import named, split_component
from tests.models import (
    Block,
    Denoiser,
    Pipeline,
    TextEncoder,
    Vae,
    VectorBlock,
    build,
    differing,
    inputs,
    make,
    same,
    stack,
    tensors_of,
)
from tests.ranks import Place, RankPool, joined, poisoned_slots, ranks, recorded_gathers

ALONE_AND_TOGETHER = [1, 2, 3, 4]
TOGETHER = [2, 3, 4]
MODES = (torch.no_grad, torch.inference_mode)


@contextmanager
def streaming(*names: str, **options: Any) -> Iterator[tuple[list[Any], list[Any], OffloadBackend, Place]]:
    """Models that stream on all ranks through poisoned slots, their plain twins, the backend and the place.

    When all went well, the weights that come back are compared with the plain ones.
    """
    with joined("dlo", **options) as place, poisoned_slots(), torch.no_grad():
        models, plains = [build(name) for name in names], [build(name) for name in names]
        paths = ["transformer", "transformer_2", "transformer_3"]
        backend = place.enable(Pipeline(**dict(zip(paths, models, strict=False))))
        yield models, plains, backend, place
        backend.disable()
        assert not [
            differing(model, plain) for model, plain in zip(models, plains, strict=True) if differing(model, plain)
        ]


def agree(model: nn.Module, plain: nn.Module, seed: int = 0, visits: Sequence[int] | None = None) -> None:
    x = inputs(1, seed)[0]
    assert same(model(x, visits), plain(x, visits)), f"wrong for visits {visits}"


def differing_passes(passes: Sequence[int]) -> int:
    """Each rank computes its own number of passes, twice, and then joins the others' ones; the number of gathers."""
    with recorded_gathers() as gathers, streaming("stack5") as ([model], [plain], backend, place):
        rank = place.mesh.world.rank
        for round in range(2):
            for number in range(passes[(rank + round) % len(passes)]):
                agree(model, plain, seed=100 * rank + number)
            backend.join_others()
        return sum(gather.fills_slot for gather in gathers)


@pytest.mark.parametrize("passes", [[3, 1, 0, 2], [0, 0, 0, 4], [0, 0, 0, 0], [1, 2, 1, 1]], ids=str)
@pytest.mark.parametrize("num_ranks", TOGETHER)
def test_ranks_compute_different_numbers_of_passes(ranks: RankPool, num_ranks: int, passes: list[int]) -> None:
    counts = ranks(num_ranks).run(differing_passes, passes[-num_ranks:])
    assert len(set(counts)) == 1
    most = max(passes[-num_ranks:])
    assert counts[0] == (2 * most * 5 + 2 if most else 0), "nobody walks more passes than the busiest rank"


SKIPS = [[0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
REPEATS = [[0, 0, 1, 1, 1, 2, 3], [1, 2, 1, 2, 1, 2], [3, 3, 3], [0, 1, 2, 3, 3, 2, 1, 0]]
REORDERS = [[3, 2, 1, 0], [2], [1, 0, 3, 2], [], [0, 2, 1, 3]]
EIGHT = [[0, 1, 2, 4, 5, 6, 7], [0, 1, 3, 4, 5, 6, 7], list(range(8))]


def walk(name: str, rounds: Sequence[Sequence[int]], rotate: bool) -> list[int]:
    """Visits the blocks as told, each rank beginning with another round; the bytes of every gather."""
    with recorded_gathers() as gathers, streaming(name) as ([model], [plain], backend, place):
        first = place.mesh.world.rank % len(rounds) if rotate else 0
        for number, visits in enumerate([*rounds[first:], *rounds[:first]]):
            agree(model, plain, seed=number, visits=visits)
        backend.join_others()
        return [gather.num_bytes for gather in gathers if gather.fills_slot]


@pytest.mark.parametrize("rotate", [False, True], ids=["alike", "differently"])
@pytest.mark.parametrize(
    ("name", "rounds"),
    [("stack4", SKIPS), ("stack4", REPEATS), ("stack4", REORDERS), ("stack8", EIGHT)],
    ids=["skipped", "repeated", "reordered", "skipped_of_eight"],
)
@pytest.mark.parametrize("num_ranks", ALONE_AND_TOGETHER)
def test_case_10_blocks_in_any_order(
    ranks: RankPool, num_ranks: int, name: str, rounds: list[list[int]], rotate: bool
) -> None:
    issued = ranks(num_ranks).run(walk, name, rounds, rotate)
    assert all(each == issued[0] for each in issued), "the ranks issued different gathers"


def wander(num_rounds: int) -> None:
    """Every rank walks two models at random, and now and then has nothing to do but to join the others."""
    with streaming("uneven_repeated", "stack3") as (models, plains, backend, place):
        chance = random.Random(place.mesh.world.rank)
        for number in range(num_rounds):
            for _ in range(chance.randrange(4)):
                which = chance.randrange(2)
                size = len(models[which].blocks)
                agree(
                    models[which],
                    plains[which],
                    number,
                    [chance.randrange(size) for _ in range(chance.randrange(2 * size))],
                )
            backend.join_others()


@pytest.mark.parametrize("num_ranks", ALONE_AND_TOGETHER)
def test_random_walks_over_two_models(ranks: RankPool, num_ranks: int) -> None:
    ranks(num_ranks).run(wander, 8)


def skip_on_rank_one() -> None:
    with streaming("stack4") as ([model], [plain], backend, place):
        agree(model, plain, visits=[0, 2, 3] if place.mesh.world.rank == 1 else [0, 1, 2, 3])
        backend.join_others()


def test_case_05_a_rank_that_skips_a_block_stays_in_step(ranks: RankPool) -> None:
    ranks(2).run(skip_on_rank_one)


def alternate(orders: Sequence[Sequence[int]]) -> None:
    with streaming("stack4", "uneven", "float8") as (models, plains, backend, place):
        for number, which in enumerate(orders[place.mesh.world.rank]):
            agree(models[which], plains[which], number)
        backend.join_others()


@pytest.mark.parametrize("num_ranks", TOGETHER)
def test_ranks_are_in_different_models_at_one_time(ranks: RankPool, num_ranks: int) -> None:
    ranks(num_ranks).run(alternate, [[0, 0, 1, 2, 0], [1, 1, 0], [2, 0, 1, 1, 2, 2], []])


def stop_early(passes: Sequence[Sequence[Sequence[int]]]) -> None:
    """Disables while the ranks are at different places, which the end of `streaming` does."""
    with streaming("stack4") as ([model], [plain], _, place):
        for visits in passes[place.mesh.world.rank % len(passes)]:
            agree(model, plain, visits=visits)


@pytest.mark.parametrize(
    "passes", [[[[0, 1, 2, 3]], [[0]]], [[[2]], [[3]], []], [[[0, 1]], [[0, 1, 2, 3]] * 3]], ids=str
)
def test_disable_wherever_the_ranks_are(ranks: RankPool, passes: list[list[list[int]]]) -> None:
    ranks(3).run(stop_early, passes)


class BrokenError(Exception):
    """What a block of a test raises."""


@contextmanager
def broken(block: nn.Module, error: type[BaseException] = BrokenError) -> Iterator[None]:
    """The block's forward raises after it has used its weights."""

    def fail(x: torch.Tensor) -> torch.Tensor:
        type(block).forward(block, x)
        raise error

    block.forward = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        del block.forward


def right_or_away(block: nn.Module, twin: nn.Module) -> bool:
    """Whether a block's weight, used outside its visit, has its value or is refused."""
    try:
        return same(block.linear.weight + 0, twin.linear.weight + 0)
    except OffloadError:
        return True


def fail_alone(error: type[BaseException]) -> None:
    with streaming("stack4") as ([model], [plain], backend, _):
        for block in model.blocks:
            with broken(block, error), pytest.raises(error):
                model(inputs(1)[0])
            assert all(right_or_away(*pair) for pair in zip(model.blocks, plain.blocks, strict=True))
            backend.report_failure()
            for seed in range(2):
                agree(model, plain, seed)


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
def test_case_20_one_rank_goes_on_after_an_error_in_any_block(ranks: RankPool, error: type[BaseException]) -> None:
    ranks(1).run(fail_alone, error)


def fail_together(num_passes_before: int, error: type[BaseException]) -> list[str]:
    """Each rank in turn fails in each block in turn. What the peers saw."""
    seen = set()
    with streaming("stack4") as ([model], [plain], backend, place):
        rank, size = place.mesh.world.rank, place.mesh.world.size
        for failing in range(size):
            for index in range(4):
                if rank == failing:
                    for seed in range(num_passes_before):
                        agree(model, plain, seed)
                    with broken(model.blocks[index], error), pytest.raises(error):
                        model(inputs(1)[0])
                    backend.report_failure()
                    assert all(right_or_away(*pair) for pair in zip(model.blocks, plain.blocks, strict=True))
                else:
                    with pytest.raises(PeerFailedError) as raised:
                        for seed in range(rank):  # so that some compute and others only join
                            agree(model, plain, seed)
                        backend.join_others()
                    seen.add(str(raised.value).replace(f"rank {failing}", "rank N"))
                agree(model, plain, seed=rank)
                backend.join_others()
    return sorted(seen)


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize(("num_ranks", "num_passes_before"), [(2, 0), (3, 2), (4, 1)])
def test_case_20_ranks_stop_together_and_go_on_together(
    ranks: RankPool, num_ranks: int, num_passes_before: int, error: type[BaseException]
) -> None:
    for messages in ranks(num_ranks).run(fail_together, num_passes_before, error):
        assert len(messages) == 1 and "rank N" in messages[0]


def fail_outside_blocks() -> None:
    """An error before the first block, after the last, or between requests is told in the same way."""
    with streaming("stack3") as ([model], [plain], backend, place):
        for module in (model.stem, model.head, None):
            if place.mesh.world.rank:
                with pytest.raises(PeerFailedError):
                    for seed in range(3):
                        agree(model, plain, seed)
            else:
                if module is not None:
                    with broken(module), pytest.raises(BrokenError):
                        model(inputs(1)[0])
                backend.report_failure()
            agree(model, plain)


@pytest.mark.parametrize("num_ranks", TOGETHER)
def test_errors_outside_blocks_are_told_too(ranks: RankPool, num_ranks: int) -> None:
    ranks(num_ranks).run(fail_outside_blocks)


def fail_at_once() -> None:
    with streaming("stack4", "uneven") as (models, plains, backend, place):
        rank = place.mesh.world.rank
        model, block = models[rank % 2], models[rank % 2].blocks[rank % 3]
        try:
            with broken(block):
                model(inputs(1)[0])
        except BrokenError:
            backend.report_failure()
        except PeerFailedError:
            assert rank % 2, "the ranks of the first model fail in the same pass, before they hear of each other"
        for model, plain in zip(models, plains, strict=True):
            agree(model, plain)


@pytest.mark.parametrize("num_ranks", TOGETHER)
def test_ranks_may_fail_at_once(ranks: RankPool, num_ranks: int) -> None:
    """Ranks that walk different models meet in one pass after the other, so not all of them fail in the same one."""
    ranks(num_ranks).run(fail_at_once)


class Nesting(Block):
    """Calls another block inside its forward."""

    inner: list[nn.Module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        for block in getattr(self, "inner", []):
            x = block(x)
        return super().forward(x)


def nest(distance: int) -> None:
    with joined("dlo") as place, poisoned_slots(), torch.no_grad():
        model, plain = [make(lambda: Denoiser([Nesting() for _ in range(4)])) for _ in range(2)]
        place.enable(Pipeline(transformer=model))
        for index in range(4):
            model.blocks[index].inner = [model.blocks[(index + distance) % 4]]
            with pytest.raises(SlotError, match="nested"):
                agree(model, plain)
            model.blocks[index].inner = []
            agree(model, plain)


@pytest.mark.parametrize("distance", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nested_blocks_are_refused(ranks: RankPool, num_ranks: int, distance: int) -> None:
    ranks(num_ranks).run(nest, distance)


class Borrower(Denoiser):
    """Uses weights of its blocks outside their forward: before the first, between two, and after the last."""

    borrows = True

    def forward(self, x: torch.Tensor, visits: Sequence[int] | None = None) -> torch.Tensor:
        x = self.stem(x)
        if self.borrows:
            x = x + self.blocks[-1].shift
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.borrows and index == 1:
                x = F.linear(x, self.blocks[0].linear.weight, self.blocks[2].linear.bias)
        return F.linear(x, self.blocks[0].linear.weight) if self.borrows else x


def borrow(num_passes: Sequence[int]) -> None:
    with joined("dlo") as place, poisoned_slots(), torch.no_grad():
        model, plain = [make(lambda: Borrower([Block() for _ in range(4)])) for _ in range(2)]
        backend = place.enable(Pipeline(transformer=model))
        rank = place.mesh.world.rank
        for borrows in ((False, True), (True, False, True))[rank % 2]:
            model.borrows = plain.borrows = borrows
            for number in range(num_passes[rank]):
                with MODES[number % 2]():
                    agree(model, plain, number)
            backend.join_others()
        for _ in ((), (1,))[1 - rank % 2]:
            backend.join_others()
        backend.disable()
        assert not differing(model, plain)


@pytest.mark.parametrize("num_passes", [[3, 3, 3, 3], [3, 0, 1, 2], [0, 4, 2, 1]], ids=str)
@pytest.mark.parametrize("num_ranks", ALONE_AND_TOGETHER)
def test_weights_used_outside_their_block_are_right(ranks: RankPool, num_ranks: int, num_passes: list[int]) -> None:
    ranks(num_ranks).run(borrow, num_passes)


class Reader(Block):
    """Uses another block's weight inside its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "other"):
            x = F.linear(super().forward(x), self.other[0].linear.weight)
        return super().forward(x)


def read_inside(distance: int) -> None:
    with joined("dlo") as place, poisoned_slots(), torch.no_grad():
        model, plain = [make(lambda: Denoiser([Reader() for _ in range(4)])) for _ in range(2)]
        place.enable(Pipeline(transformer=model))
        for index in range(4):
            for each in (model, plain):
                each.blocks[index].other = [each.blocks[(index + distance) % 4]]
            try:
                result = model(inputs(1)[0])
            except OffloadError:
                result = plain(inputs(1)[0])
            assert same(result, plain(inputs(1)[0]))
            for each in (model, plain):
                del each.blocks[index].other
            agree(model, plain)


@pytest.mark.parametrize("distance", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_another_blocks_weight_inside_a_block_is_right_or_refused(
    ranks: RankPool, num_ranks: int, distance: int
) -> None:
    ranks(num_ranks).run(read_inside, distance)


def staged_bytes(staging_shards: int) -> tuple[int, int]:
    """H2D bytes of the first pass over eight equal blocks, and of the second."""
    with joined("dlo", staging_shards=staging_shards) as place, torch.no_grad():
        model = build("stack8")
        backend = place.enable(Pipeline(transformer=model))
        model(inputs(1)[0])
        first = backend.figures().h2d_bytes
        model(inputs(1)[0])
        return first, backend.figures().h2d_bytes - first


@pytest.mark.parametrize("staging_shards", [2, 3, 4])
def test_staging_holds_as_many_shards_as_configured(ranks: RankPool, staging_shards: int) -> None:
    """Later passes copy as many shards as they use; the first one also those in the slots and those in the staging."""
    for first, later in ranks(3).run(staged_bytes, staging_shards):
        assert 8 * first == (8 + 2 + staging_shards) * later > 0


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "more_blocks": lambda: stack(5),
    "another_size": lambda: Denoiser([Block(), Block(), VectorBlock(7), Block()]),
    "another_order": lambda: Denoiser([Block(), VectorBlock(239), VectorBlock(7), Block()]),
    "another_dtype": lambda: _with_other_weight(lambda weight: weight.int()),
    "another_stride": lambda: _with_other_weight(lambda weight: weight.t()),
    "a_tie": lambda: _tied(stack(4)),
}


def _with_other_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    model = stack(4)
    model.blocks[2].linear.weight = nn.Parameter(change(model.blocks[2].linear.weight.detach()), requires_grad=False)
    return model


def _tied(model: Any) -> nn.Module:
    model.blocks[1].shift = model.blocks[1].norm.bias
    return model


def mismatch(variant: str, odd_rank: int) -> tuple[str, str, int]:
    """The error of this rank, its words, and how many gathers of weights there were."""
    with joined("dlo") as place, recorded_gathers() as gathers, torch.no_grad():
        model = make(VARIANTS[variant] if place.mesh.world.rank == odd_rank else lambda: stack(4))
        before, twin = (
            tensors_of(model),
            make(VARIANTS[variant] if place.mesh.world.rank == odd_rank else lambda: stack(4)),
        )
        with pytest.raises(OffloadError) as raised:
            place.enable(Pipeline(transformer=model))
        assert not differing(model, twin) and all(tensor is before[name] for name, tensor in tensors_of(model).items())
        num_gathers = len(gathers)
        model, plain = build("stack3"), build("stack3")
        place.enable(Pipeline(transformer=model))
        agree(model, plain)
        return type(raised.value).__name__, str(raised.value), num_gathers


@pytest.mark.parametrize("variant", VARIANTS)
def test_plans_that_differ_are_refused_on_all_ranks(ranks: RankPool, variant: str) -> None:
    answers = ranks(3).run(mismatch, variant, 1)
    assert {(kind, num_gathers) for kind, _, num_gathers in answers} == {(RankMismatchError.__name__, 0)}
    assert {words for _, words, _ in answers} == {"the offload plan of rank 1 differs from that of rank 0"}


def test_settings_that_differ_are_refused_on_all_ranks(ranks: RankPool) -> None:
    assert ranks(2).run(differ_in_settings) == [RankMismatchError.__name__] * 2


def differ_in_settings() -> str:
    with joined("dlo", staging_shards=2 + int(os.environ["RANK"])) as place:
        model = build("stack3")
        with pytest.raises(OffloadError) as raised:
            place.enable(Pipeline(transformer=model))
        assert not differing(model, build("stack3"))
        return type(raised.value).__name__


def full_pipeline() -> Pipeline:
    return Pipeline(
        text_encoder=make(TextEncoder, 1),
        text_encoder_2=make(TextEncoder, 2),
        transformer=build("stack3"),
        transformer_2=build("uneven"),
        vae=make(Vae, 3),
        extra=make(TextEncoder, 4),
    )


def untouched(pipeline: Pipeline, plain: Pipeline) -> list[str]:
    """What differs between two pipelines: values, kinds of tensors, or hooks."""
    found = []
    for name, module in pipeline.components.items():
        found += [f"{name}.{tensor}" for tensor in differing(module, plain.components[name])]
        found += [
            f"{name}.{key}"
            for key, tensor in tensors_of(module).items()
            if type(tensor) not in (nn.Parameter, torch.Tensor)
        ]
        found += [
            f"hook on {name}.{path}"
            for path, each in module.named_modules()
            if each._forward_hooks or each._forward_pre_hooks
        ]
    return found


@contextmanager
def failing_call(owner: Any, name: str, number: int, error: type[BaseException]) -> Iterator[list[int]]:
    """The call with this number raises; the calls that were made."""
    calls: list[int] = []
    original = getattr(owner, name)

    def count(*arguments: Any, **rest: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == number + 1:
            raise error("no memory is left")
        return original(*arguments, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, count)
        yield calls


SHORTAGES: dict[str, tuple[Any, str, type[BaseException]]] = {
    "device": (CpuDevice, "empty", torch.OutOfMemoryError),
    "host": (HostMemory, "allocate", MemoryError),
}


def run_short(strategy: str, shortage: str, failing: int) -> int:
    """Lets one allocation of `enable` fail on one rank, each in turn, until there is no further; their number."""
    owner, name, error = SHORTAGES[shortage]
    with joined(strategy) as place, poisoned_slots(), torch.no_grad():
        rank, number = place.mesh.world.rank, 0
        while True:
            pipeline = full_pipeline()
            with failing_call(owner, name, number if rank == failing else -1, error) as calls:
                try:
                    backend = place.enable(pipeline)
                except (PeerFailedError, error) as raised:
                    assert isinstance(raised, error) is (rank == failing)
                else:
                    break
            assert len(calls) >= number + 1 or rank != failing
            assert not untouched(pipeline, full_pipeline()), f"allocation {number}"
            number += 1
        agree(pipeline.transformer, full_pipeline().transformer)
        backend.disable()
        assert not untouched(pipeline, full_pipeline())
        return number


@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [("none", 1), ("model_level", 1), ("layer_wise", 1), ("dlo", 2), ("dlo", 3)], ids=str
)
def test_a_failed_enable_leaves_all_ranks_as_they_were(
    ranks: RankPool, strategy: str, num_ranks: int, shortage: str
) -> None:
    counts = ranks(num_ranks).run(run_short, strategy, shortage, num_ranks - 1)
    least = {"none": 0, "model_level": 4, "layer_wise": 4, "dlo": 4}[strategy] if shortage == "host" else 2
    assert len(set(counts)) == 1 and counts[0] >= least


def interrupt_consumption() -> int:
    """Stops `enable` at every copy in turn, as an impatient user would."""
    with joined("layer_wise") as place, torch.no_grad():
        number = 0
        while True:
            pipeline = full_pipeline()
            with failing_call(store, "copy_range", number, KeyboardInterrupt):
                try:
                    backend = place.enable(pipeline)
                except KeyboardInterrupt:
                    pass
                else:
                    break
            assert not untouched(pipeline, full_pipeline()), f"copy {number}"
            number += 1
        backend.disable()
        return number


def test_an_interrupted_enable_leaves_the_model_as_it_was(ranks: RankPool) -> None:
    assert ranks(1).run(interrupt_consumption)[0] >= 6


def refuse_on_one_rank(failing: int) -> str:
    with joined("dlo") as place, torch.no_grad():
        pipeline = full_pipeline()
        if place.mesh.world.rank == failing:
            pipeline.components["transformer"] = make(TextEncoder)
            del pipeline.components["transformer_2"]
        before = {name: tensors_of(module) for name, module in pipeline.components.items()}
        with pytest.raises(OffloadError) as raised:
            backend = place.enable(pipeline)
        for name, module in pipeline.components.items():
            assert all(tensor is before[name][key] for key, tensor in tensors_of(module).items())
        pipeline = full_pipeline()
        backend = place.enable(pipeline)
        agree(pipeline.transformer, full_pipeline().transformer)
        backend.disable()
        return type(raised.value).__name__


@pytest.mark.parametrize("num_ranks", TOGETHER)
def test_a_plan_refused_on_one_rank_is_refused_on_all(ranks: RankPool, num_ranks: int) -> None:
    failing = num_ranks - 1
    names = [PlanError.__name__ if rank == failing else PeerFailedError.__name__ for rank in range(num_ranks)]
    assert ranks(num_ranks).run(refuse_on_one_rank, failing) == names


def fail_and_retry() -> None:
    """A backend whose `enable` failed holds nothing and can be used again."""
    with joined("layer_wise") as place, torch.no_grad():
        backend = LayerWiseOffloadBackend(place.config, place.device)
        model = build("stack3")
        model.blocks[1].register_buffer("odd", torch.eye(3).to_sparse_csr())
        nothing = backend.figures()
        with pytest.raises(PlanError):
            backend.enable(Pipeline(transformer=model))
        assert backend.figures() == nothing and not backend.is_enabled()
        with failing_call(CpuDevice, "empty", 2, torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
            backend.enable(Pipeline(transformer=build("stack3")))
        assert backend.figures() == nothing and not backend.is_enabled()
        model, plain = build("stack3"), build("stack3")
        backend.enable(Pipeline(transformer=model))
        agree(model, plain)
        backend.disable()
        assert backend.figures() == nothing and not differing(model, plain)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_backend_can_be_used_after_it_failed(ranks: RankPool) -> None:
    ranks(1).run(fail_and_retry)
