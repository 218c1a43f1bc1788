"""`latency.py` against references that know nothing of it: quadrature, loops over single workers,
times prescribed one by one.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from archipel.errors import UserError
from archipel.theory import latency
from archipel.theory.latency import Job, LogNormal, pair, ring, tree

SIGMAS = [0.1, 0.5, 1.0, 1.5]
NO_TIME = LogNormal(0, 0)


class Prescribed(LogNormal):
    """Message times in the order in which they are drawn, one list a draw; they need not be
    log-normal.
    """

    def __init__(self, *times: list[float]) -> None:
        super().__init__(1.0, 0.0)
        object.__setattr__(self, "times", list(times))

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        return np.array(self.times.pop(0)).reshape(shape)  # type: ignore[attr-defined]


def close(found: np.ndarray, expected: np.ndarray | float) -> None:
    """Means agree within four standard errors of their difference."""
    errors = [
        values.std(ddof=1) / math.sqrt(values.size)
        for values in (found, np.atleast_1d(expected))
        if values.size > 1
    ]
    assert abs(found.mean() - np.mean(expected)) < 4 * math.hypot(*errors)


# Log-normal times


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_slower_of_two_against_quadrature(sigma: float) -> None:
    """E max = ∫ 2 t·f(t)·F(t) dt, in z = the standardised logarithm."""
    z = np.linspace(-12, 12, 20_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    cumulative = np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in z])
    integrand = 2 * 3.0 * np.exp(sigma * z - sigma**2 / 2) * density * cumulative
    assert LogNormal(3.0, sigma).slower_of_two_s == pytest.approx(
        integrand.sum() * (z[1] - z[0]), rel=1e-9
    )


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_slower_of_two_against_monte_carlo(sigma: float) -> None:
    times = np.random.default_rng(1).lognormal(math.log(3.0) - sigma**2 / 2, sigma, (100_000, 2))
    close(times.max(axis=1), LogNormal(3.0, sigma).slower_of_two_s)


def test_draws_have_the_mean_and_the_sigma_that_were_asked_for() -> None:
    drawn = LogNormal(3.0, 0.5).draw((1000, 100), np.random.default_rng(0))
    assert drawn.shape == (1000, 100)
    close(drawn, 3.0)
    close(np.log(drawn), math.log(3.0) - 0.5**2 / 2)
    close((np.log(drawn) - np.log(drawn).mean()) ** 2, 0.5**2)


def test_draws_that_do_not_vary_are_exact() -> None:
    rng = np.random.default_rng(0)
    assert (LogNormal(0.1, 0.0).draw((2, 3), rng) == 0.1).all()
    assert (LogNormal(0.0, 1.0).draw((2, 3), rng) == 0.0).all()
    assert LogNormal(0.1, 0.0).slower_of_two_s == 0.1


# Exchanges


def tree_by_hand(ready: list[float], message: Callable[[], float]) -> list[float]:
    """Recursively: (when the root of this tree has the sum, and then the way down)."""

    def up(leaves: list[float], height: int) -> float:
        if height == 0:
            return leaves[0]
        half = 2 ** (height - 1)
        children = [leaves[:half], leaves[half:]] if len(leaves) > half else [leaves]
        return max(up(child, height - 1) + message() for child in children)

    def down(root: float, count: int, height: int) -> list[float]:
        if height == 0:
            return [root]
        half = 2 ** (height - 1)
        counts = [half, count - half] if count > half else [count]
        return [leaf for below in counts for leaf in down(root + message(), below, height - 1)]

    height = math.ceil(math.log2(len(ready)))
    return down(up(ready, height), len(ready), height)


def ring_by_hand(ready: list[float], message: Callable[[], float]) -> list[float]:
    n = len(ready)
    for _ in range(2 * (n - 1)):
        ready = [max(ready[i], ready[(i - 1) % n] + message() / n) for i in range(n)]
    return ready


@pytest.mark.parametrize(("exchange", "by_hand"), [(tree, tree_by_hand), (ring, ring_by_hand)])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_all_reduces_against_loops(exchange: latency.Exchange, by_hand: object, n: int) -> None:
    """Workers that start at different times; each worker's mean, and that of the last."""
    ready = [0.5 * i % 1.7 for i in range(n)]
    found = exchange(np.tile(ready, (5000, 1)), LogNormal(1.0, 0.7), np.random.default_rng(0))
    rng = random.Random(0)
    expected = np.array(
        [by_hand(ready, lambda: rng.lognormvariate(-(0.7**2) / 2, 0.7)) for _ in range(1500)]
    )  # type: ignore[operator]
    for i in range(n):
        close(found[:, i], expected[:, i])
    close(found.max(axis=1), expected.max(axis=1))


