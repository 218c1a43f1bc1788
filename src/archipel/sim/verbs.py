"""What an actor may ask for, on the virtual clock: `actor.Context`.

What belongs here: what each verb costs, and the event that answers it. What does not: what happens
when that event comes (`clock.py`), and what goes wrong on purpose (`trouble.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipel.actor import Group, Message, NodeId, Sent, Vector
from archipel.errors import TrainingError, UserError
from archipel.run import wire
from archipel.sim import collectives, routes, stages
from archipel.sim.collectives import Complete, Contribution
from archipel.sim.engine import Engine
from archipel.sim.events import Deliver, Finish
from archipel.sim.messages import post
from archipel.sim.teams import Request
from archipel.train.trainer import Promise


@dataclass
class NodeContext:
    """One node's view of the world.

    Attributes:
        engine: the simulated run.
        seed, rank: seed of the run and rank of this node; together they seed its random numbers.
    """

    me: NodeId
    engine: Engine
    seed: int
    rank: int

    @property
    def now(self) -> float:
        return self.engine.state.now

    @property
    def rng(self) -> np.random.Generator:
        rngs = self.engine.state.rngs
        if self.me not in rngs:
            rngs[self.me] = np.random.default_rng((self.seed, self.rank))
        return rngs[self.me]

    def after(self, seconds: float, message: Message) -> None:
        self.engine.push(self.now + seconds, Deliver(self.me, message, self.me))

    # Messages

    def send(self, to: NodeId, message: Sent) -> Sent:
        engine, me = self.engine, self.me
        setting, state = engine.setting, engine.state
        if to not in setting.rank:
            kind = type(message).__name__
            raise TrainingError(f"{me} sent {kind} to {to}, and there is no such node")
        node = state.nodes[me]
        coder = node.coder
        weight = wire.weight(message, node.numel, coder.wire, coder.parameters)
        arrives = message if coder.wire == "fp32" else coder.arrived(message)
        post(engine, Deliver(to, arrives, me, setting.vector_bytes[me] * weight))
        return arrives

    def all_reduce(
        self,
        group: Group,
        vector: Vector,
        round: int = 0,
        share: float | None = None,
        *,
        difference: bool = False,
    ) -> None:
        engine, state = self.engine, self.engine.state
        node = state.nodes[self.me]
        if share is None:
            share = wire.share(vector, node.numel)
        if difference:
            share *= wire.saving(vector, node.coder.wire, node.coder.parameters)
        refused = node.refuses([vector], self.me, state.now, state.recorder)
        complete = state.collectives.call(
            self.me,
            Contribution(group, vector, round, share, refused, difference),
            state.outages.lost,
            again=state.outages.begun,
        )
        if complete is not None:
            reduce(engine, complete)

    # Inner steps

    def train(self, theta: Vector, steps: int, progress: int) -> None:
        engine, me = self.engine, self.me
        engine.state.nodes[me].check_steps(steps)
        if engine.state.teams is not None:
            stages.train(engine, me, Request(theta.clone(), steps, progress))
            return
        end_s = self._end_s(steps)
        answer = engine.setting.trainer.train(me, theta, steps, progress, end_s)
        self._begin(answer, steps, progress, end_s)

    def gradient(self, theta: Vector, progress: int) -> None:
        setting = self.engine.setting
        if setting.pipeline:
            raise UserError(
                "pipeline: this method asks for single gradients, which a model in stages does not "
                "give"
            )
        end_s = self._end_s(1)
        self._begin(setting.trainer.gradient(self.me, theta, end_s), 1, progress, end_s)

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        end_s = self._end_s(0)  # at once: the profile's step time has the optimizer's part in it
        answer = self.engine.setting.trainer.apply(self.me, theta, gradient, progress, end_s)
        self._begin(answer, 0, progress, end_s)

    def _end_s(self, steps: int) -> float:
        """When `steps` inner steps end that begin now. A restart may be from before them."""
        setting, state = self.engine.setting, self.engine.state
        if self.me in state.outages.saves:
            state.outages.before[self.me] = setting.trainer.state_of(self.me)
        usual_s = steps * setting.step_time_s[self.me]
        return state.now + setting.faults.compute_s(self.me, state.now, usual_s)

    def _begin(self, answer: Promise, steps: int, progress: int, end_s: float) -> None:
        """Inner steps are under way until `end_s`."""
        state, me = self.engine.state, self.me
        state.nodes[me].begin_job()
        for observer in state.observers:
            observer.begins(me, state.now, steps * self.engine.setting.step_time_s[me])
        if end_s > state.now:
            state.recorder.computes(me, state.now, end_s)
        state.jobs[me] = job = Finish(me, answer, steps, progress)
        self.engine.push(end_s, job)


def reduce(engine: Engine, complete: Complete) -> None:
    """A collective starts: plan the arrival of its mean at all members."""
    setting, state = engine.setting, engine.state
    group = complete.group
    coders, chain = [state.nodes[node].coder for node in group], group
    if coders[0].wire != "fp32":
        chain = routes.chain(setting.network.topology, group, setting.vector_bytes[group[0]])
    reduced = collectives.reduced(complete, coders, chain)
    size_bytes = setting.vector_bytes[group[0]] * complete.calls[0].share
    cost = setting.network.all_reduce(group, size_bytes)
    end_s = setting.faults.collective_end_s(group, state.now, cost.seconds)
    state.recorder.counts(cost.messages, cost.sent_bytes, cost.slow_link_bytes)
    state.recorder.reduces(group, state.now, end_s)
    for observer in state.observers:
        observer.reduces(cost.sent_bytes, cost.seconds, cost.between)
    state.collectives.starts(complete, state.number)
    for node in group:
        engine.push(end_s, Deliver(node, reduced, node))
