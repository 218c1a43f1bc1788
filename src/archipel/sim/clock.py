"""The virtual clock: actors run on modelled time, with real gradients or none.

What belongs here: the heap of events and what puts events on it. What does not: how long a message
takes (`network.py`), how a gradient is computed (`pool.py`), what a method does.

Events are ordered by (time, sequence number) and by nothing else, so that one seed gives one run.
An inner step takes the profile's step time divided by its worker's relative speed. Its gradients
are computed in the background from the moment it starts on the virtual clock, and are waited for
only when they are the next event: all workers that train at the same virtual time really train at
the same time.

Faults that a recipe asks for are events like all others, and what is lost is taken off the heap: a
node that is gone has nothing under way. With a schedule, even an empty one, the books of
`invariants.py` are kept. A worker whose loss is not finite is lost and back at once, in every run.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archipel import outer
from archipel.actor import (
    Actor,
    Gradient,
    Group,
    Joined,
    Lost,
    Message,
    NodeId,
    Reduced,
    Refused,
    Start,
    Trained,
    Update,
    Vector,
    Worker,
)
from archipel.errors import Diverged, TrainingError, UserError
from archipel.run.invariants import Ledger, Violation, counts
from archipel.run.metrics import Evaluation, Recorder, Training
from archipel.run.screening import Screen, ScreeningConfig, vectors_of
from archipel.sim.faults import Cut, Fail, Faults, Mend, Notice, Return, Save, Strike
from archipel.sim.network import FairLink, Network
from archipel.sim.topology import Profile
from archipel.train.pipeline import Pipeline, join, norm_end_s, step_end_s
from archipel.train.trainer import Promise, Trainer

NOT_FINITE = 3
"""A worker whose loss is not finite so many times in a row, with no inner steps that it finishes in
between, ends the run.
"""


@dataclass(frozen=True)
class Stop:
    """When a run ends: at the first of these. Inner steps are those that the model to take home has
    absorbed.
    """

    steps: int | None = None
    seconds: float | None = None
    target_loss: float | None = None


# What lies on the heap. Not frozen: that would make each of them three times as slow to create.


@dataclass(eq=False, slots=True)
class Deliver:
    """A message arrives."""

    to: NodeId
    message: Message
    sender: NodeId


@dataclass(eq=False, slots=True)
class Finish:
    """A worker's inner steps end; the answer is waited for now, if it is still being computed."""

    worker: NodeId
    answer: Promise
    steps: int
    progress: int


@dataclass(eq=False, slots=True)
class Drain:
    """A transfer on a shared link ends, unless another transfer has started or ended there
    since.
    """

    direction: tuple[str, str]
    version: int


@dataclass(eq=False, slots=True)
class Tally:
    """The inner steps of a pipeline's team end; until now they have sent this much."""

    messages: int = 0
    sent_bytes: float = 0.0
    slow_link_bytes: float = 0.0


Event = Deliver | Finish | Drain | Tally | Strike


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """What a node of a pipeline asked for, while it waits for the others of its team."""

    theta: Vector
    steps: int
    progress: int


@dataclass(eq=False, slots=True)
class Contribution:
    """What a member of a collective called with, while it waits for the others."""

    group: Group
    vector: Vector
    round: int


@dataclass(frozen=True, eq=False, slots=True)
class Saved:
    """A node's state that it would restart from: its actor, and what the trainer keeps of a
    worker.
    """

    actor: Actor
    worker: Any


@dataclass
class Trouble:
    """How things stand with what goes wrong.

    Attributes:
        begun: somebody is not there, or has not been for a while.
        down: who is not there, and since when.
        lost: those of them whose peers have been told.
        left: those who never come again.
        severed: pairs of regions whose nodes take each other for lost.
        saves: the states that nodes would restart from.
        before: of the workers among them, what the trainer kept of each one before its inner steps
            under way.
        reducing: the members of collectives that wait for others.
        reduced: what each member last gave to a collective that has started, where books are kept.
        rng: drawn from for messages that are lost or doubled.
    """

    down: dict[NodeId, float]
    rng: np.random.Generator
    begun: bool = False
    lost: dict[NodeId, None] = field(default_factory=dict)
    saves: dict[NodeId, Saved] = field(default_factory=dict)
    before: dict[NodeId, Any] = field(default_factory=dict)
    left: dict[NodeId, None] = field(default_factory=dict)
    severed: dict[tuple[str, str], None] = field(default_factory=dict)
    reducing: dict[NodeId, Contribution] = field(default_factory=dict)
    reduced: dict[NodeId, Contribution] = field(default_factory=dict)


@dataclass
class Transfer:
    """A message on its way over a shared link, from the sender's `start_s`; `latency_s` comes after
    its last byte has left.

    `followers` are later and smaller messages between the same two nodes that have left already;
    they must not arrive before it.
    """

    deliver: Deliver
    start_s: float
    latency_s: float
    size_bytes: float
    followers: list[Transfer] = field(default_factory=list)


@dataclass
class SharedLink:
    """A direction of a link between regions, and the transfers on it; `version` tells which `Drain`
    is still true.
    """

    link: FairLink
    transfers: dict[int, Transfer] = field(default_factory=dict)
    version: int = 0


FIXED = (
    "network",
    "profile",
    "trainer",
    "stop",
    "evaluate_every",
    "tokens_per_step",
    "parameters",
    "seed",
    "pipeline",
    "step_time_s",
    "vector_bytes",
    "faults",
    "books",
    "screening",
    "strict",
)
"""What a simulator is made with and never changes; all its other attributes are its state."""


