"""Studies: what every one must offer, their own statistics, and a short run of each."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import methods, report, studies, study
from archipel.actor import NodeId
from archipel.disk import rundir
from archipel.errors import UserError
from archipel.methods import noloco
from archipel.run.codec import CODECS
from archipel.studies import (
    Size,
    noloco_gamma,
    noloco_routing,
    noloco_spread,
    noloco_stability,
    wire_codecs,
)
from archipel.theory.moments import Setting
from archipel.train.task import Schedule


@pytest.mark.parametrize("name", studies.names())
def test_it_asks_a_question_in_two_sizes(name: str) -> None:
    asked = studies.load(name)
    assert asked.TITLE.endswith("?")
    assert asked.QUICK.steps <= asked.FULL.steps
    assert asked.FULL.seeds >= 5
    for size in (asked.QUICK, Size(steps=100, seeds=2)):
        names = [rundir.name_of(recipe) for recipe in asked.recipes(size)]
        assert len(set(names)) == len(names)  # each has a folder of its own
        assert len(names) % size.seeds == 0


def test_an_unknown_study_names_the_nearest() -> None:
    with pytest.raises(
        UserError,
        match=r"^study 'noloco-spred': allowed are .*noloco-spread.* \(did you mean "
        r"'noloco-spread'\?\)$",
    ):
        studies.load("noloco-spred")


def test_pearson_is_the_covariance_over_both_deviations() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 5.0]), np.array([2.0, 1.0, 4.0, 4.0])
    dx, dy = x - 2.75, y - 2.75
    assert noloco_spread.pearson(x, y) == pytest.approx(
        (dx @ dy) / math.sqrt((dx @ dx) * (dy @ dy))
    )


def test_the_interval_of_three_correlations_by_hand() -> None:
    z = [math.atanh(r) for r in (0.8, 0.9, 0.95)]
    mean = sum(z) / 3
    half = 4.303 * math.sqrt(sum((value - mean) ** 2 for value in z) / 2) / math.sqrt(3)
    assert noloco_spread.confidence_interval([0.8, 0.9, 0.95]) == pytest.approx(
        (math.tanh(mean - half), math.tanh(mean + half))
    )
    assert noloco_spread.mean_correlation([0.8, 0.9, 0.95]) == pytest.approx(math.tanh(mean))
    assert all(math.isnan(end) for end in noloco_spread.confidence_interval([0.9]))


def test_growth_is_that_of_the_second_half() -> None:
    assert noloco_stability.growth(np.array([9.0, 0.1, 5.0, 2.0, 3.0, 4.5])) == pytest.approx(1.5)


def test_one_pair_moves_by_the_eigenvalues_of_its_own_matrix() -> None:
    """Two workers always meet, so nothing is random: [[1 − γ, α], [−γ, α]] for every outer step."""
    for alpha, gamma in ((0.5, 0.7), (0.9, 1.5), (0.3, 2.5)):
        radius = np.abs(np.linalg.eigvals([[1 - gamma, alpha], [-gamma, alpha]])).max()
        typical = noloco_stability.typical_factor(
            Setting(alpha, 0.7, gamma, workers=2), outer_steps=2000
        )
        assert typical == pytest.approx(radius, rel=2e-3)


def test_workers_that_average_fully_are_soon_equal() -> None:
    """α = 0, γ = 1: a pair ends at its mean, and three rounds can make eight workers equal."""
    assert noloco_stability.typical_factor(Setting(0.0, 0.7, 1.0, workers=8)) == 0


def test_the_predicted_spread_is_that_of_kicked_workers() -> None:
    """Eight workers moved one by one, 4000 coordinates that share the partitions of seed 5."""
    alpha, gamma, rng = 0.9, 0.7, np.random.default_rng(0)
    phi, delta = np.zeros((8, 4000)), np.zeros((8, 4000))
    everyone = tuple(NodeId("a", f"w{i}") for i in range(8))
    for predicted, outer_step in zip(
        noloco_stability.predicted(alpha, gamma, 3, seed=5), range(12), strict=False
    ):
        moved = sum(
            Schedule().factor(3 * outer_step + i, 150) * rng.normal(size=phi.shape)
            for i in range(3)
        )
        for group in set(noloco.groups(everyone, 2, 5, outer_step).values()):
            pair = [everyone.index(member) for member in group]
            delta[pair] = (
                alpha * delta[pair]
                + 0.7 * moved[pair].mean(0)
                - gamma * (phi[pair] - phi[pair].mean(0))
            )
        phi = phi + delta
        assert predicted == pytest.approx(math.sqrt(phi.var(axis=0).mean()), rel=0.05)


@pytest.mark.slow
def test_replicas_drift_apart_outside_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few outer steps, and far outside; a run that a loss ended is named."""
    monkeypatch.setattr(noloco_stability, "OUTER_STEPS", 10)
    monkeypatch.setattr(noloco_stability, "ALPHAS_AND_GAMMAS", ((0.9, 2.5), (0.5, 0.7)))
    small = {"layers": 1, "width": 16, "heads": 2, "sequence": 16, "valid_sequences": 8}
    recipe_of = noloco_stability._recipe

    def small_recipe(*arguments: Any) -> Any:
        recipe = recipe_of(*arguments)
        return replace(recipe, task=recipe.task.model_copy(update=small))

    monkeypatch.setattr(noloco_stability, "_recipe", small_recipe)
    size = Size(steps=80, seeds=2)
    made = study.make("noloco-stability", size, tmp_path, processes=1)
    runs = [report.load(path) for path in sorted(tmp_path.glob("alpha*"))]
    [claim] = made.findings.claims  # two seeds are too few
    assert claim.verdict == "cannot be told"
    assert claim.reason == "only 0 of 2 settings have an interval apart from 1"
    runs[1] = replace(runs[1], summary={**runs[1].summary, "stopped": rundir.DIVERGED})
    findings = noloco_stability.answer(sorted(runs, key=_alpha, reverse=True), size, tmp_path)
    outside, inside = (dict(zip(findings.columns, row, strict=True)) for row in findings.rows)
    lost = runs[1].directory.name
    short, whole = (inside, outside) if lost.startswith("alpha0.5") else (outside, inside)
    assert float(outside["√ρ"]) > 1 > float(inside["√ρ"])
    assert float(outside["measured"].split(" ± ")[0]) > 1.1
    assert float(inside["measured"].split(" ± ")[0]) < 1
    assert " ± " in whole["measured"]
    assert " ± " not in short["measured"]  # one seed is left
    assert "outside the window 0 to 0.44" in findings.finding
    assert f"Without figures: {lost} has diverged" in findings.finding
    assert made.headline.startswith("Real: gradients")
    assert findings.plots[0].is_file()


