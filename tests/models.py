"""Small models for tests, each with something in it that is easily lost when its weights travel.

Every model takes activations of shape (ROWS, WIDTH) and keeps them finite and sensitive to all of its weights. Built
twice with the same arguments, a model has the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16
ROWS = 3
LARGE_BYTES = 1 << 20
"""A buffer of this size streams, a smaller one stays on the device."""
UNEVEN_SIZES = (1231, 239, 7)


class Pipeline:
    """What a pipeline is to the offloader: an object with `components`."""

    def __init__(self, **components: object) -> None:
        self.components = components

    def __getattr__(self, name: str) -> Any:
        if name == "components" or name not in self.components:
            raise AttributeError(name)
        return self.components[name]


class Block(nn.Module):
    """A norm, a Linear and a bare parameter around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) + self.shift)


class Denoiser(nn.Module):
    """A DiT in small: stem, blocks, a lone norm, a head, and a bare parameter in the root."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, visits: Sequence[int] | None = None) -> torch.Tensor:
        """With `visits`, the blocks with these indices run, in this order."""
        x = self.stem(x) * self.scale
        for index in range(len(self.blocks)) if visits is None else visits:
            x = self.blocks[index](x)
        return self.head(self.norm(x))


class VectorBlock(nn.Module):
    """One vector of any length, down to nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        folded = F.pad(self.vector, (0, -len(self.vector) % WIDTH)).view(-1, WIDTH)
        return torch.tanh(x + (folded * torch.arange(1, len(folded) + 1).rsqrt()[:, None]).sum(0))


class MixedBlock(nn.Module):
    """fp32 norm, bf16 Linear, int64 and bool buffers, and packed 4-bit codes of which only the many stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3)
        self.register_buffer("few_codes", torch.randint(256, (WIDTH,), dtype=torch.uint8))
        self.register_buffer("many_codes", torch.randint(256, (LARGE_BYTES // WIDTH, WIDTH), dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = (self.few_codes & 15) * 0.1 + (self.many_codes >> 4).sum(0) / len(self.many_codes)
        y = self.linear(self.norm(x).bfloat16()).float()[..., self.order]
        return x + torch.tanh(torch.where(self.mask, y, codes))


class Float8Block(nn.Module):
    """A column-major float8 weight with a separate fp32 scale, as quantised checkpoints have it."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH + 5, WIDTH).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight.t(), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(F.linear(F.pad(x, (0, 5)), self.weight.float() * self.scale))


class RotaryBlock(nn.Module):
    """A non-persistent rotary table, a counter that forward increments, and one that forward replaces."""

    counter: torch.Tensor
    replaced: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        angles = torch.arange(ROWS)[:, None] * torch.rand(WIDTH // 2)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        self.replaced = self.replaced + 1
        turned = torch.view_as_complex(self.linear(x).view(ROWS, -1, 2)) * self.table
        return x + torch.tanh(torch.view_as_real(turned).view(ROWS, WIDTH) + 0.1 * self.counter + 0.01 * self.replaced)


class TiedBlock(nn.Module):
    """One weight under two names, and a buffer that looks at a part of it."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.up.weight = self.down.weight
        self.register_buffer("rows", self.down.weight.detach()[2:5], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(torch.tanh(self.down(x))) + self.rows.sum(0))


class StridedBlock(nn.Module):
    """A transposed weight, an expanded one, and q, k and v cut with strides from one fused storage."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.expanded = nn.Parameter(torch.randn(1).expand(WIDTH))
        fused = torch.randn(WIDTH, 3, WIDTH) / 4
        strides = (3 * WIDTH, 1)
        self.q, self.k, self.v = (
            nn.Parameter(fused.as_strided((WIDTH, WIDTH), strides, part * WIDTH)) for part in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = torch.softmax(F.linear(x, self.q) @ F.linear(x, self.k).t(), -1)
        return x + torch.tanh(F.linear(attention @ F.linear(x, self.v), self.transposed) * self.expanded)


class EdgeBlock(nn.Module):
    """A parameter without elements and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.gain = nn.Parameter(torch.rand(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + torch.tanh(self.linear(x)) * self.gain, self.nothing])


class TextEncoder(nn.Module):
    """Places its ids where its first parameter is, as encoders of the transformers library do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        return self.linear(self.embedding(torch.tensor(ids, device=next(self.parameters()).device)))


class Vae(nn.Module):
    """Is called by `decode`, never by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, 4)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.decoder(x))


def stack(num_blocks: int) -> Denoiser:
    return Denoiser([Block() for _ in range(num_blocks)])


def tied_to_each_other() -> Denoiser:
    """The first and the last block share a weight, two blocks a whole module, and one block and the head a weight."""
    model = stack(5)
    model.blocks[0].linear.weight = model.blocks[4].linear.weight
    model.blocks[2].norm = model.blocks[1].norm
    model.head.weight = model.blocks[3].linear.weight
    return model


def all_tied_block() -> Denoiser:
    """One block owns nothing alone, so nothing of it travels."""
    model = stack(3)
    model.head = model.blocks[1].linear
    model.norm = model.blocks[1].norm
    model.scale = model.blocks[1].shift
    return model


def same_block_twice() -> Denoiser:
    first, second = Block(), Block()
    return Denoiser([first, second, first])


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **{f"stack{num_blocks}": lambda num_blocks=num_blocks: stack(num_blocks) for num_blocks in (1, 2, 3, 4, 5, 7, 8)},
    "uneven": lambda: Denoiser([VectorBlock(size) for size in UNEVEN_SIZES]),
    "uneven_repeated": lambda: Denoiser([VectorBlock(size) for size in (7, *UNEVEN_SIZES, 7, 7, 1231)]),
    "mixed": lambda: Denoiser([MixedBlock(), MixedBlock()]),
    "float8": lambda: Denoiser([Float8Block() for _ in range(3)]),
    "rotary": lambda: Denoiser([RotaryBlock() for _ in range(3)]),
    "tied_in_block": lambda: Denoiser([TiedBlock() for _ in range(3)]),
    "tied_to_each_other": tied_to_each_other,
    "all_tied_block": all_tied_block,
    "same_block_twice": same_block_twice,
    "strided": lambda: Denoiser([StridedBlock() for _ in range(3)]),
    "edge": lambda: Denoiser([EdgeBlock() for _ in range(3)]),
    "empty_block": lambda: Denoiser([VectorBlock(0), VectorBlock(239), VectorBlock(0)]),
    "different_blocks": lambda: Denoiser(
        [Block(), MixedBlock(), EdgeBlock(), Float8Block(), VectorBlock(7), StridedBlock()]
    ),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of that name, in eval mode; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]().eval()


def make(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A component other than a denoiser, made like `build`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind().eval()


def inputs(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Different activations."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name, tied ones too."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in logical order, whatever the dtype: NaN equals NaN and -0.0 differs from 0.0."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree in everything that a forward can see: type, dtype, shape, strides and bytes."""
    return (
        isinstance(one, nn.Parameter) is isinstance(other, nn.Parameter)
        and one.dtype is other.dtype
        and one.requires_grad is other.requires_grad
        and one.shape == other.shape
        and one.stride() == other.stride()
        and bytes_of(one) == bytes_of(other)
    )


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of the tensors that are not the same in two modules; a name that one of them lacks is among them."""
    ones, others = tensors_of(one), tensors_of(other)
    missing = list(ones.keys() ^ others.keys())
    return missing + [name for name in ones.keys() & others.keys() if not same(ones[name], others[name])]
