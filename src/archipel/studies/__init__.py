"""Studies: one file a question, each answered with numbers, a plot, and the run directories behind
them.

A study offers

- `TITLE`, the question in one line;
- `QUICK` and `FULL`, two sizes: seconds to a few minutes, and as long as a verdict needs;
- `recipes(size)`, the grid of runs that answer it;
- `answer(runs, size, out)`, what these say: `Findings`, with plots in the folder `out`.

What follows a ± is half of a mean's 95 % interval over seeds (`report/intervals.py`).

A new file is a new study, `archipel study NAME`: nothing is registered. What makes the runs, keeps
them, and writes the page of claims is not here (`study.py`).
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from archipel.errors import UserError, nearest
from archipel.recipe import Recipe
from archipel.report import Result

Verdict = Literal["holds", "does not hold", "cannot be told"]


@dataclass(frozen=True)
class Size:
    """How large a study is.

    Attributes:
        steps: inner steps of each run, of all its workers together.
        seeds: how many runs there are of each kind.
    """

    steps: int
    seeds: int

    @property
    def text(self) -> str:
        """As it is printed."""
        return f"{self.seeds} seed{'s' if self.seeds > 1 else ''} of {self.steps:,} inner steps"


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, or one doubt of its readers, and what was seen.

    Attributes:
        claim: what is said, in a sentence.
        source: where it is said.
        seen: the figures of this study that bear on it.
        verdict: what follows from them; with its reason where it cannot be told.
        reason: why, in a few words; empty where the figures say it.
    """

    claim: str
    source: str
    seen: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Findings:
    """What a study has found.

    Attributes:
        finding: the answer in a sentence or two, with its figures.
        claims: what follows for the papers' claims.
        columns, rows: a table.
        plots: PNG files.
    """

    finding: str
    claims: list[Claim]
    columns: list[str]
    rows: list[list[Any]]
    plots: list[Path]


def within(interval: tuple[float, float], published: tuple[float, float]) -> tuple[Verdict, str]:
    """The verdict on a published range, and its reason, from the interval of what was seen."""
    low, high = interval
    least, most = published
    if math.isnan(low):
        return "cannot be told", "one seed has no interval"
    if least <= low and high <= most:
        return "holds", ""
    if high < least or low > most:
        side = "below" if high < least else "above"
        return "does not hold", f"all of the interval is {side} the published range"
    return "cannot be told", "the interval goes beyond the published range"


class Study(Protocol):
    """What a file in this folder offers."""

    TITLE: str
    QUICK: Size
    FULL: Size

    def recipes(self, size: Size) -> list[Recipe]:
        """The runs that are made; those that share a pool follow each other."""

    def answer(self, runs: Sequence[Result], size: Size, out: Path) -> Findings:
        """What the runs say. A run that has diverged is among them, with what happened until then;
        its summary says so (`report.comparison.diverged`).
        """


def names() -> list[str]:
    """The names of all studies, sorted, as they are written on the command line."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Study:
    """The study called `name`.

    Raises:
        UserError: there is no such study.
    """
    if name not in names():
        raise UserError(f"study {name!r}: allowed are {', '.join(names())}{nearest(name, names())}")
    return cast(Study, importlib.import_module(f"{__name__}.{name.replace('-', '_')}"))