@pytest.mark.parametrize(
    ("settings", "verdict", "reason"),
    [
        ([True, True], "holds", ""),
        ([True, None], "cannot be told", "only 1 of 2 settings have an interval apart from 1"),
        ([False, None, True], "does not hold", "1 of 3 settings are as the theorem says"),
    ],
)
def test_a_window_holds_where_all_settings_agree(
    settings: list[bool | None], verdict: str, reason: str
) -> None:
    assert noloco_stability.verdict(settings) == (verdict, reason)


@pytest.mark.parametrize(
    ("factors", "inside", "agrees"),
    [
        ([0.90, 0.91, 0.92], True, True),
        ([0.90, 0.91, 0.92], False, False),
        ([1.10, 1.11, 1.12], False, True),
        ([1.10, 1.11, 1.12], True, False),
        ([0.90, 1.00, 1.05], True, None),
        ([0.90], True, None),  # one seed
    ],
)
def test_growth_is_on_a_side_of_one_with_all_of_its_interval(
    factors: list[float], inside: bool, agrees: bool | None
) -> None:
    assert noloco_stability.agrees(factors, inside) is agrees


def _alpha(run: report.Result) -> float:
    return float(run.summary["settings"]["alpha"])


def test_where_replicas_drift_apart_is_told_for_each_momentum(tmp_path: Path) -> None:
    """Made-up runs: the spread grows by 1.1 an outer step above γ_max and shrinks by 0.9 below, but
    for α = 0.5, where it shrinks everywhere, and α = 0.7, where two of three runs past the end of
    the window diverge.
    """

    def run(recipe: Any) -> report.Result:
        alpha, part = (float(word) for word in recipe.label.removeprefix("alpha").split("-part"))
        seed = recipe.run.seed
        factor = (1.1 if part > 1 and alpha != 0.5 else 0.9) + 0.001 * seed
        diverged = alpha == 0.7 and part == 1.5 and seed > 0
        evals = [{"replica_std": 0.0}, *({"replica_std": factor ** (2 * i)} for i in range(25))]
        summary = {
            "label": recipe.label,
            "stopped": rundir.DIVERGED if diverged else "",
            "replica_std": factor**50,
            "replica_loss": 3 - part if part < 1 else 5.0,
            "final_loss": 2.0,
        }
        return report.Result(Path(), summary, evals)

    size = Size(100, 3)
    runs = [run(recipe) for recipe in noloco_gamma.recipes(size)]
    findings = noloco_gamma.answer(runs, size, tmp_path)
    assert [claim.verdict for claim in findings.claims] == ["holds", "does not hold", "holds"]
    assert findings.claims[1].reason == "4 of 7 settings are as the theorem says"
    assert "1.1 γ_max: 1.101 ± 0.002" in findings.claims[0].seen
    assert findings.claims[2].seen.endswith("1.5 γ_max: 2 of 3 diverge")
    assert len(findings.rows) == 24
    # α = 0: of 8 workers' variance 3/7 is between pairs, and 4/7 within is times (1 − γ)².
    assert findings.rows[7][:4] == [0.0, "3.000", 1.5, f"{math.sqrt(3 / 7 + 4 / 7 * 4):.3f}"]
    assert findings.rows[-1][5:7] == ["1.100, 2 diverged", "1.2e+02"]
    assert findings.finding.startswith(
        "α = 0.0, γ_max = 2.00: the spread grows from 1.1 γ_max on; the replicas' own loss is "
        "least at 0.9 γ_max, 2.100. α = 0.5, γ_max = 1.62: the spread grows at none of these γ;"
    )
    assert findings.plots[0].is_file()


