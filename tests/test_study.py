"""How a study is made, kept and written down: no run twice, records that come back, the page of
claims; and the intervals that verdicts hang on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from archipel import simulation, studies, study
from archipel.errors import UserError
from archipel.recipe import Recipe, parse_recipe
from archipel.report import Result, intervals
from archipel.studies import Claim, Findings, Size

DOCS = Path(__file__).parents[1] / "docs"


def recipes(size: Size) -> list[Recipe]:
    """Two methods without gradients, for each seed."""
    return [
        parse_recipe(
            {
                "method": {"name": name, "inner_steps": 4},
                "topology": {"name": "two", "regions": {"a": [1.0, 1.0]}},
                "task": {"name": "none"},
                "run": {"steps": size.steps, "seed": seed},
            }
        )
        for name in ("diloco", "noloco")
        for seed in range(size.seeds)
    ]


def answer(runs: Sequence[Result], size: Size, out: Path) -> Findings:
    """What was run, in the order in which it came."""
    (out / "plot.png").write_bytes(b"a plot")
    rows = [[run.summary["method"], run.summary["seed"]] for run in runs]
    return Findings(
        "Two | methods.",
        [Claim("It runs.", "nobody", f"{len(rows)} runs", "holds")],
        ["method", "seed"],
        rows,
        [out / "plot.png"],
    )


@pytest.fixture(autouse=True)
def one_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    fake = SimpleNamespace(
        TITLE="Does it run?", QUICK=Size(8, 1), FULL=Size(16, 2), recipes=recipes, answer=answer
    )
    usual = studies.load
    monkeypatch.setattr(studies, "load", lambda name: fake if name == "fake" else usual(name))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The run directories that were run, in that order."""
    ran: list[str] = []
    usual = simulation.simulate

    def simulate(recipe: Any, pool: Any, directory: Path, *rest: Any, **more: Any) -> Any:
        ran.append(directory.name)
        return usual(recipe, pool, directory, *rest, **more)

    monkeypatch.setattr(simulation, "simulate", simulate)
    return ran


def test_no_run_is_made_twice_and_more_seeds_are_added(made: list[str]) -> None:
    first = study.make("fake", Size(8, 1))
    assert made == ["diloco-seed0", "noloco-seed0"]
    assert study.make("fake", Size(8, 1)) == first
    assert len(made) == 2
    more = study.make("fake", Size(8, 3))
    assert sorted(made[2:]) == ["diloco-seed1", "diloco-seed2", "noloco-seed1", "noloco-seed2"]
    assert more.findings.rows == [
        [name, seed] for name in ("diloco", "noloco") for seed in (0, 1, 2)
    ]
    assert len(list(Path("runs/studies").iterdir())) == 1
    study.make("fake", Size(16, 1))  # of another length: other runs
    assert made[6:] == ["diloco-seed0", "noloco-seed0"]
    assert len(list(Path("runs/studies").iterdir())) == 2


