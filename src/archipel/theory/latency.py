"""NoLoCo's latency model: what a tree, a ring and a pair exchange cost when message and step times
vary. Nothing is trained.

What belongs here: log-normal times, three ways to exchange weights, the time of a run with each,
tables and plots of these. What does not: real topologies and bytes (`sim/network.py`), methods,
engines. `docs/latency.md` has the figures and what follows.

Messages are alike and independent (NoLoCo, arXiv 2506.10911); `sigma` changes how they vary, not
how long they are on average:

    t = mean_s · exp(sigma·z − sigma²/2),  z ~ N(0, 1),     E max(t₁, t₂) = 2·mean_s·Φ(sigma/√2)

A message is one vector of weights. An exchange maps the times at which n workers are ready to the
times at which each can go on:

    tree   workers are the leaves of a binary tree; a parent, run by one of them, waits for messages
           from both of its children; the sum goes down the same way: 2⌈log₂ n⌉ messages one after
           the other
    ring   2(n − 1) steps; in each, every worker waits for its predecessor's chunk, 1/n of a vector,
           which takes 1/n of a message's time
    pair   both send two vectors (weights and displacement) as one message; each waits for the
           other's

At sigma = 0 they take 2⌈log₂ n⌉, 2(n − 1)/n and 2 message times: tree ÷ pair is log₂ n exactly
where n is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from rich.table import Table

from archipel.errors import UserError

Times = npt.NDArray[np.float64]  # seconds on the workers' clocks, shape (samples, n)
Exchange = Callable[[Times, "LogNormal", np.random.Generator], Times]
Varies = Literal["step", "round", "worker"]
VARIES: tuple[Varies, ...] = ("step", "round", "worker")
SIGMAS = (0.0, 0.25, 0.5, 1.0)
NODES = tuple(2**k for k in range(1, 13))
INNER_STEPS = (50, 100, 200, 400)
# Published: 10 times as fast at a few hundred workers; 20 % of the time at 1024 and 100 steps.
TENFOLD = 10.0
TARGET = 0.2
FEW_HUNDRED = (256, 512)
_STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
}
_STYLE["axes.prop_cycle"] = (
    "cycler(color=['#444444', '#56B4E9', '#0072B2', '#D55E00', '#009E73', '#CC79A7'])"
)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UserError(otherwise)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal times: their mean (not their median) in seconds, and the standard deviation of
    their natural logarithm.
    """

    mean_s: float
    sigma: float

    def __post_init__(self) -> None:
        _require(
            0 <= self.mean_s < math.inf,
            f"a mean time of {self.mean_s} s; expected a number from 0 up",
        )
        _require(0 <= self.sigma <= 3, f"sigma is {self.sigma}; expected a number from 0 to 3")

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Times:
        """Independent times in seconds. Nothing is drawn from `rng` where they do not vary."""
        varies = self.sigma > 0 and self.mean_s > 0
        z = (
            rng.standard_normal(shape, np.float32) if varies else np.zeros(shape, np.float32)
        )  # three times as fast as float64
        times_s: Times = self.mean_s * np.exp(self.sigma * z - self.sigma**2 / 2).astype(np.float64)
        return times_s

    @property
    def slower_of_two_s(self) -> float:
        """E max(t₁, t₂) = 2·E[t₁; t₁ > t₂], and weighing with t₁ shifts z₁ by sigma: the condition
        becomes z₂ − z₁ < sigma.
        """
        return 2 * self.mean_s * NormalDist().cdf(self.sigma / math.sqrt(2))


def tree(ready_s: Times, message: LogNormal, rng: np.random.Generator) -> Times:
    """An all-reduce by a tree. Where n is no power of two, some parents have one child."""
    clock_s, counts = ready_s, []
    while (count := clock_s.shape[1]) > 1:
        counts.append(count)
        clock_s = np.maximum.reduceat(
            clock_s + message.draw(clock_s.shape, rng), np.arange(0, count, 2), axis=1
        )
    for count in reversed(counts):
        parents_s = clock_s.repeat(2, axis=1)[:, :count]
        clock_s = parents_s + message.draw(parents_s.shape, rng)
    return clock_s


def ring(ready_s: Times, message: LogNormal, rng: np.random.Generator) -> Times:
    """An all-reduce by a ring. Where a chunk takes as long as a whole vector (latency alone), it
    takes n times as long.
    """
    clock_s, chunk = ready_s, replace(message, mean_s=message.mean_s / ready_s.shape[1])
    for _ in range(2 * (ready_s.shape[1] - 1)):
        clock_s = np.maximum(clock_s, np.roll(clock_s, 1, axis=1) + chunk.draw(clock_s.shape, rng))
    return clock_s