@pytest.mark.slow
def test_the_spread_of_noloco_follows_the_learning_rate(tmp_path: Path) -> None:
    """A short run; the full one has the same sign and size, see docs/theory.md."""
    made = study.make("noloco-spread", Size(steps=800, seeds=1), tmp_path, processes=1)
    findings = made.findings
    assert findings.plots[0].is_file()
    assert float(findings.rows[0][1]) > 0.8
    assert made.headline.startswith("Real: gradients")
    assert findings.claims[0].verdict == "cannot be told"  # one seed


@pytest.mark.slow
def test_random_routes_are_compared_with_fixed_ones(tmp_path: Path) -> None:
    size = Size(steps=200, seeds=1)
    findings = study.make("noloco-routing", size, tmp_path, processes=1).findings
    assert [row[:2] for row in findings.rows] == [
        ["without", "fixed"],
        ["without", "random"],
        ["with", "fixed"],
        ["with", "random"],
    ]
    spreads = [float(row[-1]) for row in findings.rows]
    assert min(spreads[:2]) > 10 * max(spreads[2:])  # an outer step does more than routes
    assert findings.finding.startswith("Without an outer step, random routes change the spread by ")
    assert findings.plots[0].is_file()


def test_changes_are_of_pairs_with_one_seed() -> None:
    def run(loss: float, spread: float) -> report.Result:
        return report.Result(Path(), {"replica_loss": loss, "replica_std": spread}, [])

    fixed, random = (
        [run(2.0, 0.1), run(3.0, 0.2)],
        [run(2.0 + math.log(1.02), 0.09), run(3.0, 0.16)],
    )
    assert noloco_routing.finding("without", fixed, random) == (
        "Without an outer step, random routes change the spread by -15.0 ± 63.5 % and the "
        "replicas' own perplexity by +1.0 ± 12.7 %."
    )


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ((-0.10, -0.05), "holds", ""),
        ((-0.50, -0.41), "does not hold", "all of the interval is below the published range"),
        ((0.05, 0.10), "does not hold", "all of the interval is above the published range"),
        ((-0.02, 0.01), "cannot be told", "the interval goes beyond the published range"),
        ((-0.20, -0.10), "cannot be told", "the interval goes beyond the published range"),
        ((math.nan, math.nan), "cannot be told", "one seed has no interval"),
    ],
)
def test_a_published_range_holds_where_the_interval_is_in_it(
    change: tuple[float, float], verdict: str, reason: str
) -> None:
    assert studies.within(change, (-0.15, 0.0)) == (verdict, reason)


@pytest.mark.slow
def test_codecs_are_compared_for_every_method(tmp_path: Path) -> None:
    """A short run; the full one is in docs/decisions.md."""
    size = Size(steps=640, seeds=1)
    findings = study.make("wire-codecs", size, tmp_path, processes=1).findings
    rows = {(row[0], row[1]): row for row in findings.rows}
    assert len(rows) == 4 * len(methods.names())
    for name in methods.names():
        slow = [float(rows[name, codec][-1].removesuffix(" GB")) for codec in CODECS]
        assert slow == sorted(slow, reverse=True)
        # Not less: servers send models as bf16, and where messages are faster more of them leave.
        assert slow[-1] < 0.65 * slow[0]
    assert "One seed says nothing about chance." in findings.finding
    assert findings.plots[0].is_file()


def test_what_a_codec_changes_is_of_pairs_with_one_seed() -> None:
    def run(loss: float, time_s: float) -> report.Result:
        evals = [
            {"time_s": 0.0, "loss": 6.0},
            {"time_s": time_s / 2, "loss": 4.0},
            {"time_s": time_s, "loss": loss},
        ]
        return report.Result(Path(), {"final_loss": loss, "slow_link_bytes": 2e9}, evals)

    runs = {("m", codec): [run(2.0, 20.0), run(3.0, 20.0)] for codec in CODECS}
    runs["m", "int8"] = [run(2.1, 10.0), run(2.9, 10.0)]
    assert wire_codecs.changes("m", "int8", runs) == pytest.approx([0.1, -0.1])
    # The worst run ends at 3: on the line from 4 to 2 half way, on that to 3 at its end.
    assert wire_codecs.times_s("m", "fp32", runs) == pytest.approx([15.0, 20.0])
    assert wire_codecs.rows("m", runs)[2] == [
        "m", "int8", "2.500 ± 5.082", "+0.0000 ± 1.2706", "9 ± 12 s", "2.03 ± 0.82", "2 GB"
    ]  # fmt: skip
