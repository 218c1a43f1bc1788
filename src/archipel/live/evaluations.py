"""Evaluations of a live run, made of the losses that hosts have computed.

What belongs here: waiting for all holders of the model, and recording their losses as one
evaluation. What does not: how a loss is computed (`compute.py`), when the model is evaluated
(`watch.py`).

Only losses travel. So where the model to take home is the mean of several replicas, its loss is
known only at the end, when it is taken home (`home.py`). Until then an evaluation holds the mean of
the replicas' own losses. At the start all replicas are equal, and so are the two numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from archipel.actor import NodeId
from archipel.errors import TrainingError
from archipel.live.protocol import Mark
from archipel.run.census import put_down
from archipel.run.metrics import Evaluation, Recorder


@dataclass(frozen=True)
class Losses:
    """The losses of the model at one moment.

    Attributes:
        loss: of the model to take home; None: it is not known, or nothing is trained.
        own: the losses of the replicas whose mean it is; empty where it is no mean.
        replica_std: see `metrics.Evaluation`.
    """

    loss: float | None
    own: Sequence[float] = ()
    replica_std: float | None = None


@dataclass
class Pending:
    """An evaluation whose losses are being computed.

    Attributes:
        evaluation: everything about it except the losses.
        marks: number of the mark of each holder of the model.
        heard: the marks whose losses have come.
        here: the losses, where this process computes them; None: hosts compute them.
    """

    evaluation: Evaluation
    marks: Mapping[NodeId, int]
    heard: dict[NodeId, Mark] = field(default_factory=dict)
    here: Future[Losses] | None = None

    def losses(self) -> Losses | None:
        """All losses; None: they have not all come.

        Raises:
            TrainingError: one could not be computed.
        """
        if self.here is not None:
            return self.here.result() if self.here.done() else None
        if len(self.heard) < len(self.marks):
            return None
        for mark in self.heard.values():
            if mark.failure is not None:
                raise TrainingError(mark.failure)
        own = [loss for node in self.marks if (loss := self.heard[node].loss) is not None]
        if len(own) < 2:
            return Losses(own[0] if own else None)
        at_start = self.evaluation.inner_steps == 0
        return Losses(own[0] if at_start else None, own, 0.0 if at_start else None)


@dataclass
class Evaluations:
    """All evaluations of a run.

    Attributes:
        recorder: gets each evaluation when its losses are there.
        reached: the marks that each host has reported, by number.
        pending: evaluations whose losses are being computed, in the order of time.
        latest: the last evaluation whose losses are there.
    """

    recorder: Recorder
    reached: dict[NodeId, dict[int, Mark]] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    latest: Pending | None = None

    def hear(self, node: NodeId, first: int, marks: Sequence[Mark]) -> None:
        """A host has told of its `marks` from number `first` on."""
        self.reached.setdefault(node, {}).update(enumerate(marks, first))
        for pending in self.pending:
            self._fill(pending, [node])

    def common(self, holders: Collection[NodeId]) -> int:
        """How many marks all of `holders` have reached."""
        return min((len(self.reached.get(node, ())) for node in holders), default=0)

    def begin(self, pending: Pending) -> None:
        """Wait for the losses of an evaluation."""
        self.pending.append(pending)
        self._fill(pending, pending.marks)

    def lose(self, node: NodeId) -> None:
        """A host has died. An evaluation that still waits for a loss of it is given up."""
        self.reached.pop(node, None)
        self.pending = [
            pending
            for pending in self.pending
            if pending.here or node in pending.heard or node not in pending.marks
        ]

    def collect(self) -> None:
        """Put down those evaluations whose losses are there.

        Raises:
            Diverged: a loss is not finite.
            TrainingError: a loss could not be computed.
        """
        while self.pending and (losses := self.pending[0].losses()):
            self.latest = pending = self.pending.pop(0)
            put_down(pending.evaluation, losses.loss, losses.own, "")
            pending.evaluation.replica_std = losses.replica_std
            self.recorder.evaluations.append(pending.evaluation)

    def replace_latest(self, pending: Pending) -> None:
        """Another evaluation takes the place of the latest one."""
        if self.latest is not None:
            self.recorder.evaluations.remove(self.latest.evaluation)
        self.latest = pending
        self.recorder.evaluations.append(pending.evaluation)

    @property
    def latest_loss(self) -> float | None:
        """What a target is compared with: the loss of the model to take home, or, before it is
        known, the mean of its replicas' losses.
        """
        if self.latest is None:
            return None
        evaluation = self.latest.evaluation
        return evaluation.replica_loss if evaluation.loss is None else evaluation.loss

    def released(self, node: NodeId) -> int:
        """How many marks of a host are not needed any more: those before the latest evaluation."""
        return self.latest.marks.get(node, 0) if self.latest else 0

    def _fill(self, pending: Pending, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            mark = self.reached.get(node, {}).get(pending.marks.get(node, -1))
            if mark is not None and mark.evaluated:
                pending.heard[node] = mark
