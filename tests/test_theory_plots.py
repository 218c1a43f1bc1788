"""The figures of NoLoCo's theory: what their lines say, against formulas written out here, and the
files that are left.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archipel.theory import moments, plots
from archipel.theory.moments import Setting

PUBLISHED = Setting(0.5, 0.7, 0.7)


def test_the_window_of_pairs_among_many_is_twice_one_minus_alpha_squared() -> None:
    axes = plots.window(replace(PUBLISHED, alpha=0.3, gamma=1.0)).axes[0]
    lines = {str(line.get_label()): line.get_xydata() for line in axes.lines}
    alphas, highs = np.asarray(lines["pairs, N → ∞"]).T
    np.testing.assert_allclose(highs, 2 * (1 - alphas**2))
    np.testing.assert_allclose(np.asarray(lines["published: α = 0.5, γ = 0.7"]), [[0.5, 0.7]])
    np.testing.assert_allclose(np.asarray(lines["asked: α = 0.3, γ = 1"]), [[0.3, 1.0]])


def test_on_the_ellipse_the_factor_is_one() -> None:
    axes = plots.ellipse(PUBLISHED).axes[0]
    for alpha, line in zip((0.5, 0.9), axes.lines, strict=False):
        points = [
            (gamma, k) for gamma, k in np.asarray(line.get_xydata())[::80] if gamma > 0 and k > 1e-3
        ]
        assert len(points) > 10
        for gamma, k in points:  # D = −1, so that k = β
            at = Setting(alpha, float(k), float(gamma), curvature_rate=1.0, inner_steps=1)
            assert moments.spread_radius(at) == pytest.approx(1, abs=1e-6)


def test_dots_lie_where_factor_and_spread_are_least() -> None:
    for axes in plots.factor_and_spread(replace(PUBLISHED, workers=8)).axes:
        for line, dot in zip(axes.lines[:8:2], axes.lines[1:8:2], strict=True):
            least = np.asarray(line.get_ydata()).min()
            assert np.asarray(dot.get_ydata())[0] == pytest.approx(least, rel=1e-2)
            assert np.asarray(dot.get_ydata())[0] <= least + 1e-9


def test_files_are_written_and_are_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, left_out = plots.write(PUBLISHED, tmp_path / "all")
    assert [path.name for path in paths] == list(plots.FIGURES)
    assert not left_out
    monkeypatch.setattr(plots, "FIGURES", {"theory_window.png": plots.window})
    plots.write(PUBLISHED, tmp_path / "again")
    assert paths[0].read_bytes() == (tmp_path / "again" / "theory_window.png").read_bytes()


def test_figures_without_a_fixed_point_are_left_out_with_the_reason(tmp_path: Path) -> None:
    paths, left_out = plots.write(Setting(0.9, 0.7, 0.7), tmp_path)
    assert [path.name for path in paths] == [
        "theory_window.png",
        "theory_ellipse.png",
        "theory_factor.png",
    ]
    assert left_out == {
        "theory_omega.png": "gamma is 0.7, not stable in a flat direction",
        "theory_conjecture.png": "the spread has no fixed point: gamma is 0.7, stable between 0 "
        "and 0.4668",
    }
