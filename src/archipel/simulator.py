"""The virtual clock: actors run on modelled time, with real gradients or none.

What belongs here: the heap of events and what puts events on it. What does not: how long a message takes
(`network.py`), how a gradient is computed (`pool.py`), what a method does.

Events are ordered by (time, sequence number) and by nothing else, so that one seed gives one run. An inner step takes
the profile's step time divided by its worker's relative speed. Its gradients are computed in the background from the
moment it starts on the virtual clock, and are waited for only when they are the next event: all workers that train at
the same virtual time really train at the same time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archipel import outer
from archipel.actor import Actor, Gradient, Group, Message, NodeId, Reduced, Start, Trained, Vector, Worker
from archipel.errors import Diverged, TrainingError, UserError
from archipel.metrics import Evaluation, Recorder, Training
from archipel.network import FairLink, Network
from archipel.pipeline import Pipeline, join, norm_end_s, step_end_s
from archipel.pool import Promise, Trainer
from archipel.topology import Profile


@dataclass(frozen=True)
class Stop:
    """When a run ends: at the first of these. Inner steps are those that the model to take home has absorbed."""

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
    """A transfer on a shared link ends, unless another transfer has started or ended there since."""

    direction: tuple[str, str]
    version: int


@dataclass(eq=False, slots=True)
class Tally:
    """The inner steps of a pipeline's team end; until now they have sent this much."""

    messages: int = 0
    sent_bytes: float = 0.0
    slow_link_bytes: float = 0.0


Event = Deliver | Finish | Drain | Tally


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """What a node of a pipeline asked for, while it waits for the others of its team."""

    theta: Vector
    steps: int
    progress: int


@dataclass
class Transfer:
    """A message on its way over a shared link, from the sender's `start_s`; `latency_s` comes after its last byte has left."""

    deliver: Deliver
    start_s: float
    latency_s: float
    size_bytes: float


@dataclass
class SharedLink:
    """A direction of a link between regions, and the transfers on it; `version` tells which `Drain` is still true."""

    link: FairLink
    transfers: dict[int, Transfer] = field(default_factory=dict)
    version: int = 0


