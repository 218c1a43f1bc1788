"""Inner steps of a pipeline whose messages share links: times counted by hand, and the recursion
where no message meets another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import simulator

from archipel.actor import Actor, Context, Message, NodeId, Start, Trained
from archipel.run.census import Plan
from archipel.run.invariants import Ledger
from archipel.run.observer import Observer
from archipel.sim.clock import Simulator
from archipel.sim.topology import Profile, Topology
from archipel.train.pipeline import Pipeline, Routing
from archipel.train.trainer import NoTraining

LATENCY_S = 0.5
FORWARD_S = 1 / 6
"""Of one micro-batch, where a whole model's inner step takes 1 s: 2 stages, a backward twice a
forward.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Parcel(Message):
    """Weighs as much as its sender's weights."""

    theta: Tensor


@dataclass(kw_only=True)
class Member(Actor):
    """Does one thing at the start, and notes when what happens."""

    begin: Callable[[Context], None]
    laps: int = 1
    trained_s: list[float] = field(default_factory=list)
    got_s: list[float] = field(default_factory=list)

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                self.begin(ctx)
            case Trained(steps=steps):
                self.absorbed += steps
                self.trained_s.append(ctx.now)
                if len(self.trained_s) < self.laps:
                    self.begin(ctx)
            case Parcel():
                self.got_s.append(ctx.now)

    def model(self) -> Tensor:
        return torch.empty(0)


def trains(steps: int) -> Callable[[Context], None]:
    return lambda ctx: ctx.train(torch.empty(0), steps, 0)


def rests(ctx: Context) -> None:
    """A replica that takes no part."""


def simulated(
    pipeline: Pipeline,
    topology: Topology,
    activation_bytes: int,
    begin: dict[NodeId, Callable[[Context], None]],
    steps: int = 1,
    laps: int = 1,
    observers: Sequence[Observer] = (),
) -> Simulator:
    """A run of the nodes of `pipeline`, each of which takes `steps` inner steps or does what
    `begin` says, until all have done that `laps` times.
    """
    nodes = [node for stage in pipeline.nodes for node in stage]
    actors = [Member(me=node, begin=begin.get(node, trains(steps)), laps=laps) for node in nodes]
    total = sum(laps * steps for node in nodes if node not in begin)
    sim = simulator(
        "",
        NoTraining(),
        topology=topology,
        actors=actors,
        theta=torch.empty(0),
        profile=Profile(
            name="tiny", model_bytes=6, step_time_s=1.0, activation_bytes=activation_bytes
        ),
        plan=Plan(steps=total),
        pipeline=pipeline,
    )
    sim.state.observers = observers
    assert sim.run() == "steps"
    return sim


def ends_s(sim: Simulator) -> list[list[float]]:
    return [actor.trained_s for actor in sim.actors.values()]


def over_the_sea(
    replicas: int, sharing: Literal["none", "fair"], routing: Routing, micro_batches: int = 1
) -> tuple[Pipeline, Topology]:
    """The first stage of each replica lies in one region and the second in another; 1 byte a second
    lies between them.
    """
    first, second = ([NodeId(region, f"w{q}") for q in range(replicas)] for region in "ab")
    topology = Topology(
        regions={"a": [1.0] * replicas, "b": [1.0] * replicas},
        default={"bandwidth_gbit_s": 8e-9, "latency_ms": 500},
        sharing=sharing,
    )
    return Pipeline((tuple(first), tuple(second)), micro_batches, routing), topology


@pytest.mark.parametrize("routing", ["random", "fixed"])
@pytest.mark.parametrize(("sharing", "crossing_s"), [("none", 3.0), ("fair", 6.0)])
def test_two_replicas_that_cross_at_once_take_twice_as_long(
    routing: Routing, sharing: Literal["none", "fair"], crossing_s: float
) -> None:
    """3 bytes each, at the same moment, forwards and back; under fixed routes they are two teams
    that know nothing of each other.
    """
    pipeline, topology = over_the_sea(2, sharing, routing)
    sim = simulated(pipeline, topology, 3, {})
    second_s = FORWARD_S + crossing_s + LATENCY_S + 3 * FORWARD_S
    first_s = second_s + crossing_s + LATENCY_S + 2 * FORWARD_S
    assert ends_s(sim) == [
        [pytest.approx(first_s)],
        [pytest.approx(first_s)],
        [pytest.approx(second_s)],
        [pytest.approx(second_s)],
    ]
    assert (sim.recorder.messages, sim.recorder.sent_bytes) == (4, 12)
    assert sim.recorder.slow_link_bytes == 12


def test_micro_batches_of_one_replica_share_with_each_other() -> None:
    """Two of 3 bytes each. The second leaves the first node 1/12 s after the first, so from 1/6 s
    to 1/12 + 6 - 1/12 s both are on the link.
    """
    pipeline, topology = over_the_sea(1, "fair", "random", micro_batches=2)
    sim = simulated(pipeline, topology, 6, {})
    forward_s = FORWARD_S / 2
    # The first has 3 - 1/12 bytes left when the second starts; then both have half the bandwidth.
    first_gone_s = 2 * forward_s + 2 * (3 - forward_s)
    second_gone_s = first_gone_s + forward_s
    forwards_s = second_gone_s + LATENCY_S + forward_s  # the first one's forward is long over
    # The last one goes back first, after 2 forwards' time; the other follows as much later.
    last_back_s = forwards_s + 2 * forward_s
    second_s = last_back_s + 2 * forward_s
    last_gone_s = second_s + 2 * (3 - 2 * forward_s)
    other_gone_s = last_gone_s + 2 * forward_s
    first_s = other_gone_s + LATENCY_S + 2 * forward_s
    assert ends_s(sim) == [[pytest.approx(first_s)], [pytest.approx(second_s)]]


