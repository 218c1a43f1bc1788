"""Who watches over the hosts of a live run: are they alive, how far are they, when are they saved,
and is the run over.

What belongs here: everything that nobody who has one actor can know. What does not: how a host is
made (`ray_host.py`), what goes before a run and comes after it (`launch.py`).
"""

from __future__ import annotations

import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from archipel import checkpoint, outer
from archipel.actor import NodeId, Vector
from archipel.checkpoint import Every, Surroundings
from archipel.errors import Diverged, TrainingError, UserError
from archipel.live.cluster import Machine, listed, machines, place
from archipel.live.host import Beginning, Meeting, News, NotFinite, Record, Setup, Snapshot, Status
from archipel.live.ray_host import make_followers, make_host
from archipel.recipe import Recipe
from archipel.run.census import NOT_FINITE
from archipel.run.metrics import Evaluation, Recorder
from archipel.train.replica import Replica

TICK_S = 1.0
"""How often hosts are asked how things stand."""
START_S = 300.0
"""Longest time until the next host is up: a process, torch, the data."""


@dataclass(frozen=True)
class Now:
    """How a live run stands, for whoever shows it.

    Attributes:
        inner_steps, planned: trained so far, and the plan.
        time_s: since the start.
        loss: mean of the workers' last training losses; None before the first.
        tokens_per_s: trained, since the start; None where nothing is trained.
        idle: the part of their time that workers have not computed so far.
        late: who is not there, or has been silent longest and what it does; None if nobody for more
            than a few ticks.
    """

    inner_steps: int
    planned: int
    time_s: float
    loss: float | None
    tokens_per_s: float | None
    idle: dict[NodeId, float]
    late: str | None


# Evaluation


@dataclass
class Evaluator:
    """Evaluates models in a thread of this process, one after the other.

    Attributes:
        replica: computes losses; None where nothing is trained.
        recorder: gets an `Evaluation` when its loss is there.
        deadline_s: longest wait for a part of a model.
        whole: makes whole models of the holders' parts.
        parts: the whole models that were evaluated last.
    """

    replica: Replica | None
    recorder: Recorder
    deadline_s: float
    whole: Callable[[Sequence[Vector]], list[Vector]]
    parts: list[Vector] = field(default_factory=list)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "evaluations"))
    waiting: list[Future[Evaluation]] = field(default_factory=list)

    def submit(self, evaluation: Evaluation, snapshots: Sequence[Snapshot]) -> None:
        """Evaluate the mean of the parts in `snapshots`."""
        self.waiting.append(self.thread.submit(self._evaluate, evaluation, snapshots))

    def collect(self, *, wait: bool) -> Evaluation | None:
        """Put down the evaluations that are done, or `wait` for all; the last one so far.

        A model that went with a host before it was here has no evaluation.

        Raises:
            Diverged: a loss is not finite.
        """
        while self.waiting and (wait or self.waiting[0].done()):
            try:
                evaluation = self.waiting.pop(0).result()
            except ray.exceptions.RayError:
                continue
            if evaluation.loss is not None and not np.isfinite(evaluation.loss):
                raise Diverged(
                    f"the validation loss is {evaluation.loss} at {evaluation.time_s:.1f} s, after "
                    f"{evaluation.inner_steps:,} "
                    "inner steps; try a lower learning rate, inner or outer"
                )
            self.recorder.evaluations.append(evaluation)
        return self.recorder.evaluations[-1] if self.recorder.evaluations else None

    def _evaluate(self, evaluation: Evaluation, snapshots: Sequence[Snapshot]) -> Evaluation:
        if self.replica is None:
            return evaluation
        torch.set_num_threads(1)
        self.parts = self.whole(
            [
                torch.from_numpy(np.array(ray.get(snapshot.model, timeout=self.deadline_s)))
                for snapshot in snapshots
            ]
        )
        model = outer.mean(self.parts)
        if len(self.parts) > 1:
            deviations = [
                (part - model)[: self.replica.layout.parameters].square().mean()
                for part in self.parts
            ]
            evaluation.replica_std = float(torch.stack(deviations).mean().sqrt())
            evaluation.replica_loss = float(
                np.mean([self.replica.evaluate(part)[0] for part in self.parts])
            )
        [evaluation.loss] = self.replica.evaluate(model)
        return evaluation


# The one who watches


class Died(TrainingError):
    """A host's process is gone."""


