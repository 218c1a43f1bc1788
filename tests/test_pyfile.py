"""Files that the user names: what they can import, and from where."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipel import pyfile


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
