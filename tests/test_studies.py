"""Studies: what every one must offer, the statistics, and a short run of each."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from archipel import report, studies
from archipel.errors import UserError
from archipel.studies import noloco_routing, noloco_spread


@pytest.mark.parametrize("name", studies.names())
def test_it_asks_a_question(name: str) -> None:
    study = studies.load(name)
    assert study.TITLE.endswith("?")
    assert callable(study.run)


def test_an_unknown_study_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"^study 'noloco-spred': allowed are .*noloco-spread.* \(did you mean 'noloco-spread'\?\)$"
    ):
        studies.load("noloco-spred")


def test_pearson_is_the_covariance_over_both_deviations() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 5.0]), np.array([2.0, 1.0, 4.0, 4.0])
    dx, dy = x - 2.75, y - 2.75
    assert noloco_spread.pearson(x, y) == pytest.approx((dx @ dy) / math.sqrt((dx @ dx) * (dy @ dy)))


def test_the_interval_of_three_correlations_by_hand() -> None:
    z = [math.atanh(r) for r in (0.8, 0.9, 0.95)]
    mean = sum(z) / 3
    half = 4.303 * math.sqrt(sum((value - mean) ** 2 for value in z) / 2) / math.sqrt(3)
    assert noloco_spread.confidence_interval([0.8, 0.9, 0.95]) == pytest.approx((math.tanh(mean - half), math.tanh(mean + half)))
    assert noloco_spread.mean_correlation([0.8, 0.9, 0.95]) == pytest.approx(math.tanh(mean))
    assert all(math.isnan(end) for end in noloco_spread.confidence_interval([0.9]))


@pytest.mark.slow
def test_the_spread_of_noloco_follows_the_learning_rate(tmp_path: Path) -> None:
    """A short run; the full one has the same sign and size, see docs/theory.md."""
    answer = noloco_spread.run(tmp_path / "out", studies.Settings(steps=800, seeds=1))
    assert answer.plots[0].is_file()
    assert float(answer.rows[0][1]) > 0.8
    assert answer.headline.startswith("Real: gradients")


@pytest.mark.slow
def test_random_routes_are_compared_with_fixed_ones(tmp_path: Path) -> None:
    answer = noloco_routing.run(tmp_path / "out", studies.Settings(steps=200, seeds=1))
    assert [row[:2] for row in answer.rows] == [["without", "fixed"], ["without", "random"], ["with", "fixed"], ["with", "random"]]
    spreads = [float(row[-1]) for row in answer.rows]
    assert min(spreads[:2]) > 10 * max(spreads[2:])  # an outer step does more than routes
    assert answer.finding.startswith("Without an outer step, random routes change the spread by ")
    assert answer.plots[0].is_file()


def test_changes_are_of_pairs_with_one_seed() -> None:
    def run(loss: float, spread: float) -> report.Run:
        return report.Run(Path(), {"replica_loss": loss, "replica_std": spread}, [])

    fixed, random = [run(2.0, 0.1), run(3.0, 0.2)], [run(2.0 + math.log(1.02), 0.09), run(3.0, 0.16)]
    assert noloco_routing.finding("without", fixed, random) == (
        "Without an outer step, random routes change the spread by -15.0 ± 7.1 % and the replicas' own perplexity by +1.0 ± 1.4 %."
    )
