"""How far a live run is: its marks, the evaluations there, its stop rules, and which model is taken
home.

What belongs here: what hosts' reports of marks mean for the run. What does not: asking them
(`watch.py`), waiting for losses (`evaluations.py`), and models in this process (`home.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from archipel.actor import NodeId
from archipel.errors import TrainingError
from archipel.live.cluster import listed
from archipel.live.evaluations import Evaluations, Losses, Pending
from archipel.live.health import Health
from archipel.live.home import Home
from archipel.run.census import Census, put_down
from archipel.run.metrics import Evaluation


@dataclass
class Course:
    """The course of a run.

    As long as nobody has been lost, the model is evaluated at the rehearsed `marks`, which hosts
    reach on their own. From then on (`as_rehearsed` is false) hosts are asked for a mark when the
    run is seen to have passed one of its plan's.

    Attributes:
        marks: what each holder has trained at each mark; see `rehearsal.rehearse`.
        census: how far the run is, as of the last mark.
        health: what hosts have said.
        evaluations: the evaluations so far, and those whose losses are waited for.
        home: where models are put together.
        as_rehearsed: nobody has been lost, so marks are where the rehearsal has found them.
        begun: evaluations at rehearsed marks that have begun.
        taken: the evaluation whose model is taken home; None: not known yet.
        thread: evaluates models in stages, in this process.
    """

    marks: Sequence[Mapping[NodeId, int]]
    census: Census
    health: Health
    evaluations: Evaluations
    home: Home
    as_rehearsed: bool = True
    begun: int = 0
    taken: Pending | None = None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "home"))

    @property
    def planned(self) -> int:
        """Inner steps of the whole run."""
        assert self.census.plan.steps is not None
        return self.census.plan.steps

    def holders(self, gone: Mapping[NodeId, None]) -> list[NodeId]:
        """Those who hold a part of the model to take home: as rehearsed, or as they say, without
        those that are lost.
        """
        if self.as_rehearsed:
            return list(self.marks[-1])
        statuses = self.health.statuses
        return [node for node, status in statuses.items() if status.holds and node not in gone]

    def inner_steps(self, holders: Sequence[NodeId]) -> int:
        """Inner steps of the run, as the holders of the model have said last."""
        there = [node for node in holders if node in self.health.statuses]
        return self.health.trained(there) // self.census.plan.stages

    # Marks

    def begin_reached(self) -> None:
        """Begin the evaluations at rehearsed marks that all holders have reached."""
        if not self.as_rehearsed:
            return
        holders = list(self.marks[-1])
        while self.begun < min(len(self.marks), self.evaluations.common(holders)):
            self.begin(dict.fromkeys(holders, self.begun))
            self.begun += 1

    def wants_mark(self, inner_steps: int) -> bool:
        """Whether hosts are to be asked for a mark, now that the run has come to `inner_steps`."""
        if self.as_rehearsed:
            return False
        at_mark = self.census.inner_steps
        if inner_steps >= self.planned and (at_mark < self.planned or self.taken is None):
            return True
        return inner_steps >= self.census.next_mark and not self.evaluations.pending

    def begin(self, marks: Mapping[NodeId, int]) -> None:
        """Have the model at `marks` evaluated, and taken home unless there is a later one."""
        self.taken = Pending(self._evaluation(marks), marks)
        if self.home.pipeline is not None:
            self.taken.here = self.thread.submit(self.home.evaluate, marks)
        self.evaluations.begin(self.taken)

    def _evaluation(self, marks: Mapping[NodeId, int]) -> Evaluation:
        """What is known of the model at `marks` before its losses are."""
        at = {node: self.evaluations.reached[node][number] for node, number in marks.items()}
        self.census.recount({node: mark.trained for node, mark in at.items()})
        self.census.passes_mark()
        recorder, statuses = self.evaluations.recorder, self.health.statuses.values()
        if self.census.inner_steps:
            # What a host had counted since its last save is lost with it, and a total does not
            # fall.
            sent = sum(status.sent_bytes for status in statuses)
            slow = sum(status.slow_link_bytes for status in statuses)
            recorder.sent_bytes = max(recorder.sent_bytes, sent)
            recorder.slow_link_bytes = max(recorder.slow_link_bytes, slow)
        return self.census.evaluation(
            max(mark.time_s for mark in at.values()),
            sum(mark.absorbed for mark in at.values()),
            next(iter(at.values())).outer_steps,
            recorder,
        )

    def leave_rehearsal(self) -> None:
        """Somebody is lost, so from now on the run takes another course than the rehearsed one."""
        self.begin_reached()
        self.as_rehearsed = False

    def lose(self, node: NodeId) -> None:
        """A host has died, and with it its part of the model at all marks."""
        self.evaluations.lose(node)
        if self.taken is not None and node in self.taken.marks:
            self.taken = None

    # The end

    def stop_rule(self) -> str | None:
        """The name of the stop rule that holds now, but for `seconds`; None: there is none.

        A run that has reached its target ends with the model that has reached it.
        """
        target = self.census.plan.target_loss
        rule = self.census.reached(self.evaluations.latest_loss)
        if rule == "target_loss":
            self.taken, self.evaluations.pending = self.evaluations.latest, []
        elif target is not None and self.evaluations.pending:
            return None  # an earlier model may have reached the target
        return rule if self.taken is not None else None

    def take_home(self) -> Evaluation:
        """Have the model to take home here; what it is worth. Of several replicas it is the mean,
        whose loss nobody has computed before.

        Replicas that are lost on the way are left out, and the evaluation says so by its counts.

        Raises:
            TrainingError: there is no model, or it was lost with those who held it.
            Diverged: its loss is not finite.
        """
        taken = self.taken
        if taken is None:
            raise TrainingError("nobody who holds the model was there when it was to be taken home")
        if self.home.replica is None:
            return taken.evaluation
        missing = self.home.bring(taken.marks)
        if missing:
            taken = self._without(taken, missing)
        if self.home.pipeline is None and len(taken.marks) > 1:
            losses = self.home.evaluate(taken.marks)
            put_down(taken.evaluation, losses.loss, losses.own, "")
            taken.evaluation.replica_std = losses.replica_std
        return taken.evaluation

    def _without(self, taken: Pending, missing: Mapping[NodeId, Exception]) -> Pending:
        """The evaluation of those replicas that are there, in the place of the whole one."""
        why = "; ".join(f"{node}: {error}" for node, error in missing.items())
        left = {node: number for node, number in taken.marks.items() if node not in missing}
        if not left or self.home.pipeline is not None:
            raise TrainingError(
                f"the model to take home was lost with {listed(list(missing))}, who held it: {why}"
            )
        warnings.warn(
            f"the model that is taken home is the mean of {len(left)} replicas instead of "
            f"{len(taken.marks)}: {why}",
            stacklevel=2,
        )
        rest = Pending(self._evaluation(left), left)
        rest.heard = {node: taken.heard[node] for node in left if node in taken.heard}
        losses = rest.losses() or Losses(None)
        put_down(rest.evaluation, losses.loss, losses.own, "")
        self.evaluations.replace_latest(rest)
        return rest
