"""The figures of `docs/theory.md`, drawn from `moments.py`. Closed forms and fixed points; nothing
is trained and nothing is random.

What belongs here: one function a figure, each from a `Setting`, and `write`, which makes files of
them. What does not: any formula. A figure takes from its setting what it does not vary itself: β,
m, N, n and ωλ, as its title says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from archipel.theory import moments
from archipel.theory.moments import Setting

_STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "legend.frameon": False,
}
_STYLE["axes.prop_cycle"] = (
    "cycler(color=['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#444444'])"
)
ALPHAS = (0.3, 0.5, 0.7, 0.9)
PUBLISHED = (0.5, 0.7)
"""(α, γ) of NoLoCo: α as printed (arXiv 2506.10911), γ from its code."""
HIGH_MOMENTUM = (0.9, 0.7)
"""The same γ with the outer momentum that DiLoCo publishes (arXiv 2311.08105)."""


def window(setting: Setting) -> Figure:
    """γ_max of a flat direction over α, for several N and n; below each line is stable. Reads α and
    γ, as a point.
    """
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    alphas = np.linspace(0, 0.99, 100)
    crowds = [(2, None), (4, None), (8, None), (2, 16), (2, 8), (2, 4)]
    for size, workers in crowds:
        label = f"groups of {size}, N → ∞" if workers is None else f"pairs, N = {workers}"
        highs = [moments.gamma_max_limit(float(alpha), size, workers) for alpha in alphas]
        axes.plot(
            alphas,
            highs,
            "-" if workers is None else "--",
            label=label.replace("groups of 2", "pairs"),
        )
    points = {
        PUBLISHED: ("o", "published: α = 0.5, γ = 0.7"),
        HIGH_MOMENTUM: ("X", "α = 0.9, γ = 0.7"),
    }
    points.setdefault(
        (setting.alpha, setting.gamma),
        ("D", f"asked: α = {setting.alpha:g}, γ = {setting.gamma:g}"),
    )
    for (alpha, gamma), (marker, label) in points.items():
        axes.plot(alpha, gamma, marker, color="black", markersize=8, label=label)
    axes.set(
        xlabel="outer momentum α",
        ylabel="averaging strength γ",
        xlim=(0, 1),
        ylim=(0, max(2.6, 1.05 * setting.gamma)),
    )
    axes.set_title("Replicas stay together below the line (flat direction)")
    axes.legend(loc="lower left", fontsize=9)
    return figure


def ellipse(setting: Setting) -> Figure:
    """Where the spread is stable in the plane (γ, k), for α = 0.5 and 0.9. Reads β, γ, N and n."""
    figure = Figure(figsize=(7, 5.2), layout="constrained")
    axes = figure.subplots()
    for alpha, color in ((0.5, "#0072B2"), (0.9, "#D55E00")):
        # One inner step at ωλ = 1 has D = −1, so that k = β: any k can be asked for.
        one = replace(setting, alpha=alpha, inner_steps=1, curvature_rate=1.0)
        pulls = np.linspace(1e-6, 4 * (1 + alpha), 2001)
        edges = np.array([moments.gamma_window(replace(one, beta=float(k))) for k in pulls])
        inside = ~np.isnan(edges[:, 0])
        low, high, pulls = edges[inside, 0], edges[inside, 1], pulls[inside]
        axes.fill_betweenx(pulls, low, high, color=color, alpha=0.2)
        axes.plot(
            np.append(low, high[::-1]),
            np.append(pulls, pulls[::-1]),
            color=color,
            label=f"α = {alpha}: stable inside",
        )
    axes.axhline(
        setting.beta,
        color="#444444",
        linestyle="--",
        label=f"k = β = {setting.beta:g}, the strongest pull",
    )
    axes.plot(
        [setting.gamma] * 2,
        [0, setting.beta],
        color="black",
        linewidth=3,
        label=f"γ = {setting.gamma:g}, every curvature",
    )
    axes.set(
        xlabel="averaging strength γ",
        ylabel="pull of the curvature k = −βD",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.set_title(f"Stable pulls of a difference between replicas ({_crowd(setting)})")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def factor_and_spread(setting: Setting) -> Figure:
    """The spread's factor in one outer step, and its stationary value, over γ in a flat direction.
    Reads β, N and n.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    factors, spreads = figure.subplots(1, 2)
    for alpha in ALPHAS:
        flat = replace(setting, alpha=alpha, curvature_rate=0.0)
        _, high = moments.gamma_window(flat)
        gammas = np.linspace(0, 2, 201)
        factors.plot(
            gammas,
            [moments.spread_radius(replace(flat, gamma=float(g))) for g in gammas],
            label=f"α = {alpha}",
        )
        best = replace(flat, gamma=moments.gamma_best(flat))
        factors.plot(
            best.gamma, moments.spread_radius(best), "o", color=factors.lines[-1].get_color()
        )
        # The flat limit of V/s²: the law's constant is V/(ωλ)² where s² = m(ωλσ)².
        stable = np.linspace(0, high, 502)[1:-1]
        values = [_spread_over_noise(replace(flat, gamma=float(g))) for g in stable]
        quiet = replace(flat, gamma=moments.gamma_quietest(flat))
        spreads.semilogy(stable, values, label=f"α = {alpha}")
        spreads.semilogy(
            quiet.gamma, _spread_over_noise(quiet), "o", color=spreads.lines[-1].get_color()
        )
    factors.axhline(1, color="#444444", linestyle="--", linewidth=1)
    factors.set(
        title="Factor of the variance in one outer step (dots: least)",
        ylabel="spectral radius",
        ylim=(0.5, 1.3),
    )
    spreads.set(
        title="Stationary variance between replicas (dots: least)",
        ylabel="V ÷ s², noise of a round",
        ylim=(0.5, 100),
    )
    for axes in (factors, spreads):
        axes.set(
            xlabel=f"averaging strength γ ({_crowd(setting)}, flat direction, β = "
            f"{setting.beta:g})",
            xlim=(0, 2),
        )
        axes.legend(loc="lower right", fontsize=9)
    return figure


