"""`theory.py` against references that know nothing of it: all partitions counted out, NumPy Monte
Carlo, `outer.gossip` itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.actor import NodeId
from archipel.methods import noloco
from archipel.outer import gossip
from archipel.theory import moments
from archipel.theory.moments import Setting

PARTITIONS = [
    (2, 2),
    (4, 2),
    (8, 2),
    (16, 2),
    (6, 3),
    (16, 4),
    (4, 4),
    (5, 2),
    (7, 3),
    (8, 3),
    (4, 8),
]
"""(N, n): pairs, bigger groups, one group of all, one worker left alone (5, 2 and 7, 3), a rest of
two (8, 3), n > N.
"""

SETTING = Setting(0.5, 0.7, 0.7, curvature_rate=0.15, inner_steps=3)


def start(workers: int, samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Slow weights and momenta, shape (workers, samples), with the moments `START`: a common part
    and a part of each one's own.
    """
    phi = 1 + rng.normal(size=samples) + rng.normal(size=(workers, samples))
    delta = 0.3 * phi + 0.5 * rng.normal(size=(workers, samples))
    return phi, delta


START = np.array([[3, 0.9], [0.9, 0.52]]), np.array([[2, 0.6], [0.6, 0.18]])
"""(p, q) of `start`."""


def trained(phi: np.ndarray, s: Setting, rng: np.random.Generator) -> np.ndarray:
    """m steps of SGD, gradient λ(θ − c); only ωλ matters."""
    theta = phi.copy()
    for _ in range(s.inner_steps):
        theta -= s.curvature_rate * (theta - s.sigma * rng.normal(size=theta.shape))
    return theta


