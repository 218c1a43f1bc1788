"""`sim/teams.py` alone: who takes inner steps together, and when they end, counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from archipel.actor import NodeId
from archipel.errors import UserError
from archipel.sim.network import Network
from archipel.sim.teams import Lap, Request, Teams
from archipel.sim.topology import Link, Profile, Topology
from archipel.train.pipeline import Pipeline, Routing

F = 0.25
"""Seconds of a node's forward of one of two micro-batches: a whole model's inner step takes 3 s,
half of that each stage's, and a backward twice a forward.
"""
SEA_S = 2.0
"""Seconds of a micro-batch's 3 bytes from region to region: 0.5 s latency, 2 bytes a second."""


def teams(
    routing: Routing = "fixed", sharing: str = "none", regions: str = "ab", **pipeline: Any
) -> Teams:
    """The first stage of both replicas lies in one region and the second in another, or both in
    one; inside a region messages take no time.
    """
    first, second = regions[0], regions[-1]
    nodes = (
        (NodeId(first, "w0"), NodeId(first, "w1")),
        (NodeId(second, "x0"), NodeId(second, "x1")),
    )
    topology = Topology(
        regions={region: [1.0] for region in regions},
        local=Link(bandwidth_gbit_s=1e12),
        default=Link(bandwidth_gbit_s=16e-9, latency_ms=500),
        sharing=sharing,
    )
    return Teams(
        Pipeline(nodes, micro_batches=2, routing=routing, **pipeline),
        Network(topology, np.random.default_rng(0)),
        Profile(model_bytes=1, step_time_s=3.0, activation_bytes=6),
        {node: 3.0 for stage in nodes for node in stage},
        seed=0,
    )


def asks(steps: int = 1, progress: int = 0) -> Request:
    return Request(torch.empty(0), steps, progress)


def lap_of(made: Teams, replicas: tuple[int, ...], steps: int = 1) -> Lap:
    """The inner steps of a team, all of whose nodes ask."""
    laps = [made.join(stage[q], asks(steps)) for stage in made.pipeline.nodes for q in replicas]
    assert laps[:-1] == [None] * (len(laps) - 1)
    assert laps[-1] is not None
    return laps[-1]


# Who


def test_under_random_routes_all_nodes_are_one_team() -> None:
    made = teams("random")
    [a, a1], [x, x1] = made.pipeline.nodes
    asked = {node: asks(5, i) for i, node in enumerate((x1, a, x, a1))}
    laps = [made.join(node, request) for node, request in asked.items()]
    assert laps[:3] == [None, None, None]
    lap = laps[3]
    assert lap is not None
    assert lap.team == (0, 1)
    assert list(lap.requests) == [a, a1, x, x1]  # by stage, then by replica
    assert all(lap.requests[node] is request for node, request in asked.items())
    assert not made.waiting


def test_under_fixed_routes_each_replica_is_a_team() -> None:
    made = teams("fixed")
    [a, a1], [_, x1] = made.pipeline.nodes
    assert made.join(a, asks()) is None
    assert made.join(a1, asks()) is None
    lap = made.join(x1, asks())
    assert lap is not None
    assert lap.team == (1,)
    assert list(lap.requests) == [a1, x1]
    assert list(made.waiting) == [(0,)]


def test_the_inner_steps_of_a_team_are_numbered_through() -> None:
    """The routes are drawn from the number. Each team counts its own."""
    made = teams("fixed")
    firsts = [lap_of(made, (q,), steps).first for q, steps in ((0, 5), (0, 3), (1, 2), (0, 1))]
    assert firsts == [0, 5, 0, 8]


def test_the_nodes_of_a_team_must_ask_for_equally_many_steps() -> None:
    made = teams("random")
    [a, a1], [x, x1] = made.pipeline.nodes
    for node, steps in ((x, 4), (a, 4), (a1, 5)):
        made.join(node, asks(steps))
    with pytest.raises(UserError) as error:
        made.join(x1, asks(4))
    assert str(error.value) == (
        "the nodes of a pipeline must take equally many inner steps (without dynamic_steps), not "
        "a/w0: 4, a/w1: 5, b/x0: 4, b/x1: 4"
    )


@pytest.mark.parametrize(
    ("regions", "sharing", "routing", "shares"),
    [
        ("ab", "fair", "random", True),
        ("ab", "fair", "fixed", True),
        ("ab", "none", "random", False),
        ("a", "fair", "random", False),
    ],
)
def test_a_team_shares_links_if_it_lies_in_several_regions(
    regions: str, sharing: str, routing: Routing, shares: bool
) -> None:
    made = teams(routing, sharing, regions)
    assert made.share_links(lap_of(made, made.pipeline.team(made.pipeline.nodes[0][0]))) is shares


