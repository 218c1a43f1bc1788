"""Sweeps: which runs a file stands for, what is kept when the same sweep comes again, and what it
says of its settings.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml

import archipel
from archipel import grid, simulation
from archipel.errors import Interrupted, UserError
from archipel.sim.engine import Engine
from archipel.sim.topology import PROFILES

TASK = {"name": "synthetic", "layers": 1, "width": 16, "heads": 2, "sequence": 16}
TRAINED = {
    "method": {"name": "halos", "inner_steps": 4},
    "topology": "two-regions",
    "task": {**TASK, "valid_sequences": 8},
    "run": {"steps": 160, "evaluations": 4},
}
TIMED = {"method": "halos", "topology": "two-regions", "task": "none", "run": {"steps": 600}}
KEYS = {"halos.global_momentum": [0.0, 0.5], "halos.accumulate": [4, 8]}


def left(folder: Path) -> dict[str, Any]:
    """All that runs left in a folder, without what depends on the machine's speed, and the plots of
    the sweep.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name == "summary.json":
            summary = json.loads(path.read_text())
            found[name] = {
                key: value for key, value in summary.items() if key not in ("wall_s", "processes")
            }
        elif path.is_file() and path.name != "report.html":
            found[name] = path.read_bytes()
    return found


def interrupt_at(event: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is pressed while event number `event` happens, in the second run."""
    handle, runs = Engine.handle, []

    def handling(self: Engine, *arguments: Any) -> None:
        if self.state.events == event and id(self.state) not in runs:
            runs.append(id(self.state))
            if len(runs) == 2:
                signal.raise_signal(signal.SIGINT)
        handle(self, *arguments)

    monkeypatch.setattr(Engine, "handle", handling)


def ran(told: list[tuple[str, int, int, float]]) -> list[str]:
    """The runs that went on, in their order."""
    return list(dict.fromkeys(name for name, *_ in told))


# From a file to recipes


def test_a_grid_is_the_product_of_its_values_and_seeds() -> None:
    keys, cells = grid.plan(
        {"recipe": {**TIMED, "run": {"seed": 5}}, "grid": KEYS, "seeds": 3},
        {"halos.merge_weight": 1},
    )
    assert [key.name for key in keys] == ["global_momentum", "accumulate"]
    runs = [recipe for cell in cells for recipe in cell.recipes]
    wanted = [(beta, k, seed) for beta in (0.0, 0.5) for k in (4, 8) for seed in (5, 6, 7)]
    got: list[Any] = [
        (run.config.global_momentum, run.config.accumulate, run.run.seed) for run in runs
    ]  # type: ignore[attr-defined]
    assert got == wanted
    assert {run.config.merge_weight for run in runs} == {1}  # type: ignore[attr-defined]
    assert cells[1].recipes[0].label == "global_momentum=0.0,accumulate=8"
    assert grid.size(cells) == "12 runs: 4 settings × 3 seeds"
    assert grid.size(cells[:1]) == "3 runs: 1 setting × 3 seeds"


def test_whole_sections_can_be_swept_and_names_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    network = tmp_path / "my network.yaml"
    network.write_text("regions: {a: [1.0], b: [1.0]}\ndefault: {bandwidth_gbit_s: 1}\n")
    source = {
        "recipe": {"task": "none", "label": "base"},
        "grid": {
            "method": ["halos", "noloco"],
            "topology": ["two-regions", str(network)],
            "bad_updates": [None, False],
        },
    }
    keys, cells = grid.plan(source, {})
    assert [cell.recipes[0].method for cell in cells] == ["halos"] * 4 + ["noloco"] * 4
    assert {len(cell.recipes[0].topology.regions) for cell in cells} == {2}
    assert cells[0].recipes[0].label == "base,method=halos,topology=two-regions,bad_updates=null"
    assert "/" not in cells[2].recipes[0].label
    both = {
        "method.inner_steps": [4],
        "pipeline.stages": [1],
        "run.steps": [64],
        "task.name": ["none"],
    }
    keys, _ = grid.plan({"recipe": {"method": "diloco"}, "grid": both}, {})
    assert [key.name for key in keys] == ["inner_steps", "stages", "steps", "name"]
    twins = {
        "halos.local_lr": [1.0],
        "halos.global_lr": [1.0],
        "wire.name": ["int8"],
        "task.name": ["none"],
    }
    keys, _ = grid.plan({"recipe": {"method": "halos"}, "grid": twins}, {})
    assert [key.name for key in keys] == ["local_lr", "global_lr", "wire.name", "task.name"]


SECTIONS = "method, topology, profile, task, pipeline, run, wire, faults, bad_updates"
ONCE = "is given twice; give it in one place"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"grids": {}},
            "sweep.grids: unknown key 'grids' (did you mean 'grid'?); allowed: recipe, grid, seeds",
        ),
        (
            {"recipe": 5},
            "sweep.recipe = 5: expected a recipe's keys, or the path of a recipe file",
        ),
        ({"seeds": 0}, "sweep.seeds = 0: should be greater than or equal to 1"),
    ],
)
def test_a_file_that_is_no_sweep_is_told(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        grid.plan({"recipe": TIMED, "grid": {"halos.accumulate": [8]}, **change}, {})


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        ("halos.accumulate", [], "halos.accumulate: the list is empty; give at least one value"),
        (
            "halos.accumulate",
            [8, [9]],
            "halos.accumulate: [9]: expected a number, a text, true, false or null",
        ),
        ("halos.accumulate", [8, 9, 8], "halos.accumulate: 8 is in the list 2 times"),
        (
            "halos.acumulate",
            [8],
            "acumulate=8: halos.acumulate: unknown key 'acumulate' (did you mean 'accumulate'?)",
        ),
        (
            "halo.accumulate",
            [8],
            "accumulate=8: halo.accumulate: unknown section 'halo' (did you mean 'halos'?); "
            f"allowed: halos, {SECTIONS}",
        ),
        ("track", ["wandb"], "track: nothing that a simulation does depends on it"),
        ("live.pace", ["none"], "live.pace: nothing that a simulation does depends on it"),
        (
            "halos.accumulate",
            [8, 0],
            "accumulate=0: halos.accumulate = 0: should be greater than or equal to 1",
        ),
        ("halos.inner_steps", [8], f"inner_steps=8: method.inner_steps {ONCE}"),
        (
            "method",
            ["noloco"],
            "method: the recipe has a section 'method' too; give it in one place",
        ),
        ("run.seed", [1], "run.seed: seeds are no setting; say how many, as in `seeds: 3`"),
        (
            "task.name",
            ["none", "synthetic"],
            "the losses of tasks none, synthetic are of different kinds and cannot share a "
            "report; make a sweep for each task",
        ),
    ],
)
def test_a_key_or_a_value_that_cannot_be_is_told_with_its_setting(
    key: str, values: list[Any], said: str
) -> None:
    with pytest.raises(UserError, match=f"^grid: {re.escape(said)}"):
        grid.plan({"recipe": TIMED, "grid": {key: values}}, {"halos.inner_steps": 4})


# Running


def test_a_sweep_has_a_row_for_each_setting_and_a_dict_for_each_run(tmp_path: Path) -> None:
    told: list[str] = []
    source = {"recipe": TRAINED, "grid": {"halos.accumulate": [4, 8]}, "seeds": 2}
    found = archipel.sweep(
        source,
        processes=1,
        target_loss=50.0,
        out=tmp_path / "out",
        tell=told.append,
    )
    assert told == ["4 runs: 2 settings × 2 seeds"]
    dicts = found.to_dicts()
    seen = [(one["halos.accumulate"], one["settings.accumulate"], one["seed"]) for one in dicts]
    assert seen == [(4, 4, 0), (4, 4, 1), (8, 8, 0), (8, 8, 1)]
    for row in found.rows():
        k = row["halos.accumulate"]
        losses = [one["final_loss"] for one in dicts if one["halos.accumulate"] == k]
        assert (row["seeds"], row["final_loss"]) == (2, pytest.approx(fmean(losses)))
        assert row["final_loss_sd"] == pytest.approx(stdev(losses))
    assert found.page == tmp_path / "out" / "report.html"
    page = found.page.read_text()
    assert page.index("sensitivity.png") < page.index("loss_vs_time.png")
    assert "mean ± one standard deviation over 2 seeds" in page
    untimed = archipel.sweep(source, out=tmp_path / "out")
    losses = [row["final_loss"] for row in untimed.rows()]
    assert (losses, untimed.target_loss) == (sorted(losses), None)
    assert f"ends at the lowest loss, {losses[0]:.3f}" in untimed.page.read_text()


@pytest.mark.parametrize("recipe", [TIMED, pytest.param(TRAINED, marks=pytest.mark.slow)])
def test_interrupted_and_gone_on_with_is_the_same_to_the_byte(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of processes: the one has two, the other one."""
    source = {"recipe": recipe, "grid": {"halos.accumulate": [2, 4, 8]}}
    archipel.sweep(source, processes=2, out=tmp_path / "whole")
    out = tmp_path / "out"
    told: list[tuple[str, int, int, float]] = []

    def again() -> grid.Sweep:
        told.clear()
        return archipel.sweep(source, processes=1, out=out, progress=lambda *now: told.append(now))

    with monkeypatch.context() as patched:
        interrupt_at(60, patched)
        with pytest.raises(Interrupted, match=rf"^the same command with `--out {out}` goes on"):
            again()
    assert ran(told) == ["accumulate=2-seed0", "accumulate=4-seed0"]
    assert (out / "accumulate=4-seed0" / "checkpoint").is_dir()
    again()
    assert ran(told) == ["accumulate=4-seed0", "accumulate=8-seed0"]
    assert told[0][1] > 0  # it went on, and did not start anew
    assert left(out) == left(tmp_path / "whole")
    again()
    assert told == []


def test_only_the_very_same_recipe_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int, float]] = []

    def swept(**changes: Any) -> list[str]:
        told.clear()
        source = {"recipe": TIMED, "grid": {"halos.accumulate": [4, 8]}, **changes}
        archipel.sweep(source, out=tmp_path, progress=lambda *now: told.append(now))
        return ran(told)

    both = ["accumulate=4-seed0", "accumulate=8-seed0"]
    assert swept() == both
    assert swept() == []
    assert swept(recipe={**TIMED, "live": {"deadline_s": 50.0}, "track": "tensorboard"}) == []
    assert swept(grid={"halos.accumulate": [4, 16]}) == ["accumulate=16-seed0"]
    assert swept(seeds=2) == ["accumulate=4-seed1", "accumulate=8-seed1"]
    assert swept(recipe={**TIMED, "run": {"steps": 700}}) == both
    with monkeypatch.context() as patched:
        interrupt_at(100, patched)
        with pytest.raises(Interrupted):
            swept()
    with pytest.raises(UserError, match=r"accumulate=8-seed0 is a run that has not ended"):
        swept(recipe={**TIMED, "run": {"steps": 800}})
    assert swept() == ["accumulate=8-seed0"]