def shuffled(
    phi: np.ndarray, delta: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """New places for the workers, drawn for each sample alone: cutting the rows after it gives
    every sample its own partition.
    """
    order = rng.random(phi.shape).argsort(axis=0)
    return np.take_along_axis(phi, order, 0), np.take_along_axis(delta, order, 0)


def monte_carlo(s: Setting, samples: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(φ, δ) after each outer step, shape (N, samples), from `start`; δ ← αδ + (β/n)ΣΔ − γ(φ − mean
    φ), φ ← φ + δ.
    """
    rng = np.random.default_rng(seed)
    assert s.workers is not None
    phi, delta = start(s.workers, samples, rng)
    while True:
        phi, delta = shuffled(phi, delta, rng)
        change = trained(phi, s, rng) - phi
        for k in range(0, s.workers, s.group_size):
            group = slice(k, k + s.group_size)
            pulled = s.gamma * (phi[group] - phi[group].mean(0))
            delta[group] = s.alpha * delta[group] + s.beta * change[group].mean(0) - pulled
        phi = phi + delta
        yield phi, delta


def estimates(phi: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Estimates of p and v, one of each a sample: shape (samples, 2, 2)."""
    x = np.stack([phi, delta])
    apart = x - x.mean(1, keepdims=True)
    p = np.einsum("ans,bns->sab", x, x) / len(phi)
    return p, np.einsum("ans,bns->sab", apart, apart) / (len(phi) - 1)


def assert_agrees(estimates: np.ndarray, exact: np.ndarray) -> None:
    """The mean over samples (axis 0) lies within 5 of its own standard errors."""
    error = estimates.std(0, ddof=1) / math.sqrt(len(estimates))
    assert np.all(np.abs(estimates.mean(0) - exact) <= 5 * error + 1e-12)


def bisected(s: Setting, low: float, high: float) -> float:
    """Where the spread's radius passes 1, between a γ that is stable and one that is not."""
    for _ in range(100):
        middle = (low + high) / 2
        stable = moments.spread_radius(replace(s, gamma=middle)) < 1
        low, high = (middle, high) if stable else (low, middle)
    return low


def settings_of(**fixed: object) -> st.SearchStrategy[Setting]:
    drawn: dict[str, st.SearchStrategy[object]] = {
        "alpha": st.floats(0, 0.95),
        "beta": st.floats(0.1, 1.2),
        "gamma": st.floats(0, 2),
        "curvature_rate": st.just(0.0) | st.floats(1e-4, 1),
        "inner_steps": st.integers(1, 60),
        "workers": st.none() | st.integers(2, 40),
        "group_size": st.integers(2, 6),
    }
    return st.builds(Setting, **drawn | {name: st.just(value) for name, value in fixed.items()})


# The recursion


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.1, 1.0, 1.7])
def test_inner_steps_move_and_spread_as_counted_step_by_step(rate: float) -> None:
    s = Setting(0.5, 0.7, 0.7, curvature_rate=rate, inner_steps=7, sigma=2.0)
    factor, variance = 1.0, 0.0
    for _ in range(7):
        factor, variance = (1 - rate) * factor, (1 - rate) ** 2 * variance + (rate * 2.0) ** 2
    assert moments.contraction(s) == pytest.approx(factor - 1, rel=1e-9, abs=1e-15)
    assert moments.noise_variance(s) == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize(
    ("workers", "size"), [(2, 2), (4, 2), (4, 3), (5, 2), (5, 3), (6, 4), (3, 5)]
)
def test_step_is_the_mean_over_all_partitions(workers: int, size: int) -> None:
    """All N! orders, the full 2N × 2N second moment, and no symmetry used."""
    s = replace(SETTING, workers=workers, group_size=size)
    p, q = START
    same = np.eye(workers)
    before = np.kron(same, p) + np.kron(1 - same, q)
    after = np.zeros_like(before)
    for order in permutations(range(workers)):
        average = np.zeros((workers, workers))
        for k in range(0, workers, size):
            group = list(order[k : k + size])
            average[np.ix_(group, group)] = 1 / len(group)
        change = s.beta * moments.contraction(s) * average - s.gamma * (same - average)
        momentum = np.kron(change, [[0, 0], [1, 0]]) + np.kron(same, [[0, 0], [0, s.alpha]])
        move = np.kron(same, [[1, 1], [0, 1]]) @ (np.kron(same, [[1, 0], [0, 0]]) + momentum)
        noise = (
            s.beta**2 * moments.noise_variance(s) * np.kron(average @ average.T, np.ones((2, 2)))
        )
        after += (move @ before @ move.T + noise) / math.factorial(workers)
    p, q = moments.step(s, p, q)
    np.testing.assert_allclose(after, np.kron(same, p) + np.kron(1 - same, q), rtol=1e-12)


@pytest.mark.parametrize(("workers", "size"), PARTITIONS)
def test_moments_agree_with_monte_carlo(workers: int, size: int) -> None:
    s = replace(SETTING, workers=workers, group_size=size)
    p, q = START
    for phi, delta in islice(monte_carlo(s, samples=8000, seed=workers), 6):
        p, q = moments.step(s, p, q)
        seen_p, seen_v = estimates(phi, delta)
        assert_agrees(seen_p, p)
        assert_agrees(seen_v, p - q)


def test_monte_carlo_would_notice_a_wrong_number_of_workers() -> None:
    s = replace(SETTING, workers=4)
    v = START[0] - START[1]
    *_, state = islice(monte_carlo(s, samples=8000, seed=1), 3)
    for _ in range(3):
        v = moments.step_spread(replace(s, workers=None), v)
    with pytest.raises(AssertionError):
        assert_agrees(estimates(*state)[1], v)


