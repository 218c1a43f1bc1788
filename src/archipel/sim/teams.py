"""A pipeline's teams on the virtual clock: who waits to train, and when their common inner steps
end.

What belongs here: the timing of stages, by the routes and the schedule of `train/pipeline.py`. What
does not: gradients (`train/`), and what nodes do between two outer steps (`methods/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from archipel.actor import NodeId, Vector
from archipel.errors import UserError
from archipel.sim.events import Tally
from archipel.sim.network import Network
from archipel.sim.topology import Profile
from archipel.train.pipeline import Pipeline, norm_end_s, step_end_s

Team = tuple[int, ...]
"""The replicas whose nodes take their inner steps together."""


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """What a node asks for, while it waits for the others of its team."""

    theta: Vector
    steps: int
    progress: int


@dataclass(frozen=True)
class Lap:
    """The inner steps that a team takes together.

    Attributes:
        team: its replicas.
        requests: what each node has asked for, by stage, then by replica.
        steps: inner steps that each of them takes.
        end_s: when each node has taken them, by stage, then by replica, shape (stages, replicas).
        tally: what the nodes send each other meanwhile.
    """

    team: Team
    requests: dict[NodeId, Request]
    steps: int
    end_s: np.ndarray
    tally: Tally


@dataclass
class Teams:
    """All teams of a pipeline.

    Attributes:
        pipeline: who holds which stage.
        network, profile: what messages and steps cost.
        step_time_s: of a whole model's inner step on each node.
        seed: of the run, for the routes.
        waiting: for each team, those of its nodes that wait for the others.
        begun: inner steps that each team has begun.
    """

    pipeline: Pipeline
    network: Network
    profile: Profile
    step_time_s: Mapping[NodeId, float]
    seed: int
    waiting: dict[Team, dict[NodeId, Request]] = field(default_factory=dict)
    begun: dict[Team, int] = field(default_factory=dict)

    def join(self, node: NodeId, request: Request, now: float) -> Lap | None:
        """A node wants to train. With the last one of its team their common inner steps start.

        Raises:
            UserError: they do not ask for equally many.
        """
        pipeline, team = self.pipeline, self.pipeline.team(node)
        waiting = self.waiting.setdefault(team, {})
        waiting[node] = request
        nodes = [stage[q] for stage in pipeline.nodes for q in team]
        if len(waiting) < len(nodes):
            return None
        del self.waiting[team]
        if any(other.steps != request.steps for other in waiting.values()):
            asked = ", ".join(f"{other}: {waiting[other].steps}" for other in nodes)
            raise UserError(
                "the nodes of a pipeline must take equally many inner steps (without "
                "dynamic_steps), "
                f"not {asked}"
            )
        end_s, tally = self._end_s(team, request.steps, now)
        return Lap(team, {other: waiting[other] for other in nodes}, request.steps, end_s, tally)

    def busy_s(self, node: NodeId, steps: int) -> float:
        """Seconds that a node computes in `steps` inner steps; the rest of their time it waits."""
        return steps * self.step_time_s[node] / self.pipeline.stages

    def _end_s(self, team: Team, steps: int, now: float) -> tuple[np.ndarray, Tally]:
        """When the nodes of `team` have taken `steps` inner steps from now on, and what they
        send.
        """
        pipeline = self.pipeline
        nodes = [[stage[q] for q in team] for stage in pipeline.nodes]
        parts = 3 * pipeline.micro_batches * pipeline.stages  # a backward takes twice a forward
        forward_s = np.array(
            [[self.step_time_s[node] / parts for node in stage] for stage in nodes]
        )
        activation_bytes, tally = self.profile.activation_bytes / pipeline.micro_batches, Tally()

        def message_s(size_bytes: float) -> Callable[[int, int, int, int], float]:
            def seconds(k: int, a: int, to: int, b: int) -> float:
                sender, receiver = nodes[k][a], nodes[to][b]
                tally.messages += 1
                tally.sent_bytes += size_bytes
                tally.slow_link_bytes += size_bytes if sender.region != receiver.region else 0.0
                return self.network.message_s(sender, receiver, size_bytes)

            return seconds

        end_s = np.full(forward_s.shape, now)
        first = self.begun.get(team, 0)
        self.begun[team] = first + steps
        for step in range(first, first + steps):
            # A team of one keeps to itself.
            routes = pipeline.routes(self.seed, step)[:, :, : len(team)]
            end_s = step_end_s(routes, end_s, forward_s, message_s(activation_bytes))
            if pipeline.clips:
                end_s = norm_end_s(end_s, message_s(4))
        return end_s, tally
