"""Files that the user names: what they can import, and from where."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import archipel
from archipel import pyfile
from archipel.errors import UserError
from archipel.methods import blaming
from archipel.sim.verbs import NodeContext


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports is gone after it, and what other tests imported is out of its sight."""
    for name, module in list(sys.modules.items()):
        if pyfile._user_folder(module) is not None:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(pyfile, "folders", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def folder(path: Path, value: int) -> Path:
    """A folder with a file to import, its neighbour, and a package beside them."""
    (path / "parts").mkdir(parents=True)
    (path / "neighbour.py").write_text(f"VALUE = {value}\n")
    (path / "parts" / "__init__.py").write_text("")
    (path / "parts" / "inner.py").write_text(f"VALUE = {10 * value}\n")
    file = path / "task.py"
    file.write_text(
        "from neighbour import VALUE\nfrom parts.inner import VALUE as INNER\n"
        "def later():\n    import neighbour\n    return neighbour.VALUE\n"
    )
    return file


def test_each_file_imports_its_own_neighbours_whatever_others_have_imported(tmp_path: Path) -> None:
    """Two tasks in two folders, each with its `model.py`, are one Python program's to compare."""
    first, second = folder(tmp_path / "a", 1), folder(tmp_path / "b", 2)
    for file, value in ((first, 1), (second, 2), (first, 1)):
        module = pyfile.import_file(file, "here")
        assert (module.VALUE, module.INNER, module.later()) == (value, 10 * value, value)
        assert sys.path[0] == str(file.parent)
        assert sys.path.count(str(file.parent)) == 1


def test_a_neighbour_stays_one_module_for_files_of_one_folder(tmp_path: Path) -> None:
    file = folder(tmp_path, 1)
    other = tmp_path / "method.py"
    other.write_text("import neighbour\n")
    pyfile.import_file(file, "here")
    kept = sys.modules["neighbour"]
    assert pyfile.import_file(other, "here").neighbour is kept


def test_a_neighbour_does_not_hide_what_the_first_file_alone_has(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a", 1), tmp_path / "b" / "task.py"
    second.parent.mkdir()
    second.write_text("from neighbour import VALUE\n")
    pyfile.import_file(first, "here")
    assert pyfile.import_file(second, "here").VALUE == 1  # it lies on the path already


# A method that fails

EXAMPLE = Path(__file__).parents[1] / "CONTRIBUTING.md"
BUILD = "    everybody = tuple"
COMPUTE = "        ctx.train(self.theta, self.steps, self.progress)"
FAILING = {  # what stands in CONTRIBUTING.md, what is put before it, and what that raises
    "build": (BUILD, "    world.workres", "AttributeError: 'World' object has no attribute 'wor"),
    "a message": (COMPUTE, "        {}['steps']", "KeyError: 'steps'"),
    "a late message": (
        COMPUTE, "        1 / (self.round < 2)", "ZeroDivisionError: division by zero"),
    "arithmetic": (COMPUTE, "        outer.mean([None])", "AttributeError: 'NoneType' object has"),
    "a library": (COMPUTE, "        math.sqrt(-1.0)", "ValueError: math domain error"),
}  # fmt: skip


def method(folder: Path, before: str, line: str) -> tuple[Path, int]:
    """The method of CONTRIBUTING.md with one more line, and that line's number."""
    [code] = re.findall(r"```python\n(.*?)```", EXAMPLE.read_text(), flags=re.DOTALL)
    code = code.replace(
        "from dataclasses", "import math\nfrom archipel import outer\nfrom dataclasses"
    )
    assert code.count(before) == 1
    file = folder / "own.py"
    file.write_text(code.replace(before, f"{line}\n{before}"))
    return file, 1 + file.read_text().splitlines().index(line)


@pytest.mark.parametrize("where", FAILING)
def test_a_users_method_that_fails_is_told_with_its_file_and_line(
    where: str, tmp_path: Path
) -> None:
    before, line, text = FAILING[where]
    file, number = method(tmp_path, before, line)
    with pytest.raises(UserError) as error:
        archipel.compare([str(file)], task="none", steps=2048, out=tmp_path / "out")
    said = f"method = '{file}': it failed at {file}:{number}: {text}"
    assert str(error.value).startswith(said)
    assert type(error.value.__cause__).__name__ == text.partition(":")[0]
    assert not (tmp_path / "out").exists()


def test_a_mistake_of_an_engine_is_not_blamed_on_the_method_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(NodeContext, "_end_s", broken)
    broken.__code__ = broken.__code__.replace(co_filename=NodeContext.train.__code__.co_filename)
    file, _ = method(tmp_path, BUILD, "    math")
    with pytest.raises(KeyError, match="ours"):
        archipel.compare([str(file)], task="none", steps=2048, out=tmp_path / "out")


def test_a_mistake_of_the_script_is_not_blamed_on_the_method(tmp_path: Path) -> None:
    def progress(*_: object) -> None:
        raise KeyError("the script's")

    file, _ = method(tmp_path, BUILD, "    math")
    with pytest.raises(KeyError, match="the script's"):
        archipel.compare(
            [str(file)], task="none", steps=2048, out=tmp_path / "out", progress=progress
        )


def test_a_method_of_the_package_is_never_the_users_mistake() -> None:
    with pytest.raises(KeyError), blaming("halos"):
        raise KeyError("ours")
