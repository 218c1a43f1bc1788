"""The virtual clock: actors run on modelled time, with real gradients or none.

What belongs here: the loop that takes events off the heap, and what each one does. What does not:
what puts them there (`verbs.py`), faults on purpose (`trouble.py`), how far the run is
(`run/census.py`), how a gradient is computed (`train/pool.py`), what a method does.

Events are ordered by (time, number) and by nothing else, so that one seed gives one run. An inner
step takes the profile's step time divided by its worker's relative speed. Its gradients are
computed in the background from the moment it starts on the virtual clock, and are waited for only
when they are the next event: all workers that train at the same virtual time really train at the
same time.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from archipel.actor import Actor, Message, NodeId, Reduced, Start, Vector, WorkerSpec
from archipel.errors import Diverged, TrainingError
from archipel.run.census import Census, Plan
from archipel.run.codec import Codec
from archipel.run.metrics import Recorder
from archipel.run.node import Node
from archipel.run.observer import Look, Observer
from archipel.run.screening import Screen, ScreeningConfig
from archipel.run.wire import Coder
from archipel.sim import stages
from archipel.sim.collectives import Collectives
from archipel.sim.deadlock import who_waits
from archipel.sim.engine import Engine, RunSetting, RunState
from archipel.sim.events import Deliver, Drain, Event, Finish, Notice, PassEnd, Save, Tally
from archipel.sim.links import Links, under_way
from archipel.sim.messages import depart
from archipel.sim.network import Network
from archipel.sim.outages import Outages, peers_of
from archipel.sim.passes import Activations
from archipel.sim.schedule import Faults
from archipel.sim.teams import Teams
from archipel.sim.topology import Profile
from archipel.sim.trouble import begin_anew, go_wrong, saved
from archipel.sim.verbs import NodeContext
from archipel.train.pipeline import Pipeline
from archipel.train.trainer import Trainer


class Simulator:
    """Runs `actors` until a stop rule holds.

    Args:
        actors: the method's; started in this order at time 0.
        workers: who trains, and how fast.
        network, profile: what messages and steps cost.
        trainer: computes gradients.
        recorder: is told what happens.
        plan: when the model is evaluated, and when the run ends.
        numel: entries of a whole model's vector; 0 where nothing is trained.
        parameters: how many of them, the leading ones, are parameters.
        seed: of the nodes' random numbers.
        pipeline: how the workers share the replicas' stages; None: each has a whole replica.
        faults: what goes wrong on purpose; None: nothing.
        screening: which updates are refused; None: none.
        wire: the codec by which vectors travel.
        observers: are told of each event.
    """

    def __init__(
        self,
        actors: Sequence[Actor],
        workers: Sequence[WorkerSpec],
        network: Network,
        profile: Profile,
        trainer: Trainer,
        recorder: Recorder,
        plan: Plan,
        *,
        numel: int,
        parameters: int,
        seed: int,
        pipeline: Pipeline | None = None,
        faults: Faults | None = None,
        screening: ScreeningConfig | None = None,
        wire: Codec = "fp32",
        observers: Sequence[Observer] = (),
    ) -> None:
        rank = {actor.me: i for i, actor in enumerate(actors)}
        if len(rank) < len(actors):
            raise ValueError("two actors have one address: every actor's `me` must be its own")
        fastest = max(worker.speed for worker in workers)
        setting = RunSetting(
            network=network,
            profile=profile,
            trainer=trainer,
            faults=faults or Faults((), tuple(rank), ()),
            pipeline=pipeline,
            parameters=parameters,
            step_time_s={
                worker.id: profile.step_time_s / (worker.speed / fastest) for worker in workers
            },
            vector_bytes={
                node: profile.model_bytes * (pipeline.share(node) if pipeline else 1.0)
                for node in rank
            },
            peers=peers_of(actors),
            rank=rank,
        )
        nodes = _nodes(actors, pipeline, numel, parameters, screening, wire)
        absent = dict.fromkeys(setting.faults.absent, 0.0)
        fault_rng = np.random.default_rng((seed, setting.faults.seed, 0xFA17))
        teams = Teams(pipeline, network, profile, setting.step_time_s, seed) if pipeline else None
        state = RunState(
            nodes=nodes,
            census=Census(plan),
            links=Links(network),
            collectives=Collectives(),
            teams=teams,
            outages=Outages(setting.peers, fault_rng, absent, begun=bool(absent)),
            recorder=recorder,
            network_rng=network.rng,
            observers=list(observers),
        )
        contexts: dict[NodeId, NodeContext] = {}
        self.engine = Engine(setting, state, contexts)
        contexts.update((node, NodeContext(node, self.engine, seed, i)) for node, i in rank.items())

    # What can be asked between two events

    @property
    def state(self) -> RunState:
        """All that the run has changed, the trainer's part apart."""
        return self.engine.state

    @property
    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self.state.now

    @property
    def recorder(self) -> Recorder:
        return self.state.recorder

    @property
    def inner_steps(self) -> int:
        """Inner steps of the run so far, as its plan counts them."""
        return self.state.census.inner_steps

    @property
    def absorbed_steps(self) -> int:
        """Those of them that are in the model to take home."""
        absorbed = sum(actor.absorbed for actor in self.holders())
        return absorbed // self.state.census.plan.stages

    @property
    def actors(self) -> dict[NodeId, Actor]:
        """All actors as they are now."""
        return {me: node.actor for me, node in self.state.nodes.items()}

    def holders(self) -> list[Actor]:
        """Those who hold a part of the model to take home."""
        return self.engine.holders()

    def parts(self) -> list[Vector]:
        """The whole models whose mean is the one that a user takes home."""
        return self.engine.parts()

    # Saving and going on

    @property
    def fixed(self) -> dict[str, object]:
        """What the state refers to and a run never changes, by name."""
        setting = self.engine.setting
        return {
            "network": setting.network,
            "profile": setting.profile,
            "pipeline": setting.pipeline,
            "step_time_s": setting.step_time_s,
            "rank": setting.rank,
            "peers": setting.peers,
            "trainer": setting.trainer,
            "on_progress": self.recorder.on_progress,
        }

    def restore(self, state: RunState) -> None:
        """Go on from a state that was saved; this simulator must have been made with the same
        arguments.
        """
        self.engine.setting.network.rng = state.network_rng
        self.engine.state = state

    # The loop

    def run(self, pause: Callable[[], bool] = lambda: False) -> str | None:
        """Run to the end; the name of the stop rule that ended it: `steps`, `seconds` or
        `target_loss`.

        `pause` is asked after each event; if it says so, this returns None, and another call goes
        on with the next one.

        Raises:
            Diverged: a validation loss is not finite, or the training loss of one worker several
                times in a row.
            TrainingError: nothing can happen any more (a deadlock), or training failed.
            Violation: an observer has found that something does not hold.
        """
        with _few_collections():
            return self._run(pause)

    def _run(self, pause: Callable[[], bool]) -> str | None:
        state, reason = self.state, None
        heap, links, seconds = state.heap, state.links, state.census.plan.seconds
        if not state.number:
            self._start()
            reason = self._evaluate_at_marks()
        while reason is None:
            if state.changed and (not heap or heap[0][0] > state.now):
                state.changed = False  # all of this moment has happened
                reason = self._evaluate_at_marks()
                continue
            if not heap:
                self._raise_deadlock()
            if seconds is not None and heap[0][0] > seconds:
                state.now, reason = seconds, "seconds"
                break
            time_s, number, event = heapq.heappop(heap)
            if links.anything_is_void and links.is_void(number, event):
                links.void_events.discard(number)
                continue
            for observer in state.observers:
                observer.happens(state.now, time_s)
            state.now = time_s
            state.events += 1
            self._happen(event)
            if pause():
                return None
        self._inspect()
        evaluations = self.recorder.evaluations
        if not evaluations or evaluations[-1].inner_steps != self.inner_steps:
            self._evaluate()
        state.evaluations.collect()
        return reason

    def _start(self) -> None:
        """Plan the start of all who are there, and all that will go wrong."""
        engine, outages = self.engine, self.state.outages
        for node in engine.setting.rank:
            if node not in outages.down:
                engine.push(0.0, Deliver(node, Start(), node))
        for node in outages.down:
            engine.push(0.0, Notice(node, 0.0))
        for time_s, event in engine.setting.faults.events():
            if isinstance(event, Save) and event.node not in outages.saves:
                outages.saves[event.node] = saved(engine, event.node)
            if time_s or not isinstance(event, Save):
                engine.push(time_s, event)

    def _happen(self, event: Event) -> None:
        engine = self.engine
        state = engine.state
        match event:
            case Deliver(to=to, message=message, sender=sender):
                if to != sender:
                    for observer in state.observers:
                        observer.delivers(sender, to, message)
                    if isinstance(message, Activations):
                        stages.arrives(engine, to, message)
                        return
                elif isinstance(message, Reduced):
                    state.nodes[to].coder.keep(state.collectives.ends(to))
                engine.handle(to, message, sender)
            case Finish():
                self._finish(event)
            case Drain():
                departures, next_end = state.links.drain(event, state.now)
                for deliver, start_s, end_s in departures:
                    depart(engine, deliver, start_s, end_s)
                if next_end is not None:
                    engine.push(*next_end)
            case PassEnd(node=node):
                stages.ends(engine, node)
            case Tally():
                state.recorder.counts(event.messages, event.sent_bytes, event.slow_link_bytes)
            case _:
                self._inspect()
                go_wrong(engine, event)

    def _finish(self, event: Finish) -> None:
        """A worker's inner steps have come to something, or to a loss that is not finite."""
        engine, worker = self.engine, event.worker
        state = engine.state
        del state.jobs[worker]
        try:
            answer: Message = event.answer.result()
        except Diverged as error:
            begin_anew(engine, worker, str(error))
            return
        lost_servers = self._lost_servers() if state.outages.down else ()
        state.census.finishes(worker, event.steps, lost_servers)
        for observer in state.observers:
            observer.finishes(worker, event.steps)
        node = state.nodes[worker]
        node.end_job(answer, state.now, event.progress, state.recorder, losses_count=node.numel > 0)
        engine.handle(worker, answer, worker)

    def _lost_servers(self) -> Sequence[NodeId]:
        workers = self.engine.setting.step_time_s
        return [node for node in self.state.outages.down if node not in workers]

    # Evaluation and inspection

    def _evaluate_at_marks(self) -> str | None:
        """Evaluate if a mark has been passed; the name of the stop rule that holds now."""
        state = self.state
        if state.census.passes_mark():
            self._evaluate()
        if state.census.plan.target_loss is not None:
            state.evaluations.collect()
        return state.census.reached(self.recorder.evaluations[-1].loss)

    def _evaluate(self) -> None:
        """Have the model to take home evaluated in the background, as it is now."""
        state, setting = self.state, self.engine.setting
        held = self.holders()
        evaluation = state.census.evaluation(
            state.now, self.absorbed_steps, held[0].outer_steps, self.recorder
        )
        self.recorder.evaluations.append(evaluation)
        for observer in state.observers:
            observer.evaluates({actor.me: actor.trained for actor in held})
        state.evaluations.submit(
            evaluation, self.parts(), setting.parameters, setting.trainer, state.now
        )

    def _inspect(self) -> None:
        if self.state.observers:
            look = _look(self.engine)
            for observer in self.state.observers:
                observer.inspects(look)

    def _raise_deadlock(self) -> None:
        """Nothing can happen any more."""
        waits = who_waits(self.state)
        text = f"deadlock at {self.now:.6g} s after {self.inner_steps} inner steps: {waits}"
        look = _look(self.engine)
        for observer in self.state.observers:
            observer.stuck(look, text)
        raise TrainingError(text)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for cycles in memory less often: events and messages are many and form none, and to look
    each 700 of them takes up to a quarter of a run in which nothing is trained.
    """
    usual = gc.get_threshold()
    gc.set_threshold(50_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _look(engine: Engine) -> Look:
    state, setting = engine.state, engine.setting
    steps_s, down = setting.step_time_s.values(), state.outages.down
    in_flight = under_way(state.heap, state.links)
    return Look(
        now=state.now,
        sent_bytes=state.recorder.sent_bytes,
        in_flight_bytes=sum(deliver.size_bytes for deliver in in_flight),
        workers=[node for node in setting.step_time_s if node not in down],
        excused=state.outages.excused(setting.step_time_s),
        quiet_since_s=setting.faults.quiet_since_s(state.now),
        lag_s=setting.faults.apart_s * max(steps_s) / min(steps_s),
    )


def _nodes(
    actors: Sequence[Actor],
    pipeline: Pipeline | None,
    numel: int,
    parameters: int,
    screening: ScreeningConfig | None,
    wire: Codec,
) -> dict[NodeId, Node]:
    """What is kept beside each actor."""
    nodes = {}
    for actor in actors:
        count = pipeline.parameters_of(actor.me) if pipeline else parameters
        nodes[actor.me] = Node(
            actor,
            parameters=count,
            numel=pipeline.numel_of(actor.me) if pipeline else numel,
            screen=Screen(screening) if screening else None,
            coder=Coder(wire, count),
        )
    return nodes
