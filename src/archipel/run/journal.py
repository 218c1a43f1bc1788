"""A run's figures while it goes on: `metrics.jsonl` grows, and trackers are told.

What belongs here: which figures are new, and handing them on. What does not: what a line of
`metrics.jsonl` looks like (`metrics.py`), and what trackers do (`tracking.py`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TextIO

from archipel.run.metrics import (
    Evaluation,
    LearningRate,
    Recorder,
    evaluation_line,
    training_line,
)

LOGGED = (
    "loss",
    "replica_loss",
    "replica_std",
    "time_s",
    "tokens",
    "absorbed_steps",
    "outer_steps",
    "sent_bytes",
    "slow_link_bytes",
)
"""Fields of an `Evaluation` that trackers are told, as far as it has them."""


class Listener(Protocol):
    """Is told of evaluations; see `tracking.Trackers`."""

    def log(self, figures: Mapping[str, float], step: int) -> None: ...

    def end(self, summary: Mapping[str, Any] | None) -> None: ...


@dataclass
class Journal:
    """Hands on what a recorder has put down since the last look.

    In the file, evaluations come when their losses are there; the finished run's file is in the
    order of time.

    Attributes:
        path: the file `metrics.jsonl`, which begins anew.
        has_loss: evaluations have losses, and come when they are there.
        learning_rate: None: nothing is trained.
        listener: is told of each evaluation.
        told: evaluations that the listener has been told of, now or before the run was stopped.
    """

    path: Path
    has_loss: bool
    learning_rate: LearningRate | None
    listener: Listener
    told: int = 0
    file: TextIO | None = field(init=False)
    trainings: int = 0
    evaluations: int = 0
    latest: Evaluation | None = None
    recent: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.file = self.path.open("w", encoding="utf-8")

    def look(self, recorder: Recorder, train_loss: float | None = None) -> None:
        """Hand on what is new.

        Args:
            train_loss: mean of the workers' last training losses, where the recorder has none.
        """
        new = recorder.trainings[self.trainings :]
        for training in new:
            self._write(training_line(training, self.learning_rate))
            self.recent.append((training.time_s, training.loss))
        self.trainings += len(new)
        for evaluation in recorder.evaluations[self.evaluations :]:
            if self.has_loss and not evaluation.has_loss:
                break
            self._write(evaluation_line(evaluation))
            self.evaluations += 1
            self._tell(evaluation, train_loss)

    def end(self, recorder: Recorder, summary: Mapping[str, Any] | None) -> None:
        """The run has ended; its last evaluation may have got the loss of the mean by now."""
        self.look(recorder)
        last = recorder.evaluations[-1] if recorder.evaluations else None
        known = last is not None and (last.has_loss or not self.has_loss)
        if summary is not None and last is not None and known and self.latest != replace(last):
            self.told = min(self.told, self.evaluations - 1)
            self._tell(last, None)
        if self.file is not None:
            self.file.close()
        self.listener.end(summary)

    def _write(self, line: dict[str, Any]) -> None:
        """Add a line. A full disk may have room again when the run has ended, and is told now."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            warnings.warn(f"{self.path}: {error.strerror}; the run goes on", stacklevel=3)
            self.file = None

    def _tell(self, evaluation: Evaluation, train_loss: float | None) -> None:
        """Tell the listener of an evaluation and of the training losses since the one before."""
        losses = [loss for time_s, loss in self.recent if time_s <= evaluation.time_s]
        self.recent = [one for one in self.recent if one[0] > evaluation.time_s]
        self.latest = replace(evaluation)  # what is told now: more may be known of it later
        if self.told >= self.evaluations:
            return
        self.told = self.evaluations
        figures = {
            name: float(value)
            for name in LOGGED
            if (value := getattr(evaluation, name)) is not None
        }
        if (mean_loss := fmean(losses) if losses else train_loss) is not None:
            figures["train_loss"] = mean_loss
        if self.learning_rate is not None:
            figures["learning_rate"] = self.learning_rate(evaluation.inner_steps)
        self.listener.log(figures, evaluation.inner_steps)
