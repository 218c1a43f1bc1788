"""Watching over the hosts of a live run: who is lost, when is the model evaluated, when is it over.

What belongs here: decisions for which one has to look at more than one host. What does not: calls
to hosts (`fleet.py`), what they have said of themselves (`health.py`), the rules of restarts
(`restarts.py`) and of saves (`saves.py`), how far the run is (`course.py`), and what goes before a
run and comes after it (`launch.py`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from archipel.actor import NodeId
from archipel.errors import TrainingError
from archipel.live.cluster import listed
from archipel.live.course import Course
from archipel.live.fleet import Died, Fleet, Reply
from archipel.live.health import Health, Now
from archipel.live.notices import Notices
from archipel.live.on_purpose import OnPurpose
from archipel.live.protocol import BadLoss, HostSetup, Mark, NeedsWeights, News, Ready, Status
from archipel.live.restarts import Restarts
from archipel.live.saves import SaveSchedule, WatchState, save_watch
from archipel.recipe import Recipe

TICK_S = 1.0
"""How often hosts are asked how they are."""
QUICK_TICK_S = 0.2
"""The same where nobody says on its own that it is time for an evaluation, or for the end."""
START_S = 300.0
"""Longest time until a host is up: a process, torch, the data."""


@dataclass
class Watch:
    """A live run, as the command sees it.

    Attributes:
        recipe: the recipe of the run.
        setups: what the first host of each node was told.
        peers: the nodes that each node may send to.
        fleet: the hosts.
        health: what hosts have reported.
        course: how far the run is.
        schedule: when all are saved.
        restarts: which hosts are lost, and how often each was started again.
        on_purpose: what goes wrong on purpose.
        progress: told about once a second how things stand.
        folder: where the watch saves what no host knows.
        saved: what it has saved last.
        address: address of the cluster; None: a private one.
        started_s: when the run started, on this process's clock; None: it has not.
        notices: what the user is told meanwhile.
    """

    recipe: Recipe
    setups: Mapping[NodeId, HostSetup]
    peers: Mapping[NodeId, Sequence[NodeId]]
    fleet: Fleet
    health: Health
    course: Course
    schedule: SaveSchedule
    restarts: Restarts
    on_purpose: OnPurpose
    progress: Callable[[Now], None]
    folder: Path
    saved: WatchState
    address: str | None
    started_s: float | None = None

    def __post_init__(self) -> None:
        self.notices = Notices(self.course.evaluations.recorder, self.health)

    @property
    def now(self) -> float:
        """Seconds that the run has taken."""
        return 0.0 if self.started_s is None else time.perf_counter() - self.started_s

    @property
    def deadline_s(self) -> float:
        return self.recipe.live.deadline_s

    def _let_run(self, node: NodeId) -> None:
        self.fleet.run(node, self.now, self.peers[node])
        self.fleet.call(node, "next_event")
        self.health.begin(node, self.now)

    # While it goes on

    def run(self) -> str:
        """Let all hosts run and watch them until a stop rule holds; its name.

        Raises:
            Diverged: a loss is not finite.
            TrainingError: a host has failed, or has died or fallen silent once too often; or
                nothing happens any more.
        """
        self.started_s = time.perf_counter() - self.saved.time_s
        for node in self.setups:
            self._let_run(node)
        self.save()
        while True:
            for reply in self.fleet.replies(
                self._rest_s(), "run", "next_event", "connect", "begin_again", "save"
            ):
                self._take(reply)
            self.ask(self.fleet.waiting("run"))
            for node in self.on_purpose.act(self.now):
                self._lose(node, f"{node} leaves, on purpose")
            self._restart_lost()
            _tell(self)
            self.course.begin_reached()
            if self.course.wants_mark(self.inner_steps()):
                self.mark_now()
            self.course.evaluations.collect()
            if (rule := self.course.stop_rule()) is not None:
                return rule
            if (seconds := self.recipe.run.seconds) is not None and self.now >= seconds:
                self.mark_now()
                return "seconds"
            if self.schedule.is_due(self._tokens(), self.now):
                self.save_hosts()
                self.save()
            self._check_alive()

    def _rest_s(self) -> float:
        """How long to wait for something to happen."""
        plan = self.course.census.plan
        told = self.course.as_rehearsed and plan.target_loss is None and plan.stages == 1
        tick_s = TICK_S if told else QUICK_TICK_S
        return tick_s if plan.seconds is None else max(0.0, min(tick_s, plan.seconds - self.now))

    def ask(self, nodes: Iterable[NodeId]) -> None:
        """Ask hosts how they are, but those that still owe an answer, and note what is said within
        a tick.
        """
        for node in set(nodes) - self.fleet.waiting("status"):
            self.fleet.call(node, "status", self.course.evaluations.released(node))
        for reply in self.fleet.replies(TICK_S, "status", everything=True):
            if isinstance(status := reply.value, Status):  # else its run says so too
                self.health.hear(reply.node, status, self.now)
                self.course.evaluations.hear(reply.node, status.first_mark, status.marks)
                self.notices.hear(reply.node, status)
        if self.notices.look(self.now):
            self.course.leave_rehearsal()

    def _take(self, reply: Reply) -> None:
        """A call has come back. A host's run only does so early if something is wrong."""
        node = reply.node
        if node not in self.fleet.hosts:  # it was found to be lost a moment ago
            return
        match reply.what, reply.value:
            case _, Died() as error:
                self._lose(node, self.death(node, error))
            case _, Exception() as error:
                raise error
            case "connect", Ready() as ready:
                self.hear_ready(node, ready)
                self._tell_others(self.restarts.join(node))
                self._let_run(node)
            case "connect", NeedsWeights():
                self.fleet.give_weights(node)
            case "begin_again", _:
                self._tell_others(self.restarts.join(node))
            case "next_event", event:
                self.fleet.call(node, "next_event")
                if event is not None:
                    self._begin_again(node, event)

    def hear_ready(self, node: NodeId, ready: Ready) -> None:
        """A host can run."""
        self.fleet.addresses[node] = ready.address
        self.on_purpose.tell(node)
        for text in ready.said:
            warnings.warn(text, stacklevel=2)

    # Marks

    def mark_now(self) -> None:
        """Have the model evaluated and taken home as it is now; as it was last if nobody holds it.

        Raises:
            TrainingError: a holder does not answer.
        """
        self.course.begin_reached()
        asked = self.course.holders(self.restarts.gone)
        marks: dict[NodeId, int] = {}
        for node in set(asked) - self.fleet.waiting("mark"):
            self.fleet.call(node, "mark")
        for reply in self.fleet.replies(self.deadline_s, "mark", everything=True):
            match reply.value:
                case (int() as number, Mark() as mark):
                    self.course.evaluations.hear(reply.node, number, [mark])
                    marks[reply.node] = number
        if self.course.as_rehearsed and (late := [node for node in asked if node not in marks]):
            raise TrainingError(
                f"{listed(late)} did not give its model within {self.deadline_s:g} s "
                "(live.deadline_s)"
            )
        if marks:
            self.course.begin({node: marks[node] for node in self.setups if node in marks})

    def inner_steps(self) -> int:
        """Inner steps of the run, as hosts have said last."""
        return self.course.inner_steps(self.course.holders(self.restarts.gone))

    def now_report(self) -> Now:
        """How things stand."""
        return self.health.report(
            min(self.course.planned, self.inner_steps()),
            self.course.census.plan,
            self.now,
            [worker.id for worker in self.recipe.topology.workers],
            starting=self.fleet.waiting("connect"),
            without_machine=self.restarts.without_process,
        )

    # When something is wrong

    def _lose(self, node: NodeId, why: str) -> None:
        """A host's process is gone, or as good as gone: end what is left of it, tell the others,
        and have it started again.

        Raises:
            TrainingError: not again.
        """
        self.course.leave_rehearsal()
        self.drop(node)
        again = self.restarts.counts.get(node, 0)
        purpose = node in self.on_purpose.away
        may_restart = self.restarts.may_restart(node) and self.recipe.pipeline.stages == 1
        if not purpose and not may_restart:
            times = f"; it has been started again {again} times (live.max_restarts)"
            raise TrainingError(f"{why}{times if again else ''}")
        returns, most = self.on_purpose.returns(node), self.restarts.most
        then = f"it is started again (live.max_restarts = {most})" if returns else "it stays away"
        warnings.warn(f"{why}; {then}{', on purpose' * purpose}", stacklevel=2)
        self._tell_others(self.restarts.lose(node, process=True, returns=returns))

    def _tell_others(self, news: News | None) -> None:
        if news is not None:
            self.notices.tell(news, self.now)
            self.fleet.tell_others(news)

    def drop(self, node: NodeId) -> None:
        """Forget a host that has died, and what was waited for from it."""
        self.fleet.kill(node)
        self.health.lose(node, self.now)
        self.course.lose(node)

    def _begin_again(self, node: NodeId, bad: BadLoss) -> None:
        """A loss is not finite: its worker is lost to all others, and then there again.

        Raises:
            Diverged: this ends the run; see `Census.bad_loss`.
        """
        if bad.finished:
            self.course.census.bad_losses.pop(node, None)
        self.course.census.bad_loss(node, f"{bad.text}, after {self.now:.1f} s")
        self.course.evaluations.recorder.restarts(node, bad.text, self.now)
        self.course.leave_rehearsal()
        self._tell_others(self.restarts.lose(node, process=False))
        self.fleet.call(node, "begin_again", self.restarts.begin_life(node))

    def _restart_lost(self) -> None:
        """Start those again that have a machine to run on: their own, or another one of their
        region.
        """
        workers = [node for node, setup in self.setups.items() if setup.shard is not None]
        for node in list(self.restarts.without_process):
            away = self.on_purpose.is_away(node, self.now)
            if away or not self.fleet.find_machine(node, workers, self.address):
                continue
            setup = replace(
                self.setups[node],
                marks=(),
                begins="restart",
                membership=self.restarts.begin_life(node),
            )
            self.fleet.make(node, setup)
            self.fleet.connect(setup, node, None)
            self.health.begin(node, self.now)

    def _check_alive(self) -> None:
        """Find hosts that have been silent for too long, and whether all stand still.

        Raises:
            TrainingError: all do.
        """
        for node in self.fleet.waiting("run"):
            if self.health.silence_s(node, self.now) > self.deadline_s:
                self._lose(node, self.death(node, None))
        starting = self.fleet.waiting("connect")
        for node in starting:
            if self.health.silence_s(node, self.now) > START_S:
                who = self.fleet.describe(node)
                self._lose(node, f"{who} did not start within {START_S:g} s")
        running = self.fleet.waiting("run")
        waits = starting or self.on_purpose.waits(self.now)
        if not waits and all(node in self.health.statuses for node in running):
            away = self.on_purpose.away
            without = [node for node in self.restarts.without_process if node not in away]
            if (text := self.health.standstill(self.now, without)) is not None:
                raise TrainingError(text)

    def death(self, node: NodeId, error: Died | None) -> str:
        """Who has died, or, without an `error`, fallen silent; and its last words."""
        return self.health.death(node, self.fleet.describe(node), self.now, error)

    # Saving

    def save_hosts(self) -> None:
        """Have all hosts saved that are not being saved."""
        for node in self.fleet.waiting("run") - self.fleet.waiting("save"):
            self.fleet.call(node, "save")

    def save(self) -> None:
        """Save what no host knows, and plan when all are saved next."""
        if self.schedule.every is None:
            return
        self.saved = replace(
            self.saved,
            time_s=self.now,
            evaluations=self.course.evaluations.recorder.evaluations,
            restarts=self.restarts.counts,
            bad_losses=self.course.evaluations.recorder.restarted,
            saves=self.saved.saves + 1,
        )
        save_watch(self.folder, self.saved, self.recipe.to_yaml(), self.schedule.every)
        self.schedule.plan(self._tokens(), self.now)

    def _tokens(self) -> int:
        return (self.course.census.plan.tokens_per_step or 0) * self.inner_steps()


def _tell(watch: Watch) -> None:
    """Tell how things stand. A tracker that takes long must not make hosts look silent."""
    before_s = watch.now
    watch.progress(watch.now_report())
    if watch.now > before_s + TICK_S:
        watch.ask(watch.fleet.waiting("run"))
