"""What NoLoCo does on a quadratic, exactly: second moments of the replicas, and the averaging
strengths that are stable.

What belongs here: closed forms and small recursions, pure NumPy. What does not: simulation, plots,
anything that trains. `docs/theory.md` derives every line; `tests/test_theory.py` holds them against
Monte Carlo.

One coordinate of curvature λ: L(θ) = ½λ(θ − c)², c ~ N(0, σ²) new for every inner step and worker.
From the slow weight φ, m steps of SGD at rate ω give Δ = θ − φ = Dφ + ξ with D = (1 − ωλ)^m − 1 and
Var ξ = s². The N workers are split at random into G groups, all of n members but perhaps the last,
and take NoLoCo's outer step (arXiv 2506.10911, with the sign of `outer.gossip`):

    δ ← αδ + β·mean Δ − γ(φ − mean φ),   φ ← φ + δ

Stack x = (φ, δ) and let A(κ) = [[1 + κ, α], [κ, α]]. A group's mean moves by A_s = A(βD) and is
kicked by β·mean ξ in both entries; a deviation from the mean moves by A_d = A(−γ) and is not
kicked. All that the partition does to the spread between replicas, v = E[x_i x_iᵀ] − E[x_i x_jᵀ]
for i ≠ j, is then in one number, a = (G − 1)/(N − 1):

    v ← a·(A_s v A_sᵀ + β²s²·J) + (1 − a)·A_d v A_dᵀ,   J = ones(2, 2)

    symbol       here                     meaning
    α, β, γ      alpha, beta, gamma       outer momentum, outer learning rate, averaging strength
    ωλ           curvature_rate           inner learning rate × curvature; → 0 in a flat direction
    m, N, n, σ   inner_steps, workers, group_size, sigma
    D, s²        contraction, noise_variance
    a            residual                 the part of the spread that one exact averaging leaves
                                          (α = 0, γ = 1, D = 0)
    k = −βD ≥ 0  pull                     pull of the curvature on a group's mean, as γ is the pull
                                          on a deviation
    V            stationary_spread[0, 0]  the spread of the slow weights themselves
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
"""Second moments of x = (φ, δ), or a map of x: shape (2, 2)."""


@dataclass(frozen=True)
class Setting:
    """One quadratic, one NoLoCo. The defaults are the limits that a network meets: a flat
    direction, infinitely many workers.

    Attributes:
        alpha, beta, gamma: α in [0, 1), β > 0, γ ≥ 0.
        curvature_rate: ωλ in [0, 2), 0 for the limit of a flat direction.
        group_size: n. Where it does not divide N the last group is smaller, as in `methods.noloco`;
            a worker alone only trains.
        inner_steps, workers, sigma: m; N, or None for infinitely many; σ in units of the weights.
    """

    alpha: float
    beta: float
    gamma: float
    curvature_rate: float = 0.0
    inner_steps: int = 50
    workers: int | None = None
    group_size: int = 2
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _require(0 <= self.alpha < 1, f"alpha is {self.alpha}; an outer momentum lies in [0, 1)")
        _require(
            0 < self.beta < math.inf, f"beta is {self.beta}; an outer learning rate is positive"
        )
        _require(
            0 <= self.gamma < math.inf,
            f"gamma is {self.gamma}; an averaging strength is not negative",
        )
        _require(
            0 <= self.curvature_rate < 2,
            f"curvature_rate is {self.curvature_rate}; inner SGD converges in [0, 2) only",
        )
        _require(
            self.inner_steps >= 1, f"inner_steps is {self.inner_steps}; a round has at least 1"
        )
        _require(
            self.workers is None or self.workers >= 2,
            f"workers is {self.workers}; a spread needs 2 (None: infinitely many)",
        )
        _require(
            self.group_size >= 2, f"group_size is {self.group_size}; a group has at least 2 members"
        )
        _require(
            0 <= self.sigma < math.inf,
            f"sigma is {self.sigma}; a standard deviation is not negative",
        )


def contraction(setting: Setting) -> float:
    """D = (1 − ωλ)^m − 1: m inner steps move φ by D·φ on average. In (−1, 0) for 0 < ωλ < 1."""
    rate, steps = setting.curvature_rate, setting.inner_steps
    return math.expm1(steps * math.log1p(-rate)) if rate < 1 else (1 - rate) ** steps - 1


def noise_variance(setting: Setting) -> float:
    """s² = (ωλσ)²·(1 − b^{2m})/(1 − b²) with b = 1 − ωλ, written so that nothing cancels:
    ωλσ²·(−D)(2 + D)/(2 − ωλ).
    """
    moved = contraction(setting)
    return (
        setting.curvature_rate
        * setting.sigma**2
        * -moved
        * (2 + moved)
        / (2 - setting.curvature_rate)
    )


def pull(setting: Setting) -> float:
    """k = −βD."""
    return -setting.beta * contraction(setting)


def residual(setting: Setting) -> float:
    """a = (G − 1)/(N − 1) with G = ⌈N/n⌉ groups: 1/n for infinitely many workers, never more; 0
    where one group holds all.
    """
    workers, size = setting.workers, setting.group_size
    return 1 / size if workers is None else (-(-workers // size) - 1) / (workers - 1)


def matrices(setting: Setting) -> tuple[Matrix, Matrix]:
    """(A_s, A_d): what one outer step does to the mean of a group, and to a member's deviation from
    it.
    """
    alpha, k, gamma = setting.alpha, pull(setting), setting.gamma
    return np.array([[1 - k, alpha], [-k, alpha]]), np.array([[1 - gamma, alpha], [-gamma, alpha]])


def step(setting: Setting, p: Matrix, q: Matrix) -> tuple[Matrix, Matrix]:
    """One outer step of p = E[x_i x_iᵀ] and q = E[x_i x_jᵀ] (i ≠ j) of exchangeable workers. v = p
    − q moves by `step_spread`, and

    W = q + v/N ← A_s W A_sᵀ + β²s²/N·J   (the mean of all workers),   q ← W − v/N,   p ← q + v
    """
    mean, _ = matrices(setting)
    part = 0.0 if setting.workers is None else 1 / setting.workers
    centre, spread = q + part * (p - q), step_spread(setting, p - q)
    shared = (
        mean @ centre @ mean.T + part * setting.beta**2 * noise_variance(setting) - part * spread
    )
    return shared + spread, shared


def step_spread(setting: Setting, v: Matrix) -> Matrix:
    """One outer step of the spread: v ← a·(A_s v A_sᵀ + β²s²·J) + (1 − a)·A_d v A_dᵀ."""
    left, (mean, deviation) = residual(setting), matrices(setting)
    kicked: Matrix = mean @ v @ mean.T + setting.beta**2 * noise_variance(setting)
    return left * kicked + (1 - left) * deviation @ v @ deviation.T


def mean_radius(setting: Setting) -> float:
    """Spectral radius of A_s, the factor of E x in one outer step: below 1 iff 0 < k < 2(1 + α).
    Exactly 1 in a flat direction.
    """
    return float(np.abs(np.linalg.eigvals(matrices(setting)[0])).max())


def spread_radius(setting: Setting) -> float:
    """Spectral radius of a·A_s⊗A_s + (1 − a)·A_d⊗A_d, the factor of the spread in one outer step.
    Never below α.
    """
    left, (mean, deviation) = residual(setting), matrices(setting)
    moments = left * np.kron(mean, mean) + (1 - left) * np.kron(deviation, deviation)
    return float(np.abs(np.linalg.eigvals(moments)).max())


def stationary_spread(setting: Setting) -> Matrix:
    """The fixed point of `step_spread`, aβ²s²/gap · [[1 + α, h], [h, 2h]].

        h = (1 − a)γ + ak,   κ₂ = (1 − a)γ² + ak²,   gap = 2(1 − α²)h + 2αh² − (1 + α)κ₂

    Its first entry is V; the mean over all workers of (φ_i − mean φ)², as a run measures it, has
    expectation (1 − 1/N)·V. A ValueError if γ lies outside its window.
    """
    kick = residual(setting) * setting.beta**2 * noise_variance(setting)
    low, high = gamma_window(setting)
    unstable = (
        f"the spread has no fixed point: gamma is {setting.gamma:g}, stable between "
        f"{low:.4g} and {high:.4g}"
    )
    return kick * _response(setting.alpha, *_pulls(setting), otherwise=unstable)


def stationary(setting: Setting) -> tuple[Matrix, Matrix]:
    """(p, q) at the fixed point of `step`. The mean over all workers is a heavy ball of its own,
    with 1/N of the noise:

        W = β²s²/N · [[1 + α, k], [k, 2k]]/(2(1 − α²)k − (1 − α)k²),   q = W − v/N,   p = q + v

    Infinitely many workers: W = 0, replicas are uncorrelated. A ValueError where the spread or the
    mean has no fixed point.
    """
    spread, pulled = stationary_spread(setting), pull(setting)
    if setting.workers is None:
        return spread, np.zeros((2, 2))
    wandering = (
        f"the mean has no fixed point: the curvature's pull is {pulled:g}, stable between "
        f"0 and {2 * (1 + setting.alpha):g}"
    )
    kick = setting.beta**2 * noise_variance(setting) / setting.workers
    shared = (
        kick * _response(setting.alpha, pulled, pulled**2, otherwise=wandering)
        - spread / setting.workers
    )
    return shared + spread, shared


def gamma_window(setting: Setting) -> tuple[float, float]:
    """(γ_min, γ_max): the spread is stable iff γ lies between them; `setting.gamma` is not read.
    (nan, nan) where no γ is.

    The condition is gap > 0 (see `stationary_spread`), a quadratic in γ. With c = 1 − a:

        c(1 + α − 2αc)·γ² − 2c(1 − α² + 2αak)·γ + ak·((1 + α − 2αa)k − 2(1 − α²)) < 0

    γ_min is cut at 0: where γ_min = 0 and k > 0, γ = 0 itself is usually stable, by the curvature
    alone.
    """
    alpha, left, pulled = setting.alpha, residual(setting), pull(setting)
    square = (1 - left) * (1 - alpha + 2 * alpha * left)
    half = (1 - left) * (1 - alpha**2 + 2 * alpha * left * pulled)
    constant = left * pulled * ((1 + alpha - 2 * alpha * left) * pulled - 2 * (1 - alpha**2))
    if half**2 <= square * constant:
        return math.nan, math.nan
    largest = half + math.sqrt(half**2 - square * constant)
    return max(0.0, constant / largest), largest / square


def common_window(setting: Setting) -> tuple[float, float]:
    """(γ_min, γ_max) that keep the spread stable at every curvature from 0 to
    `setting.curvature_rate`. (nan, nan): none.

    The stable region in the plane (γ, k) is the inside of an ellipse, so what is stable at both
    ends is stable between them.
    """
    _require(
        setting.curvature_rate <= 1,
        f"curvature_rate is {setting.curvature_rate}; the pull grows with it up to 1 only",
    )
    low, high = gamma_window(setting)
    high = min(high, gamma_max_limit(setting.alpha, setting.group_size, setting.workers))
    return (low, high) if low < high else (math.nan, math.nan)


def gamma_max_limit(alpha: float, group_size: int = 2, workers: int | None = None) -> float:
    """γ_max of a flat direction: 2(1 − α²)/(1 − α + 2αa), whatever β, m and σ are.

    Pairs of infinitely many workers: 2(1 − α²). Groups of n of them: 2(1 − α²)/(1 − α(n − 2)/n).
    One group of all: 2(1 + α).
    """
    left = residual(Setting(alpha, 1.0, 0.0, workers=workers, group_size=group_size))
    return 2 * (1 - alpha**2) / (1 - alpha + 2 * alpha * left)


def gamma_best(setting: Setting) -> float:
    """The γ that contracts the spread fastest; `setting.gamma` is not read. nan where no γ is
    stable.

    A flat direction, or one group of all workers, has a closed form with the factor ρ that is
    reached:

        ρ² − a(1 + α²)·ρ − α²(1 − 2a) = 0,   γ = (1 + α)(1 − α)²/((1 + α²)(1 − 2a) + 2ρ)

    Pairs of infinitely many workers: ρ = (1 + α²)/2. One group of all: ρ = α, at this γ among
    others. Elsewhere a golden-section search: with growing γ the radius falls, then rises.
    """
    alpha, left = setting.alpha, residual(setting)
    if pull(setting) == 0 or left == 0:
        half = left * (1 + alpha**2) / 2
        factor = half + math.sqrt(half**2 + alpha**2 * (1 - 2 * left))
        return (1 + alpha) * (1 - alpha) ** 2 / ((1 + alpha**2) * (1 - 2 * left) + 2 * factor)
    low, high = gamma_window(setting)
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        below, above = high - golden * (high - low), low + golden * (high - low)
        falls = spread_radius(replace(setting, gamma=below)) > spread_radius(
            replace(setting, gamma=above)
        )
        low, high = (below, high) if falls else (low, above)
    return (low + high) / 2


def gamma_quietest(setting: Setting) -> float:
    """The γ of the smallest stationary spread, the top of the parabola gap(γ): γ_max/2 in a flat
    direction. Not `gamma_best`.
    """
    twice = 2 * setting.alpha * residual(setting)
    return (1 - setting.alpha**2 + twice * pull(setting)) / (1 - setting.alpha + twice)


@dataclass(frozen=True)
class Verdict:
    """Whether a setting is stable in mean square, and which γ would be.

    Attributes:
        stable: the spread contracts and the mean converges (in a flat direction: at every small
            curvature).
        spectral_radius_mean, spectral_radius_spread: factors of the mean and of the spread in one
            outer step.
        gamma_min, gamma_max: the window of γ at this curvature and number of workers; nan if it is
            empty.
        gamma_max_limit, gamma_best: γ_max of a flat direction and infinitely many workers; the γ
            that contracts fastest here.
        workers, group_size, curvature, inner_steps: N (None: infinitely many), n, ωλ, m.
    """

    stable: bool
    spectral_radius_mean: float
    spectral_radius_spread: float
    gamma_min: float
    gamma_max: float
    gamma_max_limit: float
    gamma_best: float
    workers: int | None
    group_size: int
    curvature: float
    inner_steps: int


def verdict(setting: Setting) -> Verdict:
    """The verdict on one setting; with the defaults of `Setting`, on a network's flat directions
    and many workers.
    """
    low, high = gamma_window(setting)
    return Verdict(
        stable=_gap(setting.alpha, *_pulls(setting)) > 0
        and pull(setting) < 2 * (1 + setting.alpha),
        spectral_radius_mean=mean_radius(setting),
        spectral_radius_spread=spread_radius(setting),
        gamma_min=low,
        gamma_max=high,
        gamma_max_limit=gamma_max_limit(setting.alpha, setting.group_size),
        gamma_best=gamma_best(setting),
        workers=setting.workers,
        group_size=setting.group_size,
        curvature=setting.curvature_rate,
        inner_steps=setting.inner_steps,
    )


@dataclass(frozen=True)
class GroupDeviation:
    """E(φ_i − mean φ of its group of n)² at the fixed point, the square of what γ multiplies.

    Attributes:
        exact: (n − 1)/n · (Var φ_i − Cov(φ_i, φ_j)) = (n − 1)/n · V.
        independent: (n − 1)/n · Var φ_i, what it would be for independent replicas.
        conjectured: 2·((n − 1)/n)² · Var φ_i.
    """

    exact: float
    independent: float
    conjectured: float


def group_deviation(setting: Setting) -> GroupDeviation:
    """The exact deviation from a group's mean beside that of independent replicas and the
    conjectured 2((n − 1)/n)²·Var φ.

    Independence gives (n − 1)/n: the conjectured factor is 2(n − 1)/n times as large, right for n =
    2 only. And replicas are correlated: exact/independent = 1 − Corr(φ_i, φ_j) tends to 1 as N
    grows, but at fixed N to 0 in flat directions.
    """
    _require(
        setting.curvature_rate > 0,
        "curvature_rate is 0; a flat direction has no variance to compare: take a small one",
    )
    p, q = stationary(setting)
    size = (
        setting.group_size if setting.workers is None else min(setting.group_size, setting.workers)
    )
    share, variance = (size - 1) / size, float(p[0, 0])
    return GroupDeviation(
        share * (variance - float(q[0, 0])), share * variance, 2 * share**2 * variance
    )


@dataclass(frozen=True)
class Conjecture:
    """How far from right two shortcuts to E(φ_i − mean φ)² are: 1 is right, less is too large a
    guess.

    Attributes:
        workers: N; None: infinitely many.
        exact_over_independent: 1 − Corr(φ_i, φ_j). 0 where one group holds all: replicas that start
            equal stay equal.
        exact_over_conjectured: the same over 2(n − 1)/n.
    """

    workers: int | None
    exact_over_independent: float
    exact_over_conjectured: float


def conjecture(
    setting: Setting, crowds: Sequence[int | None] = (4, 8, 16, 64, 256, 1024, None)
) -> list[Conjecture]:
    """`group_deviation` as ratios, for the N in `crowds` and that of `setting`, smallest first. A
    ValueError as there.
    """
    rows = []
    for workers in sorted({*crowds, setting.workers}, key=lambda n: n or math.inf):
        seen = group_deviation(replace(setting, workers=workers))
        rows.append(
            Conjecture(workers, seen.exact / seen.independent, seen.exact / seen.conjectured)
        )
    return rows


@dataclass(frozen=True)
class OmegaSquaredLaw:
    """V ≈ constant·(ωλ)², so V/ω² ≈ constant·λ²: the replicas' standard deviation follows the inner
    learning rate.

    Attributes:
        constant: the limit of V/(ωλ)² for ωλ → 0, m·aβ²σ²(1 + α)/gap with the gap of a flat
            direction.
        ratio: the exact V of this setting over the law's; 1 in a flat direction.
        valid_below: the ωλ at which the law is too high by `tolerance`, to first order; it shrinks
            as 1/m.
    """

    constant: float
    ratio: float
    valid_below: float


def omega_squared_law(setting: Setting, tolerance: float = 0.1) -> OmegaSquaredLaw:
    """How far the stationary spread is proportional to ω². To first order V = constant·(ωλ)²·(1 −
    slope·ωλ), with slope = m − 1 + mβa·(2(1 − α²) + 4α(1 − a)γ)/gap. Far beyond, for mωλ ≫ 1, V ∝
    ωλ/(2 − ωλ): the deviation follows √ω. A ValueError if γ lies outside the window of a flat
    direction or of this setting, or if there is no spread at all.
    """
    alpha, left, rate, steps = (
        setting.alpha,
        residual(setting),
        setting.curvature_rate,
        setting.inner_steps,
    )
    gap = _gap(alpha, *_pulls(replace(setting, curvature_rate=0.0)))
    _require(gap > 0, f"gamma is {setting.gamma:g}, not stable in a flat direction")
    _require(
        setting.sigma * left > 0,
        "the stationary spread is 0: sigma is 0, or one group holds all workers",
    )
    constant = steps * left * (setting.beta * setting.sigma) ** 2 * (1 + alpha) / gap
    slope = (
        steps
        - 1
        + steps
        * setting.beta
        * left
        * (2 * (1 - alpha**2) + 4 * alpha * (1 - left) * setting.gamma)
        / gap
    )
    ratio = float(stationary_spread(setting)[0, 0]) / (constant * rate**2) if rate else 1.0
    return OmegaSquaredLaw(constant, ratio, tolerance / slope)


def _pulls(setting: Setting) -> tuple[float, float]:
    """(h, κ₂): mean and mean square of the pull that a difference between replicas meets, k with
    weight a and γ with 1 − a.
    """
    left, pulled = residual(setting), pull(setting)
    return (1 - left) * setting.gamma + left * pulled, (
        1 - left
    ) * setting.gamma**2 + left * pulled**2


def _gap(alpha: float, h: float, square: float) -> float:
    """2(1 − α²)h + 2αh² − (1 + α)κ₂: positive iff a heavy ball with random pulls of these moments
    is stable in mean square.
    """
    return 2 * (1 - alpha**2) * h + 2 * alpha * h**2 - (1 + alpha) * square


def _response(alpha: float, h: float, square: float, otherwise: str) -> Matrix:
    """Stationary E[x xᵀ] of that heavy ball, kicked with variance 1; a ValueError that says
    `otherwise` if it is not stable.
    """
    gap = _gap(alpha, h, square)
    _require(gap > 0, otherwise)
    return np.array([[1 + alpha, h], [h, 2 * h]]) / gap


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
