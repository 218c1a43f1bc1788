"""The house itself: rooms of bearable size, and imports that point down and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import archipel

ROOT = Path(archipel.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST_FILE, LONGEST_CLASS = 500, 300


def module_of(path: Path) -> str:
    """`sim.clock` for `sim/clock.py`, and `methods` for `methods/__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> set[str]:
    """The modules of archipel that a file imports when it is run, those inside functions too."""
    found = set()
    for node in running(tree_of(path)):
        match node:
            case ast.ImportFrom(module=str(place)) if place.split(".")[0] == "archipel":
                base = place.removeprefix("archipel").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".removeprefix(".")
                    found.add(inner if inner in MODULES else base)
            case ast.Import():
                names = [alias.name for alias in node.names if alias.name.startswith("archipel.")]
                found |= {name.removeprefix("archipel.") for name in names}
    return found & set(MODULES) - {module_of(path), ""}


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not typing_only:
            yield child
            yield from running(child)


def room_of(module: str) -> str:
    """The folder that a module lies in; a file right in the package is a room of its own."""
    place, _, _ = module.partition(".")
    return place


@pytest.mark.parametrize("path", FILES, ids=map(module_of, FILES))
def test_no_file_is_longer_than_a_reader_bears(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def test_no_class_is_longer_than_a_reader_bears() -> None:
    sizes = {
        f"{module_of(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > LONGEST_CLASS} == {}


def test_no_file_imports_itself_by_others() -> None:
    graph = {module: imports_of(path) for module, path in MODULES.items()}
    assert graph["sim.clock"] > {"sim.engine", "run.census"}  # the reading of imports works
    check_acyclic(graph)


def test_no_room_imports_itself_by_others() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        room = room_of(module)
        graph.setdefault(room, set()).update(map(room_of, imports_of(path)))
        graph[room].discard(room)
    assert graph["sim"] >= {"run", "train"}
    check_acyclic(graph)


def check_acyclic(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_methods_and_rules_know_no_engine() -> None:
    """What is true on any clock imports neither clock, and what is trained knows of none."""
    engines = {"sim", "live"}
    for room in ("run", "methods", "actor", "vector", "outer", "collective", "parameter_server"):
        for module, path in MODULES.items():
            if room_of(module) == room:
                assert not engines & set(map(room_of, imports_of(path))), module