@pytest.mark.parametrize(("workers", "size"), [(4, 2), (5, 2), (6, 3)])
def test_moments_agree_with_gossip_itself(workers: int, size: int) -> None:
    """Each coordinate of the vectors is one sample; each has its own partition, because `shuffled`
    gives it its own places.
    """
    s, samples = replace(SETTING, workers=workers, group_size=size), 20_000
    rng = np.random.default_rng(5)
    phi, delta = start(workers, samples, rng)
    p, q = START
    for _ in range(5):
        phi, delta = shuffled(phi, delta, rng)
        phis = [torch.from_numpy(row) for row in phi.copy()]
        gradients = [torch.from_numpy(row) for row in phi - trained(phi, s, rng)]
        for i in range(workers):
            group = slice(i - i % size, i - i % size + size)
            mine, velocity = torch.from_numpy(phi[i]), torch.from_numpy(delta[i])
            gossip(
                mine,
                velocity,
                gradients[group],
                phis[group],
                alpha=s.alpha,
                beta=s.beta,
                gamma=s.gamma,
            )
        p, q = moments.step(s, p, q)
        seen_p, seen_v = estimates(phi, delta)
        assert_agrees(seen_p, p)
        assert_agrees(seen_v, p - q)


def test_mean_agrees_with_monte_carlo() -> None:
    s = replace(SETTING, workers=4)
    mean = np.array([1.0, 0.3])
    for phi, delta in islice(monte_carlo(s, samples=8000, seed=2), 8):
        mean = moments.matrices(s)[0] @ mean
        assert_agrees(np.stack([phi.mean(0), delta.mean(0)], axis=1), mean)


@pytest.mark.parametrize(("workers", "size"), PARTITIONS)
def test_residual_counts_the_groups_that_noloco_forms(workers: int, size: int) -> None:
    everyone = tuple(NodeId("r", f"w{i}") for i in range(workers))
    formed = set(noloco.groups(everyone, size, seed=0, outer_step=3).values())
    s = replace(SETTING, workers=workers, group_size=size)
    assert moments.residual(s) == pytest.approx((len(formed) - 1) / (workers - 1))


def test_two_workers_with_equal_starts_stay_identical() -> None:
    s = replace(SETTING, workers=2)
    p = q = np.array([[1.0, 0.0], [0.0, 0.0]])
    for _ in range(20):
        p, q = moments.step(s, p, q)
    np.testing.assert_array_equal(p, q)
    assert moments.stationary_spread(s)[0, 0] == 0


# Fixed points