def test_activations_share_with_the_messages_of_outer_steps() -> None:
    """Replica 1 takes no inner steps; its first stage sends half a model, 3 bytes, at time 0."""
    pipeline, topology = over_the_sea(2, "fair", "fixed")
    (_, sender), (_, receiver) = pipeline.nodes
    sim = simulated(
        pipeline,
        topology,
        3,
        {sender: lambda ctx: ctx.send(receiver, Parcel(torch.empty(0))), receiver: rests},
    )
    parcel_gone_s = FORWARD_S + 2 * (3 - FORWARD_S)
    activations_gone_s = parcel_gone_s + FORWARD_S
    second_s = activations_gone_s + LATENCY_S + 3 * FORWARD_S
    first_s = second_s + 3 + LATENCY_S + 2 * FORWARD_S
    assert sim.actors[receiver].got_s == [pytest.approx(parcel_gone_s + LATENCY_S)]
    assert ends_s(sim) == [[pytest.approx(first_s)], [], [pytest.approx(second_s)], []]


def test_a_node_computes_its_part_of_a_step_whoever_shares() -> None:
    """And every byte that is sent has arrived at the end, in the order of sending."""
    pipeline, topology = over_the_sea(2, "fair", "random", micro_batches=3)
    ledger = Ledger()
    sim = simulated(pipeline, topology, 12, {}, steps=4, observers=[ledger])
    assert list(sim.recorder.compute_s.values()) == pytest.approx([4 / 2] * 4)
    assert ledger.checks["bytes"] == 1
    assert ledger.delivered_bytes == sim.recorder.sent_bytes == 4 * 2 * 3 * 2 * 4


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Pipeline, Topology]:
    """Any pipeline in any regions, with links that are never crowded: of endless bandwidth."""
    stages, replicas = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    count = draw(st.integers(2, 3))
    regions = [draw(st.integers(0, count - 1)) for _ in range(stages * replicas)]
    names = [f"r{region}" for region in sorted({*regions})]
    sizes = {name: sum(f"r{region}" == name for region in regions) for name in names}
    seconds = st.floats(0, 2000, allow_subnormal=False)
    topology = Topology(
        regions={
            name: [draw(st.sampled_from([1.0, 0.7, 0.3])) for _ in range(size)]
            for name, size in sizes.items()
        },
        links=[
            {"between": (a, b), "bandwidth_gbit_s": 1e15, "latency_ms": draw(seconds)}
            for i, a in enumerate(names)
            for b in names[i + 1 :]
        ],
    )
    free = draw(st.permutations([worker.id for worker in topology.workers]))
    nodes = tuple(tuple(free[k::stages]) for k in range(stages))
    routing: Routing = draw(st.sampled_from(["random", "fixed"]))
    return Pipeline(nodes, draw(st.integers(1, 3)), routing, clips=draw(st.booleans())), topology


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_where_messages_do_not_meet_the_ends_are_those_of_the_recursion(
    world: tuple[Pipeline, Topology],
) -> None:
    pipeline, topology = world
    runs = {
        sharing: simulated(
            pipeline,
            topology.model_copy(update={"sharing": sharing}),
            1000,
            {},
            steps=2,
            laps=2,
        )
        for sharing in ("none", "fair")
    }
    none, fair = runs["none"], runs["fair"]
    np.testing.assert_allclose(ends_s(fair), ends_s(none), rtol=1e-9)
    assert fair.recorder.messages == none.recorder.messages
    assert fair.recorder.sent_bytes == pytest.approx(none.recorder.sent_bytes)
    assert fair.recorder.slow_link_bytes == pytest.approx(none.recorder.slow_link_bytes)
    assert fair.recorder.compute_s == pytest.approx(none.recorder.compute_s)


@settings(max_examples=40, deadline=None)
@given(worlds(), st.floats(1e-6, 1e-3))
def test_company_never_brings_an_end_forward(
    world: tuple[Pipeline, Topology], gbit_s: float
) -> None:
    pipeline, topology = world
    crowded = [
        link.model_copy(update={"bandwidth_gbit_s": gbit_s, "latency_ms": 0.0})
        for link in topology.links
    ]
    slow = topology.model_copy(update={"links": crowded})
    fair, none = (
        np.array(
            ends_s(
                simulated(pipeline, slow.model_copy(update={"sharing": sharing}), 100_000, {}, 2)
            )
        )
        for sharing in ("fair", "none")
    )
    assert (fair >= none * (1 - 1e-9)).all()


def test_a_pipeline_in_one_region_shares_nothing() -> None:
    """Its ends are all known at the start, to the bit."""
    nodes = [NodeId("a", f"w{i}") for i in range(4)]
    pipeline = Pipeline.of(nodes, 2, 2, "random")
    regions = {"a": [1.0] * 4, "b": [1.0]}
    ends = [
        ends_s(simulated(pipeline, Topology(regions=regions, sharing=sharing), 100, {}, 3))
        for sharing in ("none", "fair")
    ]
    assert ends[0] == ends[1]