@dataclass
class Watch:
    """Hosts that run, and what is known of them.

    As long as nobody has been lost the model is evaluated at the rehearsed `marks`, where the
    holders have kept it; from then on (`exact` is false) it is evaluated as it is when it is seen
    to have passed a mark of the plan.

    Attributes:
        setups: what the first host of each node was told.
        peers: those whom each node may send to.
        marks: see `launch.rehearse`.
        planned: inner steps.
        tokens_per_step: of one inner step; None where nothing is trained.
        every: how often all are saved, in `folder`; None: never.
        number: tells this run's saves from those of another run of the same name.
        address: of the cluster; None: a private one.
        spent_s: what the run has taken before it was stopped.
        hosts, places: the Ray actor of each node that is there or being started, and its machine.
        followers: the other processes of workers that have several.
        runs, starting, saving, asked: calls that have not come back, and whose they are.
        homeless: nodes that wait for a machine of their region, how they will begin there, and from
            which batch on.
        lives: of nodes that have been started again since this process has run.
        restarts: how often each node has been started again in the whole run.
        losses: of hosts, so far.
        lost_s: when the last one was lost.
        not_finite: how often each worker's loss has not been finite, with no inner steps that it
            has finished in between.
        warned: of whose updates it has been said that they are refused.
    """

    recipe: Recipe
    setups: Mapping[NodeId, Setup]
    peers: Mapping[NodeId, Sequence[NodeId]]
    places: dict[NodeId, Machine]
    marks: list[dict[NodeId, int]]
    evaluator: Evaluator
    planned: int
    tokens_per_step: int | None
    progress: Callable[[Now], None]
    folder: Path
    every: Every | None
    number: int
    address: str | None
    spent_s: float = 0.0
    exact: bool = True
    hosts: dict[NodeId, Any] = field(default_factory=dict)
    followers: dict[NodeId, list[Any]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    started_s: float = 0.0
    statuses: dict[NodeId, Status] = field(default_factory=dict)
    answered_s: dict[NodeId, float] = field(default_factory=dict)
    asked: dict[Any, NodeId] = field(default_factory=dict)
    runs: dict[Any, NodeId] = field(default_factory=dict)
    starting: dict[Any, NodeId] = field(default_factory=dict)
    saving: dict[Any, NodeId] = field(default_factory=dict)
    homeless: dict[NodeId, tuple[Beginning, int]] = field(default_factory=dict)
    lives: dict[NodeId, int] = field(default_factory=dict)
    restarts: dict[NodeId, int] = field(default_factory=dict)
    losses: int = 0
    lost_s: float = 0.0
    not_finite: dict[NodeId, int] = field(default_factory=dict)
    warned: set[NodeId] = field(default_factory=set)
    saves: int = 0
    next_save: float = 0.0
    sent_bytes: float = 0.0
    slow_link_bytes: float = 0.0
    evaluated: int = 0
    final: list[Snapshot] = field(default_factory=list)

    @property
    def now(self) -> float:
        """Seconds that the run has taken."""
        return time.perf_counter() - self.started_s

    @property
    def deadline_s(self) -> float:
        return self.recipe.live.deadline_s

    @property
    def holders(self) -> list[NodeId]:
        """Those who hold a part of the model to take home: as rehearsed, or as they say."""
        if self.exact:
            return list(self.marks[-1])
        running = set(self.runs.values())
        return [node for node, status in self.statuses.items() if status.holds and node in running]

    @property
    def inner_steps(self) -> int:
        """Inner steps that had been trained when the model was taken that was evaluated last; one
        that a replica takes in stages is one.
        """
        return self._whole_steps(snapshot.trained for snapshot in self.final)

    @property
    def absorbed_steps(self) -> int:
        """Those of them that are in that model."""
        return self._whole_steps(snapshot.absorbed for snapshot in self.final)

    # The beginning

    def start(self, meetings: Mapping[NodeId, Meeting]) -> None:
        """Make all hosts, and wait until they are up.

        Args:
            meetings: where those meet that hold the stages of a model.

        Raises:
            UserError, TrainingError: one has failed, or is not up in time.
        """
        for node, setup in self.setups.items():
            self.hosts[node] = make_host(self.recipe, setup, self.places[node])
        for node in self.hosts:
            self._connect(node, self.setups[node], meetings.get(node))
        while self.starting:
            ready, late = ray.wait(list(self.starting), timeout=START_S)
            if not ready:
                raise TrainingError(
                    f"{listed([self.starting[ref] for ref in late])} did not start within "
                    f"{START_S:g} s"
                )
            for ref in ready:
                self._check(ref, self.starting[ref])
                for text in ray.get(ref):
                    warnings.warn(text, stacklevel=2)
                del self.starting[ref]

    def _connect(self, node: NodeId, setup: Setup, meeting: Meeting | None = None) -> None:
        """Tell a host where its peers are, and those with whom it takes its inner steps."""
        if self.recipe.live.processes > 1 and setup.trains:
            meeting = Meeting(self.meeting_file(), 0, self.recipe.live.processes)
            self.followers[node] = make_followers(self.recipe, setup, self.places[node], meeting)
        peers = {peer: self.hosts[peer] for peer in self.peers[node] if peer in self.hosts}
        self.starting[
            self.hosts[node].connect.remote(peers, meeting, self.followers.get(node, []))
        ] = node

    def meeting_file(self) -> str:
        """A place where processes of one machine can meet, and nobody else can guess."""
        self.files.append(Path(tempfile.gettempdir()) / f"archipel-{secrets.token_hex(16)}")
        return f"file://{self.files[-1]}"

    # While it goes on

    def run(self) -> str:
        """Let all hosts run and watch them until a stop rule holds; its name. `final` then has the
        model to take home.

        Raises:
            Diverged: a loss is not finite.
            TrainingError: a host has failed, or has died or fallen silent once too often; or
                nothing happens any more.
        """
        self.started_s = time.perf_counter() - self.spent_s
        for node in self.hosts:
            self._let_run(node)
        self._save_own()
        self._plan_next_save()
        reached = [self.hosts[node].reached.remote() for node in self.holders] if self.exact else []
        stop = self.recipe.run
        while True:
            tick_s = TICK_S if self.exact else TICK_S / 5  # nobody says that a mark is passed
            rest_s = (
                tick_s if stop.seconds is None else max(0.0, min(tick_s, stop.seconds - self.now))
            )
            reached = reached if self.exact else []
            ended = self._wait([*self.runs, *self.starting, *self.saving, *reached], rest_s)
            for ref in ended:
                self._came_back(ref)
            reached = [ref for ref in reached if ref not in ended]
            self.ask()
            self._house()
            self.progress(self._report())
            self._evaluate_marks()
            last = self.evaluator.collect(wait=stop.target_loss is not None and not reached)
            if (
                stop.target_loss is not None
                and last
                and last.loss is not None
                and last.loss <= stop.target_loss
            ):
                return "target_loss"
            if (
                self.inner_steps >= self.planned
                if not self.exact
                else self.evaluated == len(self.marks)
            ):
                return "steps"
            if stop.seconds is not None and self.now >= stop.seconds:
                self.take_home_now()
                return "seconds"
            self._save_if_due()
            self._check_deadline()

    def ask(self) -> None:
        """Ask all hosts how things stand, but those that still owe an answer, and note what is said
        within a tick.
        """
        silent = set(self.asked.values())
        # What it has kept at marks is needed no more once it has been evaluated, or marks do not
        # count any more.
        needless = self.evaluated if self.exact else len(self.marks)
        self.asked |= {
            self.hosts[node].status.remote(needless): node
            for node in self.runs.values()
            if node not in silent
        }
        for ref in self._wait(list(self.asked), TICK_S, everything=True):
            node = self.asked.pop(ref)
            with suppress(ray.exceptions.RayError):  # its run says so too
                self.statuses[node] = status = ray.get(ref)
                self.answered_s[node] = self.now
                for sender in status.refused.keys() - self.warned:
                    warnings.warn(
                        f"{node} refuses an update of {sender}: not finite, or absurdly large",
                        stacklevel=2,
                    )
                self.warned |= status.refused.keys()

    def _wait(self, refs: list[Any], timeout_s: float, *, everything: bool = False) -> list[Any]:
        """Those calls that have come back, when one has, or `everything`, or when time is up."""
        if not refs:
            time.sleep(0.0 if everything else timeout_s)
            return []
        ready, _ = ray.wait(refs, num_returns=len(refs) if everything else 1, timeout=timeout_s)
        return list(ready)

    def _came_back(self, ref: Any) -> None:
        """A call is over: a host's run, which only ends so early if something is wrong; its start;
        or its saving.
        """
        if ref in self.runs:
            self._examine(ref, self.runs[ref])
        elif ref in self.starting:
            node = self.starting[ref]
            if self._examine(ref, node):
                for text in ray.get(ref):
                    warnings.warn(text, stacklevel=2)
                del self.starting[ref]
                self._tell_others(News(node, self.lives[node]))
                self._let_run(node)
        elif ref in self.saving:
            node = self.saving.pop(ref)
            with suppress(Died):  # its run says so too
                self._check(ref, node)

    def _let_run(self, node: NodeId) -> None:
        self.runs[self.hosts[node].run.remote(self.now)] = node
        self.answered_s[node] = self.now

    def _evaluate_marks(self) -> None:
        """Have the model evaluated at the marks that all its holders have passed."""
        if self.exact:
            self._evaluate_kept()
        else:
            between = max(1, self.planned // self.recipe.run.evaluations)
            trained = self._whole_steps(self.statuses[node].trained for node in self.holders)
            before = [
                evaluation.inner_steps for evaluation in self.evaluator.recorder.evaluations[-1:]
            ]  # of a run that goes on
            passed = max(self.inner_steps, *before, 0)
            if trained >= min(self.planned, (passed // between + 1) * between):
                self.take_home_now()

    def _evaluate_kept(self) -> None:
        kept = [self.statuses[node].snapshots for node in self.holders if node in self.statuses]
        while len(kept) == len(self.holders) and self.evaluated < min(map(len, kept)):
            self._evaluate([snapshots[self.evaluated] for snapshots in kept])
            self.evaluated += 1

    def take_home_now(self) -> None:
        """Have the model evaluated, and taken home, as it is at this moment; as it was last if
        nobody holds it now.
        """
        if self.exact:
            self._evaluate_kept()
        refs = {self.hosts[node].snapshot.remote(): node for node in self.holders}
        ready = self._wait(list(refs), self.deadline_s, everything=True)
        if self.exact and len(ready) < len(refs):
            late = listed([node for ref, node in refs.items() if ref not in ready])
            raise TrainingError(
                f"{late} did not give its model within {self.deadline_s:g} s (live.deadline_s)"
            )
        snapshots = []
        for ref in ready:
            with suppress(ray.exceptions.RayError):  # its run says so too
                snapshots.append(ray.get(ref))
        if snapshots and (not self.exact or len(snapshots) == len(refs)):
            self._evaluate(snapshots)

    def _evaluate(self, snapshots: list[Snapshot]) -> None:
        self.final = snapshots
        first = not self.inner_steps
        if (
            not first
        ):  # what a host had counted since its last save is lost with it, and a total does not fall
            self.sent_bytes = max(
                self.sent_bytes, sum(status.sent_bytes for status in self.statuses.values())
            )
            self.slow_link_bytes = max(
                self.slow_link_bytes,
                sum(status.slow_link_bytes for status in self.statuses.values()),
            )
        evaluation = Evaluation(
            time_s=max(snapshot.time_s for snapshot in snapshots),
            inner_steps=self.inner_steps,
            tokens=None
            if self.tokens_per_step is None
            else self.inner_steps * self.tokens_per_step,
            absorbed_steps=self.absorbed_steps,
            outer_steps=snapshots[0].outer_steps,
            sent_bytes=0 if first else round(self.sent_bytes),
            slow_link_bytes=0 if first else round(self.slow_link_bytes),
        )
        self.evaluator.submit(evaluation, snapshots)

    def _whole_steps(self, counted: Any) -> int:
        return int(sum(counted)) // self.recipe.pipeline.stages

    # When something is wrong

    def _examine(self, ref: Any, node: NodeId) -> bool:
        """Whether a call has come back well. If its host has died, or its loss is not finite, it is
        started again.

        Raises:
            UserError, TrainingError: that would not help; or has not, as often as it may.
        """
        try:
            self._check(ref, node)
        except (Died, NotFinite) as error:
            if isinstance(error, NotFinite):
                # A loss that it has said since it was started is one of inner steps that it has
                # finished.
                finished = node in self.statuses and self.statuses[node].loss is not None
                count = self.not_finite[node] = 1 if finished else self.not_finite.get(node, 0) + 1
                if self.recipe.run.strict or count == NOT_FINITE:
                    times = f", {count} times in a row" if count > 1 else ""
                    raise Diverged(f"{error}{times}; try a lower learning rate") from None
                self._lose(node, error, "reset", error.batch)
            else:
                self._lose(node, error, "restart")
            return False
        return True

    def _check(self, ref: Any, node: NodeId) -> None:
        """Raise what a host's call has raised, if it has."""
        try:
            ray.get(ref)
        except ray.exceptions.RayActorError as error:
            reason = " ".join(str(error).split())[:80]
            raise Died(
                f"{self._who(node)} died; {self._last_words(node)}; Ray says: {reason}"
            ) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (UserError, TrainingError)):
                raise error.cause from None
            raise TrainingError(
                f"{self._who(node)} failed: {type(error.cause).__name__}: {error.cause}"
            ) from None

    def _check_deadline(self) -> None:
        for node in list(self.runs.values()):
            silent_s = self.now - self.answered_s[node]
            if silent_s > self.deadline_s:
                silent = (
                    f"has not answered for {silent_s:.0f} s (live.deadline_s = {self.deadline_s:g})"
                )
                self._lose(
                    node,
                    TrainingError(f"{self._who(node)} {silent}; {self._last_words(node)}"),
                    "restart",
                )
        for node in list(self.starting.values()):
            if self.now - self.answered_s[node] > START_S:
                self._lose(
                    node,
                    TrainingError(f"{self._who(node)} did not start within {START_S:g} s"),
                    "restart",
                )
        statuses = self.statuses
        quiet_s = min(
            (status.quiet_s for status in statuses.values()), default=self.now - self.lost_s
        )
        if self.starting or len(statuses) < len(self.runs) or quiet_s <= self.deadline_s:
            return
        doing = [
            f"{node} is lost, and no machine of region {node.region!r} is there"
            for node in self.homeless
        ]
        doing += [f"{node} {status.doing}" for node, status in statuses.items()]
        more = f" and {len(doing) - 8} more" if len(doing) > 8 else ""
        raise TrainingError(
            f"nothing has happened for {self.deadline_s:g} s (live.deadline_s): "
            f"{'; '.join(doing[:8])}{more}"
        )

    def _lose(self, node: NodeId, why: Exception, begins: Beginning, batch: int = 0) -> None:
        """A host is lost: end what is left of it, tell the others, and start it again, from `batch`
        on at least.
        """
        if self.exact:
            self._evaluate_kept()
        for process in [self.hosts.pop(node), *self.followers.pop(node, [])]:
            ray.kill(process)
        for calls in (self.runs, self.starting, self.saving, self.asked):
            for ref in [ref for ref, owner in calls.items() if owner == node]:
                del calls[ref]
        self.statuses.pop(node, None)
        self.exact = False
        self.losses += 1
        self.lost_s = self.now
        before = self.restarts.get(node, 0)
        if before >= self.recipe.live.max_restarts or self.recipe.pipeline.stages > 1:
            again = (
                f"; it has been started again {before} times (live.max_restarts)" if before else ""
            )
            raise (Diverged if isinstance(why, Diverged) else TrainingError)(f"{why}{again}")
        warnings.warn(
            f"{why}; it is started again (live.max_restarts = {self.recipe.live.max_restarts})",
            stacklevel=2,
        )
        self.restarts[node] = before + 1
        self._tell_others(News(node))
        self.homeless[node] = begins, batch
        self._house()

    def _house(self) -> None:
        """Start those again that have a machine to live on: their own, or another one of their
        region.
        """
        if not self.homeless:
            return
        found = machines()
        workers = [node for node, setup in self.setups.items() if setup.shard is not None]
        live, running = self.recipe.live, set(self.runs.values())
        for node, (begins, batch) in list(self.homeless.items()):
            here = [machine for machine in found if machine.id == self.places[node].id]
            try:
                self.places |= place(
                    [node], workers, here or found, live.gpu_fraction * live.processes, self.address
                )
            except UserError:  # there is none now
                continue
            del self.homeless[node]
            self.lives[node] = self.lives.get(node, 0) + 1
            setup = replace(
                self.setups[node],
                marks=(),
                begins=begins,
                batch=batch,
                life=self.lives[node],
                lives={other: life for other, life in self.lives.items() if other != node},
                gone=tuple(
                    other for other in self.setups if other not in running and other != node
                ),
                losses=self.losses,
            )
            self.hosts[node] = make_host(self.recipe, setup, self.places[node])
            self.answered_s[node] = self.now
            self._connect(node, setup)

    def _tell_others(self, news: News) -> None:
        handle = None if news.life is None else self.hosts[news.node]
        for node, host in self.hosts.items():
            if node != news.node:
                host.tell.remote(news, handle)

    def _who(self, node: NodeId) -> str:
        return f"{node} in region {node.region!r} on {self.places[node].address}"

    def _last_words(self, node: NodeId) -> str:
        if node not in self.statuses:
            return "it had not said anything yet"
        status = self.statuses[node]
        return (
            f"last words, at {status.time_s:.1f} s: {status.doing}, {status.events:,} events so far"
        )

    # Saving

    def _save_if_due(self) -> None:
        match self.every:
            case Every(tokens=int()) if self._saved_by() < self.next_save:
                return
            case Every(seconds=float()) if self.now < self.next_save:
                return
            case None:
                return
        busy = set(self.saving.values())
        self.saving |= {
            self.hosts[node].save.remote(): node for node in self.runs.values() if node not in busy
        }
        self._save_own()
        self._plan_next_save()

    def _saved_by(self) -> int:
        return (self.tokens_per_step or 0) * self._whole_steps(
            status.trained for status in self.statuses.values() if status.holds
        )

    def _plan_next_save(self) -> None:
        match self.every:
            case Every(tokens=int(tokens)):
                self.next_save = (self._saved_by() // tokens + 1) * tokens
            case Every(seconds=float(seconds)):
                self.next_save = self.now + seconds

    def save_all(self) -> None:
        """Have all hosts saved before the run is stopped, and warn of those that are not within the
        deadline.
        """
        if self.every is None:
            return
        refs = {self.hosts[node].save.remote(): node for node in self.runs.values()}
        ready = self._wait(list(refs), self.deadline_s, everything=True)
        for ref in ready:
            with suppress(ray.exceptions.RayError):
                ray.get(ref)
        if late := [node for ref, node in refs.items() if ref not in ready]:
            warnings.warn(
                f"{listed(late)} had not ended its inner steps after {self.deadline_s:g} s, and is "
                "not saved",
                stacklevel=2,
            )
        self.evaluator.collect(wait=True)
        self._save_own()

    def _save_own(self) -> None:
        """Save what nobody else knows. Each node's folder is inside this one's."""
        if self.every is None:
            return
        evaluations = self.evaluator.recorder.evaluations
        state = {
            "number": self.number,
            "time_s": self.now,
            "evaluations": evaluations,
            "restarts": self.restarts,
            "saves": self.saves,
        }
        checkpoint.save(
            self.folder, self.saves, state, Surroundings({}), self.recipe.to_yaml(), self.every
        )
        self.saves += 1

    # The end

    def stop(self) -> list[Record]:
        """Stop all hosts; what each leaves."""
        for node in self.runs.values():
            self.hosts[node].stop.remote()
        ready = self._wait(list(self.runs), self.deadline_s, everything=True)
        if late := [node for ref, node in self.runs.items() if ref not in ready]:
            raise TrainingError(f"{listed(late)} did not stop within {self.deadline_s:g} s")
        records = []
        for ref in ready:
            with suppress(Died):
                self._check(ref, self.runs[ref])
                records.append(ray.get(ref))
        return records

    def end(self) -> None:
        """End all hosts, whatever they are doing. They know each other, so Ray would keep them for
        as long as the cluster runs.
        """
        self.evaluator.thread.shutdown(wait=False, cancel_futures=True)
        for process in [
            *self.hosts.values(),
            *(follower for group in self.followers.values() for follower in group),
        ]:
            ray.kill(process)
        for path in self.files:
            path.unlink(missing_ok=True)

    # For the terminal

    def _report(self) -> Now:
        workers = [
            worker.id for worker in self.recipe.topology.workers if worker.id in self.statuses
        ]
        losses = [loss for worker in workers if (loss := self.statuses[worker].loss) is not None]
        trained = min(
            self.planned, self._whole_steps(status.trained for status in self.statuses.values())
        )
        quiet_s, slowest = max(
            ((status.quiet_s, node) for node, status in self.statuses.items()), default=(0.0, None)
        )
        late = (
            None
            if slowest is None or quiet_s < 5 * TICK_S
            else f"{slowest} {self.statuses[slowest].doing}"
        )
        for node in self.starting.values():
            late = f"{node} is being started again"
        for node in self.homeless:
            late = f"{node}, for which no machine of region {node.region!r} is there"
        return Now(
            trained,
            self.planned,
            self.now,
            float(np.mean(losses)) if losses else None,
            self.tokens_per_step and trained * self.tokens_per_step / self.now,
            {
                worker: max(0.0, 1 - self.statuses[worker].compute_s / self.statuses[worker].time_s)
                for worker in workers
            },
            late,
        )