FIXED = (
    "network", "profile", "trainer", "stop", "evaluate_every", "tokens_per_step", "parameters", "seed", "pipeline", "step_time_s",
    "vector_bytes",
)  # fmt: skip
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
    ) -> None:
        self.actors = {actor.me: actor for actor in actors}
        if len(self.actors) < len(actors):
            raise ValueError("two actors have one address: every actor's `me` must be its own")
        fastest = max(worker.speed for worker in workers)
        self.step_time_s = {worker.id: profile.step_time_s / (worker.speed / fastest) for worker in workers}
        self.network, self.profile, self.trainer, self.recorder, self.stop = network, profile, trainer, recorder, stop
        self.evaluate_every, self.tokens_per_step, self.parameters = evaluate_every, tokens_per_step, parameters
        self.seed, self.pipeline = seed, pipeline
        self.vector_bytes = {actor.me: profile.model_bytes * (pipeline.share(actor.me) if pipeline else 1.0) for actor in actors}
        self.contexts = {actor.me: NodeContext(actor.me, self, seed, i) for i, actor in enumerate(actors)}
        self.now = 0.0
        self.absorbed_by_nodes = 0
        self.next_mark = 0
        self.changed = False
        self.heap: list[tuple[float, int, Event]] = []
        self.sequence = 0
        self.events = 0  # that have happened
        self.training: set[NodeId] = set()
        self.unabsorbed: dict[NodeId, int] = {}  # inner steps since the model to take home last changed
        self.gathering: dict[Group, dict[NodeId, Vector]] = {}
        self.joining: dict[tuple[int, ...], dict[NodeId, Call]] = {}  # by team of replicas
        self.stage_steps: dict[tuple[int, ...], int] = {}  # inner steps that a team has begun
        self.last_arrival_s: dict[tuple[NodeId, NodeId], float] = {}
        self.shared: dict[tuple[str, str], SharedLink] = {}
        self.evaluations: list[tuple[Evaluation, Promise, list[Promise]]] = []

    def run(self, pause: Callable[[], bool] = lambda: False) -> str | None:
        """Run to the end; the name of the stop rule that ended it: `steps`, `seconds` or `target_loss`.

        `pause` is asked after each event; if it says so, this returns None, and another call goes on with the next one.

        Raises:
            Diverged: a loss is not finite.
            TrainingError: nothing can happen any more (a deadlock), or training failed.
        """
        reason = None
        if not self.sequence:  # nothing has happened
            for node in self.actors:
                self.push(0.0, Deliver(node, Start(), node))
            reason = self._evaluate_at_marks()
        while reason is None:
            if self.changed and (not self.heap or self.heap[0][0] > self.now):  # all of this moment has happened
                self.changed = False
                reason = self._evaluate_at_marks()
                continue
            if not self.heap:
                raise TrainingError(self._deadlock())
            time_s, _, event = heapq.heappop(self.heap)
            if self.stop.seconds is not None and time_s > self.stop.seconds:
                self.now, reason = self.stop.seconds, "seconds"
                break
            self.now = time_s
            self.events += 1
            match event:
                case Deliver(to=to, message=message, sender=sender):
                    self._handle(to, message, sender)
                case Finish(worker=worker):
                    self._handle(worker, self._answer(event), worker)
                case Drain():
                    self._drain(event)
                case Tally(messages=messages, sent_bytes=sent_bytes, slow_link_bytes=slow_link_bytes):
                    self.recorder.counts(messages, sent_bytes, slow_link_bytes)
            if pause():
                return None
        if not self.recorder.evaluations or self.recorder.evaluations[-1].inner_steps < self.absorbed:
            self._evaluate()
        self.collect_evaluations()
        return reason

    def state(self) -> dict[str, Any]:
        """Everything that a run changes, the trainer's part apart; to be read before anything else happens."""
        return {name: value for name, value in vars(self).items() if name not in FIXED} | {"network_rng": self.network.rng}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state()` gave; this simulator must have been made with the same arguments and not have run."""
        self.network.rng = state["network_rng"]
        vars(self).update({name: value for name, value in state.items() if name != "network_rng"})

    @property
    def absorbed(self) -> int:
        """Inner steps that the model to take home has absorbed; one that a replica takes in stages is one."""
        return self.absorbed_by_nodes // (self.pipeline.stages if self.pipeline else 1)

    def parts(self) -> list[Vector]:
        """The whole models whose mean is the one that a user takes home."""
        if self.pipeline is None:
            return [part for actor in self.actors.values() if (part := actor.model()) is not None]
        stages = [[part for node in stage if (part := self.actors[node].model()) is not None] for stage in self.pipeline.nodes]
        return [join(parts, self.pipeline.parameters) for parts in zip(*stages, strict=True)]

    def outer_steps(self) -> int:
        """Those of the first actor that holds a part of the model to take home."""
        return next(actor.outer_steps for actor in self.actors.values() if actor.model() is not None)

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
        actor.upon(message, sender, self.contexts[to])
        if actor.absorbed != before:
            self.absorbed_by_nodes += actor.absorbed - before
            self.changed = True
            self.unabsorbed.clear()
            self.recorder.on_progress(self.absorbed, self.now)

    def _answer(self, event: Finish) -> Message:
        self.training.discard(event.worker)
        self._check_plan(event)
        try:
            answer: Message = event.answer.result()
        except Diverged as error:
            raise Diverged(f"{error}, after {self.now:.1f} s on the virtual clock; try a lower learning rate") from None
        match answer:
            case Trained(losses=losses, steps=steps) if losses:
                self._trained(event, steps, sum(losses) / len(losses))
            case Gradient(loss=loss) if self.tokens_per_step is not None:
                self._trained(event, 1, loss)
        return answer

    def _check_plan(self, event: Finish) -> None:
        """Stop a run that would never end, because its workers train on and on and no outer step is taken."""
        plan, taken = self.stop.steps, self.unabsorbed
        already = taken.get(event.worker, 0)
        stages = self.pipeline.stages if self.pipeline else 1
        if plan is not None and already and sum(taken.values()) > 10 * plan * stages:
            raise UserError(
                f"the workers have taken {sum(taken.values()) // stages:,} inner steps since the model to take home last changed, "
                f"and the run is planned for {plan:,}: outer steps come too seldom; "
                f"lower inner_steps or accumulate, or give it more steps"
            )
        if event.steps:
            taken[event.worker] = already + event.steps

    def _trained(self, event: Finish, steps: int, loss: float) -> None:
        self.recorder.trainings.append(Training(self.now, event.worker, steps, loss, event.progress))

    # What contexts ask for

    def train(self, worker: NodeId, theta: Vector, steps: int, progress: int) -> None:
        if self.pipeline:
            self._occupy(worker)
            self._join(self.pipeline, worker, Call(theta.clone(), steps, progress))
        else:
            seconds = steps * self.step_time_s[worker]
            answer = self.trainer.train(worker, theta, steps, progress, self.now + seconds)
            self.start_training(worker, seconds, answer, steps, progress)

    def start_training(self, worker: NodeId, seconds: float, answer: Promise, steps: int, progress: int) -> None:
        """A worker takes `steps` inner steps in `seconds`; it must not be computing already."""
        self._occupy(worker)
        if seconds:
            self.recorder.computes(worker, self.now, self.now + seconds)
        self.push(self.now + seconds, Finish(worker, answer, steps, progress))

    def _occupy(self, worker: NodeId) -> None:
        if worker in self.training:
            raise TrainingError(f"{worker} asked to train while it is training: a method's worker has one job at a time")
        self.training.add(worker)

    def _join(self, pipeline: Pipeline, worker: NodeId, call: Call) -> None:
        """A node of a pipeline wants to train; the last of its team to do so starts their common inner steps."""
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
            asked = ", ".join(f"{node}: {other.steps}" for node, other in zip(nodes, calls, strict=True))
            raise UserError(f"the nodes of a pipeline must take equally many inner steps (without dynamic_steps), not {asked}")
        end_s, tally = self._pipeline_end_s(pipeline, team, steps)
        self.push(float(end_s.max()), tally)
        thetas, progress = [other.theta for other in calls], [other.progress for other in calls]
        promises = self.trainer.train_stages(team, thetas, steps, progress, float(end_s.min()))
        for node, other, answer, node_end_s in zip(nodes, calls, promises, end_s.flatten().tolist(), strict=True):
            busy_s = steps * self.step_time_s[node] / pipeline.stages
            self.recorder.computes(node, self.now, node_end_s, busy_s)
            self.push(node_end_s, Finish(node, answer, steps, other.progress))

    def _pipeline_end_s(self, pipeline: Pipeline, team: tuple[int, ...], steps: int) -> tuple[np.ndarray, Tally]:
        """When the nodes of `team` have taken `steps` inner steps from now on, shape (stages, len(team)), and what they send."""
        nodes = [[stage[q] for q in team] for stage in pipeline.nodes]
        parts = 3 * pipeline.micro_batches * pipeline.stages
        forward_s = np.array([[self.step_time_s[node] / parts for node in stage] for stage in nodes])
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
            routes = pipeline.routes(self.seed, step)[:, :, : len(team)]  # a team of one keeps to itself
            end_s = step_end_s(routes, end_s, forward_s, message_s(size_bytes))
            if pipeline.clips:
                end_s = norm_end_s(end_s, message_s(4))
        return end_s, tally

    def send(self, sender: NodeId, to: NodeId, message: Message) -> None:
        if to not in self.actors:
            raise TrainingError(f"{sender} sent {type(message).__name__} to {to}, and there is no such node")
        size_bytes = self.vector_bytes[sender] * _vectors(message)
        deliver = Deliver(to, message, sender)
        if self.network.topology.sharing == "fair" and sender.region != to.region:
            self._share(deliver, size_bytes)
        else:
            self._arrive(deliver, self.now, self.now + self.network.message_s(sender, to, size_bytes), size_bytes)

    def _arrive(self, deliver: Deliver, start_s: float, end_s: float, size_bytes: float) -> None:
        # Messages of one sender to one receiver keep their order, whatever the jitter.
        pair = deliver.sender, deliver.to
        end_s = self.last_arrival_s[pair] = max(end_s, self.last_arrival_s.get(pair, 0.0))
        slow = deliver.sender.region != deliver.to.region
        self.recorder.sends(deliver.sender, start_s, end_s, size_bytes, slow=slow)
        self.push(end_s, deliver)

    def all_reduce(self, member: NodeId, group: Group, vector: Vector) -> None:
        waiting = self.gathering.setdefault(group, {})
        waiting[member] = vector
        if len(waiting) < len(group):
            return
        del self.gathering[group]
        reduced = Reduced(outer.mean([waiting[node] for node in group]))
        cost = self.network.all_reduce(group, self.vector_bytes[member])
        self.recorder.counts(cost.messages, cost.sent_bytes, cost.slow_link_bytes)
        self.recorder.reduces(group, self.now, self.now + cost.seconds)
        for node in group:
            self.push(self.now + cost.seconds, Deliver(node, reduced, node))

    # Shared links

    def _share(self, deliver: Deliver, size_bytes: float) -> None:
        direction = deliver.sender.region, deliver.to.region
        if direction not in self.shared:
            self.shared[direction] = SharedLink(FairLink(self.network.link(*direction).bandwidth_bytes_per_s))
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
        self._arrive(transfer.deliver, transfer.start_s, self.now + transfer.latency_s, transfer.size_bytes)
        if shared.transfers:
            self._await_next_end(event.direction, shared)

    def _await_next_end(self, direction: tuple[str, str], shared: SharedLink) -> None:
        shared.version += 1
        self.push(shared.link.next_end()[0], Drain(direction, shared.version))

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
            deviations = torch.stack([(part - model)[: self.parameters].square().mean() for part in parts])
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
                    f"the validation loss is {value} at {evaluation.time_s:.1f} s on the virtual clock, after "
                    f"{evaluation.inner_steps:,} inner steps; try a lower learning rate, inner or outer"
                )
            evaluation.loss = value
            if own:
                evaluation.replica_loss = float(np.mean([promise.result() for promise in own]))
        self.evaluations = []

    # Errors

    def _deadlock(self) -> str:
        return f"deadlock at {self.now:.6g} s after {self.absorbed} inner steps: {_first(self._waits(), 8)}"

    def _waits(self) -> Iterator[str]:
        gathered = set()
        for group, waiting in self.gathering.items():
            missing = _first((str(node) for node in group if node not in waiting), 4)
            for node in waiting:
                gathered.add(node)
                yield f"{node} waits in an all-reduce of {len(group)} for {missing}"
        for calls in self.joining.values():
            for node in calls:
                gathered.add(node)
                yield f"{node} waits for the other stages of its pipeline to train"
        for actor in self.actors.values():
            if actor.me not in gathered:
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
            raise UserError("pipeline: this method asks for single gradients, which a model in stages does not give")
        seconds = simulator.step_time_s[self.me]
        answer = simulator.trainer.gradient(self.me, theta, self.now + seconds)
        simulator.start_training(self.me, seconds, answer, 1, progress)

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        # The profile's step time holds the optimizer's part already.
        answer = self.simulator.trainer.apply(self.me, theta, gradient, progress, self.now)
        self.simulator.start_training(self.me, 0.0, answer, 0, progress)

    def all_reduce(self, group: Group, vector: Vector) -> None:
        self.simulator.all_reduce(self.me, group, vector)


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