def omega_squared(setting: Setting) -> Figure:
    """The replicas' stationary standard deviation over ωλ, exact and by the law, for m = 10, 50,
    100. Reads α, β, γ, N and n.
    """
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    rates = np.geomspace(1e-6, 1, 121)
    for steps in (10, 50, 100):
        one = replace(setting, inner_steps=steps, sigma=1.0)
        law = moments.omega_squared_law(one)
        stable = [
            s for s in (replace(one, curvature_rate=float(r)) for r in rates) if _is_stable(s)
        ]
        seen = [s.curvature_rate for s in stable]
        exact = [float(moments.stationary_spread(s)[0, 0]) ** 0.5 for s in stable]
        (line,) = axes.loglog(seen, exact, label=f"m = {steps}")
        axes.loglog(rates, law.constant**0.5 * rates, ":", color=line.get_color())
        axes.loglog(
            law.valid_below,
            law.constant**0.5 * law.valid_below,
            "|",
            color=line.get_color(),
            markersize=14,
        )
    axes.plot([], [], ":", color="#444444", label="law: proportional to ω")
    axes.plot([], [], "|", color="#444444", markersize=10, label="law 5 % too high")
    axes.set(
        xlabel="inner learning rate × curvature ωλ",
        ylabel="standard deviation between replicas √V ÷ σ",
        ylim=(1e-6, 3),
    )
    axes.set_title(
        f"α = {setting.alpha:g}, β = {setting.beta:g}, γ = {setting.gamma:g}, {_crowd(setting)}"
    )
    axes.legend(loc="upper left", fontsize=9)
    return figure


def conjecture(setting: Setting) -> Figure:
    """Deviation from the mean of a group over N: exact, for independent replicas, and by the
    conjecture, for n = 2, 3, 4.

    Reads α, β, γ, m and ωλ; where ωλ is 0 it is taken as 0.001, because a flat direction has no
    variance to compare.
    """
    rate = setting.curvature_rate or 0.001
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for size, axes in zip((2, 3, 4), figure.subplots(1, 3, sharey=True), strict=True):
        crowds = [size * 2**k for k in range(1, 11)]
        many = moments.group_deviation(
            replace(setting, curvature_rate=rate, workers=None, group_size=size)
        ).exact
        found = [
            moments.group_deviation(
                replace(setting, curvature_rate=rate, workers=n, group_size=size)
            )
            for n in crowds
        ]
        axes.loglog(
            crowds, [d.conjectured / many for d in found], "s-", label="conjectured", markersize=5
        )
        axes.loglog(
            crowds,
            [d.independent / many for d in found],
            "o-",
            label="if independent",
            markersize=3,
        )
        axes.loglog(crowds, [d.exact / many for d in found], ".-", label="exact")
        axes.set(title=f"groups of {size}", xlabel="workers N")
        axes.set_xscale("log", base=2)
        axes.set_xticks(crowds[::3], [str(n) for n in crowds[::3]])
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
        axes.minorticks_off()
    figure.axes[0].set_ylabel("E(φ − mean of group)² ÷ exact at N → ∞")
    figure.axes[0].legend(fontsize=9)
    figure.suptitle(
        f"α = {setting.alpha:g}, β = {setting.beta:g}, γ = {setting.gamma:g}, m = "
        f"{setting.inner_steps}, ωλ = {rate:g}"
    )
    return figure


FIGURES = {
    "theory_window.png": window,
    "theory_ellipse.png": ellipse,
    "theory_factor.png": factor_and_spread,
    "theory_omega.png": omega_squared,
    "theory_conjecture.png": conjecture,
}


def write(setting: Setting, out: Path) -> tuple[list[Path], dict[str, str]]:
    """Write the figures into the folder `out`: the paths, and for each file that there is none of,
    why (no stationary spread).
    """
    out.mkdir(parents=True, exist_ok=True)
    paths, left_out = [], {}
    with matplotlib.rc_context(_STYLE):
        for name, draw in FIGURES.items():
            try:
                figure = draw(setting)
            except ValueError as error:
                left_out[name] = str(error)
                continue
            figure.savefig(out / name, dpi=160, metadata={"Software": None})
            paths.append(out / name)
    return paths, left_out


def _crowd(setting: Setting) -> str:
    who = "pairs" if setting.group_size == 2 else f"groups of {setting.group_size}"
    return f"{who}, N → ∞" if setting.workers is None else f"{who}, N = {setting.workers}"


def _is_stable(setting: Setting) -> bool:
    low, high = moments.gamma_window(setting)
    return low < setting.gamma < high


def _spread_over_noise(flat: Setting) -> float:
    """V/s² in a flat direction: the law's constant without its m and σ."""
    return moments.omega_squared_law(replace(flat, inner_steps=1, sigma=1.0)).constant
