"""The Python interface: what `archipel.compare` and `archipel.simulate` take and give back."""

from __future__ import annotations

import inspect
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import archipel
from archipel import methods, report
from archipel.errors import Diverged, UserError
from archipel.recipe import Recipe, arguments, parse_recipe

TASK = {"name": "synthetic", "layers": 1, "width": 16, "heads": 2, "sequence": 16}
SMALL = {**TASK, "valid_sequences": 8}


def test_a_comparison_has_a_record_for_each_run_and_a_report(tmp_path: Path) -> None:
    told: list[tuple[str, int, int, float]] = []
    found = archipel.compare(
        ["diloco", {"name": "halos", "accumulate": 4, "label": "often"}],
        topology="two-regions",
        task=SMALL,
        steps=320,
        seeds=2,
        settings={"run.evaluations": 4, "diloco.inner_steps": 8},
        processes=1,
        out=tmp_path / "out",
        progress=lambda *now: told.append(now),
    )
    records = found.to_dicts()
    assert [(one["label"], one["method"], one["seed"]) for one in records] == [
        ("diloco", "diloco", 0),
        ("diloco", "diloco", 1),
        ("often", "halos", 0),
        ("often", "halos", 1),
    ]
    plain = (str, int, float, type(None))
    assert all(isinstance(value, plain) for one in records for value in one.values())
    assert [one.get("settings.accumulate") for one in records] == [None, None, 4, 4]
    assert found.target_loss == max(one["final_loss"] for one in records)
    assert {row["label"] for row in found.rows()} == {"diloco", "often"}
    assert found.page == tmp_path / "out" / "report.html"
    assert found.page.is_file()
    assert found.diverged == []
    assert found.results[0].directory.name == "diloco-seed0"
    assert {name for name, *_ in told} == {result.directory.name for result in found.results}
    assert ("often-seed1", 320, 320) in [now[:3] for now in told]


def test_a_recipe_can_be_a_file_its_fields_or_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"method": "diloco", "task": "none", "run": {"steps": 1024}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(fields))
    given: list[Any] = [tmp_path / "recipe.yaml", str(tmp_path / "recipe.yaml"), fields]
    given.append(parse_recipe({**fields}))
    monkeypatch.chdir(tmp_path)
    results = [
        archipel.simulate(one, settings={"diloco.inner_steps": 16}, out=f"out{i}")
        for i, one in enumerate(given)
    ]
    assert [result.summary["outer_steps"] for result in results] == [4] * 4
    texts = {(result.directory / "recipe.yaml").read_text() for result in results}
    assert len(texts) == 1


def test_an_object_is_run_as_it_is_where_nothing_is_changed(tmp_path: Path) -> None:
    recipe = parse_recipe({"method": "halos", "task": "none", "run": {"steps": 500}})
    assert isinstance(recipe, Recipe)
    left = archipel.simulate(recipe, out=tmp_path).directory / "recipe.yaml"
    assert left.read_text() == recipe.to_yaml()


def test_a_run_without_a_folder_gets_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = {"method": "diloco", "task": "none", "run": {"steps": 512}}
    folders = {archipel.simulate(fields).directory.parent for _ in range(2)}
    assert len(folders) == 2
    assert all(folder.parent == Path("runs") for folder in folders)


def test_what_cannot_run_is_refused_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    split = {"regions": {"north": [1.0], "south": [1.0]}}
    with pytest.raises(UserError, match=r"north/w0 cannot reach south/w0"):
        archipel.compare("noloco", topology=split, task="none")
    with pytest.raises(UserError, match=r"^method: `name` is required; methods: "):
        archipel.compare([{"accumulate": 3}], task="none")
    with pytest.raises(UserError, match=r"^--methods: halos is named twice$"):
        archipel.compare(["halos", {"name": "halos", "accumulate": 3}], task="none")
    with pytest.raises(UserError, match=r"^run\.tokens = 10: task none has no tokens; give steps$"):
        archipel.simulate({"method": "halos", "task": "none", "run": {"tokens": 10}})
    assert not list(tmp_path.rglob("*.yaml"))
    assert not list(tmp_path.glob("runs/*"))


def test_every_method_trains_and_is_compared(tmp_path: Path) -> None:
    """Methods differ in what they count: synchronous SGD has no outer steps."""
    small = {"task.layers": 1, "task.width": 16, "task.heads": 2, "task.sequence": 16}
    settings = small | {"task.valid_sequences": 8, "run.evaluations": 4}
    compared = archipel.compare(
        task="synthetic", steps=160, settings=settings, processes=1, out=tmp_path
    )
    assert {result.summary["method"] for result in compared.results} == set(methods.names())
    assert all(result.summary["final_loss"] for result in compared.results)
    assert "too few to judge it" in (tmp_path / "report.html").read_text()