def test_a_run_is_kept_that_is_older_than_a_setting(tmp_path: Path) -> None:
    """Its recipe lacks the setting: what it ran is today's default."""
    told: list[tuple[str, int, int, float]] = []

    def swept(steps: int) -> list[str]:
        told.clear()
        recipe = {**TIMED, "run": {"steps": steps}}
        source = {"recipe": recipe, "grid": {"halos.accumulate": [4]}}
        archipel.sweep(source, out=tmp_path, progress=lambda *now: told.append(now))
        return ran(told)

    [name] = swept(600)
    path = tmp_path / name / "recipe.yaml"
    fields = yaml.safe_load(path.read_text())
    del fields["method"]["report_since"]
    path.write_text(yaml.safe_dump(fields))
    assert swept(600) == []
    fields["method"]["report_since"] = "send"
    path.write_text(yaml.safe_dump(fields))
    assert swept(600) == [name]
    path.write_text("nothing: {that: is}")
    assert swept(600) == [name]


def test_a_profile_is_measured_once_also_for_what_is_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter([1.0, 2.0])

    def measure(pool: object) -> Any:
        fixed = PROFILES["pythia-70m-h100"]
        return fixed.model_copy(update={"name": "measured", "step_time_s": next(times_s)})

    monkeypatch.setattr(simulation, "measure_profile", measure)
    recipe = {**TIMED, "profile": "measured"}
    for networks in (["two-regions", "internet-4"], ["two-regions", "internet-4", "internet-2"]):
        archipel.sweep(
            {"recipe": _without(recipe, "topology"), "grid": {"topology": networks}}, out=tmp_path
        )
        for path in tmp_path.glob("*/recipe.yaml"):  # as a run that is older than this setting
            path.write_text(path.read_text().replace("wire: fp32\n", ""))
    texts = [path.read_text() for path in tmp_path.glob("*/recipe.yaml")]
    assert len(texts) == 3
    assert all("step_time_s: 1.0" in text and "wire" not in text for text in texts)