class Simulator:
    """Runs `actors` until a stop rule holds.

    Args:
        actors: the method's; started in this order at time 0.
        workers: who trains, and how fast.
        network, profile: what messages and steps cost.
        trainer: computes gradients.
        recorder: is told what happens.
        stop: when to end.
        evaluate_every: inner steps between two evaluations of the model to take home.
        tokens_per_step: of one inner step; None where nothing is trained.
        parameters: how many leading entries of a whole model's vector are parameters.
        seed: of the nodes' random numbers.
        pipeline: how the workers share the replicas' stages; None: each has a whole replica.
        faults: what goes wrong; None: nothing, and no books are kept.
        screening: which updates are refused; None: none.
        strict: the first training loss that is not finite ends the run.
    """

    def __init__(
        self,
        actors: Sequence[Actor],
        workers: Sequence[Worker],
        network: Network,
        profile: Profile,
        trainer: Trainer,
        recorder: Recorder,
        stop: Stop,
        *,
        evaluate_every: int,
        tokens_per_step: int | None,
        parameters: int,
        seed: int,
        pipeline: Pipeline | None = None,
        faults: Faults | None = None,
        screening: ScreeningConfig | None = None,
        strict: bool = False,
    ) -> None:
        self.actors = {actor.me: actor for actor in actors}
        if len(self.actors) < len(actors):
            raise ValueError("two actors have one address: every actor's `me` must be its own")
        fastest = max(worker.speed for worker in workers)
        self.step_time_s = {
            worker.id: profile.step_time_s / (worker.speed / fastest) for worker in workers
        }
        self.network, self.profile, self.trainer, self.recorder, self.stop = (
            network,
            profile,
            trainer,
            recorder,
            stop,
        )
        self.evaluate_every, self.tokens_per_step, self.parameters = (
            evaluate_every,
            tokens_per_step,
            parameters,
        )
        self.seed, self.pipeline, self.screening, self.strict = seed, pipeline, screening, strict
        self.books, self.faults = faults is not None, faults or Faults((), tuple(self.actors), ())
        self.vector_bytes = {
            actor.me: profile.model_bytes * (pipeline.share(actor.me) if pipeline else 1.0)
            for actor in actors
        }
        self.contexts = {
            actor.me: NodeContext(actor.me, self, seed, i) for i, actor in enumerate(actors)
        }
        self.now = 0.0
        self.absorbed_by_nodes = 0
        self.next_mark = 0
        self.changed = False
        self.heap: list[tuple[float, int, Event]] = []
        self.sequence = 0
        self.events = 0  # that have happened
        self.training: set[NodeId] = set()
        self.unabsorbed: dict[
            NodeId, int
        ] = {}  # inner steps since the model to take home last changed
        self.not_finite: dict[NodeId, int] = {}  # losses in a row, by worker
        self.screens: dict[
            NodeId, Screen
        ] = {}  # by receiver; of a collective, by the first of its members
        self.joining: dict[tuple[int, ...], dict[NodeId, Call]] = {}  # by team of replicas
        self.stage_steps: dict[tuple[int, ...], int] = {}  # inner steps that a team has begun
        self.last_arrival_s: dict[tuple[NodeId, NodeId], float] = {}
        self.shared: dict[tuple[str, str], SharedLink] = {}
        self.evaluations: list[tuple[Evaluation, Promise, list[Promise]]] = []
        rng, absent = (
            np.random.default_rng((seed, self.faults.seed, 0xFA17)),
            dict.fromkeys(self.faults.absent, 0.0),
        )
        self.ledger, self.trouble = Ledger(), Trouble(absent, rng, begun=bool(absent))

    def run(self, pause: Callable[[], bool] = lambda: False) -> str | None:
        """Run to the end; the name of the stop rule that ended it: `steps`, `seconds` or
        `target_loss`.

        `pause` is asked after each event; if it says so, this returns None, and another call goes
        on with the next one.

        Raises:
            Diverged: a validation loss is not finite, or the training loss of one worker several
                times in a row.
            TrainingError: nothing can happen any more (a deadlock), or training failed.
            Violation: there is a schedule of faults, and an invariant does not hold.
        """
        reason = None
        if not self.sequence:  # nothing has happened
            for node in self.actors:
                if node not in self.trouble.down:
                    self.push(0.0, Deliver(node, Start(), node))
            self._plan()
            reason = self._evaluate_at_marks()
        while reason is None:
            if self.changed and (
                not self.heap or self.heap[0][0] > self.now
            ):  # all of this moment has happened
                self.changed = False
                reason = self._evaluate_at_marks()
                continue
            if not self.heap:
                if self.books and set(self.step_time_s) - set(self.trouble.down) - self._excused():
                    raise Violation("liveness", self._deadlock())
                raise TrainingError(self._deadlock())
            if self.stop.seconds is not None and self.heap[0][0] > self.stop.seconds:
                self.now, reason = self.stop.seconds, "seconds"
                break
            time_s, _, event = heapq.heappop(self.heap)
            if self.books:
                self.ledger.time(self.now, time_s)
            self.now = time_s
            self.events += 1
            match event:
                case Deliver(to=to, message=message, sender=sender):
                    if self.books and to != sender:
                        self.ledger.delivers(sender, to, message, self._size_bytes(event))
                    if self.screening is not None and isinstance(message, Update):
                        message = self._screened(to, message, sender)
                    self._handle(to, message, sender)
                case Finish(worker=worker):
                    answer = self._answer(event)
                    if answer is not None:
                        self._handle(worker, answer, worker)
                case Drain():
                    self._drain(event)
                case Tally(
                    messages=messages, sent_bytes=sent_bytes, slow_link_bytes=slow_link_bytes
                ):
                    self.recorder.counts(messages, sent_bytes, slow_link_bytes)
                case _:
                    self._strike(event)
            if pause():
                return None
        if self.books:
            self._check_books()
        if (
            not self.recorder.evaluations
            or self.recorder.evaluations[-1].inner_steps != self.absorbed
        ):
            self._evaluate()
        self.collect_evaluations()
        return reason

    def state(self) -> dict[str, Any]:
        """Everything that a run changes, the trainer's part apart; to be read before anything else
        happens.
        """
        return {name: value for name, value in vars(self).items() if name not in FIXED} | {
            "network_rng": self.network.rng
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state()` gave; this simulator must have been made with the same
        arguments and not have run.
        """
        self.network.rng = state["network_rng"]
        vars(self).update({name: value for name, value in state.items() if name != "network_rng"})

    @property
    def absorbed(self) -> int:
        """Inner steps that the model to take home has absorbed; one that a replica takes in stages
        is one.
        """
        return self.absorbed_by_nodes // (self.pipeline.stages if self.pipeline else 1)

    def holders(self) -> list[Actor]:
        """Those who hold a part of the model to take home; if nobody is there who does, those who
        were there last.
        """
        holders, down = (
            [actor for actor in self.actors.values() if actor.model() is not None],
            self.trouble.down,
        )
        last_s = max((down[actor.me] for actor in holders if actor.me in down), default=0.0)
        return [actor for actor in holders if actor.me not in down] or [
            actor for actor in holders if down[actor.me] == last_s
        ]

    def parts(self) -> list[Vector]:
        """The whole models whose mean is the one that a user takes home."""
        if self.pipeline is None:
            return [part for actor in self.holders() if (part := actor.model()) is not None]
        stages = [
            [part for node in stage if (part := self.actors[node].model()) is not None]
            for stage in self.pipeline.nodes
        ]
        return [join(parts, self.pipeline.parameters) for parts in zip(*stages, strict=True)]

    def outer_steps(self) -> int:
        """Those of the first actor that holds a part of the model to take home."""
        return self.holders()[0].outer_steps

    def local_updates(self) -> int:
        """Those of all actors."""
        return sum(actor.local_updates for actor in self.actors.values())

    # Events

    def push(self, time_s: float, event: Event) -> None:
        heapq.heappush(self.heap, (time_s, self.sequence, event))
        self.sequence += 1

    def _handle(self, to: NodeId, message: Message, sender: NodeId) -> None:
        actor = self.actors[to]
        before = actor.absorbed
        if self.books:
            others = counts(actor)
            actor.upon(message, sender, self.contexts[to])
            self.ledger.counts(actor, others, server=to not in self.step_time_s)
        else:
            actor.upon(message, sender, self.contexts[to])
        if actor.absorbed != before:
            if self.trouble.begun:
                self._recount()
            else:
                self._absorbed(self.absorbed_by_nodes + actor.absorbed - before)

    def _recount(self) -> None:
        """Count the absorbed inner steps anew: those of the dead only count if nobody who is there
        holds the model.
        """
        absorbed = sum(actor.absorbed for actor in self.holders())
        if absorbed != self.absorbed_by_nodes:
            self._absorbed(absorbed)

    def _absorbed(self, steps: int) -> None:
        self.absorbed_by_nodes = steps
        self.changed = True
        self.unabsorbed.clear()
        self.recorder.on_progress(self.absorbed, self.now)
        if self.books:
            self.ledger.absorbs(steps)

    def _answer(self, event: Finish) -> Message | None:
        """What a worker's inner steps have come to; None if their loss is not finite, and it has
        been restarted.
        """
        self.training.discard(event.worker)
        self._check_plan(event)
        try:
            answer: Message = event.answer.result()
        except Diverged as error:
            self._restart(event.worker, str(error))
            return None
        if event.steps and self.not_finite:
            self.not_finite.pop(event.worker, None)
        if self.books:
            self.ledger.trained += event.steps
        match answer:
            case Trained(losses=losses, steps=steps) if losses:
                self._trained(event, steps, sum(losses) / len(losses))
            case Gradient(loss=loss) if self.tokens_per_step is not None:
                self._trained(event, 1, loss)
        return answer

    def _check_plan(self, event: Finish) -> None:
        """Stop a run that would never end, because its workers train on and on and no outer step is
        taken.
        """
        plan, taken = self.stop.steps, self.unabsorbed
        already = taken.get(event.worker, 0)
        stages = self.pipeline.stages if self.pipeline else 1
        if plan is not None and already and sum(taken.values()) > 10 * plan * stages:
            if lost := [str(node) for node in self.trouble.down if node not in self.step_time_s]:
                raise TrainingError(
                    f"the model to take home has not changed for {sum(taken.values()) // stages:,} "
                    "inner steps, and "
                    f"{', '.join(lost)} is lost: it does not come back soon enough, or never"
                )
            raise UserError(
                f"the workers have taken {sum(taken.values()) // stages:,} inner steps since the "
                "model to take home last changed, "
                f"and the run is planned for {plan:,}: outer steps come too seldom; "
                f"lower inner_steps or accumulate, or give it more steps"
            )
        if event.steps:
            taken[event.worker] = already + event.steps

    def _trained(self, event: Finish, steps: int, loss: float) -> None:
        self.recorder.trainings.append(
            Training(self.now, event.worker, steps, loss, event.progress)
        )

    # What contexts ask for

    def train(self, worker: NodeId, theta: Vector, steps: int, progress: int) -> None:
        if self.pipeline:
            self._occupy(worker)
            self._join(self.pipeline, worker, Call(theta.clone(), steps, progress))
        else:
            seconds = steps * self.step_time_s[worker]
            if self.books:
                seconds = self.about_to_train(worker, seconds)
            answer = self.trainer.train(worker, theta, steps, progress, self.now + seconds)
            self.start_training(worker, seconds, answer, steps, progress)

    def about_to_train(self, worker: NodeId, seconds: float) -> float:
        """Seconds of inner steps that take `seconds` where nothing slows them down. A restart may
        be from before them.
        """
        if worker in self.trouble.saves:
            self.trouble.before[worker] = self.trainer.state_of(worker)
        return self.faults.compute_s(worker, self.now, seconds)

    def start_training(
        self, worker: NodeId, seconds: float, answer: Promise, steps: int, progress: int
    ) -> None:
        """A worker takes `steps` inner steps in `seconds`; it must not be computing already."""
        self._occupy(worker)
        if self.books:
            self.ledger.begins(worker, self.now, steps * self.step_time_s[worker])
        if seconds:
            self.recorder.computes(worker, self.now, self.now + seconds)
        self.push(self.now + seconds, Finish(worker, answer, steps, progress))

    def _occupy(self, worker: NodeId) -> None:
        if worker in self.training:
            raise TrainingError(
                f"{worker} asked to train while it is training: a method's worker has one job at a "
                "time"
            )
        self.training.add(worker)

    def _join(self, pipeline: Pipeline, worker: NodeId, call: Call) -> None:
        """A node of a pipeline wants to train; the last of its team to do so starts their common
        inner steps.
        """
        team = pipeline.team(worker)
        waiting = self.joining.setdefault(team, {})
        waiting[worker] = call
        nodes = [stage[q] for stage in pipeline.nodes for q in team]
        if len(waiting) < len(nodes):
            return
        del self.joining[team]
        calls = [waiting[node] for node in nodes]
        steps = call.steps
        if any(other.steps != steps for other in calls):
            asked = ", ".join(
                f"{node}: {other.steps}" for node, other in zip(nodes, calls, strict=True)
            )
            raise UserError(
                "the nodes of a pipeline must take equally many inner steps (without "
                f"dynamic_steps), not {asked}"
            )
        end_s, tally = self._pipeline_end_s(pipeline, team, steps)
        self.push(float(end_s.max()), tally)
        thetas, progress = [other.theta for other in calls], [other.progress for other in calls]
        promises = self.trainer.train_stages(team, thetas, steps, progress, float(end_s.min()))
        for node, other, answer, node_end_s in zip(
            nodes, calls, promises, end_s.flatten().tolist(), strict=True
        ):
            busy_s = steps * self.step_time_s[node] * pipeline.work_of(node)
            self.recorder.computes(node, self.now, node_end_s, busy_s)
            self.push(node_end_s, Finish(node, answer, steps, other.progress))

    def _pipeline_end_s(
        self, pipeline: Pipeline, team: tuple[int, ...], steps: int
    ) -> tuple[np.ndarray, Tally]:
        """When the nodes of `team` have taken `steps` inner steps from now on, shape (stages,
        len(team)), and what they send.
        """
        nodes = [[stage[q] for q in team] for stage in pipeline.nodes]
        parts = 3 * pipeline.micro_batches
        forward_s = np.array(
            [
                [self.step_time_s[node] * pipeline.work_of(node) / parts for node in stage]
                for stage in nodes
            ]
        )
        size_bytes, tally = self.profile.activation_bytes / pipeline.micro_batches, Tally()

        def message_s(size_bytes: float) -> Callable[[int, int, int, int], float]:
            def seconds(k: int, a: int, to: int, b: int) -> float:
                sender, receiver = nodes[k][a], nodes[to][b]
                tally.messages += 1
                tally.sent_bytes += size_bytes
                tally.slow_link_bytes += size_bytes if sender.region != receiver.region else 0.0
                return self.network.message_s(sender, receiver, size_bytes)

            return seconds

        end_s = np.full(forward_s.shape, self.now)
        first = self.stage_steps.get(team, 0)
        self.stage_steps[team] = first + steps
        for step in range(first, first + steps):
            routes = pipeline.routes(self.seed, step)[
                :, :, : len(team)
            ]  # a team of one keeps to itself
            end_s = step_end_s(routes, end_s, forward_s, message_s(size_bytes))
            if pipeline.clips:
                end_s = norm_end_s(end_s, message_s(4))
        return end_s, tally

    def send(self, sender: NodeId, to: NodeId, message: Message) -> None:
        if to not in self.actors:
            raise TrainingError(
                f"{sender} sent {type(message).__name__} to {to}, and there is no such node"
            )
        deliver = Deliver(to, message, sender)
        size_bytes = self._size_bytes(deliver)
        if (self.books or self.trouble.begun) and sender != to:
            if not self._reachable(sender, to):
                self._count_lost(deliver, 1)
                return
            if self.books:
                self.ledger.sends(sender, to, message)
        if self.network.topology.sharing == "fair" and sender.region != to.region:
            self._share(deliver, size_bytes)
        else:
            self._arrive(
                deliver,
                self.now,
                self.now + self.network.message_s(sender, to, size_bytes),
                size_bytes,
            )

    def _size_bytes(self, deliver: Deliver) -> float:
        return self.vector_bytes[deliver.sender] * _vectors(deliver.message)

    def _arrive(self, deliver: Deliver, start_s: float, end_s: float, size_bytes: float) -> None:
        if self.books and deliver.sender != deliver.to:
            end_s = self._disturbed(deliver, start_s, end_s)
        # Messages of one sender to one receiver keep their order, whatever the jitter.
        pair = deliver.sender, deliver.to
        end_s = self.last_arrival_s[pair] = max(end_s, self.last_arrival_s.get(pair, 0.0))
        slow = deliver.sender.region != deliver.to.region
        self.recorder.sends(deliver.sender, start_s, end_s, size_bytes, slow=slow)
        self.push(end_s, deliver)

    def all_reduce(self, member: NodeId, group: Group, vector: Vector, round: int) -> None:
        reducing = self.trouble.reducing
        # After a loss it may have been told of a later round while it waited: then its last call
        # counts.
        if member in reducing and not self.trouble.begun:
            raise TrainingError(
                f"{member} called all_reduce while it waits in one: a member is in one all-reduce "
                "at a time"
            )
        reducing[member] = Contribution(group, vector, round)
        if len(reducing) >= len(group) - len(self.trouble.lost):  # else somebody has not called
            self._reduce_if_complete(member)

    def _reduce_if_complete(self, member: NodeId) -> None:
        """Start the collective that `member` waits in, if all have called who are named by one of
        those that wait in it.
        """
        reducing = self.trouble.reducing
        if member not in reducing:
            return
        group, number = reducing[member].group, reducing[member].round
        if len(reducing) != len(group) or any(
            call.group is not group or call.round != number for call in reducing.values()
        ):
            named, seen = {member}, set[NodeId]()
            while named != seen:
                seen = set(named)
                for caller, call in reducing.items():
                    if call.round == number and (
                        caller in named or not named.isdisjoint(call.group)
                    ):
                        named |= {
                            caller,
                            *(node for node in call.group if node not in self.trouble.lost),
                        }
            if any(node not in reducing or reducing[node].round != number for node in named):
                return
            group = tuple(node for node in self.actors if node in named)
        calls = {node: reducing.pop(node) for node in group}
        if self.books:
            self.trouble.reduced.update(calls)
        self._reduce(group, [call.vector for call in calls.values()], number)

    def _reduce(self, group: Group, vectors: list[Vector], round: int) -> None:
        refused = self._refused(group, vectors) if self.screening is not None else ()
        accepted = (
            [vector for node, vector in zip(group, vectors, strict=True) if node not in refused]
            if refused
            else vectors
        )
        mean = outer.mean(accepted) if accepted else torch.zeros_like(vectors[0])
        reduced = Reduced(mean, group, round, refused)
        cost = self.network.all_reduce(group, self.vector_bytes[group[0]])
        end_s = self.now + cost.seconds
        if self.books:
            end_s = self.faults.collective_end_s(group, self.now, cost.seconds)
            self.ledger.delivered_bytes += cost.sent_bytes
            self.ledger.longest_message_s = max(self.ledger.longest_message_s, cost.seconds)
        self.recorder.counts(cost.messages, cost.sent_bytes, cost.slow_link_bytes)
        self.recorder.reduces(group, self.now, end_s)
        for node in group:
            self.push(end_s, Deliver(node, reduced, node))

    # Bad updates, and losses that are not finite

    def _screened(self, to: NodeId, update: Update, sender: NodeId) -> Message:
        """What a receiver is told of an update."""
        why = self._screen(to).refuses(vectors_of(update), self._parameters_of(to))
        if why is None:
            return update
        self.recorder.refuses(sender, why, self.now)
        return Refused(update)

    def _refused(self, group: Group, vectors: list[Vector]) -> Group:
        """Whose vectors a collective does without. All members see them all, so one of them judges
        for all.
        """
        screen, parameters, refused = self._screen(group[0]), self._parameters_of(group[0]), []
        for node, vector in zip(group, vectors, strict=True):
            if why := screen.refuses([vector], parameters):
                self.recorder.refuses(node, why, self.now)
                refused.append(node)
        return tuple(refused)

    def _screen(self, receiver: NodeId) -> Screen:
        assert self.screening is not None
        if receiver not in self.screens:
            self.screens[receiver] = Screen(self.screening)
        return self.screens[receiver]

    def _parameters_of(self, node: NodeId) -> int:
        """How many leading entries of a node's vectors are parameters."""
        return self.pipeline.parameters_of(node) if self.pipeline else self.parameters

    def _restart(self, worker: NodeId, error: str) -> None:
        """A worker is lost and back at once, as it is, but its inner optimizer begins anew: what
        that keeps may not be finite.
        """
        count = self.not_finite[worker] = self.not_finite.get(worker, 0) + 1
        if self.strict or self.pipeline or count == NOT_FINITE:
            times = f", {count} times in a row" if count > 1 else ""
            raise Diverged(
                f"{error}, after {self.now:.1f} s on the virtual clock{times}; try a lower "
                "learning rate"
            )
        self.recorder.restarts(worker, error, self.now)
        self.trainer.reset_optimizer(worker)
        self._stop(worker)
        self._lose(worker)
        self._rejoin(worker)

    # Shared links

    def _share(self, deliver: Deliver, size_bytes: float) -> None:
        direction = deliver.sender.region, deliver.to.region
        if direction not in self.shared:
            self.shared[direction] = SharedLink(
                FairLink(self.network.link(*direction).bandwidth_bytes_per_s)
            )
        shared = self.shared[direction]
        shared.link.advance(self.now)
        shared.link.remaining[self.sequence] = size_bytes
        latency_s = self.network.latency_s(deliver.sender, deliver.to)
        shared.transfers[self.sequence] = Transfer(deliver, self.now, latency_s, size_bytes)
        self._await_next_end(direction, shared)

    def _drain(self, event: Drain) -> None:
        shared = self.shared[event.direction]
        if event.version != shared.version:
            return
        _, ended = shared.link.next_end()
        shared.link.advance(self.now)
        del shared.link.remaining[ended]
        transfer = shared.transfers.pop(ended)
        pair = transfer.deliver.sender, transfer.deliver.to
        for key, other in shared.transfers.items():
            if key < ended and (other.deliver.sender, other.deliver.to) == pair:
                other.followers += [transfer, *transfer.followers]
                break
        else:
            for arrived in (transfer, *transfer.followers):
                self._arrive(
                    arrived.deliver,
                    arrived.start_s,
                    self.now + arrived.latency_s,
                    arrived.size_bytes,
                )
        if shared.transfers:
            self._await_next_end(event.direction, shared)

    def _await_next_end(self, direction: tuple[str, str], shared: SharedLink) -> None:
        shared.version += 1
        self.push(shared.link.next_end()[0], Drain(direction, shared.version))

    # Faults

    def _plan(self) -> None:
        """Put all that will go wrong on the heap, and tell the peers of those who are not there
        yet.
        """
        for node in self.trouble.down:
            self.push(0.0, Notice(node, 0.0))
        for time_s, strike in self.faults.strikes():
            if isinstance(strike, Save) and strike.node not in self.trouble.saves:
                self.trouble.saves[strike.node] = self._saved(strike.node)
            if time_s or not isinstance(strike, Save):
                self.push(time_s, strike)

    def _strike(self, strike: Strike) -> None:
        trouble = self.trouble
        self._check_books()
        match strike:
            case Save(node) if node not in trouble.down:
                trouble.saves[node] = self._saved(node)
            case Fail(node, leaves):
                self._fail(node, leaves=leaves)
            case Notice(node, since_s) if (
                trouble.down.get(node) == since_s and node not in trouble.lost
            ):
                self._lose(node)
            case Return(node) if node in trouble.down and node not in trouble.left:
                self._return(node)
            case Cut(link):
                trouble.severed[link] = None
                self._drop(
                    lambda sender, to: (
                        link in ((sender.region, to.region), (to.region, sender.region))
                    )
                )
                for a, b in self._across(link):
                    self._handle(a, Lost(b, unreachable=True), a)
            case Mend(link):
                del trouble.severed[link]
                for a, b in self._across(link):
                    self._handle(a, Joined(b), a)

    def _saved(self, node: NodeId) -> Saved:
        """A node's state as of now. Inner steps under way are no part of it: they will be lost with
        the node.
        """
        worker = None
        if node in self.step_time_s:
            worker = (
                self.trouble.before[node] if node in self.training else self.trainer.state_of(node)
            )
        return Saved(copy.deepcopy(self.actors[node]), worker)

    def _fail(self, node: NodeId, *, leaves: bool) -> None:
        """A node crashes or leaves."""
        trouble = self.trouble
        if leaves:
            trouble.left[node] = None
        if node not in trouble.down:
            self._stop(node)
            self.push(self.now + self.faults.deadline_s, Notice(node, self.now))
        if leaves and node not in trouble.lost:
            self._lose(node)

    def _stop(self, node: NodeId) -> None:
        """A node is gone, and all that it had under way."""
        trouble = self.trouble
        for _, _, event in self.heap:
            if isinstance(event, Finish) and event.worker == node:
                with contextlib.suppress(Diverged, TrainingError):
                    event.answer.result()  # the memory that it is computed in is needed again
        self._drop(lambda sender, to: node in (sender, to), node)
        self.training.discard(node)
        trouble.reducing.pop(node, None)
        trouble.down[node], trouble.begun = self.now, True
        self._recount()

    def _lose(self, node: NodeId) -> None:
        """The others are told that a node is gone. A collective that waited for it goes on without
        it.
        """
        trouble = self.trouble
        trouble.lost[node] = None
        for member, call in trouble.reducing.items():
            left = tuple(other for other in call.group if other != node)
            trouble.reducing[member] = Contribution(left, call.vector, call.round)
        self._tell_peers_of(node, Lost(node))
        for member in list(trouble.reducing):
            self._reduce_if_complete(member)

    def _return(self, node: NodeId) -> None:
        """A node comes (again), with the state of its last save."""
        trouble = self.trouble
        if node not in trouble.lost:
            self._lose(node)
        if node in trouble.saves:
            self.actors[node] = copy.deepcopy(trouble.saves[node].actor)
            if node in self.step_time_s:
                self.trainer.put(node, trouble.saves[node].worker)
        self.ledger.restarted[node] = None
        self._rejoin(node)

    def _rejoin(self, node: NodeId) -> None:
        """A node is there again, and everybody is told."""
        trouble, actor = self.trouble, self.actors[node]
        del trouble.down[node], trouble.lost[node]
        self._handle(node, Joined(node), node)
        self._recount()
        self._tell_peers_of(node, Joined(node))
        for peer in dict.fromkeys(actor.peers()):
            if peer in trouble.lost:
                self._handle(node, Lost(peer), node)
            elif not self._connected(node, peer):
                self._handle(node, Lost(peer, unreachable=True), node)

    def _tell_peers_of(self, node: NodeId, message: Message) -> None:
        for actor in list(self.actors.values()):
            reachable = isinstance(message, Lost) or self._connected(actor.me, node)
            if (
                actor.me != node
                and actor.me not in self.trouble.down
                and reachable
                and node in actor.peers()
            ):
                self._handle(actor.me, message, actor.me)

    def _across(self, link: tuple[str, str]) -> list[tuple[NodeId, NodeId]]:
        """Those that are there and have a peer at the other end of a link, and that peer."""
        down = self.trouble.down
        return [
            (actor.me, peer)
            for actor in self.actors.values()
            for peer in dict.fromkeys(actor.peers())
            if {actor.me.region, peer.region} == {*link}
            and actor.me not in down
            and peer not in down
        ]

    def _connected(self, a: NodeId, b: NodeId) -> bool:
        severed = self.trouble.severed
        return (a.region, b.region) not in severed and (b.region, a.region) not in severed

    def _reachable(self, a: NodeId, b: NodeId) -> bool:
        return a not in self.trouble.down and b not in self.trouble.down and self._connected(a, b)

    def _drop(self, lost: Callable[[NodeId, NodeId], bool], gone: NodeId | None = None) -> None:
        """Take messages off the heap that are lost, by sender and receiver; and all that `gone`
        waited for.
        """
        kept = []
        for item in self.heap:
            event = item[2]
            match event:
                case Deliver(to=to, sender=sender, message=message) if to != sender and lost(
                    sender, to
                ):
                    if self.books:
                        self.ledger.drops(sender, to, message, self._size_bytes(event))
                    continue
                case Deliver(to=node) | Finish(worker=node) if node == gone:
                    continue
                case Deliver(to=node, message=Reduced(group=group)) if (
                    gone in group and self.books
                ):  # it begins again, without it
                    call = self.trouble.reduced[node]
                    self.trouble.reducing[node] = Contribution(group, call.vector, call.round)
                    continue
            kept.append(item)
        self.heap = kept
        heapq.heapify(self.heap)
        for direction, shared in self.shared.items():
            shared.link.advance(self.now)
            for key, transfer in list(shared.transfers.items()):
                if lost(
                    transfer.deliver.sender, transfer.deliver.to
                ):  # its bytes are counted when the last one has left
                    for dropped in (transfer, *transfer.followers) if self.books else ():
                        self.ledger.drops(
                            dropped.deliver.sender, dropped.deliver.to, dropped.deliver.message, 0.0
                        )
                    del shared.transfers[key], shared.link.remaining[key]
            shared.version += 1
            if shared.transfers:
                self._await_next_end(direction, shared)
        for pair in [pair for pair in self.last_arrival_s if lost(*pair)]:
            del self.last_arrival_s[pair]

    def _disturbed(self, deliver: Deliver, start_s: float, end_s: float) -> float:
        """When a message that would arrive at `end_s` does arrive. What is sent again or twice is
        counted at once.
        """
        sender, to = deliver.sender, deliver.to
        self.ledger.longest_message_s = max(self.ledger.longest_message_s, end_s - start_s)
        end_s, copies = self.faults.arrival(
            self.trouble.rng, sender, to, start_s, end_s, end_s - start_s
        )
        if copies > 1:
            self._count_lost(deliver, copies - 1)
        return end_s

    def _count_lost(self, deliver: Deliver, copies: int) -> None:
        size_bytes = copies * self._size_bytes(deliver)
        self.recorder.counts(
            copies, size_bytes, size_bytes if deliver.sender.region != deliver.to.region else 0.0
        )
        self.ledger.lost_bytes += size_bytes

    def _excused(self) -> set[NodeId]:
        """Workers that may have to wait until a server of theirs is there again, or a link is
        up.
        """
        return {
            node
            for node in self.step_time_s
            for peer in self.actors[node].peers()
            if not self._connected(node, peer)
            or (peer not in self.step_time_s and peer in self.trouble.down)
        }

    def _check_books(self) -> None:
        in_flight = [
            event
            for _, _, event in self.heap
            if isinstance(event, Deliver) and event.sender != event.to
        ]
        self.ledger.bytes(
            self.recorder.sent_bytes, sum(self._size_bytes(deliver) for deliver in in_flight)
        )
        workers = [node for node in self.step_time_s if node not in self.trouble.down]
        lag_s = (
            self.faults.apart_s * max(self.step_time_s.values()) / min(self.step_time_s.values())
        )
        self.ledger.alive(
            workers, self._excused(), self.faults.quiet_since_s(self.now), self.now, lag_s
        )

    # Evaluation

    def _evaluate_at_marks(self) -> str | None:
        """Evaluate if a mark has been passed; the name of the stop rule that holds now."""
        if self.absorbed >= self.next_mark:
            self._evaluate()
            self.next_mark = (self.absorbed // self.evaluate_every + 1) * self.evaluate_every
        if self.stop.target_loss is not None:
            self.collect_evaluations()
            loss = self.recorder.evaluations[-1].loss
            if loss is not None and loss <= self.stop.target_loss:
                return "target_loss"
        if self.stop.steps is not None and self.absorbed >= self.stop.steps:
            return "steps"
        return None

    def _evaluate(self) -> None:
        """Have the model to take home evaluated in the background."""
        parts = self.parts()
        model = outer.mean(parts)
        recorder = self.recorder
        evaluation = Evaluation(
            time_s=self.now,
            inner_steps=self.absorbed,
            tokens=None if self.tokens_per_step is None else self.absorbed * self.tokens_per_step,
            outer_steps=self.outer_steps(),
            sent_bytes=round(recorder.sent_bytes),
            slow_link_bytes=round(recorder.slow_link_bytes),
        )
        own: list[Promise] = []
        if len(parts) > 1 and self.parameters:
            deviations = torch.stack(
                [(part - model)[: self.parameters].square().mean() for part in parts]
            )
            evaluation.replica_std = float(deviations.mean().sqrt())
            own = [self.trainer.evaluate(part, self.now) for part in parts]
        recorder.evaluations.append(evaluation)
        self.evaluations.append((evaluation, self.trainer.evaluate(model, self.now), own))

    def collect_evaluations(self) -> None:
        """Wait for the evaluations under way and put down their losses."""
        for evaluation, loss, own in self.evaluations:
            value = loss.result()
            if value is not None and not math.isfinite(value):
                raise Diverged(
                    f"the validation loss is {value} at {evaluation.time_s:.1f} s on the virtual "
                    "clock, after "
                    f"{evaluation.inner_steps:,} inner steps; try a lower learning rate, inner or "
                    "outer"
                )
            evaluation.loss = value
            if own:
                evaluation.replica_loss = float(np.mean([promise.result() for promise in own]))
        self.evaluations = []

    # Errors

    def _deadlock(self) -> str:
        return (
            f"deadlock at {self.now:.6g} s after {self.absorbed} inner steps: "
            f"{_first(self._waits(), 8)}"
        )

    def _waits(self) -> Iterator[str]:
        gathered = set()
        for calls in self.joining.values():
            for node in calls:
                gathered.add(node)
                yield f"{node} waits for the other stages of its pipeline to train"
        reducing = self.trouble.reducing
        for node, call in reducing.items():
            gathered.add(node)
            missing = _first(
                (
                    str(other)
                    for other in call.group
                    if other not in reducing or reducing[other].round != call.round
                ),
                4,
            )
            yield f"{node} waits in an all-reduce of {len(call.group)} for {missing}"
        for actor in self.actors.values():
            if actor.me in self.trouble.down:
                yield f"{actor.me} is lost"
            elif actor.me not in gathered:
                yield f"{actor.me} waits for {actor.waits_for()}"


@dataclass
class NodeContext:
    """One node's view of the simulator: `actor.Context`."""

    me: NodeId
    simulator: Simulator
    seed: int
    rank: int
    _rng: np.random.Generator | None = None

    @property
    def now(self) -> float:
        return self.simulator.now

    @property
    def rng(self) -> np.random.Generator:
        if self._rng is None:
            self._rng = np.random.default_rng((self.seed, self.rank))
        return self._rng

    def send(self, to: NodeId, message: Message) -> None:
        self.simulator.send(self.me, to, message)

    def after(self, seconds: float, message: Message) -> None:
        self.simulator.push(self.now + seconds, Deliver(self.me, message, self.me))

    def train(self, theta: Vector, steps: int, progress: int) -> None:
        self.simulator.train(self.me, theta, steps, progress)

    def gradient(self, theta: Vector, progress: int) -> None:
        simulator = self.simulator
        if simulator.pipeline:
            raise UserError(
                "pipeline: this method asks for single gradients, which a model in stages does not "
                "give"
            )
        seconds = simulator.step_time_s[self.me]
        if simulator.books:
            seconds = simulator.about_to_train(self.me, seconds)
        answer = simulator.trainer.gradient(self.me, theta, self.now + seconds)
        simulator.start_training(self.me, seconds, answer, 1, progress)

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        # The profile's step time holds the optimizer's part already.
        if self.simulator.books:
            self.simulator.about_to_train(self.me, 0.0)
        answer = self.simulator.trainer.apply(self.me, theta, gradient, progress, self.now)
        self.simulator.start_training(self.me, 0.0, answer, 0, progress)

    def all_reduce(self, group: Group, vector: Vector, round: int = 0) -> None:
        self.simulator.all_reduce(self.me, group, vector, round)


def _vectors(message: Message) -> int:
    """How many vectors a message carries."""
    kind = type(message)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(part.name for part in fields(message))
    return sum(isinstance(getattr(message, name), Tensor) for name in _FIELDS[kind])


_FIELDS: dict[type[Message], tuple[str, ...]] = {}


def _first(texts: Iterator[str], count: int) -> str:
    """The first `count` of `texts`, and how many more there are."""
    everything = list(texts)
    more = f" and {len(everything) - count} more" if len(everything) > count else ""
    return ", ".join(everything[:count]) + more