def test_runs_that_diverge_are_named_and_the_others_compared(tmp_path: Path) -> None:
    (tmp_path / "wild.py").write_text(WILD)
    wild = f"{tmp_path}/wild.py:make"
    settings = {"diloco.outer_lr": 1e38, "diloco.inner_steps": 2}
    common: dict[str, Any] = {
        "topology": "two-regions",
        "task": wild,
        "steps": 160,
        "settings": settings,
        "processes": 1,
        "strict": True,
    }
    found = archipel.compare("diloco,async_local_sgd", out=tmp_path / "a", **common)
    assert [result.summary["label"] for result in found.results] == ["async_local_sgd"]
    [line] = found.diverged
    assert line.startswith("diloco: ")
    assert line.endswith("(seed 0)")
    with pytest.raises(Diverged, match=r"^diloco: .* \(seed 0\)$"):
        archipel.compare("diloco", out=tmp_path / "b", **common)
    assert not (tmp_path / "b").exists()


WILD = """
import torch
from archipel import Task

def make():
    return Task(
        model=lambda: torch.nn.Linear(8, 1),
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        batches=lambda shard, index: torch.ones(4, 8),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    )
"""

SCRIPT = """
import torch
import archipel

def make():
    return archipel.Task(
        model=lambda: torch.nn.Linear(8, 1),
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        batches=lambda shard, index: torch.ones(4, 8),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    )

GUARD
    found = archipel.compare(
        "diloco", task=__file__ + ":make", topology="two-regions", steps=64,
        profile={"model_bytes": 36, "step_time_s": 0.1},
        settings={"diloco.inner_steps": 4}, processes=2, out="out",
    )
    print(len(found.results))
"""