def test_tree_by_prescribed_times() -> None:
    """Three leaves: the third one's parent has one child. Up, level by level; then down."""
    message = Prescribed([1, 2, 3], [10, 20], [100, 200], [1000, 2000, 3000])
    # Parents at max(0 + 1, 5 + 2) = 7 and 0 + 3 = 3, root at max(17, 23) = 23, down to 123 and 223.
    assert tree(np.array([[0.0, 5.0, 0.0]]), message, np.random.default_rng()).tolist() == [
        [1123, 2123, 3223]
    ]


def test_ring_by_hand() -> None:
    """Chunks of 1 s. Worker 0 has worker 1's first chunk at 2, worker 1 worker 0's at 1; the second
    ones arrive at 2 and 3.
    """
    found = ring(np.array([[0.0, 1.0]]), LogNormal(2.0, 0.0), np.random.default_rng())
    assert found.tolist() == [[2.0, 3.0]]


def test_pairs_wait_for_the_partner_and_for_two_vectors() -> None:
    found = pair(np.array([[0.0, 5.0]]), LogNormal(1.0, 0.0), np.random.default_rng(0))
    assert found.tolist() == [[7.0, 5.0]]  # the slower one has the other's message since 2 s
    found = pair(np.zeros((50_000, 2)), LogNormal(1.0, 0.7), np.random.default_rng(0))
    close(found[:, 0], 2.0)
    close(found.max(axis=1), 2 * LogNormal(1.0, 0.7).slower_of_two_s)


def test_pairs_are_random_and_complete() -> None:
    rng, ready = np.random.default_rng(0), np.arange(7.0)[None]
    partners = set()
    for _ in range(50):
        found = pair(ready, NO_TIME, rng)[
            0
        ]  # both members of a pair go on when the later one is ready
        assert sorted(np.unique(found, return_counts=True)[1]) == [1, 2, 2, 2]
        partners.add(tuple(found))
    assert len(partners) > 20


# Ratios


@pytest.mark.parametrize("n", [2**k for k in range(1, 11)])
def test_without_variation_the_ratio_is_exactly_log2_n(n: int) -> None:
    row = latency.ratio(n, 0.0, samples=64)
    assert row["tree"] == math.log2(n)
    assert row["tree_se"] == 0
    assert row["ring"] == pytest.approx((n - 1) / n, rel=1e-12)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9, 100, 4095, 4096])
def test_without_variation_other_numbers_of_workers_take_whole_levels(n: int) -> None:
    found = tree(np.zeros((1, n)), LogNormal(0.5, 0.0), np.random.default_rng())
    assert (found == math.ceil(math.log2(n))).all()


@pytest.mark.parametrize("sigma", SIGMAS)
def test_variation_costs_a_tree_more_than_a_pair(sigma: float) -> None:
    two, four, many = (latency.ratio(n, sigma, samples=2**16) for n in (2, 4, 256))
    assert abs(two["tree"] - 1) < 4 * two["tree_se"]  # a tree of two is a pair
    assert four["tree"] > 2 + 4 * four["tree_se"]
    assert many["tree"] > 8 + 4 * many["tree_se"]


# Whole runs


