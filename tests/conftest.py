"""What all tests share: one torch thread, and pools that several tests of a file use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from archipel import simulation
from archipel.recipe import Recipe
from archipel.train.pool import Pool


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
