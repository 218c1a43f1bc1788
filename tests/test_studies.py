"""Studies: what every one must offer, the statistics, and a short run of each."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from archipel import studies
from archipel.errors import UserError
from archipel.studies import noloco_spread


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