# How long


@pytest.mark.parametrize(("work", "seconds"), [((), (6.0, 6.0)), ((0.2, 0.8), (2.4, 9.6))])
def test_a_node_computes_its_stages_share_of_the_work(
    work: tuple[float, ...], seconds: tuple[float, float]
) -> None:
    made = teams(work=work)
    found = tuple(made.busy_s(stage[0], 4) for stage in made.pipeline.nodes)
    assert found == pytest.approx(seconds)


def test_two_micro_batches_through_two_stages_over_the_sea() -> None:
    """The first stage forwards at 0 and F. The second one has the first micro-batch at F + SEA, is
    then always busy (2 forwards, 2 backwards), and hands back the second gradient at the end; the
    first stage works its last backward after that.
    """
    made = teams()
    end_s, tally = made.end_s(lap_of(made, (0,)), 100.0)
    second_s = 100.0 + F + SEA_S + 2 * F + 2 * 2 * F
    assert end_s.tolist() == [[pytest.approx(second_s + SEA_S + 2 * F)], [pytest.approx(second_s)]]
    assert (tally.messages, tally.sent_bytes, tally.slow_link_bytes) == (4, 12.0, 12.0)


def test_inner_steps_follow_each_other() -> None:
    """The second stage is done when the first one is not; its next input comes when that is."""
    made = teams()
    end_s, tally = made.end_s(lap_of(made, (0,), 2), 0.0)
    step_s = F + SEA_S + 2 * F + 2 * 2 * F + SEA_S + 2 * F
    assert end_s[0].tolist() == [pytest.approx(2 * step_s)]
    assert end_s[1].tolist() == [pytest.approx(2 * step_s - SEA_S - 2 * F)]
    assert tally.messages == 8


def test_clipping_takes_a_number_there_and_back() -> None:
    """4 bytes: 2.5 s each way, after the first stage's last backward."""
    plain, clipped = teams(), teams(clips=True)
    end_s, _ = plain.end_s(lap_of(plain, (0,)), 0.0)
    known_s, tally = clipped.end_s(lap_of(clipped, (0,)), 0.0)
    first_s = max(end_s[0, 0], end_s[1, 0] + 2.5)
    assert known_s[:, 0].tolist() == [pytest.approx(first_s), pytest.approx(first_s + 2.5)]
    assert (tally.messages, tally.sent_bytes, tally.slow_link_bytes) == (6, 20.0, 20.0)


def test_a_team_in_one_region_sends_nothing_over_slow_links() -> None:
    made = teams("random", regions="a")
    _, tally = made.end_s(lap_of(made, (0, 1), 3), 0.0)
    assert (tally.messages, tally.sent_bytes, tally.slow_link_bytes) == (3 * 2 * 4, 3 * 24.0, 0.0)


def test_slower_nodes_and_heavier_stages_take_longer() -> None:
    """One replica, everything in one region: stage 1 has 3/4 of the work and runs at half speed."""
    made = teams(regions="a", work=(0.25, 0.75))
    [[first, *_], [second, *_]] = made.pipeline.nodes
    made.step_time_s = {first: 3.0, second: 6.0}
    end_s, _ = made.end_s(lap_of(made, (0,)), 0.0)
    light, heavy = 3.0 * 0.25 / 6, 6.0 * 0.75 / 6
    second_s = light + 6 * heavy  # it waits for one forward, then never again
    assert end_s[:, 0].tolist() == [pytest.approx(second_s + 2 * light), pytest.approx(second_s)]


def test_each_boundary_between_stages_has_its_own_link() -> None:
    """Of three stages the first two lie in one region: only the second boundary is over the sea.
    The last stage has the first micro-batch at 2F + SEA, where F is now 1 s / 6, and hands back
    the second gradient when it has worked 2 forwards and 2 backwards.
    """
    made = teams()
    nodes = ((NodeId("a", "w0"),), (NodeId("a", "w1"),), (NodeId("b", "w0"),))
    made.pipeline = Pipeline(nodes, micro_batches=2, routing="fixed")
    made.step_time_s = {node: 3.0 for [node] in nodes}
    end_s, tally = made.end_s(lap_of(made, (0,)), 0.0)
    forward_s = 1 / 6
    third_s = 2 * forward_s + SEA_S + 6 * forward_s
    second_s = third_s + SEA_S + 2 * forward_s
    assert end_s[:, 0].tolist() == [
        pytest.approx(second_s + 2 * forward_s),
        pytest.approx(second_s),
        pytest.approx(third_s),
    ]
    assert (tally.messages, tally.sent_bytes, tally.slow_link_bytes) == (8, 24.0, 12.0)