@pytest.mark.parametrize(("m", "cv"), [(1, 0.8), (10, 0.5), (100, 0.8), (100, 0.1)])
def test_the_sum_of_independent_steps_against_adding_them_up(m: int, cv: float) -> None:
    job, n = Job(inner_steps=m, step_s=2.0, step_cv=cv), 20_000
    found = job.round_s((n, 1), np.random.default_rng(0))[:, 0]
    sigma = math.sqrt(math.log(1 + cv**2))
    steps = np.random.default_rng(1).lognormal(math.log(2.0) - sigma**2 / 2, sigma, (n, m))
    added = steps.sum(axis=1)
    close(found, 2.0 * m)
    for centred in (found - 2.0 * m, (added - 2.0 * m)):
        close(centred**2, m * (2.0 * cv) ** 2)
    close(
        found.reshape(-1, 100).max(axis=1), added.reshape(-1, 100).max(axis=1)
    )  # what a barrier of 100 waits for
    close(found.reshape(-1, 100).min(axis=1), added.reshape(-1, 100).min(axis=1))


def test_two_workers_gain_nothing() -> None:
    """Messages without time: a tree and a pair of two workers are the same barrier, for E max of
    two rounds.
    """
    job = Job(message=NO_TIME, nodes=2, inner_steps=10, steps=10, step_cv=0.5, varies="round")
    assert latency.saved(job) == 0
    expected = LogNormal(10.0, math.sqrt(math.log(1.25))).slower_of_two_s
    assert latency.total_s(job, pair) == pytest.approx(expected, rel=4 * 0.5 / math.sqrt(2**18))


@pytest.mark.parametrize(("n", "m", "r"), [(16, 100, 1.0), (256, 50, 0.3)])
def test_without_variation_the_time_saved_is_a_formula(n: int, m: int, r: float) -> None:
    job = Job(LogNormal(r, 0.0), n, inner_steps=m, step_cv=0.0, steps=2 * m)
    assert latency.total_s(job, tree) == pytest.approx(2 * (m + 2 * r * math.log2(n)))
    assert latency.total_s(job, ring, draws=1) == pytest.approx(2 * (m + 2 * r * (n - 1) / n))
    assert latency.total_s(job, pair) == pytest.approx(2 * (m + 2 * r))
    assert latency.saved(job) == pytest.approx(
        (math.log2(n) - 1) * 2 * r / (m + 2 * r * math.log2(n))
    )


def test_waits_are_handed_on() -> None:
    """Pairs lose more in a long run than in a single round; an all-reduce does not, without message
    times.
    """
    job = Job(NO_TIME, nodes=256, step_cv=0.1, varies="round", steps=5000)
    once = replace(job, steps=job.inner_steps)
    assert latency.total_s(job, pair, draws=2**16) / 50 > 1.02 * latency.total_s(
        once, pair, draws=2**16
    )
    assert latency.total_s(job, tree, draws=2**16) / 50 == pytest.approx(
        latency.total_s(once, tree, draws=2**16), rel=0.01
    )


def test_where_workers_keep_their_speed_pairs_end_up_at_the_pace_of_the_slowest() -> None:
    job = Job(NO_TIME, nodes=64, step_cv=0.2, varies="worker", inner_steps=50)
    once = replace(job, steps=50)
    assert latency.saved(once, draws=2**14) > 0.25
    assert 0 < latency.saved(job, draws=2**14) < 0.02


def test_the_published_saving_is_what_the_default_job_gives() -> None:
    assert latency.saved(Job(steps=2500), draws=2**16) == pytest.approx(0.2, abs=0.01)


def test_what_is_needed_against_the_formula() -> None:
    """(log₂ n − 1)·2r = 0.2·(m + 2r·log₂ n): r = 0.2 m/(2(0.8 log₂ n − 1))."""
    job = Job(LogNormal(2.0, 0.0), nodes=16, step_cv=0.0, steps=300, step_s=2.0)
    r = 0.2 * 100 / (2 * (0.8 * 4 - 1))
    assert latency.needed(job, draws=1) == pytest.approx(r, rel=0.01)
    assert latency.needed(replace(job, nodes=2), draws=1) is None


def test_a_seed_decides_everything() -> None:
    job = Job(nodes=8, steps=1000)
    assert (
        latency.saved(job, seed=1, draws=64)
        == latency.saved(job, seed=1, draws=64)
        != latency.saved(job, seed=2, draws=64)
    )
    assert (
        latency.ratio(8, 0.5, 1, 64) == latency.ratio(8, 0.5, 1, 64) != latency.ratio(8, 0.5, 2, 64)
    )


