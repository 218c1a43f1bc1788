"""Trackers: who is told of a run's figures while it goes on, and shows them.

What belongs here: the protocol, TensorBoard, Weights & Biases, and a user's own. What does not:
which figures there are and when (`run/journal.py`).
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from archipel.errors import UserError
from archipel.pyfile import import_file, whereabouts
from archipel.recipe import Recipe
from archipel.recipe.sections import TrackConfig
from archipel.run.journal import Journal
from archipel.run.metrics import Evaluation
from archipel.train.extra import library
from archipel.train.replica import Replica
from archipel.yamlfile import parse


@dataclass(frozen=True)
class Begun:
    """The run that a tracker is told of.

    Attributes:
        name: of the run directory, such as `halos-seed0`.
        directory: the run directory.
        recipe: all settings, as in `recipe.yaml`.
        clock: `modelled` or `measured`; `time_s` is on it.
        resumed: it goes on, and the tracker may have been told of its beginning.
    """

    name: str
    directory: Path
    recipe: Mapping[str, Any]
    clock: str
    resumed: bool


class Tracker(Protocol):
    """Whatever has these three functions."""

    def begin(self, run: Begun) -> None:
        """A run begins, or goes on."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """The model has been evaluated when all workers together had taken `step` inner steps."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The run has ended, and this is its `summary.json`; None: it failed."""


@dataclass
class TensorBoard:
    """Writes the folder `tensorboard` of the run directory."""

    writer: Any = None

    def begin(self, run: Begun) -> None:
        board = library("torch.utils.tensorboard", "track: tensorboard needs", "track")
        self.writer = board.SummaryWriter(str(run.directory / "tensorboard"))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self.writer.close()


@dataclass
class Wandb:
    """A run of Weights & Biases, whose files lie in the folder `wandb` of the run directory."""

    config: TrackConfig
    run: Any = None

    def begin(self, run: Begun) -> None:
        wandb = library("wandb", "track: wandb needs", "track")
        known = run.directory / "wandb" / "archipel-run"
        known.parent.mkdir(exist_ok=True)
        if not (run.resumed and known.is_file()):
            known.write_text(uuid.uuid4().hex[:8])
        self.run = wandb.init(
            project=self.config.project or "archipel",
            entity=self.config.entity,
            mode=self.config.mode,
            name=run.name,
            id=known.read_text(),
            resume="allow",
            dir=str(run.directory),
            config={**run.recipe, "clock": run.clock},
            reinit="create_new",  # a program may have a run of its own
            settings=wandb.Settings(console="off"),
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.run.log(dict(figures), step=step)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        for name, value in (summary or {}).items():
            if isinstance(value, (int, float, str)):
                self.run.summary[name] = value
        self.run.finish(exit_code=1 if summary is None else 0)


@dataclass
class Trackers:
    """All trackers of a run. One that fails while the run goes on is told nothing more.

    Attributes:
        of: the tracker by the name that the recipe gives it.
    """

    of: dict[str, Tracker] = field(default_factory=dict)

    def begin(self, run: Begun) -> None:
        """A run begins.

        Raises:
            UserError: a tracker cannot begin: the library is missing, nobody is logged in.
        """
        begun: dict[str, Tracker] = {}
        for name, tracker in self.of.items():
            try:
                tracker.begin(run)
            except BaseException as error:
                Trackers(begun).end(None)
                if isinstance(error, UserError) or not isinstance(error, Exception):
                    raise
                raise UserError(f"track: {name} cannot begin: {_said(name, error)}") from error
            begun[name] = tracker

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._tell(lambda tracker: tracker.log(figures, step))

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._tell(lambda tracker: tracker.end(summary))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.of.items()):
            try:
                call(tracker)
            except Exception as error:
                del self.of[name]
                with suppress(Exception):  # so that it lets go of what it holds
                    tracker.end(None)
                warnings.warn(
                    f"track: {name} failed, and the run goes on without it: {_said(name, error)}",
                    stacklevel=3,
                )


def trackers_of(configs: Sequence[TrackConfig]) -> Trackers:
    """The trackers that a recipe names.

    Raises:
        UserError: a user's file or function is not there, fails, or gives no tracker.
    """
    return Trackers({config.name: _tracker(config) for config in configs})


def journal_of(
    trackers: Trackers,
    recipe: Recipe,
    directory: Path,
    clock: str,
    *,
    replica: Replica | None,
    told: Sequence[Evaluation],
    resumed: bool,
) -> Journal:
    """Begin to tell of a run in its directory.

    Args:
        clock: `modelled` or `measured`.
        replica: what the run trains; None: nothing.
        told: the evaluations before the run was stopped.

    Raises:
        UserError: see `Trackers.begin`.
    """
    fields = parse(recipe.to_yaml())
    trackers.begin(Begun(directory.name, directory, fields, clock, resumed))
    return Journal(
        directory / "metrics.jsonl",
        has_loss=replica is not None,
        learning_rate=replica.learning_rate if replica is not None else None,
        listener=trackers,
        told=len(told) if replica is None else sum(evaluation.has_loss for evaluation in told),
    )


def _tracker(config: TrackConfig) -> Tracker:
    match config.name:
        case "tensorboard":
            return TensorBoard()
        case "wandb":
            return Wandb(config)
    path, _, name = config.name.rpartition(":")
    place = f"track = {config.name!r}"
    make = getattr(import_file(Path(path), place), name, None)
    if not callable(make):
        raise UserError(f"{place}: {path} has no function {name!r}")
    try:
        tracker: Tracker = make()
    except Exception as error:
        raise UserError(f"{place}: {name}() failed at {whereabouts(error)}") from error
    missing = [one for one in ("begin", "log", "end") if not callable(getattr(tracker, one, None))]
    if missing:
        raise UserError(
            f"{place}: what {name}() gives has no function {missing[0]!r}; a tracker has begin, "
            "log and end"
        )
    return tracker


def _said(name: str, error: Exception) -> str:
    """An error in one line; of a user's own tracker with file and line."""
    if ":" in name:
        return whereabouts(error)
    return " ".join(str(error).split()) or type(error).__name__
