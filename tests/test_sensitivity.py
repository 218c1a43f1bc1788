"""Plots of a sweep: what they show is what a few lines of arithmetic say, and they say what their
points are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from archipel.report import Result
from archipel.report.sensitivity import Key, Values, figures, text_of

START = 4.0
Loss = Callable[..., float | None]


def key(name: str, *values: Any) -> Key:
    return Key(f"halos.{name}", name, values)


def swept(
    keys: Sequence[Key], loss: Loss, seeds: int = 2
) -> tuple[dict[str, Values], list[Result]]:
    """Runs of each setting: their losses fall within 10 s from `START` to `loss(*values, seed)`;
    one that has None there has diverged.
    """
    cells: dict[str, Values] = {}
    runs = []
    for values in product(*(key.values for key in keys)):
        label = ",".join(map(text_of, values))
        cells[label] = {key.key: value for key, value in zip(keys, values, strict=True)}
        for seed in range(seeds):
            final = loss(*values, seed)
            summary = {
                "label": label,
                "seed": seed,
                "final_loss": final,
                "time_s": 10.0,
                "inner_steps": 100,
                "loss_name": "validation loss",
                "stopped": "steps" if final is not None else "diverged",
            }
            evals = [{"time_s": 0.0, "loss": START}, {"time_s": 10.0, "loss": final}]
            runs.append(Result(Path(label), summary, evals))
    return cells, runs


def drawn(
    keys: Sequence[Key], loss: Loss, seeds: int = 2, target: float | None = None
) -> list[tuple[str, Figure, str]]:
    cells, runs = swept(keys, loss, seeds)
    return list(figures(keys, cells, runs, target))


def bars(axes: Axes) -> list[list[tuple[float, float, float]]]:
    """For each line its points: place, mean, and half the height of its bar."""
    found = []
    for line, _, (segments,) in axes.containers:
        heights = [float(b[1] - a[1]) / 2 for a, b in segments.get_segments()]
        found.append(list(zip(line.get_xdata(), line.get_ydata(), heights, strict=True)))
    return found


def crosses(axes: Axes) -> list[float]:
    return [float(x) for line in axes.lines if line.get_marker() == "x" for x in line.get_xdata()]


def texts(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def test_one_key_has_means_and_standard_deviations_over_seeds() -> None:
    def loss(k: int, seed: int) -> float:
        return 1.0 + k / 100 + seed**2 / 10

    [(name, figure, caption)] = drawn([key("accumulate", 32, 8, 64)], loss, seeds=3)
    [axes] = figure.axes
    [line] = bars(axes)
    for (place, mean, half), k in zip(line, (8, 32, 64), strict=True):
        of_seeds = [loss(k, seed) for seed in range(3)]
        assert (place, mean, half) == pytest.approx((k, fmean(of_seeds), stdev(of_seeds)))
    assert (name, axes.get_xscale(), texts(axes)) == ("sensitivity", "linear", ["8", "32", "64"])
    assert axes.get_ylabel() == "final validation loss"
    assert caption == (
        "Final validation loss against accumulate. Points: single seeds. Line and bar: mean ± one "
        "standard deviation over 3 seeds."
    )


@pytest.mark.parametrize(
    ("values", "scale", "shown"),
    [
        ((1, 10), "linear", ["1", "10"]),
        ((0.1, 1e-4, 0.01), "log", ["0.0001", "0.01", "0.1"]),
        ((0.0, 100), "linear", ["0.0", "100"]),
        (("merge", "send"), "linear", ["merge", "send"]),
        ((True, False), "linear", ["true", "false"]),
        ((8, None), "linear", ["8", "null"]),
    ],
)
def test_an_axis_is_what_its_values_are(
    values: tuple[Any, ...], scale: str, shown: list[str]
) -> None:
    [(_, figure, _)] = drawn([key("k", *values)], lambda value, seed: 2.0 + seed)
    assert (figure.axes[0].get_xscale(), texts(figure.axes[0])) == (scale, shown)


def test_one_seed_has_points_alone_and_says_so() -> None:
    [(_, figure, caption)] = drawn([key("k", 1, 2)], lambda k, seed: 2.0 + k, seeds=1)
    assert bars(figure.axes[0]) == []
    assert {line.get_linestyle() for line in figure.axes[0].lines} == {"None"}
    assert caption.endswith("One seed: points alone, which say nothing of other seeds.")


def test_times_to_a_target_have_a_panel_and_a_cross_where_a_seed_never_meets_it() -> None:
    def loss(k: int, seed: int) -> float:
        return 2.0 if k == 1 or seed == 0 else 3.5

    [(_, figure, caption)] = drawn([key("k", 1, 2)], loss, target=3.0)
    losses, times = figure.axes
    assert (crosses(losses), crosses(times)) == ([], [2.0])
    assert times.get_ylabel() == "time to loss 3.000"
    [[(place, mean, half)]] = bars(times)
    assert (place, mean, half) == (1.0, 5.0, 0.0)  # halfway from 4 to 2
    assert caption.endswith(" ×: diverged, or not all seeds meet it.")


def test_two_keys_have_a_line_for_each_value_of_the_shorter_one() -> None:
    def loss(beta: float, k: int, seed: int) -> float | None:
        return None if (beta, k, seed) == (0.9, 8, 1) else beta + k / 100 + seed

    [(_, figure, caption)] = drawn([key("beta", 0.9, 0.0), key("k", 8, 16, 32)], loss)
    [axes] = figure.axes
    zero, high = bars(axes)
    assert zero == [pytest.approx((k, k / 100 + 0.5, stdev([0, 1]))) for k in (8, 16, 32)]
    assert high == [pytest.approx((k, 0.9 + k / 100 + 0.5, stdev([0, 1]))) for k in (16, 32)]
    assert crosses(axes) == [8.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["beta 0.0", "beta 0.9"]
    assert caption.startswith("Final validation loss against k, for each beta. Points: ")
    assert caption.endswith(" ×: diverged.")


def test_many_values_of_two_keys_are_a_heat_map() -> None:
    many = [key("a", *range(10)), key("b", *range(9))]
    [(_, figure, caption)] = drawn(many, lambda a, b, seed: 1.0 + a / 10 + b / 100 + seed)
    [image] = figure.axes[0].images
    means = image.get_array()
    assert means is not None
    assert means.shape == (9, 10)
    assert means[2, 7] == pytest.approx(1 + 0.7 + 0.02 + 0.5)
    assert caption.endswith("for each b. Means over 2 seeds.")


def test_more_keys_have_a_plot_each_and_say_what_is_averaged() -> None:
    def loss(a: int, b: int, c: str, seed: int) -> float | None:
        return None if (a, b, c) == (2, 5, "y") else 1.0 + a / 10 + b / 100 + seed * (c == "x")

    keys = [key("a", 1, 2), key("b", 4, 5, 6), key("c", "x", "y")]
    found = {name: (figure, caption) for name, figure, caption in drawn(keys, loss)}
    assert list(found) == ["sensitivity_a", "sensitivity_b", "sensitivity_c"]
    figure, caption = found["sensitivity_a"]
    [line] = bars(figure.axes[0])
    for place, mean, half in line:
        others = [
            [value for seed in (0, 1) if (value := loss(int(place), b, c, seed)) is not None]
            for b, c in product((4, 5, 6), "xy")
        ]
        of_seeds = [fmean(seeds) for seeds in zip(*filter(None, others), strict=True)]
        assert (mean, half) == pytest.approx((fmean(of_seeds), stdev(of_seeds)))
    assert caption == (
        "Final validation loss against a. Each point is a mean over 6 settings, those of b and c. "
        "Points: single seeds. Line and bar: mean ± one standard deviation over 2 seeds. Left out "
        "at a = 2 (diverged): 1 of 6 settings."
    )


def test_runs_without_losses_show_the_time_of_a_step() -> None:
    cells, runs = swept([key("k", 1, 2)], lambda k, seed: 2.0)
    timed = [Result(run.directory, run.summary | {"final_loss": None}, []) for run in runs]
    [(_, figure, caption)] = figures([key("k", 1, 2)], cells, timed, None)
    assert figure.axes[0].get_ylabel() == "time per inner step (s)"
    assert [point[1] for point in bars(figure.axes[0])[0]] == [0.1, 0.1]
    assert caption.startswith("Time per inner step (s) against k.")


@pytest.mark.parametrize("values", [(0.1, 0.2), tuple(range(9))])
def test_where_no_setting_has_a_number_for_all_its_seeds_nothing_of_it_is_drawn(
    values: tuple[float, ...],
) -> None:
    """One seed of each setting has diverged, or never meets the target."""
    keys = [key("accumulate", 4, 8), key("global_lr", *values)]
    assert drawn(keys, lambda *at: None if at[-1] == 0 else 3.0) == []
    [(_, figure, _)] = drawn(keys, lambda *at: 3.5 if at[-1] == 0 else 3.0, target=3.2)
    names = [axes.get_ylabel() + axes.get_title() for axes in figure.axes]
    assert not any("time to loss" in name for name in names)
