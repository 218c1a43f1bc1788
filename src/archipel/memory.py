"""How much memory a run takes, computed before it takes any.

What belongs here: which vectors, models and processes there are at a time. What does not: how large
they are for a task (`train/footprint.py`), and what is trained.

With V the bytes of a vector of all weights, S what the inner optimizer of a worker keeps (2V for
Adam), B what a batch leaves for its backward pass, K what training does not change, and P a process
that has loaded torch:

- a **simulated** run has V + S for each worker, in memory that all processes share; the method's
  own vectors; one message under way for each worker; models that are being evaluated; and in each
  process of the pool P + 3V + K + S + B, in that of the command P + 3V + K + S, for the inner
  optimizer is tried out there, and such small pieces of memory do not go back to the system;
- a **live** host has P + 3V + K + S + B, its actor's vectors, a message, the vector that it trains
  from, and two copies of the model at marks. A server has no inner optimizer, and a copy of the
  model only for evaluations.

All of that is as on CPUs, and as if each live worker were one process. What peaks for a moment,
when models are made and when the last one is written, is left out, and so are gradients on their
way to a step of synchronous SGD.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from archipel import methods
from archipel.actor import Message
from archipel.assemble import build_actors
from archipel.errors import UserError
from archipel.recipe import Recipe
from archipel.report.words import in_bytes
from archipel.train.configs import CausalLmTask, NoTask, TaskConfig, UserTask
from archipel.train.footprint import Footprint, bytes_of, look, no_values
from archipel.train.pool import usual_processes
from archipel.train.task import make_task

PROCESS_BYTES = 260_000_000
"""P: what a process takes that has loaded torch and computes, without what it shares with others.
"""
TRANSFORMERS_BYTES = 200_000_000
"""What `transformers` and `datasets` add to that."""
RAY_BYTES = 100_000_000
"""What Ray and the transport add to it, on a host."""
COPIES = 2
"""Copies of its part of the model that a live host has at a time, as a rule."""


@dataclass(frozen=True)
class Memory:
    """What a run takes, in bytes.

    Attributes:
        worker_bytes: a worker's weights, and what its inner optimizer keeps.
        simulated_bytes: a simulated run, with all its processes.
        host_bytes: the largest host of a live run.
        live_bytes: all hosts of a live run, and the command, if all are on one machine.
        whole: activations are counted too.
    """

    worker_bytes: int
    simulated_bytes: int
    host_bytes: int
    live_bytes: int
    whole: bool


def memory_of(recipe: Recipe, task: Footprint, processes: int | None = None) -> Memory:
    """What a run of `recipe` takes.

    Args:
        task: what a worker that has the whole model takes.
        processes: how many compute gradients; None: as many as there usually are.

    Raises:
        UserError: a method of the user's fails where vectors have no values.
    """
    trains = {worker.id for worker in recipe.topology.workers}
    workers, stages, replicas = len(trains), recipe.pipeline.stages, recipe.replicas
    vector, state, batch = task.vector_bytes, task.state_bytes, task.activation_bytes or 0
    process = PROCESS_BYTES
    process += TRANSFORMERS_BYTES if isinstance(recipe.task, CausalLmTask) else 0
    model = 3 * vector + task.kept_bytes
    message = vector * _vectors_in_message(recipe.method) // stages

    with no_values(), methods.blaming(recipe.method):
        theta = torch.empty(task.layout.numel)
        actors = build_actors(recipe, None, theta, [task.layout])
        own = {actor.me: bytes_of(actor) // stages for actor in actors}
        holders = sum(actor.model() is not None for actor in actors) // stages
    # A mean of replicas is evaluated together with them.
    evaluated = holders + 1 if holders > 1 else 1

    # In stages each process of the pool has all replicas, beside the whole model.
    computing = process + model + state + batch
    computing += replicas * (model + state) if stages > 1 else 0
    simulated = (
        workers * ((vector + state) // stages + message)
        + sum(own.values())
        + evaluated * vector
        + (processes or usual_processes()) * computing
        + (process + (model + state) * (2 if stages > 1 else 1))
    )
    hosts = []
    for actor in actors:
        host = process + RAY_BYTES + own[actor.me] + message
        if actor.model() is not None:
            host += COPIES * vector // stages
        if actor.me in trains:
            host += (model + state + vector) // stages + batch
        elif actor.model() is not None:  # it evaluates
            host += model
        hosts.append(host)
    return Memory(
        worker_bytes=(vector + state) // stages,
        simulated_bytes=simulated,
        host_bytes=max(hosts),
        live_bytes=sum(hosts) + process + model + vector,
        whole=task.activation_bytes is not None,
    )


def warn_of_memory(recipe: Recipe, processes: int | None = None, *, live: bool = False) -> None:
    """Warn if a run of `recipe` takes more memory than there is, as far as that can be computed.
    What a task of the user's own takes is not, for that would call its functions once more.

    Args:
        processes: see `memory_of`.
        live: all hosts of a live run are on this machine; else the run is simulated.
    """
    task, there_bytes = _built_in(recipe.task), machine_bytes()
    if task is None or there_bytes is None:
        return
    try:
        memory = memory_of(recipe, task, processes)
    except UserError:
        return
    needed_bytes = memory.live_bytes if live else memory.simulated_bytes
    if needed_bytes > there_bytes:
        warnings.warn(
            f"{recipe.label}: {too_large(needed_bytes, there_bytes, live=live)} (see: archipel "
            "check)",
            stacklevel=2,
        )


def too_large(needed_bytes: int, there_bytes: int, *, live: bool) -> str:
    """That a run takes more memory than there is, in words."""
    kind = "a live run, all of it on this machine," if live else "a simulated run"
    return (
        f"{kind} takes about {in_bytes(needed_bytes)} of memory, as computed, and this machine has "
        f"{in_bytes(there_bytes)}"
    )


@cache
def _built_in(config: TaskConfig) -> Footprint | None:
    """What a worker of a built-in task takes; None: not known, and its mistakes are told by whoever
    makes it.
    """
    if isinstance(config, NoTask | UserTask):
        return None
    try:
        return look(make_task(config))
    except UserError:
        return None


def _vectors_in_message(method: str) -> int:
    """Vectors in the largest message that the method's nodes say again and again."""
    kinds = vars(methods.load(method)).values()
    counts = [
        len(kind.differences) + len(kind.values)
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, Message)
    ]
    return max([1, *counts])  # an all-reduce has one


def machine_bytes(limits: Iterable[Path] = (Path("/sys/fs/cgroup/memory.max"),)) -> int | None:
    """The memory of this machine, or what its container may take of it; None: not known."""
    found = [
        int(text)
        for limit in limits
        if limit.is_file() and (text := limit.read_text().strip()).isdigit()
    ]
    if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)
