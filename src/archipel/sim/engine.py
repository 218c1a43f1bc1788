"""A simulated run at one moment, and what every part of the engine does with it.

What belongs here: all that a run is made of and all that it changes, putting an event on the heap,
and letting an actor react. What does not: what events there are and what comes of each (`clock.py`,
`verbs.py`, `trouble.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from archipel.actor import Actor, Context, Message, NodeId, Vector
from archipel.run.census import Census, holders
from archipel.run.metrics import Recorder
from archipel.run.node import Node
from archipel.run.observer import Observer
from archipel.sim.collectives import Collectives
from archipel.sim.evaluations import Evaluations
from archipel.sim.events import Event, Finish
from archipel.sim.links import Links
from archipel.sim.network import Network
from archipel.sim.outages import Outages, Peers
from archipel.sim.schedule import Faults
from archipel.sim.teams import Teams
from archipel.sim.topology import Profile
from archipel.train.pipeline import Pipeline, join
from archipel.train.trainer import Trainer


@dataclass(frozen=True)
class RunSetting:
    """What a run is made of and never changes.

    Attributes:
        network, profile: what messages and steps cost.
        trainer: computes gradients.
        faults: what goes wrong on purpose.
        pipeline: how the workers share the replicas' stages; None: each has a whole replica.
        parameters: leading entries of a whole model's vector that are parameters.
        step_time_s: seconds of an inner step of each worker, if nothing slows it down.
        vector_bytes: bytes on the wire of all the weights that a node holds.
        peers: the nodes that each node may send to.
        rank: the place of each node in the order in which they start.
    """

    network: Network
    profile: Profile
    trainer: Trainer
    faults: Faults
    pipeline: Pipeline | None
    parameters: int
    step_time_s: Mapping[NodeId, float]
    vector_bytes: Mapping[NodeId, float]
    peers: Mapping[NodeId, Peers]
    rank: Mapping[NodeId, int]


@dataclass
class RunState:
    """Everything that a run changes, except what the trainer keeps.

    Attributes:
        nodes: every actor, and what is kept beside it.
        census: how far the run is.
        links: messages on their way.
        collectives: all-reduces.
        teams: nodes that take inner steps together in stages; None: every worker has a whole
            replica.
        outages: which nodes are lost.
        recorder: what has happened.
        network_rng: drawn from for jitter.
        observers: are told what happens.
        evaluations: evaluations whose losses are being computed.
        now: seconds on the virtual clock.
        heap: future events: time, number, event.
        number: number of the next event that is put on the heap.
        events: how many events have happened.
        changed: the model to take home has changed at this moment.
        jobs: inner steps under way, by worker.
        rngs: generators of random numbers of the nodes that have drawn some.
    """

    nodes: dict[NodeId, Node]
    census: Census
    links: Links
    collectives: Collectives
    teams: Teams | None
    outages: Outages
    recorder: Recorder
    network_rng: np.random.Generator
    observers: Sequence[Observer] = ()
    evaluations: Evaluations = field(default_factory=Evaluations)
    now: float = 0.0
    heap: list[tuple[float, int, Event]] = field(default_factory=list)
    number: int = 0
    events: int = 0
    changed: bool = False
    jobs: dict[NodeId, Finish] = field(default_factory=dict)
    rngs: dict[NodeId, np.random.Generator] = field(default_factory=dict)


class Engine:
    """A simulated run: what it is made of, and how it stands.

    Attributes:
        contexts: what each actor may touch of the world.
    """

    def __init__(
        self, setting: RunSetting, state: RunState, contexts: Mapping[NodeId, Context]
    ) -> None:
        self.setting, self.state, self.contexts = setting, state, contexts

    def push(self, time_s: float, event: Event) -> None:
        """Something will happen at `time_s`."""
        state = self.state
        heapq.heappush(state.heap, (time_s, state.number, event))
        state.number += 1

    def handle(self, to: NodeId, message: Message, sender: NodeId) -> None:
        """Let an actor react, and note what that changes in the whole run."""
        state = self.state
        node = state.nodes[to]
        before = node.actor.trained
        node.handle(message, sender, self.contexts[to], state.recorder)
        for observer in state.observers:
            observer.handles(node.actor)
        if node.actor.trained != before:
            if state.outages.begun:
                self.recount()
            else:
                state.census.count(to, node.actor.trained)
                self._progressed()

    def recount(self) -> None:
        """Who holds the model may have changed: those who are lost count if nobody else holds
        it.
        """
        census = self.state.census
        before = census.total
        census.recount({actor.me: actor.trained for actor in self.holders()})
        if census.total != before:
            self._progressed()

    def _progressed(self) -> None:
        state = self.state
        state.changed = True
        state.census.changed()
        state.recorder.on_progress(state.census.inner_steps, state.now)
        for observer in state.observers:
            observer.progresses(state.census.total)

    def holders(self) -> list[Actor]:
        """Those who hold a part of the model to take home; see `census.holders`."""
        nodes = self.state.nodes
        holds = {me: node.actor.model() is not None for me, node in nodes.items()}
        return [nodes[me].actor for me in holders(holds, self.state.outages.down)]

    def parts(self) -> list[Vector]:
        """The whole models whose mean is the one that a user takes home."""
        pipeline = self.setting.pipeline
        if pipeline is None:
            return [part for actor in self.holders() if (part := actor.model()) is not None]
        nodes = self.state.nodes
        stages = [
            [part for node in stage if (part := nodes[node].actor.model()) is not None]
            for stage in pipeline.nodes
        ]
        return [join(parts, pipeline.parameters) for parts in zip(*stages, strict=True)]