def test_other_versions_are_other_runs(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    study.make("fake", Size(8, 1))
    monkeypatch.setattr(study.checkpoint, "versions", lambda: {"torch": "3.0"})
    study.make("fake", Size(8, 1))
    assert len(made) == 4


def test_a_record_says_how_it_is_made_again() -> None:
    assert study.make("fake", Size(8, 1)).command == "archipel study fake --quick"
    assert study.make("fake", Size(16, 2)).command == "archipel study fake --full"
    own = study.make("fake", Size(24, 1))
    assert own.command == "archipel study fake --steps 24 --seeds 1"
    assert own.headline.startswith("Real: nothing – no gradients (task none). Modelled: the clock")
    folder = next(path for path in Path("runs/studies").iterdir() if "24" in _steps(path))
    kept = json.loads((folder / "findings.json").read_text())
    assert kept["findings"]["plots"] == ["plot.png"]
    assert kept["size"] == {"steps": 24, "seeds": 1}
    assert set(kept["versions"]) >= {"archipel", "python", "torch", "numpy"}


def _steps(path: Path) -> str:
    return (path / "diloco-seed0" / "recipe.yaml").read_text()


def test_the_page_has_a_row_a_claim_and_a_section_a_study(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    record = study.make("fake", Size(8, 1))
    study.keep(record, docs)
    doubt = Claim("It is fast.", "a reader", "3 | 4 s", "cannot be told", "too few")
    study.keep(
        replace(record, study="other", findings=replace(record.findings, claims=[doubt])), docs
    )
    lines = (docs / "claims.md").read_text().splitlines()
    assert "| It runs. | nobody | 2 runs | **holds** | [fake](#fake) |" in lines
    assert (
        "| It is fast. | a reader | 3 \\| 4 s | **cannot be told**: too few | [other](#other) |"
    ) in lines
    assert [line for line in lines if line.startswith("## ")] == ["## fake", "## other"]
    assert "![fake](studies/plot.png)" in lines
    assert "`archipel study fake --quick`: 1 seed of 8 inner steps" in lines[-1]
    assert (docs / "studies" / "plot.png").read_bytes() == b"a plot"


def test_no_page_is_made_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no records of studies"):
        study.write_page(tmp_path)


def test_the_page_of_claims_is_what_its_records_say() -> None:
    """Nothing on it was typed by hand, or is of a record that has changed since."""
    assert (DOCS / study.PAGE).read_text(encoding="utf-8") == study.page(DOCS)


def test_the_command_lists_makes_and_writes(archipel: Any, tmp_path: Path) -> None:
    listed = archipel("study", "--list").out
    assert all(name in listed for name in studies.names())
    answered = archipel("study", "fake", "--json", "--write-docs", "docs")
    record = json.loads(answered.out)
    assert (record["study"], record["size"]) == ("fake", {"steps": 8, "seeds": 1})
    assert json.loads((tmp_path / "docs/studies/fake.json").read_text()) == record
    assert "docs/claims.md is written from docs/studies" in answered.err
    told = archipel("study", "fake", "--full").out
    assert "It runs. holds: 4 runs" in " ".join(told.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "study: give a NAME, or --list"),
        (("all", "--out", "x"), f"--out: give one study, not {len(studies.names())}"),
        (("fake", "fake", "--json"), "--json: give one study, not 2"),
        (("noloco-spred",), "did you mean 'noloco-spread'?"),
        (
            ("--write-docs", "docs"),
            "docs/studies has no records of studies: give a name, and --full",
        ),
    ],
)
def test_what_cannot_be_made_is_said(archipel: Any, arguments: tuple[str, ...], says: str) -> None:
    answered = archipel("study", *arguments)
    assert answered.code == 2
    assert says in " ".join(answered.err.split())


@pytest.mark.parametrize("freedom", [1, 2, 4, 11, 20])
def test_a_quantile_of_students_t_leaves_a_fortieth_above(freedom: int) -> None:
    """The density, added up numerically."""
    norm = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    x = np.linspace(0, intervals.t_95(freedom), 200_001)
    density = norm * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    assert np.trapezoid(density, x) == pytest.approx(0.475, abs=2e-5)


def test_an_interval_by_hand() -> None:
    """Mean 4, deviation 2, of 3 values: 4.303 · 2 / √3."""
    assert intervals.interval([2.0, 4.0, 6.0]) == pytest.approx((4 - 4.9687, 4 + 4.9687), abs=1e-3)
    assert intervals.text([2.0, 4.0, 6.0], "+.1f") == "+4.0 ± 5.0"
    assert intervals.text([2.0], "+.1f") == "+2.0"
    assert all(math.isnan(end) for end in intervals.interval([2.0]))


def test_intervals_meet_the_truth_in_95_of_100_cases() -> None:
    """5 draws each of a normal distribution, 4000 times: 0.95 ± 4 standard deviations of chance."""
    draws = np.random.default_rng(0).normal(1.0, 3.0, size=(4000, 5))
    met = [low <= 1.0 <= high for low, high in map(intervals.interval, draws.tolist())]
    assert np.mean(met) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))