@settings(max_examples=30)
@given(settings_of(curvature_rate=0.2))
def test_fixed_points_are_fixed(s: Setting) -> None:
    if not moments.verdict(s).stable:
        return
    v, (p, q) = moments.stationary_spread(s), moments.stationary(s)
    np.testing.assert_allclose(moments.step_spread(s, v), v, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        np.stack(moments.step(s, p, q)), np.stack([p, q]), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(p - q, v, rtol=1e-9, atol=1e-12)


def test_recursion_from_equal_starts_reaches_the_fixed_point() -> None:
    s = replace(SETTING, workers=8)
    p = q = np.array([[1.0, 0.0], [0.0, 0.0]])
    for _ in range(300):
        p, q = moments.step(s, p, q)
    np.testing.assert_allclose(np.stack([p, q]), np.stack(moments.stationary(s)), rtol=1e-9)


def test_no_fixed_point_is_an_error_that_names_the_window() -> None:
    with pytest.raises(
        ValueError,
        match=r"^the spread has no fixed point: gamma is 0\.7, stable between 0 and 0\.38$",
    ):
        moments.stationary_spread(Setting(0.9, 0.7, 0.7))
    with pytest.raises(
        ValueError,
        match=r"^the mean has no fixed point: the curvature's pull is 0, stable between 0 and 3$",
    ):
        moments.stationary(Setting(0.5, 0.7, 0.7, workers=4))


def test_quietest_gamma_has_the_smallest_spread() -> None:
    s = replace(SETTING, workers=8)
    low, high = moments.gamma_window(s)
    spread = {
        gamma: moments.stationary_spread(replace(s, gamma=gamma))[0, 0]
        for gamma in np.linspace(low, high, 2001)[1:-1]
    }
    assert moments.gamma_quietest(s) == pytest.approx(min(spread, key=spread.__getitem__), abs=1e-3)
    assert moments.gamma_quietest(Setting(0.5, 0.7, 0.7)) == pytest.approx(0.75)


# Windows


@pytest.mark.parametrize(("alpha", "high"), [(0.0, 2.0), (0.3, 1.82), (0.5, 1.5), (0.9, 0.38)])
def test_window_of_pairs_among_many_in_a_flat_direction(alpha: float, high: float) -> None:
    s = Setting(alpha, 0.7, 0.0)
    assert moments.gamma_window(s) == pytest.approx((0, high))
    assert moments.gamma_max_limit(alpha) == pytest.approx(high)
    assert bisected(s, high / 2, 2 * high) == pytest.approx(high, abs=1e-10)


@pytest.mark.parametrize("workers", [None, 2, 3, 4, 5, 7, 8, 9, 16, 64])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_closed_limit_of_every_group_size(size: int, workers: int | None) -> None:
    high = moments.gamma_max_limit(0.7, size, workers)
    assert bisected(
        Setting(0.7, 1.0, 0.0, workers=workers, group_size=size), high / 2, 2 * high
    ) == pytest.approx(high, abs=1e-10)
    assert (
        high >= moments.gamma_max_limit(0.7, size) - 1e-12
    )  # no number of workers is worse than infinitely many
    if workers is None:
        assert high == pytest.approx(2 * (1 - 0.7**2) / (1 - 0.7 * (size - 2) / size))
    elif workers <= size:
        assert high == pytest.approx(2 * (1 + 0.7))


@settings(max_examples=30)
@given(settings_of())
def test_window_is_where_the_radius_passes_one(s: Setting) -> None:
    low, high = moments.gamma_window(s)
    assert 0 <= low < high
    assert bisected(s, (low + high) / 2, 2 * high) == pytest.approx(high, rel=1e-9)
    if low > 1e-6:
        assert moments.spread_radius(replace(s, gamma=low)) == pytest.approx(1, abs=1e-9)
        assert moments.spread_radius(replace(s, gamma=low * 0.99)) > 1


@settings(max_examples=30)
@given(settings_of())
def test_verdict_agrees_with_the_radii(s: Setting) -> None:
    v = moments.verdict(s)
    radius = max(v.spectral_radius_spread, v.spectral_radius_mean if s.curvature_rate else 0.0)
    if abs(radius - 1) > 1e-9:
        assert v.stable == (radius < 1)
    assert v.spectral_radius_spread >= s.alpha - 1e-6


@settings(max_examples=30)
@given(settings_of(), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_common_window_holds_at_every_curvature_below(
    s: Setting, part: float, place: float
) -> None:
    low, high = moments.common_window(s)
    if math.isnan(low):
        return
    between = replace(s, gamma=low + place * (high - low), curvature_rate=part * s.curvature_rate)
    assert moments.spread_radius(between) < 1


def test_strong_curvature_needs_some_averaging_when_momentum_is_high() -> None:
    sharp = Setting(0.9, 0.7, 0.0, curvature_rate=1.0)
    assert moments.common_window(sharp) == pytest.approx((0.150373, 0.38), abs=1e-6)
    assert moments.spread_radius(sharp) > 1
    assert moments.common_window(replace(sharp, alpha=0.5)) == pytest.approx((0, 1.5))
    assert np.isnan(moments.common_window(replace(sharp, beta=1.5))).all()


@pytest.mark.parametrize(("beta", "stable"), [(0.1, True), (2.99, True), (3.01, False)])
def test_mean_is_stable_up_to_twice_one_plus_alpha(beta: float, stable: bool) -> None:
    """One pair, so that the curvature's pull, β here, does not touch the spread."""
    s = Setting(0.5, beta, 0.7, curvature_rate=1.0, workers=2)
    assert moments.spread_radius(s) < 1
    assert (moments.mean_radius(s) < 1) == stable == moments.verdict(s).stable


@pytest.mark.parametrize(("alpha", "best"), [(0.0, 1.0), (0.5, 0.3), (0.9, 0.0104972)])
def test_best_gamma_of_pairs_among_many_in_a_flat_direction(alpha: float, best: float) -> None:
    s = Setting(alpha, 0.7, 0.7)
    assert moments.gamma_best(s) == pytest.approx(best, abs=1e-6)
    assert moments.spread_radius(replace(s, gamma=moments.gamma_best(s))) == pytest.approx(
        (1 + alpha**2) / 2
    )


@settings(max_examples=30)
@given(settings_of())
def test_no_gamma_contracts_faster_than_the_best(s: Setting) -> None:
    best = moments.spread_radius(replace(s, gamma=moments.gamma_best(s)))
    others = [
        moments.spread_radius(replace(s, gamma=gamma))
        for gamma in np.linspace(*moments.gamma_window(s), 41)
    ]
    assert best <= min(others) + 1e-7


def test_verdict_on_the_published_setting_and_on_high_momentum() -> None:
    published = moments.verdict(Setting(0.5, 0.7, 0.7))
    assert asdict(published) == pytest.approx(
        {
            "stable": True,
            "spectral_radius_mean": 1.0,
            "spectral_radius_spread": 0.7001006,
            "gamma_min": 0.0,
            "gamma_max": 1.5,
            "gamma_max_limit": 1.5,
            "gamma_best": 0.3,
            "workers": None,
            "group_size": 2,
            "curvature": 0.0,
            "inner_steps": 50,
        }
    )
    high = moments.verdict(Setting(0.9, 0.7, 0.7))
    assert not high.stable
    assert high.spectral_radius_spread == pytest.approx(1.0984936)
    assert not moments.verdict(
        Setting(0.5, 0.7, 0.0)
    ).stable  # without averaging, replicas drift apart in flat directions


@pytest.mark.parametrize(("workers", "grows"), [(4, False), (8, True)])
def test_mean_square_stability_is_stricter_than_typical_for_few_workers(
    workers: int, grows: bool
) -> None:
    """α = 0.9, γ = 0.7, flat: unstable in mean square for both, but a typical run of 4 workers does
    contract.
    """
    assert moments.spread_radius(Setting(0.9, 0.7, 0.7, workers=workers)) > 1
    rng, growth = np.random.default_rng(0), 0.0
    x = rng.normal(size=(2, workers))
    for _ in range(3000):
        x = x[:, rng.permutation(workers)]
        x[1] = 0.9 * x[1] - 0.7 * (x[0] - x[0].reshape(-1, 2).mean(1).repeat(2))
        x[0] += x[1]
        x -= x.mean(1, keepdims=True)
        size = np.linalg.norm(x)
        growth += math.log(size)
        x /= size
    assert (growth > 0) == grows


# What the paper conjectures and reports


@pytest.mark.parametrize("size", [2, 3, 4])
def test_conjectured_factor_holds_for_pairs_only(size: int) -> None:
    seen = moments.group_deviation(replace(SETTING, workers=12, group_size=size))
    assert seen.conjectured / seen.independent == pytest.approx(2 * (size - 1) / size)


def test_conjecture_in_ratios() -> None:
    s = replace(SETTING, workers=12, group_size=4)
    rows = moments.conjecture(s, (16, 4, None))
    assert [row.workers for row in rows] == [4, 12, 16, None]
    p, q = moments.stationary(s)
    correlation = q[0, 0] / p[0, 0]
    assert rows[1].exact_over_independent == pytest.approx(1 - correlation)
    assert rows[1].exact_over_conjectured == pytest.approx((1 - correlation) / (2 * 3 / 4))
    assert rows[0].exact_over_independent == 0  # one group of all
    assert rows[3].exact_over_conjectured == pytest.approx(2 / 3)


def test_independence_holds_for_many_workers_and_fails_in_flat_directions() -> None:
    def correlation(workers: int | None, rate: float) -> float:
        seen = moments.group_deviation(Setting(0.5, 0.7, 0.7, curvature_rate=rate, workers=workers))
        return 1 - seen.exact / seen.independent

    assert correlation(2, 0.01) == pytest.approx(1)
    assert correlation(16, 0.01) == pytest.approx(0.12036, abs=1e-5)
    assert correlation(16, 1e-4) == pytest.approx(0.88765, abs=1e-5)
    assert correlation(16, 1e-7) > 0.999
    assert correlation(10**9, 0.01) == pytest.approx(0, abs=1e-6)
    assert correlation(None, 0.01) == 0


def test_group_deviation_agrees_with_monte_carlo() -> None:
    s = replace(SETTING, workers=6, group_size=3, curvature_rate=0.4)
    *_, state = islice(monte_carlo(s, samples=4000, seed=3), 40)
    phi, _ = shuffled(*state, np.random.default_rng(4))
    seen = moments.group_deviation(s)
    assert_agrees(((phi[:3] - phi[:3].mean(0)) ** 2).mean(0), np.array(seen.exact))
    assert_agrees((phi**2).mean(0) * 2 / 3, np.array(seen.independent))


def test_spread_is_quadratic_in_the_learning_rate_below_its_range() -> None:
    s = Setting(0.5, 0.7, 0.7, inner_steps=5, workers=16)
    law = moments.omega_squared_law(s)
    tiny = moments.stationary_spread(replace(s, curvature_rate=1e-7))[0, 0]
    assert tiny / 1e-14 == pytest.approx(law.constant, rel=1e-4)
    edge = moments.omega_squared_law(replace(s, curvature_rate=law.valid_below))
    assert 0.9 < edge.ratio < 0.92
    inside = moments.omega_squared_law(replace(s, curvature_rate=law.valid_below / 100))
    assert 1 - inside.ratio == pytest.approx(0.001, rel=0.01)
    assert law.ratio == 1


def test_spread_is_linear_in_the_learning_rate_far_beyond() -> None:
    small, large = (
        moments.stationary_spread(Setting(0.5, 0.7, 0.7, curvature_rate=r, inner_steps=5000))[0, 0]
        for r in (0.02, 0.04)
    )
    assert large / small == pytest.approx(2 * (2 - 0.02) / (2 - 0.04))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gamma": 1.6}, r"^gamma is 1\.6, not stable in a flat direction$"),
        (
            {"workers": 2},
            r"^the stationary spread is 0: sigma is 0, or one group holds all workers$",
        ),
        (
            {"sigma": 0.0},
            r"^the stationary spread is 0: sigma is 0, or one group holds all workers$",
        ),
    ],
)
def test_law_without_a_spread_is_an_error(change: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        moments.omega_squared_law(replace(SETTING, **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"alpha": 1.0}, r"^alpha is 1\.0; an outer momentum lies in \[0, 1\)$"),
        ({"alpha": math.nan}, r"^alpha is nan; an outer momentum lies in \[0, 1\)$"),
        ({"beta": 0.0}, r"^beta is 0\.0; an outer learning rate is positive$"),
        ({"gamma": -0.1}, r"^gamma is -0\.1; an averaging strength is not negative$"),
        (
            {"curvature_rate": 2.0},
            r"^curvature_rate is 2\.0; inner SGD converges in \[0, 2\) only$",
        ),
        ({"inner_steps": 0}, r"^inner_steps is 0; a round has at least 1$"),
        ({"workers": 1}, r"^workers is 1; a spread needs 2 \(None: infinitely many\)$"),
        ({"group_size": 1}, r"^group_size is 1; a group has at least 2 members$"),
        ({"sigma": -1.0}, r"^sigma is -1\.0; a standard deviation is not negative$"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(SETTING, **change)


def test_questions_without_an_answer_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^curvature_rate is 0; a flat direction has no variance to compare: take a small "
        r"one$",
    ):
        moments.group_deviation(Setting(0.5, 0.7, 0.7))
    with pytest.raises(
        ValueError, match=r"^curvature_rate is 1\.5; the pull grows with it up to 1 only$"
    ):
        moments.common_window(replace(SETTING, curvature_rate=1.5))
