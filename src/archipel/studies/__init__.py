"""Studies: one file a question, each answered with numbers, a plot, and the run directories behind
them.

A study offers `TITLE`, the question in one line, and `run(out, settings)`, which makes its runs and
returns `Findings`. A new file is a new study, `archipel study NAME`: nothing is registered.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from archipel.errors import UserError, nearest
from archipel.series import Progress, say_nothing


@dataclass(frozen=True)
class Settings:
    """The settings that every study has.

    Attributes:
        steps: inner steps of each run, of all its workers together.
        seeds: how many runs there are of each kind.
        processes: processes that compute gradients; None: one a core, or one a GPU.
        progress: is called while runs go on, with how far they are.
    """

    steps: int = 10_000
    seeds: int = 3
    processes: int | None = None
    progress: Progress = say_nothing


@dataclass(frozen=True)
class Findings:
    """What a study has found.

    Attributes:
        headline: what is real and what is modelled.
        finding: the answer in a sentence or two, with its figures.
        columns, rows: a table.
        plots: PNG files.
    """

    headline: str
    finding: str
    columns: list[str]
    rows: list[list[Any]]
    plots: list[Path]


class Study(Protocol):
    """What a file in this folder offers."""

    TITLE: str

    def run(self, out: Path, settings: Settings) -> Findings:
        """Make the runs in the folder `out`, and answer from them."""


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
