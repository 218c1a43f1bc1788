"""What the README and the docs say is true: files, links, commands, settings and snippets.

Not here: `docs/decisions.md`, whose entries speak of the files of their day, and the example method
in CONTRIBUTING.md (`test_cli.py`, `test_methods.py`).
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import archipel
from archipel import cli, methods
from archipel.recipe import parse_recipe
from archipel.sim.topology import Topology

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_TODAY = [path for path in DOCS if path.name != "decisions.md"]
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("src/archipel", "tests", "bench", "docs", "site")
    for path in (ROOT / folder).rglob("*")
] + [path.name for path in ROOT.iterdir()]
EXAMPLES = {"mytask.py", "mytracker.py", "my_method.py", "file.py", "local_sgd.py"}
"""Files that a reader is to write."""


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a page in one language; "" are those that name none."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    return [code for kind, code in found if kind == language]


def calls(program: str) -> Iterator[tuple[str, list[str]]]:
    """Every call of a program in a code block or a code span: its page, and the arguments."""
    for path in OF_TODAY:
        lines = [line for code in blocks(path, "") for line in code.splitlines()]
        prose = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            called = re.match(rf" *(?:\.venv/bin/)?{program} (.+)", line)
            if called and "…" not in line:
                yield path.name, shlex.split(called[1], comments=True)


@pytest.mark.parametrize("path", DOCS, ids=names(DOCS))
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    missing = [
        link
        for link in links
        if not re.match(r"https?:|#", link) and not (path.parent / link.partition("#")[0]).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("path", OF_TODAY, ids=names(OF_TODAY))
def test_every_file_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"[\w./-]+\.(?:py|md)\b", path.read_text(encoding="utf-8")))
    missing = {
        name
        for name in named
        if Path(name).name not in EXAMPLES
        and not any(f"/{file}".endswith("/" + name.removeprefix("../")) for file in FILES)
    }
    assert missing == set()


def test_the_list_of_files_is_whole() -> None:
    [tree] = blocks(ROOT / "docs" / "files.md", "")
    named, folder = set(), ""
    for line in tree.splitlines():
        if entry := re.match(r"( +)([\w/]+(?:\.py)?) ", line):
            indent, name = len(entry[1]), entry[2]
            if name.endswith("/"):
                folder = name
            else:
                named.add(name if indent == 2 else folder + name)
    package = ROOT / "src" / "archipel"
    there = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    assert named == {name for name in there if not name.endswith(("__init__.py", "__main__.py"))}


def test_every_command_can_be_called_like_that() -> None:
    group = typer.main.get_command(cli.app)
    wrong, seen = [], set()
    for page, arguments in calls("archipel"):
        name, *rest = arguments
        if name.startswith("-"):
            continue
        command, parent = group.commands.get(name), None
        if hasattr(command, "commands") and rest:
            parent, command = name, command.commands.get(rest.pop(0))
        if command is None:
            wrong.append((page, arguments, "there is no such command"))
            continue
        if not rest:  # it is only named
            continue
        seen.add(parent or name)
        try:
            command.make_context(name, rest)
        except Exception as error:
            wrong.append((page, arguments, str(error)))
    assert wrong == []
    assert seen >= {"compare", "run", "launch", "list", "resume", "report", "theory"}


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    asked = {
        argument
        for _, arguments in calls("make")
        for argument in arguments[:2]
        if re.fullmatch(r"[a-z][a-z-]+", argument)
    }
    assert {"demo", "test"} <= asked <= targets


@pytest.mark.parametrize("page", ["README.md", "docs/using.md"])
def test_networks_and_recipes_can_be_read(page: str, tmp_path: Path) -> None:
    network, recipe, *_ = map(yaml.safe_load, blocks(ROOT / page, "yaml"))
    assert Topology.model_validate(network).regions == {
        "oregon": [1.0, 1.0, 0.5],
        "paris": [0.8, 0.8],
    }
    if recipe["topology"] == "my-network.yaml":
        recipe |= {"topology": network, "task": "stdlib"}
    assert parse_recipe(recipe).method == "halos"


@pytest.mark.slow
def test_the_first_python_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = blocks(ROOT / "README.md", "python")
    assert "steps=2000" in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("steps=2000", "steps=64"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" runs/two/report.html")
    assert {line.split()[0] for line in lines[1:]} == {"halos", "diloco"}


@pytest.mark.slow
def test_the_recipe_for_a_model_of_transformers_runs(
    archipel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the command that stands before it; but for its length."""
    pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    text = blocks(ROOT / "docs" / "using.md", "yaml")[2]
    sentence = "the cat sat on the mat and the dog ran home "
    monkeypatch.chdir(tmp_path)
    table = pyarrow.table({"text": [sentence * (20 + i % 5) for i in range(200)]})
    parquet.write_table(table, "documents.parquet")
    assert "tokens: 2_000_000" in text
    Path("recipe.yaml").write_text(text.replace("2_000_000", "40_000"))
    [tokenize] = [rest for _, rest in calls("archipel") if {"tokenize", "--out"} <= {*rest}]
    assert archipel(*tokenize).code == 0
    answer = archipel("run", "recipe.yaml", "--out", "out", "--processes", 1)
    assert answer.code == 0, answer.err
    assert Path("out/halos-seed0/model/model.safetensors").is_file()


@pytest.mark.slow
def test_the_task_of_ones_own_trains_and_the_tracker_of_ones_own_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, tracker = blocks(ROOT / "docs" / "using.md", "python")
    (tmp_path / "mytask.py").write_text(task)
    (tmp_path / "mytracker.py").write_text(tracker)
    found = archipel.compare(
        "noloco",
        task=f"{tmp_path}/mytask.py:make",
        steps=3200,
        settings={"track.name": f"{tmp_path}/mytracker.py:make"},
        out=tmp_path / "out",
    )
    [result] = found.results
    assert result.summary["final_loss"] < result.evals[0]["loss"]
    first, *logs, last = capsys.readouterr().out.splitlines()
    assert first == "noloco-seed0 modelled"
    assert len(logs) == len(result.evals)
    assert last == str(result.summary["final_loss"])


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        [*command, "-f", str(ROOT / "site" / "mkdocs.yml")],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = {path.parent.name for path in tmp_path.rglob("index.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= pages
    assert set(methods.names()) <= pages
    reference = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    assert all(f'.{name}"' in reference for name in archipel.__all__ if name[0] != "_")
