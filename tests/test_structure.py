"""The house keeps its shape: imports run one way, and what lives in one place stays there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "offload").rglob("*.py")), ROOT / "launch.py"]

# Ground floor first. A module imports from its own floor or from those before it.
FLOORS = (
    ("offload.errors",),
    ("offload.config",),
    ("offload.schema",),
    ("offload.device",),
    ("offload.mesh",),
    ("offload.plan",),
    ("offload.host",),
    ("offload.stream",),
    ("offload.hooks",),
    ("offload.backends",),
    ("offload.pipelines",),
    ("offload.report",),
    ("offload.runtime",),
    ("offload.service",),
    ("launch",),
)

# What may be named only where it lives.
HOMES = {
    "hydra": ("launch", "offload.schema"),
    "omegaconf": ("launch", "offload.schema"),
    "torch.distributed": ("offload.mesh", "offload.runtime.launcher"),
    "torch.cuda": ("offload.device",),
    "torch.accelerator": ("offload.device",),
    "fastapi": ("offload.service",),
    "uvicorn": ("offload.service",),
    "http": ("offload.service",),
}

# Where `tensor.data = …` may stand: the binding, and the sketch, which casts meta tensors that hold nothing.
REBINDERS = ("offload.stream.binding", "offload.pipelines.sketch")


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int | None:
    for number, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return None


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide what imports what"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_names(file: Path) -> Iterator[str]:
    """Imports, and attribute chains such as `torch.cuda.synchronize`."""
    yield from imported(file)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_every_module_has_a_floor(file: Path) -> None:
    assert module_name(file) == "offload" or floor_of(module_name(file)) is not None


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_never_go_up(file: Path) -> None:
    here = module_name(file)
    for name in imported(file):
        target, own = floor_of(name), floor_of(here)
        if target is not None and own is not None:
            assert target <= own, f"{here} imports {name}, which stands above it"


@pytest.mark.parametrize("thing", HOMES)
def test_each_thing_lives_in_one_place(thing: str) -> None:
    for file in FILES:
        here = module_name(file)
        if not any(here == home or here.startswith(f"{home}.") for home in HOMES[thing]):
            used = [name for name in dotted_names(file) if name == thing or name.startswith(f"{thing}.")]
            assert not used, f"{here} uses {used[0]}; {thing} lives in {' and '.join(HOMES[thing])}"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_storage_is_rebound_in_one_place(file: Path) -> None:
    if module_name(file) in REBINDERS:
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                rebinds = isinstance(target, ast.Attribute) and target.attr == "data"
                assert not rebinds, f"{module_name(file)} line {node.lineno} rebinds storage"


def test_there_are_no_import_cycles() -> None:
    graph = {module_name(file): {name for name in imported(file) if name.startswith("offload")} for file in FILES}
    modules = set(graph)
    edges = {
        here: {name if name in modules else name.rpartition(".")[0] for name in names} & modules - {here}
        for here, names in graph.items()
    }
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in finished:
            for target in edges[module]:
                visit(target, (*path, module))
            finished.add(module)

    for module in modules:
        visit(module, ())
