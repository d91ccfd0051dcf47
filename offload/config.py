"""The settings of a run: frozen, validated, and with one line of help for each field.

The shape of `Settings` is the shape of `conf/config.yaml`. `offload.schema` derives Hydra's schema from these classes,
so a field is declared once, here. Everything that can be refused without opening the model is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from offload.errors import SettingsError


class OffloadStrategy(StrEnum):
    """How weights are kept off the device."""

    NONE = "none"
    MODEL_LEVEL = "model_level"
    LAYER_WISE = "layer_wise"
    DISTRIBUTED_LAYER_WISE = "distributed_layer_wise"

    @property
    def short_name(self) -> str:
        """The name that the command line and the report use."""
        return "dlo" if self is OffloadStrategy.DISTRIBUTED_LAYER_WISE else self.value

    @property
    def streams(self) -> bool:
        """Whether blocks travel to the device one by one."""
        return self in (OffloadStrategy.LAYER_WISE, OffloadStrategy.DISTRIBUTED_LAYER_WISE)


STRATEGIES = {strategy.short_name: strategy for strategy in OffloadStrategy}
TRANSPORTS = ("auto", "local", "allgather")
MODELS = ("demo", "diffusers")
TASKS = ("generate",)
PLACEMENTS = ("even", "head")
DTYPES = ("float32", "bfloat16", "float16")


def setting(help: str, default: Any = MISSING, *, factory: Any = MISSING) -> Any:
    """A dataclass field with its line of help."""
    if factory is not MISSING:
        return field(default_factory=factory, metadata={"help": help})
    return field(default=default, metadata={"help": help})


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingsError(name, value, f"allowed are {', '.join(allowed)}")


def check_at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:  # which is how NaN is refused too
        raise SettingsError(name, value, f"it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    name: str = setting("how weights are offloaded: none, model_level, layer_wise or dlo", "dlo")
    pin_memory: bool = setting("keep host weights in page-locked memory where the device can use it", True)

    def __post_init__(self) -> None:
        check_choice("strategy", self.name, tuple(STRATEGIES))


@dataclass(frozen=True, kw_only=True)
class TransportSettings:
    name: str = setting("what fills a slot: auto, local (H2D) or allgather (H2D of a shard, then all-gather)", "auto")
    staging_shards: int = setting("device staging for the all-gather, in shards of the largest block", 4)

    def __post_init__(self) -> None:
        check_choice("transport", self.name, TRANSPORTS)
        check_at_least("transport.staging_shards", self.staging_shards, 2)


@dataclass(frozen=True, kw_only=True)
class ResidencySettings:
    blocks: Any = setting("denoiser blocks that stay on the device: a number, a list of indices, or all", 0)
    placement: str = setting(
        "where a number of resident blocks goes: even (spread out) or head (the first ones)", "even"
    )
    shard_fraction: float = setting("part of every other block's shard that stays on the device, 0 to 1", 0.0)

    def __post_init__(self) -> None:
        check_choice("residency.placement", self.placement, PLACEMENTS)
        if not 0 <= self.shard_fraction <= 1:
            raise SettingsError("residency.shard_fraction", self.shard_fraction, "it must be from 0 to 1")
        numbers = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        if self.blocks != "all" and not all(type(number) is int and number >= 0 for number in numbers):
            allowed = "it must be a number of blocks, a list of their indices, or all"
            raise SettingsError("residency.blocks", self.blocks, allowed)

    @property
    def is_none(self) -> bool:
        return self.blocks in (0, ()) and self.shard_fraction == 0


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    name: str = setting("demo (built in) or diffusers (a pipeline directory on disk)", "demo")
    path: str | None = setting("directory of a diffusers pipeline: model_index.json and safetensors", None)
    dtype: str = setting("weights and compute: float32, bfloat16 or float16", "float32")
    variant: str | None = setting("checkpoint variant, as in diffusers (fp16, bf16, ...)", None)

    def __post_init__(self) -> None:
        check_choice("model", self.name, MODELS)
        check_choice("model.dtype", self.dtype, DTYPES)
        if self.name == "diffusers":
            self._check_path()
        elif self.path is not None:
            raise SettingsError("model.path", self.path, f"model={self.name} has its own weights; use model=diffusers")

    def _check_path(self) -> None:
        if self.path is None:
            raise SettingsError("model.path", "null", "model=diffusers needs the directory of a pipeline")
        if not Path(self.path).is_dir():
            raise SettingsError("model.path", self.path, "there is no such directory")
        if not (Path(self.path) / "model_index.json").is_file():
            raise SettingsError("model.path", self.path, "the directory must hold a model_index.json")


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    name: str = setting("what to do: generate", "generate")

    def __post_init__(self) -> None:
        check_choice("task", self.name, TASKS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a run depends on."""

    strategy: StrategySettings = setting("how weights are offloaded", factory=StrategySettings)
    transport: TransportSettings = setting("how a block reaches the device", factory=TransportSettings)
    residency: ResidencySettings = setting("what stays on the device", factory=ResidencySettings)
    model: ModelSettings = setting("what to run", factory=ModelSettings)
    task: TaskSettings = setting("what to do", factory=TaskSettings)

    dp_size: int | None = setting("ranks that share the host weights; null: all of them", None)
    nproc: int = setting("ranks to start on this machine; torchrun's own number wins under torchrun", 1)
    device: str = setting("auto, cpu, or an accelerator such as cuda", "auto")
    cpu_threads: int = setting("compute threads of a rank on a CPU; another number may change the last bits", 1)
    timeout_seconds: float = setting("how long a rank waits for another before the run fails", 600.0)
    output_dir: str | None = setting("where results go; null: a new directory under outputs/", None)

    prompts: tuple[str, ...] | None = setting("what to draw, one picture each", None)
    negative_prompt: str | None = setting("what to avoid; null: the pipeline's default", None)
    seed: int = setting("the first picture's seed; the n-th picture has seed + n", 0)
    num_inference_steps: int | None = setting("denoising steps; null: the pipeline's default", None)
    height: int | None = setting("pixels; null: the pipeline's default", None)
    width: int | None = setting("pixels; null: the pipeline's default", None)
    guidance_scale: float | None = setting("classifier-free guidance; null: the pipeline's default", None)
    pipeline_kwargs: Mapping[str, Any] = setting("more arguments for the pipeline's call, by name", factory=dict)

    def __post_init__(self) -> None:
        for name, least in (
            ("dp_size", 1),
            ("nproc", 1),
            ("cpu_threads", 1),
            ("timeout_seconds", 1),
            ("seed", 0),
            ("num_inference_steps", 1),
            ("height", 1),
            ("width", 1),
            ("guidance_scale", 0),
        ):
            check_at_least(name, getattr(self, name), least)
        if not self.prompts:
            raise SettingsError("prompts", "null" if self.prompts is None else "[]", "give at least one prompt")

    def offload_config(self, world_size: int) -> OffloadConfig:
        """What the backends need to know, checked against the number of ranks."""
        strategy = STRATEGIES[self.strategy.name]
        if not strategy.streams and not self.residency.is_none:
            allowed = f"strategy={strategy.value} streams no blocks; use layer_wise or dlo"
            name = "blocks" if self.residency.blocks not in (0, ()) else "shard_fraction"
            raise SettingsError(f"residency.{name}", getattr(self.residency, name), allowed)
        return OffloadConfig.for_world(
            strategy,
            self.dp_size,
            self.transport.name,
            world_size,
            pin_cpu_memory=self.strategy.pin_memory,
            staging_shards=self.transport.staging_shards,
            resident_blocks=self.residency.blocks,
            resident_placement=self.residency.placement,
            shard_fraction=self.residency.shard_fraction,
        )


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """How one pipeline is offloaded; complete and free of contradictions."""

    strategy: OffloadStrategy = OffloadStrategy.DISTRIBUTED_LAYER_WISE
    dp_size: int = 1
    transport: str = "local"
    pin_cpu_memory: bool = True
    staging_shards: int = 4
    resident_blocks: int | tuple[int, ...] | str = 0
    resident_placement: str = "even"
    shard_fraction: float = 0.0

    @classmethod
    def for_world(
        cls, strategy: OffloadStrategy, dp_size: int | None, transport: str, world_size: int, **rest: Any
    ) -> OffloadConfig:
        """Resolve what was left open for `world_size` ranks.

        Raises:
            SettingsError: the choices contradict each other or the number of ranks.
        """
        shared = strategy is OffloadStrategy.DISTRIBUTED_LAYER_WISE and transport != "local"
        if dp_size is None:
            dp_size = world_size if shared else 1
        if not shared and dp_size > 1:
            how = (
                "transport=local"
                if strategy is OffloadStrategy.DISTRIBUTED_LAYER_WISE
                else f"strategy={strategy.value}"
            )
            raise SettingsError(
                "dp_size", dp_size, f"{how} keeps whole weights on every rank, so only 1 or null is allowed"
            )
        if world_size % dp_size:
            raise SettingsError("dp_size", dp_size, f"it must divide the number of ranks, {world_size}")
        if transport == "auto":
            transport = "allgather" if dp_size > 1 else "local"
        elif transport == "allgather" and dp_size == 1:
            raise SettingsError(
                "transport", transport, "it needs strategy=dlo and dp_size of at least 2; use local or auto"
            )
        return cls(strategy=strategy, dp_size=dp_size, transport=transport, **rest)