def test_where_a_pair_is_ten_times_as_fast() -> None:
    assert latency.tenfold(1024, draws=1024) == 0  # log₂ 1024
    assert latency.tenfold(2048, draws=2048) is None  # 11 already without variation
    assert latency.tenfold(4, draws=1024) is None
    found = latency.tenfold(256, draws=2**15)
    assert found is not None
    assert latency.ratio(256, found, samples=2**15)["tree"] == pytest.approx(10, abs=0.01)


def test_claims_against_the_formula_without_variation() -> None:
    """(log₂ n − 1)·2r = 0.2·(m + 2r·log₂ n) at n = 1024 and m = 100: r = 10/7."""
    job = Job(LogNormal(3.0, 0.0), nodes=8, inner_steps=5, step_s=1.5, step_cv=0.0, steps=50)
    *ratios, share = latency.claims(job, draws=512)
    assert [(row["published"], row["here"], row["with"]) for row in ratios] == [
        (10, 8, {"sigma": 0}),
        (10, 9, {"sigma": 0}),
    ]
    assert share["here"] == pytest.approx(9 * 2 * 2 / (100 + 2 * 2 * 10))
    assert share["with"] == {"message_in_steps": 2, "step_cv": 0, "sigma": 0}
    assert share["given_by"]["message_in_steps"] == pytest.approx(10 / 7, rel=0.01)
    assert latency.claims(replace(job, message=NO_TIME), draws=512)[-1]["given_by"] is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LogNormal(-1.0, 0.5), "a mean time of -1.0 s; expected a number from 0 up"),
        (lambda: LogNormal(math.nan, 0.5), "a mean time of nan s; expected a number from 0 up"),
        (lambda: LogNormal(1.0, 4.0), "sigma is 4.0; expected a number from 0 to 3"),
        (lambda: Job(nodes=1), "1 workers; expected 2 to 65536"),
        (lambda: Job(inner_steps=0), "0 inner steps; expected 1 to 25000, the whole run"),
        (
            lambda: Job(inner_steps=200, steps=100),
            "200 inner steps; expected 1 to 100, the whole run",
        ),
        (lambda: Job(step_s=0.0), "a step of 0.0 s; expected a positive number"),
        (lambda: Job(step_cv=-0.1), "the steps' cv is -0.1; expected a number from 0 to 3"),
    ],
)
def test_impossible_settings(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == says


# The study


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return latency.study(Job(nodes=8, steps=200), nodes=(2, 4), draws=256)


def test_the_study_is_json(result: dict[str, object]) -> None:
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again["job"] == {
        "message": {"mean_s": 1.0, "sigma": 0.5},
        "nodes": 8,
        "inner_steps": 100,
        "step_s": 1.0,
        "step_cv": 0.1,
        "varies": "step",
        "steps": 200,
        "seed": 0,
    }
    assert [(row["nodes"], row["sigma"]) for row in again["ratios"]] == [
        (n, s) for s in latency.SIGMAS for n in (2, 4)
    ]
    assert {row["inner_steps"] for row in again["saved"]} == {
        50,
        100,
        200,
    }  # 400 is longer than the run
    assert {row["nodes"] for row in again["saved"]} == {4, 8}
    assert len(again["needed"]) == len(latency.SIGMAS) + len(latency.VARIES)
    assert [row["published"] for row in again["claims"]] == [10, 10, 0.2]


def test_tables(result: dict[str, object]) -> None:
    console = Console(width=80, file=io.StringIO())
    for table in latency.tables(result):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tree all-reduce ÷ pair exchange" in text
    assert "% of time saved, steps drawn per worker" in text
    assert ["4", "2.00"] in [line.split()[:2] for line in text.splitlines()]
    assert "what alone saves 20%" in text
    assert "the claims of arXiv 2506.10911" in text
    assert text.count("about 10") == 2
    assert "about 20%" in text


def test_plots(result: dict[str, object], tmp_path: Path) -> None:
    paths = latency.write(result, tmp_path / "new")
    assert [path.name for path in paths] == ["latency_ratio.png", "latency_saved.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
