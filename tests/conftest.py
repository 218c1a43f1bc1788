"""What all tests share: one torch thread, the same examples each time, pools that several tests of
a file use, and the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings

from archipel import cli, simulation
from archipel.recipe import Recipe
from archipel.train.pool import Pool

# Examples are drawn from the test itself, so that a test that passes here passes everywhere.
settings.register_profile(
    "reproducible", derandomize=True, database=None, deadline=None, max_examples=60
)
settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[..., Pool | None]]:
    """The pool for a recipe and a number of processes. It stays open for the file's other tests: to
    start one takes seconds.
    """
    opened: dict[str, Pool | None] = {}
    with ExitStack() as stack:

        def pool_of(recipe: Recipe, processes: int = 1) -> Pool | None:
            key = repr((recipe.task, recipe.topology.workers, recipe.pipeline, processes))
            if key not in opened:
                opened[key] = stack.enter_context(simulation.open_pool(recipe, processes))
            return opened[key]

        yield pool_of


class Answer(NamedTuple):
    """What one call of the command line did: its exit code, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def archipel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Calls the command line in this process."""

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["archipel", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Answer(int(stop.value.code or 0), *capsys.readouterr())

    return call
