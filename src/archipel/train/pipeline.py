"""A model in stages: who holds which, who feeds whom, and how long that takes.

What belongs here: nodes, routes and times when one copy of the model is spread over several nodes.
What does not: where the model is cut (`cut.py`), inner steps (`stages.py` in one process,
`stage.py` in several), events (`sim/`), and outer steps: a method sees the nodes of one stage only.

Every node owns one stage of one replica. An inner step splits each replica's batch into
micro-batches. `routing: random` (NoLoCo, arXiv 2506.10911) draws a permutation for every
micro-batch and every boundary between stages, from the shared seed: it says which replica's next
stage gets the activations, and the gradient comes back the same way. So replicas mix through their
data, without any collective. `routing: fixed` keeps each replica to itself.

The schedule is GPipe's (arXiv 1811.06965): all forwards, then all backwards, then the optimizer. A
stage takes its share of the step's time, a backward twice a forward.

Deviations from the NoLoCo authors' code. There each stage clips its gradient by its own norm; here
all stages clip by the norm of the whole replica's gradient, as if the replica were not split. There
all stages of a replica have the same partner in an outer step; here each stage draws its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from archipel.actor import Group, NodeId, Vector
from archipel.vector import Layout

Routing = Literal["random", "fixed"]

# Who and where


@dataclass(frozen=True)
class Pipeline:
    """Which node holds which stage of which replica, and how micro-batches find their way.

    Attributes:
        nodes: all nodes, by stage, then by replica.
        micro_batches: M: parts of a replica's batch.
        routing: `random` or `fixed`.
        numels, parameters: each stage's weights, and how many of them are parameters; empty where
            nothing is trained.
        work: each stage's share of the work of an inner step; empty where nothing is trained, and
            then all stages have equal shares.
        clips: the task clips gradients, by the norm of a whole replica's gradient.
    """

    nodes: tuple[Group, ...]
    micro_batches: int
    routing: Routing
    numels: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    work: tuple[float, ...] = ()
    clips: bool = False

    @staticmethod
    def of(
        workers: Sequence[NodeId], stages: int, micro_batches: int, routing: Routing
    ) -> Pipeline:
        """Neighbours in rank order hold neighbouring stages: worker i has stage i % stages of
        replica i // stages.
        """
        return Pipeline(
            tuple(tuple(workers[k::stages]) for k in range(stages)), micro_batches, routing
        )

    @property
    def stages(self) -> int:
        return len(self.nodes)

    @property
    def replicas(self) -> int:
        return len(self.nodes[0])

    @cached_property
    def places(self) -> dict[NodeId, tuple[int, int]]:
        """Stage and replica of each node."""
        return {node: (k, q) for k, stage in enumerate(self.nodes) for q, node in enumerate(stage)}

    def parameters_of(self, node: NodeId) -> int:
        """How many leading entries of a node's vector are parameters; 0 where nothing is
        trained.
        """
        return self.parameters[self.places[node][0]] if self.parameters else 0

    def numel_of(self, node: NodeId) -> int:
        """Entries of a node's vector; 0 where nothing is trained."""
        return self.numels[self.places[node][0]] if self.numels else 0

    def share(self, node: NodeId) -> float:
        """The part of the model's weights that `node` holds; all stages alike where nothing is
        trained.
        """
        return (
            self.numels[self.places[node][0]] / sum(self.numels) if self.numels else 1 / self.stages
        )

    def work_of(self, node: NodeId) -> float:
        """The share of `node`'s stage in the work of an inner step."""
        return self.work[self.places[node][0]] if self.work else 1 / self.stages

    def ranks(self, team: Sequence[int]) -> list[int]:
        """The ranks of the nodes of the replicas `team`, by stage, then by replica."""
        return [q * self.stages + k for k in range(self.stages) for q in team]

    def team(self, node: NodeId) -> tuple[int, ...]:
        """The replicas whose nodes take their inner steps together with `node`: all under random
        routing, else its own.
        """
        return tuple(range(self.replicas)) if self.routing == "random" else (self.places[node][1],)

    def routes(self, seed: int, step: int) -> np.ndarray:
        """Shape (micro_batches, stages, replicas): which replica's stage k computes micro-batch j
        of replica q's batch.

        `seed` is the run's, `step` the number of the inner step. Stage 0 computes its own. Between
        two neighbouring stages lies a uniformly random permutation, independent of all others.
        """
        own = np.tile(np.arange(self.replicas), (self.micro_batches, self.stages, 1))
        if self.routing == "random":
            own[:, 1:] = np.random.default_rng((seed, 0x907E, step)).permuted(own[:, 1:], axis=2)
        return own

    def neighbours(self) -> Iterator[tuple[NodeId, tuple[NodeId, ...]]]:
        """Each node but those of the last stage, and the nodes of the next stage that it may
        exchange activations with.
        """
        for before, after in itertools.pairwise(self.nodes):
            for q, node in enumerate(before):
                yield node, after if self.routing == "random" else after[q : q + 1]


