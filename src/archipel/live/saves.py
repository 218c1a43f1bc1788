"""What the parts of a live run are on disk, and when they are saved.

What belongs here: what a host saves and goes on from, what the watch saves, and how often. What
does not: how a state becomes files (`disk/checkpoint.py`), who asks whom to save (`watch.py`).
"""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from archipel.actor import Actor, NodeId, Vector
from archipel.disk import checkpoint
from archipel.disk.checkpoint import Encoded, Every
from archipel.disk.encoding import Surroundings
from archipel.live.protocol import SaveFolder
from archipel.run.metrics import Evaluation, Recorder
from archipel.run.screening import Screen

# A host


@dataclass(frozen=True)
class HostState:
    """A host's part of the run.

    Attributes:
        actor: the actor, with all its fields.
        rng: state of the actor's random numbers.
        batch: number of the next batch.
        inner: what the inner optimizer keeps.
        screen: the norms by which it refuses updates; None: it refuses none.
        left: what rounding has left over; see `wire.Coder`.
        recorder: what has happened at this host.
        events: how many things have happened at this host.
    """

    actor: Actor
    rng: np.random.Generator
    batch: int
    inner: list[Tensor]
    screen: Screen | None
    left: dict[str, Vector]
    recorder: Recorder
    events: int


@dataclass
class SaveRequests:
    """Says when a host copies its state, and lets one copy be written at a time.

    Attributes:
        wanted: somebody waits for a copy of the state.
        writing: a copy is being written.
    """

    wanted: Future[tuple[int, Encoded]] | None = None
    writing: bool = False

    def serve(self, state: HostState) -> None:
        """Give whoever waits a copy of the state, between two handlers."""
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            return
        try:
            wanted.set_result((state.events, encode(state)))
        except Exception as error:
            wanted.set_exception(error)

    def write(self, folder: SaveFolder, copy: Future[tuple[int, Encoded]]) -> None:
        """Wait for the copy, and write it.

        Raises:
            UserError: the state has something that a save cannot hold.
            TrainingError: it cannot be written.
        """
        events, encoded = copy.result()
        self.writing = True
        try:
            checkpoint.write(folder.path, events, encoded, folder.recipe)
        finally:
            self.writing = False


def encode(state: HostState) -> Encoded:
    """A copy of a host's state, as bytes."""
    return checkpoint.encode(state, _surroundings(state.actor, state.recorder))


def load(folder: SaveFolder, actor: Actor, recorder: Recorder) -> tuple[HostState, list[str]]:
    """A host's last save, and what the user should know of it.

    Args:
        actor, recorder: as they are at the start; they say what the save can refer to.

    Raises:
        UserError: there is none that is sound.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = checkpoint.load(folder.path, _surroundings(actor, recorder), folder.recipe)
    return state, [str(warning.message) for warning in caught]


def _surroundings(actor: Actor, recorder: Recorder) -> Surroundings:
    return Surroundings(
        {"on_progress": recorder.on_progress}, [sys.modules[type(actor).__module__]]
    )


# The watch


@dataclass(frozen=True)
class WatchState:
    """What the watch knows of the whole run, and no host knows.

    Attributes:
        number: tells this run's saves from those of another run of the same name.
        time_s: what the run has taken so far.
        evaluations: of the model so far.
        restarts: how often each node has been started again.
        bad_losses: how often each worker has begun again after a loss that was not finite.
        saves: how often the watch has been saved.
    """

    number: int
    time_s: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)
    restarts: dict[NodeId, int] = field(default_factory=dict)
    bad_losses: dict[NodeId, int] = field(default_factory=dict)
    saves: int = 0


def save_watch(folder: Path, state: WatchState, recipe: str, every: Every) -> None:
    """Save what no host knows. Each host's folder lies inside this one.

    Raises:
        TrainingError: it cannot be written.
    """
    checkpoint.save(folder, state.saves, state, Surroundings({}), recipe, every)


def load_watch(folder: Path, recipe: str) -> WatchState:
    """What `save_watch` saved last.

    Raises:
        UserError: there is nothing that is sound.
    """
    state: WatchState = checkpoint.load(folder, Surroundings({}), recipe)
    return state


@dataclass
class SaveSchedule:
    """When all nodes are saved.

    Attributes:
        every: how often; None: never.
        next: tokens, or seconds of the run, at which the next save is due.
    """

    every: Every | None
    next: float = 0.0

    def is_due(self, tokens: int, now_s: float) -> bool:
        match self.every:
            case Every(tokens=int()):
                return tokens >= self.next
            case Every(seconds=float()):
                return now_s >= self.next
            case _:
                return False

    def plan(self, tokens: int, now_s: float) -> None:
        """All are being saved now: when they will be again."""
        match self.every:
            case Every(tokens=int(step)):
                self.next = (tokens // step + 1) * step
            case Every(seconds=float(seconds)):
                self.next = now_s + seconds