@pytest.mark.slow
def test_a_plain_script_compares_without_a_terminal_and_without_a_word(tmp_path: Path) -> None:
    """A task of Python's own needs no guard: the pool's processes do not import the script."""
    (tmp_path / "plain.py").write_text(
        "import archipel\n"
        f"found = archipel.compare('diloco', task={SMALL!r}, topology='two-regions', steps=64,\n"
        "    settings={'diloco.inner_steps': 4}, processes=2, out='out')\n"
        "print(len(found.results))\n"
    )
    done = run_script(tmp_path / "plain.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.slow
def test_a_script_that_is_its_own_tasks_file_is_told_to_guard_the_call(tmp_path: Path) -> None:
    """Else it would start itself again and again."""
    (tmp_path / "guarded.py").write_text(SCRIPT.replace("GUARD", 'if __name__ == "__main__":'))
    (tmp_path / "bare.py").write_text(SCRIPT.replace("GUARD", "if True:"))
    done = run_script(tmp_path / "guarded.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    done = run_script(tmp_path / "bare.py")
    assert done.stderr.splitlines()[-1] == (
        f"archipel.errors.UserError: {tmp_path}/bare.py: archipel.compare() is called while this "
        'file is imported for what it defines; put the call under `if __name__ == "__main__":`'
    )


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", path], cwd=path.parent, capture_output=True, text=True
    )


@pytest.mark.slow
def test_importing_archipel_imports_neither_ray_nor_matplotlib() -> None:
    code = "import archipel, sys; print({'ray', 'matplotlib', 'rich', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"
    assert dir(archipel) == sorted(archipel.__all__)
    assert all(getattr(archipel, name) is not None for name in archipel.__all__)


def test_no_seed_is_no_comparison() -> None:
    with pytest.raises(UserError, match=r"^--seeds 0: must be at least 1$"):
        archipel.compare("diloco", seeds=0, task="none", steps=100)


OWN = """
import torch
from archipel import Task

def make():
    return Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        batches=lambda shard, index: torch.ones(4, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )

def named():
    return dataclasses.replace(make(), description="a line", tokens_per_step=4)

import dataclasses
"""


def test_a_task_of_ones_own_is_named_and_has_the_tokens_that_it_states(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    common: dict[str, Any] = {"topology": "two-regions", "steps": 256, "processes": 1}
    for function, real, tokens in (
        ("make", "own.py:make, a task of your own", None),
        ("named", "a line", 4 * 256),
    ):
        task = f"{tmp_path}/own.py:{function}"
        out = tmp_path / function
        found = archipel.compare(
            "diloco", task=task, settings={"diloco.inner_steps": 4}, out=out, **common
        )
        [row] = found.to_dicts()
        assert (row["inner_steps"], row["tokens"]) == (256, tokens)
        assert f"Real: gradients of {real}. Modelled: " in report.headline(found.results)
        text = io.StringIO()
        Console(width=200, file=text).print(report.table(found.results, found.target_loss))
        counted = "inner steps" if tokens is None else "tokens"
        headers = " ".join(text.getvalue().split("\n")[0].split())
        assert f"final loss {counted} bytes over slow links" in headers
        assert f"{counted.capitalize()}, bytes and idle time" in " ".join(text.getvalue().split())
    task = f"{tmp_path}/own.py:make"
    why = f"task {task} has no tokens, for its Task states no tokens_per_step; give"
    del common["steps"]
    with pytest.raises(UserError) as error:
        archipel.compare("diloco", task=task, tokens=1000, out=tmp_path / "no", **common)
    assert str(error.value) == f"run.tokens = 1000: {why} steps"
    with pytest.raises(UserError) as error:
        archipel.compare("diloco", task=task, checkpoint_every=9, out=tmp_path / "no", **common)
    assert str(error.value) == (
        f"--checkpoint-every 9: {why} seconds on this machine, such as 600s"
    )
    assert not (tmp_path / "no").exists()


RECIPE = "expected a recipe's fields, or the path of a YAML file"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("simulate", {"recipe": None}, f"recipe = None: {RECIPE}"),
    ("simulate", {"recipe": 3}, f"recipe = 3: {RECIPE}"),
    ("simulate", {"recipe": ["method"]}, f"recipe = ['method']: {RECIPE}"),
    ("simulate", {"recipe": ""}, f"recipe = '': {RECIPE}"),
    ("launch", {"recipe": None}, f"recipe = None: {RECIPE}"),
    ("launch", {"recipe": {"method": "diloco"}, "address": 6379},
     "address = 6379: expected a text such as '10.0.0.1:6379', or None"),
    ("launch", {"recipe": {"method": "diloco"}, "insecure": "yes"},
     "insecure = 'yes': expected True or False"),
    ("resume", {"directory": None}, "directory = None: expected the path of a folder"),
    ("compare", {"methods": None},
     "methods = None: expected names such as 'halos,diloco', or a list of names and mappings"),
    ("compare", {"methods": {"name": "halos"}},
     "methods = {'name': 'halos'}: expected names such as 'halos,diloco', or a list of names and "
     "mappings"),
    ("compare", {"methods": [3]},
     "method = 3: expected a name, or keys with `name` among them; methods: async_local_sgd, "
     "diloco, halos, noloco, sync_sgd"),
    ("compare", {"seeds": "two"}, "seeds = 'two': expected a whole number, at least 1"),
    ("compare", {"seeds": True}, "seeds = True: expected a whole number, at least 1"),
    ("compare", {"settings": ["run.seed=1"]},
     "settings = ['run.seed=1']: expected values by `section.key`, such as {'run.seed': 1}"),
    ("compare", {"settings": {1: 2}},
     "settings = {1: 2}: expected values by `section.key`, such as {'run.seed': 1}"),
    ("compare", {"target_loss": "2.4"}, "target_loss = '2.4': expected a finite number, or None"),
    ("compare", {"processes": 0}, "processes = 0: expected a whole number, at least 1, or None"),
    ("compare", {"checkpoint_every": 1.5},
     "checkpoint_every = 1.5: expected tokens such as 1000000, seconds such as '600s', or None"),
    ("compare", {"strict": None}, "strict = None: expected True or False"),
    ("compare", {"out": ""}, "out = '': expected the path of a folder, or None: a new one"),
    ("compare", {"out": 1}, "out = 1: expected the path of a folder, or None: a new one"),
    ("compare", {"progress": None}, "progress = None: expected a function"),
    ("compare", {"topology": None},
     "topology = None: expected a preset's name, a YAML file, or the topology's keys"),
    ("compare", {"profile": 3},
     "profile = 3: expected a name, or keys with `name` among them"),
    ("compare", {"task": None}, "task = None: expected a name, or keys with `name` among them"),
    ("compare", {"steps": "many"}, "run.steps = 'many': should be a valid integer"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "text"), WRONG)
def test_arguments_of_a_wrong_kind_are_named_with_what_is_allowed(
    function: str, given: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = {"task": "none", "steps": 100} if function == "compare" else {}
    with pytest.raises(UserError) as error:
        getattr(archipel, function)(**{**common, **given})
    assert str(error.value) == text
    assert not list(tmp_path.iterdir())


def test_a_check_knows_every_argument() -> None:
    """All but those that a recipe checks."""
    of_recipes = {"topology", "profile", "task", "steps", "tokens"}
    for function in (archipel.compare, archipel.simulate, archipel.launch, archipel.resume):
        assert {*inspect.signature(function).parameters} - of_recipes <= {*arguments._ALLOWED}


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'archipel' has no attribute 'compaer'$"):
        archipel.compaer  # noqa: B018