# Its vectors


def split(theta: Vector, layouts: Sequence[Layout]) -> list[Vector]:
    """The stages' vectors from that of the whole model (all parameters, then all buffers), as
    copies.
    """
    counts = [layout.parameters for layout in layouts]
    sizes = counts + [layout.numel - layout.parameters for layout in layouts]
    pieces = torch.split(theta, sizes)
    return [
        torch.cat(pair) for pair in zip(pieces[: len(counts)], pieces[len(counts) :], strict=True)
    ]


def join(parts: Sequence[Vector], counts: Sequence[int]) -> Vector:
    """The whole model's vector from its stages', of which the first `counts` entries are
    parameters: the inverse of `split`.
    """
    if not counts:  # nothing is trained
        return parts[0]
    pairs = list(zip(parts, counts, strict=True))
    return torch.cat(
        [part[:count] for part, count in pairs] + [part[count:] for part, count in pairs]
    )


# How long it takes


def step_end_s(
    routes: np.ndarray,
    start_s: np.ndarray,
    forward_s: np.ndarray,
    transfer_s: Callable[[int, int, int, int], float],
) -> np.ndarray:
    """When each node has done its forwards and backwards of one inner step: a max-plus recursion.

    A node works on one micro-batch at a time, in order, forwards and then backwards; a micro-batch
    starts there when the node is free and its input has come.

    Args:
        routes: see `Pipeline.routes`, shape (micro_batches, stages, replicas).
        start_s: when each node is free, shape (stages, replicas).
        forward_s: its seconds for the forward of one micro-batch, same shape; a backward takes
            twice that.
        transfer_s: seconds of a micro-batch's activations, or their gradient, from node (stage,
            replica) to node (stage, replica).
    """
    free_s, backward_s = start_s.copy(), 2 * forward_s
    _, stages, replicas = routes.shape

    def pass_on(route: np.ndarray, k: int, to: int, done_s: np.ndarray) -> np.ndarray:
        return np.array(
            [done_s[q] + transfer_s(k, route[k, q], to, route[to, q]) for q in range(replicas)]
        )

    for route in routes:
        ready_s = start_s[0]
        for k in range(stages):
            free_s[k, route[k]] = done_s = (
                np.maximum(free_s[k, route[k]], ready_s) + forward_s[k, route[k]]
            )
            ready_s = pass_on(route, k, k + 1, done_s) if k + 1 < stages else done_s
    for route in routes:
        ready_s = free_s[-1, route[-1]]
        for k in reversed(range(stages)):
            free_s[k, route[k]] = done_s = (
                np.maximum(free_s[k, route[k]], ready_s) + backward_s[k, route[k]]
            )
            ready_s = pass_on(route, k, k - 1, done_s) if k else done_s
    return free_s


def norm_end_s(end_s: np.ndarray, note_s: Callable[[int, int, int, int], float]) -> np.ndarray:
    """When each node knows the norm of its replica's whole gradient: a number goes to stage 0 and
    its sum comes back.

    Gradients are clipped by that norm, as if the replica were not split. `note_s`: seconds of a
    number from node to node.
    """
    known_s = end_s.copy()
    stages, replicas = end_s.shape
    for q in range(replicas):
        for k in reversed(range(stages - 1)):
            known_s[k, q] = max(known_s[k, q], known_s[k + 1, q] + note_s(k + 1, q, k, q))
        for k in range(1, stages):
            known_s[k, q] = known_s[k - 1, q] + note_s(k - 1, q, k, q)
    return known_s