def pair(ready_s: Times, message: LogNormal, rng: np.random.Generator) -> Times:
    """Exchanges in random pairs, the same pairs in all samples. Where n is odd, one worker is alone
    and goes on at once.
    """
    first, second = np.split(rng.permutation(ready_s.shape[1])[: ready_s.shape[1] // 2 * 2], 2)
    here, there, clock_s = np.append(first, second), np.append(second, first), ready_s.copy()
    arrives_s = ready_s[:, there] + 2 * message.draw((len(ready_s), len(there)), rng)
    clock_s[:, here] = np.maximum(ready_s[:, here], arrives_s)
    return clock_s


@dataclass(frozen=True)
class Job:
    """A training run: rounds of `inner_steps` steps and one exchange, `steps` steps of each worker
    in all.

    `message` is the time of one vector of weights. Step times are log-normal with mean `step_s` and
    coefficient of variation `step_cv`. They are drawn for each step, or once for all steps of a
    worker's round, or once for all of a worker's (`varies`).
    """

    message: LogNormal = LogNormal(1.0, 0.5)
    nodes: int = 1024
    inner_steps: int = 100
    step_s: float = 1.0
    step_cv: float = 0.1
    varies: Varies = "step"
    steps: int = 25_000

    def __post_init__(self) -> None:
        _require(2 <= self.nodes <= 2**16, f"{self.nodes} workers; expected 2 to 65536")
        _require(
            1 <= self.inner_steps <= self.steps,
            f"{self.inner_steps} inner steps; expected 1 to {self.steps}, the whole run",
        )
        _require(
            0 < self.step_s < math.inf, f"a step of {self.step_s} s; expected a positive number"
        )
        _require(
            0 <= self.step_cv <= 3,
            f"the steps' cv is {self.step_cv}; expected a number from 0 to 3",
        )

    def round_s(self, shape: tuple[int, ...], rng: np.random.Generator) -> Times:
        """Seconds of a round's inner steps. The sum of m independent steps is drawn as a constant
        plus a log-normal, with the sum's mean m, variance m·cv² and skewness (cv³ + 3cv)/√m: a
        log-normal of cv x has skewness x³ + 3x, x = 2 sinh(asinh(·/2)/3).
        """
        m, cv, share = self.inner_steps, self.step_cv, 1.0  # share: how much of the mean varies
        if self.varies == "step" and cv > 0:
            cv = 2 * math.sinh(math.asinh((cv**3 + 3 * cv) / math.sqrt(m) / 2) / 3)
            share = self.step_cv / (cv * math.sqrt(m))
        varying = LogNormal(
            m * self.step_s * share, math.sqrt(math.log1p(cv**2))
        )  # cv² = e^{sigma²} − 1
        return m * self.step_s * (1 - share) + varying.draw(shape, rng)


def total_s(job: Job, exchange: Exchange, seed: int = 0, draws: int = 2**19) -> float:
    """Seconds until a worker has finished the run, mean over workers and samples (`draws` rounds of
    one worker, or one run of all). Who was held up comes late to the next exchange: waits are
    handed on. A seed has the same step times for every exchange.
    """
    rounds = job.steps // job.inner_steps
    computing, sending = np.random.default_rng((seed, 0)), np.random.default_rng((seed, 1))
    clock_s = np.zeros((max(1, draws // (job.nodes * rounds)), job.nodes))
    round_s = job.round_s(clock_s.shape, computing)
    for _ in range(rounds):
        clock_s = exchange(clock_s + round_s, job.message, sending)
        round_s = round_s if job.varies == "worker" else job.round_s(clock_s.shape, computing)
    return float(clock_s.mean())


def saved(job: Job, all_reduce: Exchange = tree, seed: int = 0, draws: int = 2**19) -> float:
    """The share of the time that pair exchanges save: 1 − total_s(pair)/total_s(all_reduce)."""
    return 1 - total_s(job, pair, seed, draws) / total_s(job, all_reduce, seed, draws)


def needed(job: Job, seed: int = 0, draws: int = 2**19) -> float | None:
    """The factor on the job's message time and step_cv at which it saves `TARGET`. None: none up to
    100.
    """

    def excess(x: float) -> float:
        message = replace(job.message, mean_s=x * job.message.mean_s)
        return (
            saved(replace(job, message=message, step_cv=x * job.step_cv), tree, seed, draws)
            - TARGET
        )

    high = min(100.0, 3 / job.step_cv if job.step_cv else 100.0)
    return _root(excess, 0.0, -TARGET, high, excess(high), 0.0005)


def tenfold(nodes: int, seed: int = 0, draws: int = 2**19) -> float | None:
    """The sigma at which an exchange of pairs is `TENFOLD` as fast as a tree. None: it is faster
    already at 0, or not even at 2.
    """

    def excess(sigma: float) -> float:
        return ratio(nodes, sigma, seed, draws)["tree"] - TENFOLD

    return _root(excess, 0.0, excess(0.0), 2.0, excess(2.0), 0.01)


def _root(
    f: Callable[[float], float], low: float, below: float, high: float, above: float, close: float
) -> float | None:
    """Where f, below zero at `low` and above at `high`, is within `close` of zero, by Illinois'
    rule. None: signs are not so.
    """
    if below > 0 or above < 0:
        return None
    while abs(above) > close:
        middle = high - above * (high - low) / (above - below)
        low, below = (high, above) if (found := f(middle)) * above < 0 else (low, below / 2)
        high, above = middle, found
    return high


def ratio(nodes: int, sigma: float, seed: int = 0, samples: int = 2**19) -> dict[str, float]:
    """Mean time of a tree and a ring from a common start until the last worker goes on, ÷ E[pair];
    tree_se: its standard error.
    """
    rng, message = np.random.default_rng((seed, nodes)), LogNormal(1.0, sigma)
    trees, rings = (
        exchange(np.zeros((1 + count // nodes, nodes)), message, rng).max(axis=1)
        / (2 * message.slower_of_two_s)
        for exchange, count in ((tree, max(nodes, samples)), (ring, samples // 512))
    )
    error = float(trees.std(ddof=1)) / math.sqrt(len(trees))
    return {
        "nodes": nodes,
        "sigma": sigma,
        "tree": float(trees.mean()),
        "tree_se": error,
        "ring": float(rings.mean()),
    }


def study(
    job: Job, seed: int = 0, nodes: Sequence[int] = NODES, draws: int = 2**19
) -> dict[str, Any]:
    """All figures, fit for JSON: lists of rows. With the defaults it takes half a minute.

    ratios: see `ratio`. saved: against a tree. saved_against_ring: by the job, in 10 rounds.
    needed: what alone saves 20 % with the job's nodes and inner_steps, in one round and in the run:
    long messages, all steps alike; or varying steps, messages in no time. claims: see `claims`.
    """
    lengths, places = (
        sorted(m for m in {*INNER_STEPS, job.inner_steps} if m <= job.steps),
        sorted({*nodes[1::2], job.nodes}),
    )
    sizes: list[dict[str, Any]] = [
        {"varies": v, "inner_steps": m, "nodes": n} for v, m, n in product(VARIES, lengths, places)
    ]
    alone = {
        f"message ÷ step time, σ = {s:g}": replace(
            job, step_cv=0.0, message=LogNormal(job.step_s, s)
        )
        for s in SIGMAS
    }
    alone |= {
        f"cv of steps, drawn per {v}": replace(job, varies=v, step_cv=1.0, message=LogNormal(0, 0))
        for v in VARIES
    }
    once = {what: replace(one, steps=one.inner_steps) for what, one in alone.items()}
    return {
        "job": asdict(job) | {"seed": seed},
        "ratios": [ratio(n, sigma, seed, draws) for sigma, n in product(SIGMAS, nodes)],
        "saved": [
            size | {"saved": saved(replace(job, **size), tree, seed, draws)} for size in sizes
        ],
        "saved_against_ring": saved(
            replace(job, steps=min(job.steps, 10 * job.inner_steps)), ring, seed, draws // 32
        ),
        "needed": [
            {
                "what": w,
                "one_round": needed(once[w], seed, draws),
                "run": needed(alone[w], seed, draws),
            }
            for w in alone
        ],
        "claims": claims(job, seed, draws),
    }


def claims(job: Job, seed: int = 0, draws: int = 2**19) -> list[dict[str, Any]]:
    """The claims of arXiv 2506.10911 beside the same quantity of this job, and the parameters at
    which the two are equal.

    One exchange at a few hundred workers, and a whole run at 1024 workers and 100 inner steps;
    whatever the job's own sizes are. `given_by`: sigma, or the message time in steps and step_cv,
    sigma as in the job. None: nothing in its range gives the claim.
    """
    sigma = job.message.sigma
    rows: list[dict[str, Any]] = [
        {
            "claim": f"tree ÷ pair, {nodes} workers",
            "published": TENFOLD,
            "here": ratio(nodes, sigma, seed, draws)["tree"],
            "with": {"sigma": sigma},
            "given_by": None
            if (found := tenfold(nodes, seed, draws)) is None
            else {"sigma": found},
        }
        for nodes in FEW_HUNDRED
    ]
    run = replace(job, nodes=1024, inner_steps=100, steps=max(job.steps, 100))
    ours = {"message_in_steps": job.message.mean_s / job.step_s, "step_cv": job.step_cv}
    factor = needed(run, seed, draws)
    rows.append(
        {
            "claim": f"time saved, {run.nodes} workers, m = {run.inner_steps}",
            "published": TARGET,
            "here": saved(run, tree, seed, draws),
            "with": ours | {"sigma": sigma},
            "given_by": None
            if factor is None
            else {key: factor * value for key, value in ours.items()} | {"sigma": sigma},
        }
    )
    return rows


def panels(result: dict[str, Any]) -> dict[str, dict[str, dict[int, float]]]:
    """What is tabled and plotted: title -> line -> workers -> value."""
    shown: dict[str, dict[str, dict[int, float]]] = {}
    for kind, row in product(("tree", "ring"), result["ratios"]):
        shown.setdefault(f"{kind} all-reduce ÷ pair exchange", {}).setdefault(
            f"σ = {row['sigma']:g}", {}
        )[row["nodes"]] = row[kind]
    for row in result["saved"]:
        lines = shown.setdefault(f"% of time saved, steps drawn per {row['varies']}", {})
        lines.setdefault(f"m = {row['inner_steps']}", {})[row["nodes"]] = 100 * row["saved"]
    return shown


def tables(result: dict[str, Any]) -> list[Table]:
    """The study for a terminal: a table for each of the `panels`, and what saves 20 %."""
    shown = []
    for title, lines in panels(result).items():
        shown.append(
            Table("workers", *lines, box=None, title=title, title_justify="left", min_width=40)
        )
        for n in next(iter(lines.values())):
            shown[-1].add_row(
                f"{n}", *(f"{line[n]:.{1 if '%' in title else 2}f}" for line in lines.values())
            )
    caption = f"the job saves {result['saved_against_ring']:.1%} against a ring"
    shown.append(
        Table(
            f"what alone saves {TARGET:.0%}",
            "in one round",
            "in the run",
            box=None,
            caption=caption,
        )
    )
    for row in result["needed"]:
        shown[-1].add_row(
            *(
                "never" if cell is None else cell if isinstance(cell, str) else f"{cell:.2f}"
                for cell in row.values()
            )
        )
    title = (
        "the claims of arXiv 2506.10911, with this message and step time, and what gives the "
        "published figure here"
    )
    shown.append(
        Table(
            "",
            "published",
            "here",
            "as published with",
            box=None,
            title=title,
            title_justify="left",
        )
    )
    for row in result["claims"]:
        share = "%" if row["published"] < 1 else "f"
        published, here = f"{row['published']:.0{share}}", f"{row['here']:.1{share}}"
        given_by = _parameters(row["given_by"]) if row["given_by"] else "nothing"
        shown[-1].add_row(
            row["claim"], f"about {published}", f"{here} ({_parameters(row['with'])})", given_by
        )
    return shown


def _parameters(values: dict[str, float]) -> str:
    said = {"message_in_steps": "message {:.2f} steps", "step_cv": "cv {:.2f}", "sigma": "σ {:.2f}"}
    return ", ".join(said[key].format(value) for key, value in values.items())


def write(result: dict[str, Any], out: Path) -> list[Path]:
    """Write the `panels` into `out`, as latency_ratio.png and latency_saved.png. Returns their
    paths.
    """
    out.mkdir(parents=True, exist_ok=True)
    shown, paths = (
        list(panels(result).items()),
        [out / "latency_ratio.png", out / "latency_saved.png"],
    )
    said = (
        " (message {message[mean_s]:g} s, σ {message[sigma]:g}; step {step_s:g} s, cv {step_cv:g})"
    ).format(**result["job"])
    for path, chosen, setting in zip(paths, (shown[:2], shown[2:]), ("", said), strict=True):
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=(14, 4.8), layout="constrained")
            tops = [max(max(line.values()) for line in lines.values()) for _, lines in chosen]
            for axes, (title, lines), top in zip(
                figure.subplots(1, len(chosen)), chosen, tops, strict=True
            ):
                for label, line in lines.items():
                    axes.semilogx(list(line), list(line.values()), ".-", base=2, label=label)
                if "tree" in title:
                    axes.fill_between(
                        [200, 500],
                        TENFOLD - 1,
                        TENFOLD + 1,
                        color="#BBBBBB",
                        label="published: about 10",
                    )
                if setting:
                    axes.plot(
                        1024,
                        100 * TARGET,
                        "k*",
                        markersize=12,
                        label="published, m = 100",
                        zorder=5,
                    )
                axes.set(
                    title=title,
                    xlabel=f"workers{setting}",
                    ylim=(0, 1.05 * (max(tops) if setting else top)),
                )
                axes.set_xticks(list(line), [str(n) for n in line])
                axes.legend(loc="upper left")
            figure.savefig(path, dpi=160, metadata={"Software": None})
    return paths
