"""A pipeline's teams on the virtual clock: which nodes wait to train, and what their common inner
steps cost.

What belongs here: who takes inner steps together, and the timing of stages by the routes and the
schedule of `train/pipeline.py`. What does not: the events that this leads to (`stages.py`),
gradients (`train/`), and what nodes do between two of these (`methods/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from archipel.actor import NodeId, Vector
from archipel.errors import UserError
from archipel.sim.events import Tally
from archipel.sim.network import Network
from archipel.sim.passes import NORM_BYTES, Passes, Place, passes_of
from archipel.sim.topology import Profile
from archipel.train.pipeline import Pipeline, norm_end_s, step_end_s

Team = tuple[int, ...]
"""The replicas whose nodes take their inner steps together."""


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """The inner steps that a node asks for. It waits until all others of its team have asked."""

    theta: Vector
    steps: int
    progress: int


@dataclass(frozen=True, eq=False, slots=True)
class Lap:
    """The inner steps that a team takes together.

    Attributes:
        team: the replicas of the team.
        requests: what each node has asked for, by stage, then by replica.
        steps: how many inner steps each node takes.
        first: the number of the first one.
    """

    team: Team
    requests: dict[NodeId, Request]
    steps: int
    first: int


@dataclass
class Teams:
    """All teams of a pipeline.

    Attributes:
        pipeline: which node holds which stage.
        network, profile: what messages and steps cost.
        step_time_s: of a whole model's inner step on each node.
        seed: seed of the run, for the routes.
        waiting: for each team, those of its nodes that wait for the others.
        begun: inner steps that each team has begun.
        passes: the passes under way, for each node of a team whose messages share links.
    """

    pipeline: Pipeline
    network: Network
    profile: Profile
    step_time_s: Mapping[NodeId, float]
    seed: int
    waiting: dict[Team, dict[NodeId, Request]] = field(default_factory=dict)
    begun: dict[Team, int] = field(default_factory=dict)
    passes: dict[NodeId, Passes] = field(default_factory=dict)

    def join(self, node: NodeId, request: Request) -> Lap | None:
        """A node wants to train. With the last one of its team their common inner steps start.

        Raises:
            UserError: they do not ask for equally many.
        """
        team = self.pipeline.team(node)
        waiting = self.waiting.setdefault(team, {})
        waiting[node] = request
        nodes = [other for stage in self._nodes(team) for other in stage]
        if len(waiting) < len(nodes):
            return None
        del self.waiting[team]
        if any(other.steps != request.steps for other in waiting.values()):
            asked = ", ".join(f"{other}: {waiting[other].steps}" for other in nodes)
            raise UserError(
                "the nodes of a pipeline must take equally many inner steps (without "
                f"dynamic_steps), not {asked}"
            )
        first = self.begun.get(team, 0)
        self.begun[team] = first + request.steps
        return Lap(team, {other: waiting[other] for other in nodes}, request.steps, first)

    def busy_s(self, node: NodeId, steps: int) -> float:
        """Seconds that a node computes in `steps` inner steps; the rest of their time it waits."""
        return steps * self.step_time_s[node] * self.pipeline.work_of(node)

    def share_links(self, lap: Lap) -> bool:
        """What the nodes send each other shares its way with other messages, so that nobody knows
        beforehand when it arrives.
        """
        several = len({node.region for node in lap.requests}) > 1
        return several and self.network.topology.sharing == "fair"

    def passes_of(self, lap: Lap) -> Passes:
        """All that the nodes do in `lap`, pass by pass."""
        nodes = self._nodes(lap.team)
        places = {
            node: Place(k, q, self._forward_s(node))
            for k, stage in enumerate(nodes)
            for q, node in enumerate(stage)
        }
        passes = [
            one
            for step in range(lap.first, lap.first + lap.steps)
            for one in passes_of(
                self._routes(lap.team, step), self._activation_bytes, clips=self.pipeline.clips
            )
        ]
        return Passes(nodes, places, passes)

    def end_s(self, lap: Lap, now: float) -> tuple[np.ndarray, Tally]:
        """When each node has taken all the inner steps of `lap`, by stage, then by replica, where
        no message disturbs another; and what they send.
        """
        pipeline, nodes, tally = self.pipeline, self._nodes(lap.team), Tally()
        forward_s = np.array([[self._forward_s(node) for node in stage] for stage in nodes])

        def message_s(size_bytes: float) -> Callable[[int, int, int, int], float]:
            def seconds(k: int, a: int, to: int, b: int) -> float:
                sender, receiver = nodes[k][a], nodes[to][b]
                tally.messages += 1
                tally.sent_bytes += size_bytes
                tally.slow_link_bytes += size_bytes if sender.region != receiver.region else 0.0
                return self.network.message_s(sender, receiver, size_bytes)

            return seconds

        end_s = np.full(forward_s.shape, now)
        for step in range(lap.first, lap.first + lap.steps):
            routes = self._routes(lap.team, step)
            end_s = step_end_s(routes, end_s, forward_s, message_s(self._activation_bytes))
            if pipeline.clips:
                end_s = norm_end_s(end_s, message_s(NORM_BYTES))
        return end_s, tally

    def _nodes(self, team: Team) -> list[list[NodeId]]:
        """The nodes of a team, by stage, then by replica."""
        return [[stage[q] for q in team] for stage in self.pipeline.nodes]

    def _routes(self, team: Team, step: int) -> np.ndarray:
        """See `Pipeline.routes`. A team of one replica keeps to itself."""
        return self.pipeline.routes(self.seed, step)[:, :, : len(team)]

    def _forward_s(self, node: NodeId) -> float:
        """Seconds of a node's forward of one micro-batch; a backward takes twice that."""
        work_s = self.step_time_s[node] * self.pipeline.work_of(node)
        return work_s / (3 * self.pipeline.micro_batches)

    @property
    def _activation_bytes(self) -> float:
        """Of one micro-batch."""
        return self.profile.activation_bytes / self.pipeline.micro_batches
