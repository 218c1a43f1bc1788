"""Random numbers of a task: the same whoever computes, and whatever was computed before.

What belongs here: how the global generators are seeded before each inner step and each batch of an
evaluation. What does not: random numbers of a method (`Context.rng`) or of the data (`Shard.rng`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from archipel.train.data import Shard


def seed_step(seed: int, shard: Shard, index: int, device: torch.device, stage: int = 0) -> None:
    """Seed all random numbers of one inner step: dropout, noise and augmentation must not depend on
    which process takes this step, or what it did before.

    `stage`: of a pipeline. Each stage of a model draws numbers of its own, so that it makes no
    difference whether the one before it runs in the same process.
    """
    part = (seed * 1_000_003 + shard.index) * 1_000_003 + index
    seed_everything((part + stage * 0x9E3779B97F4A7C15) % 2**63, device)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the generators of torch (the CPU's and that of `device`), NumPy and Python."""
    # torch.manual_seed also seeds devices that are not there, by queueing a stack trace for each:
    # 0.4 ms and a leak.
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeds_kept(device: torch.device) -> Iterator[None]:
    """All these generators are afterwards as they were before."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