def _without(fields: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != key}


WILD = """
import torch
from archipel import Task

def make():
    return Task(
        model=lambda: torch.nn.Linear(8, 1),
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        batches=lambda shard, index: torch.ones(2, 8),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    )
"""


@pytest.mark.filterwarnings("default")
def test_a_setting_that_diverges_is_in_the_table_and_does_not_run_again(
    archipel: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "wild.py").write_text(WILD)
    (tmp_path / "sweep.yaml").write_text(
        "recipe:\n"
        "  method: {name: diloco, inner_steps: 2}\n"
        "  topology: two-regions\n"
        f"  task: {tmp_path}/wild.py:make\n"
        "  run: {steps: 160}\n"
        "grid: {diloco.outer_lr: [0.5, 1e38]}\n"
    )
    command = ("sweep", tmp_path / "sweep.yaml", "--processes", 1, "--out", tmp_path / "out")
    first = archipel(*command)
    assert first.code == 0, first.err
    assert "archipel: 2 runs: 2 settings × 1 seed\n" in first.err
    assert "archipel: warning: outer_lr=1e+38-seed0: " in first.err
    table = first.out.splitlines()
    [header] = [line for line in table if line.startswith("outer_lr  ")]
    sound, wild = table[table.index(header) + 1 : table.index(header) + 3]
    assert (sound.split()[0], wild.split()[:2]) == ("0.5", ["1e+38", "diverged"])
    assert "outer_lr=1e+38 has diverged: it ends with a loss above" in " ".join(first.out.split())
    ended = json.loads((tmp_path / "out" / "outer_lr=1e+38-seed0" / "summary.json").read_text())
    assert (ended["stopped"], ended["final_loss"]) == ("diverged", None)
    second = archipel(*command, "--json")
    assert second.err == "archipel: 2 runs: 2 settings × 1 seed\n"  # and nothing ran
    runs = json.loads(second.out)["runs"]
    assert [(run["swept"], run["diverged"]) for run in runs] == [
        ({"diloco.outer_lr": 0.5}, False),
        ({"diloco.outer_lr": 1e38}, True),
    ]
    again = archipel("report", tmp_path / "out")
    assert again.code == 0, again.err
