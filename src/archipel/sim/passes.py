"""A team's inner steps in passes: which node can work on which micro-batch, and who gets its
result.

What belongs here: the order of a team's work, as plain state. What does not: when a node's work
ends and when a message arrives (`stages.py`), and who is in a team (`teams.py`).

A pass goes through all stages, each time from a node to one node of the next stage. An inner step
is GPipe's list of passes (arXiv 1811.06965), but for the order of the backwards: all micro-batches
forwards, then all backwards in the same order, in which the gradients are added up everywhere (see
`train/pipeline.py`), so that live and simulated sums are equal to the bit. Where gradients are
clipped by the norm of a whole replica, two more passes of a single number follow: its parts are
added up on the way back, and the sum goes forwards. Every node takes its part of every pass, in
that order, as soon as it is free and its input has come; nobody waits for a whole team between two
inner steps.

`train/pipeline.py` computes the same times without events, where no transfer disturbs another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from archipel.actor import Message, NodeId

NORM_BYTES = 4.0
"""Of a number that helps to clip gradients: fp32."""


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One way through all stages, forwards or backwards.

    Attributes:
        route: which replica's node works for which replica, shape (stages, replicas).
        backward: from the last stage to the first.
        work: how much each node works, in forwards of one micro-batch.
        size_bytes: what a node hands to the next one.
    """

    route: np.ndarray
    backward: bool
    work: int
    size_bytes: float


@dataclass(frozen=True, eq=False, slots=True)
class Activations(Message):
    """From a node of a pipeline to the next one: the activations of a micro-batch, or the gradient
    that goes back, or a part of a norm. `number` is that of the pass.
    """

    number: int


def passes_of(routes: np.ndarray, activation_bytes: float, *, clips: bool) -> list[Pass]:
    """The passes of one inner step, in order.

    Args:
        routes: see `Pipeline.routes`, shape (micro_batches, stages, replicas).
        activation_bytes: of one micro-batch.
        clips: gradients are clipped by the norm of a whole replica.
    """
    forwards = [Pass(route, False, 1, activation_bytes) for route in routes]
    backwards = [Pass(route, True, 2, activation_bytes) for route in routes]
    own = np.tile(np.arange(routes.shape[2]), (routes.shape[1], 1))
    norms = [Pass(own, True, 0, NORM_BYTES), Pass(own, False, 0, NORM_BYTES)]
    return forwards + backwards + (norms if clips else [])


@dataclass
class Place:
    """One node's place in its team, and how far it is.

    Attributes:
        stage, replica: its stage, and its replica, counted from 0 in every team.
        forward_s: seconds of its forward of one micro-batch.
        done: passes that it has taken its part of.
        working: it works on the next one.
        arrived: numbers of the passes whose input has arrived before the node could begin them.
    """

    stage: int
    replica: int
    forward_s: float
    done: int = 0
    working: bool = False
    arrived: set[int] = field(default_factory=set)


@dataclass
class Passes:
    """The passes of all inner steps that a team takes until its next outer step.

    Attributes:
        nodes: all nodes of the team, by stage, then by replica.
        places: the place of each of these nodes.
        passes: in the order in which every node takes them; a pass's number is its index.
    """

    nodes: list[list[NodeId]]
    places: dict[NodeId, Place]
    passes: list[Pass]

    def arrives(self, node: NodeId, number: int) -> None:
        """The input of a node for one pass is there."""
        self.places[node].arrived.add(number)

    def begins(self, node: NodeId) -> float | None:
        """A node begins its next pass; the seconds that it works on it. None: it cannot begin yet,
        or has taken its part of all passes.
        """
        place = self.places[node]
        if place.working or self.is_done(node):
            return None
        one = self.passes[place.done]
        if place.stage != (len(self.nodes) - 1 if one.backward else 0):
            if place.done not in place.arrived:
                return None
            place.arrived.remove(place.done)
        place.working = True
        return one.work * place.forward_s

    def ends(self, node: NodeId) -> tuple[NodeId, Activations, float] | None:
        """A node has done its work in a pass: the node that gets its output, what that is, and its
        bytes. None: this was the last stage of the pass.
        """
        place = self.places[node]
        number, one = place.done, self.passes[place.done]
        place.working, place.done = False, number + 1
        stage = place.stage + (-1 if one.backward else 1)
        if not 0 <= stage < len(self.nodes):
            return None
        [replica] = np.flatnonzero(one.route[place.stage] == place.replica)
        to = self.nodes[stage][one.route[stage, replica]]
        return to, Activations(number), one.size_bytes

    def is_done(self, node: NodeId) -> bool:
        """A node has taken its part of all passes."""
        return self.places[node].done == len(self.passes)
