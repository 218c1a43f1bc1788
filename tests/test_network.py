"""`network.py` against the published formulas, brute force, and shared links reckoned as a
fluid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, groupby, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.actor import Group, NodeId
from archipel.sim import routes
from archipel.sim.network import Collective, FairLink, Network
from archipel.sim.topology import PROFILES, Link, RegionLink, Topology, load_topology

MODEL_BYTES = PROFILES["pythia-70m-h100"].model_bytes


def network(topology: Topology, seed: int = 0) -> Network:
    return Network(topology, np.random.default_rng(seed))


def group(topology: Topology) -> Group:
    return tuple(worker.id for worker in topology.workers)


def pair(link: Link) -> Network:
    """Two regions of one worker each, and `link` between them."""
    return network(Topology(regions={"a": [1.0], "b": [1.0]}, default=link))


A, B = NodeId("a", "w0"), NodeId("b", "w0")


# Messages


def test_headers_take_their_part_of_the_bandwidth_and_are_no_bytes_of_a_message() -> None:
    plain = Link(bandwidth_gbit_s=0.02, latency_ms=10)
    link = plain.model_copy(update={"overhead": 0.25})
    assert pair(plain).message_s(A, B, 2.5e6) == pytest.approx(0.01 + 1.0)
    assert pair(link).message_s(A, B, 2.5e6) == pytest.approx(0.01 + 1.25)
    cost = pair(link).all_reduce((A, B), 2.5e6)
    assert (cost.seconds, cost.slow_link_bytes) == (pytest.approx(2 * (0.01 + 0.625)), 5e6)


@pytest.mark.parametrize(
    ("a", "b", "gbit_s"),
    [("r0", "r1", 0.537), ("r1", "r0", 0.537), ("r3", "r1", 0.117), ("r2", "r2", 100)],
)
def test_a_message_takes_its_bytes_over_the_bandwidth(a: str, b: str, gbit_s: float) -> None:
    seconds = network(load_topology("halos-4x4")).message_s(
        NodeId(a, "w0"), NodeId(b, "server0"), MODEL_BYTES
    )
    assert seconds == MODEL_BYTES / (gbit_s * 1e9 / 8)


def test_latency_is_added_once() -> None:
    assert pair(Link(bandwidth_gbit_s=0.8, latency_ms=35)).message_s(A, B, 1e8) == 0.035 + 1.0


def test_an_empty_message_takes_the_latency() -> None:
    assert pair(Link(bandwidth_gbit_s=1, latency_ms=50)).message_s(A, B, 0) == 0.05


def test_jitter_is_log_normal_around_the_median_latency() -> None:
    """ln(latency) is normal: mean ln(median), standard deviation σ; so the mean latency is median ·
    exp(σ²/2).
    """
    net = pair(Link(bandwidth_gbit_s=1, latency_ms=50, jitter=0.5))
    drawn = np.array([net.latency_s(A, B) for _ in range(20_000)])
    assert np.log(drawn).mean() == pytest.approx(math.log(0.05), abs=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.02)
    assert drawn.mean() == pytest.approx(0.05 * math.exp(0.5**2 / 2), rel=0.02)


def test_jitter_leaves_the_transfer_alone() -> None:
    link = Link(bandwidth_gbit_s=0.8, latency_ms=50, jitter=0.5)
    first, second = pair(link), pair(link)
    assert [first.message_s(A, B, 1e8) for _ in range(5)] == [
        second.latency_s(A, B) + 1.0 for _ in range(5)
    ]


def test_jitter_is_seeded() -> None:
    topology = load_topology("internet-2")

    def draw(seed: int) -> list[float]:
        net = network(topology, seed)
        return [net.latency_s(*group(topology)) for _ in range(5)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(set(draw(1))) == 5


def test_links_without_jitter_draw_no_random_numbers() -> None:
    net = network(load_topology("two-regions"))
    before = net.rng.bit_generator.state
    net.message_s(NodeId("east", "w0"), NodeId("west", "w0"), 1e6)
    net.all_reduce(group(net.topology), 1e6)
    assert net.rng.bit_generator.state == before


# Rings


def test_the_published_time_of_a_ring_all_reduce() -> None:
    topology = load_topology("halos-4x4")
    seconds = network(topology).all_reduce(group(topology), MODEL_BYTES).seconds
    assert seconds == pytest.approx(2 * 15 / 16 * 281_706_496 * 8 / 0.127e9, rel=1e-12)


def test_a_ring_of_one_region_has_local_links_only() -> None:
    topology = Topology(regions={"a": [1.0] * 4}, local=Link(bandwidth_gbit_s=8, latency_ms=2))
    cost = network(topology).all_reduce(group(topology), 4e9)
    assert cost == Collective(
        seconds=pytest.approx(6 * (0.002 + 1.0)), messages=24, sent_bytes=24e9, slow_link_bytes=0
    )


def test_the_local_link_can_be_the_slowest_of_a_ring() -> None:
    topology = Topology(
        regions={"a": [1.0] * 2, "b": [1.0]},
        local=Link(bandwidth_gbit_s=1),
        default=Link(bandwidth_gbit_s=8),
    )
    assert network(topology).all_reduce(group(topology), 3e9).seconds == pytest.approx(
        4 * 1e9 * 8 / 1e9
    )


def test_a_ring_without_company_in_any_region_never_uses_the_local_link() -> None:
    topology = Topology(
        regions={"a": [1.0], "b": [1.0]},
        local=Link(bandwidth_gbit_s=0.001),
        default=Link(bandwidth_gbit_s=8),
    )
    assert network(topology).all_reduce(group(topology), 2e9).seconds == pytest.approx(2 * 1.0)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """2 to 5 regions of 1 to 3 workers, links of any speed and latency between them."""
    regions = {f"r{i}": [1.0] * draw(st.integers(1, 3)) for i in range(draw(st.integers(2, 5)))}
    kinds = st.tuples(st.floats(0.01, 10), st.floats(0, 200))
    links = []
    for between in combinations(regions, 2):
        gbit_s, latency_ms = draw(kinds)
        links.append(RegionLink(between=between, bandwidth_gbit_s=gbit_s, latency_ms=latency_ms))
    gbit_s, latency_ms = draw(kinds)
    return Topology(
        regions=regions, links=links, local=Link(bandwidth_gbit_s=gbit_s, latency_ms=latency_ms)
    )


# Chains


def chain_s(hops: list[Link], size_bytes: float, parts: int) -> float:
    """When the last part of a vector has gone along all `hops` and back, by following each part."""
    way = [*hops, *reversed(hops)]  # the directions of a link do not disturb each other
    free_s = [0.0] * len(way)
    for _ in range(parts):
        now_s = 0.0
        for i, link in enumerate(way):
            passed_s = max(now_s, free_s[i]) + size_bytes / parts / link.bandwidth_bytes_per_s
            free_s[i], now_s = passed_s, passed_s + link.latency_s
    return now_s


@given(topologies(), st.floats(1e3, 1e8))
def test_a_chain_takes_as_long_as_its_parts_followed_one_by_one(
    topology: Topology, size_bytes: float
) -> None:
    topology = topology.model_copy(update={"collective": "chain"})
    members = routes.chain(topology, group(topology), size_bytes)
    hops = [topology.link(a.region, b.region) for a, b in pairwise(members)]
    assert all(hops)
    parts = 32 if size_bytes >= 32 * 65536 else max(1, math.ceil(size_bytes / 65536))
    cost = network(topology).all_reduce(group(topology), size_bytes)
    # Small vectors are cut evenly here, and into parts of one size there.
    cut = size_bytes if parts == 32 else min(size_bytes, 65536) * parts
    assert cost.seconds == pytest.approx(chain_s(hops, cut, parts))  # type: ignore[arg-type]
    slow = 2 * (len(topology.regions) - 1)
    assert cost.slow_link_bytes == pytest.approx(slow * size_bytes)
    assert cost.sent_bytes == pytest.approx(2 * (len(members) - 1) * size_bytes)
    assert cost.messages == 2 * (len(members) - 1) * parts


@given(topologies())
def test_a_chain_enters_each_region_once_by_the_best_way_from_its_first(topology: Topology) -> None:
    members = group(topology)
    found = routes.chain(topology, members, 1e6)
    assert sorted(found) == sorted(members)
    assert found[0] == members[0]
    regions = [region for region, _ in groupby(node.region for node in found)]
    assert len(regions) == len(topology.regions)

    def slowest(order: Sequence[str]) -> float:
        links = [topology.link(a, b) for a, b in pairwise(order)]
        return max(link.latency_s + 1e6 / link.bandwidth_bytes_per_s for link in links if link)

    assert slowest(regions) == min(
        slowest((regions[0], *rest)) for rest in permutations(regions[1:])
    )


def test_between_two_regions_a_chain_is_up_to_twice_as_fast_as_a_ring() -> None:
    topology = Topology(regions={"a": [1.0] * 8, "b": [1.0] * 8}, default=Link(bandwidth_gbit_s=1))
    ring, chain = (
        network(topology.model_copy(update={"collective": rule})).all_reduce(group(topology), 1e9)
        for rule in ("ring", "chain")
    )
    assert ring.seconds == pytest.approx(2 * 15 / 16 * 8)
    assert chain.seconds == pytest.approx(8 * (1 + 1 / 32), rel=0.02)  # 100 Gbit/s inside
    assert ring.slow_link_bytes == pytest.approx(2 * 2 * 15 / 16 * 1e9)
    assert chain.slow_link_bytes == pytest.approx(2e9)


def ring_by_brute_force(topology: Topology, size_bytes: float) -> float:
    """Seconds of the best of all rings of *workers* that keep a region's workers together: written
    without `network.py`.
    """
    members = {
        region: [worker.id for worker in topology.workers if worker.id.region == region]
        for region in topology.regions
    }
    best = math.inf
    for order in permutations(members):
        walk = [node for region in order for node in members[region]]
        step = 0.0
        for a, b in pairwise([*walk, walk[0]]):
            link = topology.link(a.region, b.region)
            assert link is not None
            step = max(
                step,
                link.latency_ms / 1000 + size_bytes / len(walk) / (link.bandwidth_gbit_s / 8 * 1e9),
            )
        best = min(best, 2 * (len(walk) - 1) * step)
    return best


@given(topologies(), st.floats(1e3, 1e9))
def test_a_ring_is_as_fast_as_the_best_of_all_orders(topology: Topology, size_bytes: float) -> None:
    seconds = network(topology).all_reduce(group(topology), size_bytes).seconds
    assert seconds == pytest.approx(ring_by_brute_force(topology, size_bytes), rel=1e-9)


@given(topologies(), st.integers(0, 100))
def test_the_order_of_the_group_does_not_matter_to_a_ring(topology: Topology, seed: int) -> None:
    nodes = group(topology)
    shuffled = tuple(nodes[i] for i in np.random.default_rng(seed).permutation(len(nodes)))
    one, other = (
        network(topology).all_reduce(nodes, 1e6),
        network(topology).all_reduce(shuffled, 1e6),
    )
    assert other.seconds == pytest.approx(one.seconds)
    assert (other.messages, other.sent_bytes, other.slow_link_bytes) == (
        one.messages,
        one.sent_bytes,
        one.slow_link_bytes,
    )


def test_the_best_ring_depends_on_the_size_of_what_is_sent() -> None:
    """Five regions: the sides of the pentagon are quick, its diagonals wide, and either make a
    ring.
    """
    links = [
        RegionLink(between=(f"r{i}", f"r{j}"), bandwidth_gbit_s=0.08, latency_ms=1)
        if j - i in (1, 4)
        else RegionLink(between=(f"r{i}", f"r{j}"), bandwidth_gbit_s=8, latency_ms=100)
        for i, j in combinations(range(5), 2)
    ]
    net = network(Topology(regions={f"r{i}": [1.0] for i in range(5)}, links=links))
    assert net.all_reduce(group(net.topology), 5).seconds == pytest.approx(8 * 0.001, rel=1e-3)
    assert net.all_reduce(group(net.topology), 5e9).seconds == pytest.approx(8 * (0.1 + 1.0))


def test_a_ring_of_many_regions_visits_each_one_once() -> None:
    rng = np.random.default_rng(0)
    names = [f"r{i}" for i in range(12)]
    links = [
        RegionLink(between=between, bandwidth_gbit_s=rng.uniform(0.1, 1))
        for between in combinations(names, 2)
    ]
    topology = Topology(regions={name: [1.0] for name in names}, links=links)
    ring = routes.edges(routes.best_order(topology, names, 1e6, closed=True), closed=True)
    assert sorted(a for a, _ in ring) == sorted(b for _, b in ring) == sorted(names)
    at, seen = "r0", []
    for _ in names:
        seen.append(at)
        at = dict(ring)[at]
    assert (sorted(seen), at) == (sorted(names), "r0")


def test_a_ring_counts_what_each_member_passes_on() -> None:
    topology = load_topology("uneven-2-6")
    nodes = group(topology)
    messages = sent = slow = 0.0
    for _ in range(2 * 15):  # every step of the ring r0 r1 r2 r3, chunk by chunk
        for a, b in pairwise([*nodes, nodes[0]]):
            messages, sent, slow = messages + 1, sent + 1 / 16, slow + (a.region != b.region) / 16
    cost = network(topology).all_reduce(nodes, MODEL_BYTES)
    assert (cost.messages, cost.sent_bytes, cost.slow_link_bytes) == (
        messages,
        sent * MODEL_BYTES,
        slow * MODEL_BYTES,
    )


def test_every_step_of_a_ring_waits_for_the_slowest_draw() -> None:
    """Internet-8: a step is the maximum of 8 log-normal latencies, and there are 14 of them."""
    net = network(load_topology("internet-8"))
    seconds = np.mean([net.all_reduce(group(net.topology), 8e6).seconds for _ in range(500)])
    draws = 0.05 * np.exp(0.5 * np.random.default_rng(1).standard_normal((100_000, 8)))
    assert seconds == pytest.approx(14 * (draws.max(axis=1).mean() + 1e6 * 8 / 0.2e9), rel=0.02)


# Trees


@pytest.mark.parametrize(("workers", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5)])
def test_a_tree_takes_two_whole_vectors_a_level(workers: int, levels: int) -> None:
    topology = Topology(
        regions={"a": [1.0] * workers},
        local=Link(bandwidth_gbit_s=8, latency_ms=100),
        collective="tree",
    )
    cost = network(topology).all_reduce(group(topology), 1e9)
    assert cost.seconds == pytest.approx(2 * levels * (0.1 + 1.0))
    assert (cost.messages, cost.sent_bytes, cost.slow_link_bytes) == (
        2 * (workers - 1),
        2 * (workers - 1) * 1e9,
        0,
    )


def test_a_tree_waits_for_the_slowest_link_between_regions() -> None:
    topology = load_topology("halos-4x4").model_copy(update={"collective": "tree"})
    cost = network(topology).all_reduce(group(topology), MODEL_BYTES)
    assert cost.seconds == pytest.approx(2 * 4 * MODEL_BYTES * 8 / 0.117e9)
    assert (cost.messages, cost.slow_link_bytes) == (30, 6 * MODEL_BYTES)


def test_a_tree_waits_for_the_local_link_if_that_is_the_slowest() -> None:
    local, default = Link(bandwidth_gbit_s=0.8), Link(bandwidth_gbit_s=8)
    topology = Topology(
        regions={"a": [1.0] * 2, "b": [1.0] * 2}, local=local, default=default, collective="tree"
    )
    assert network(topology).all_reduce(group(topology), 1e9).seconds == pytest.approx(4 * 10.0)


@pytest.mark.parametrize("collective", ["ring", "tree"])
def test_one_member_costs_nothing(collective: str) -> None:
    topology = load_topology("one-node").model_copy(update={"collective": collective})
    assert network(topology).all_reduce(group(topology), MODEL_BYTES) == Collective(
        0.0, 0, 0.0, 0.0
    )


# Links that are shared fairly


def ends(arrivals: list[tuple[float, float]], bandwidth: float) -> list[float]:
    """When the transfers (start, bytes), in the order of their starts, leave a `FairLink`."""
    link, result = FairLink(bandwidth), [math.nan] * len(arrivals)

    def drain(until: float) -> None:
        while link.remaining and (end := link.next_end())[0] <= until:
            link.advance(end[0])
            del link.remaining[end[1]]
            result[end[1]] = end[0]

    for i, (start, size_bytes) in enumerate(arrivals):
        drain(start)
        link.advance(start)
        link.remaining[i] = size_bytes
    drain(math.inf)
    return result


def ends_of_a_fluid(arrivals: list[tuple[float, float]], bandwidth: float) -> list[float]:
    """The same from the definition: the n(t) transfers under way have each passed V(t) bytes, dV/dt
    = bandwidth / n(t).

    A transfer that starts at s leaves when V has grown by its size since s. Between two starts or
    leavings V is a straight line; which of them comes next is found by looking at all.
    """
    tags: dict[int, float] = {}
    result, clock, passed, started = [math.nan] * len(arrivals), 0.0, 0.0, 0
    while started < len(arrivals) or tags:
        slope = bandwidth / len(tags) if tags else 0.0
        leaving = clock + (min(tags.values()) - passed) / slope if tags else math.inf
        starting = arrivals[started][0] if started < len(arrivals) else math.inf
        passed, clock = passed + slope * (min(leaving, starting) - clock), min(leaving, starting)
        if leaving <= starting:
            first = min(tags, key=lambda i: tags[i])
            del tags[first]
            result[first] = clock
        else:
            tags[started] = passed + arrivals[started][1]
            started += 1
    return result


transfers = st.lists(st.tuples(st.floats(0, 20), st.floats(0.5, 60)), min_size=1, max_size=12).map(
    sorted
)


@given(transfers)
def test_a_fair_link_is_a_fluid(arrivals: list[tuple[float, float]]) -> None:
    np.testing.assert_allclose(ends(arrivals, 10.0), ends_of_a_fluid(arrivals, 10.0), rtol=1e-9)


@given(transfers)
def test_a_fair_link_is_never_idle_while_bytes_wait(arrivals: list[tuple[float, float]]) -> None:
    """The last transfer leaves when one that served them first come, first served would have
    finished too.
    """
    free = 0.0
    for start, size_bytes in arrivals:
        free = max(free, start) + size_bytes / 10.0
    assert max(ends(arrivals, 10.0)) == pytest.approx(free, rel=1e-9)


@given(transfers)
def test_company_never_speeds_a_transfer_up(arrivals: list[tuple[float, float]]) -> None:
    for (start, size_bytes), end in zip(arrivals, ends(arrivals, 10.0), strict=True):
        assert end >= (start + size_bytes / 10.0) * (1 - 1e-9)


def test_a_transfer_alone_has_the_whole_bandwidth() -> None:
    assert ends([(3.0, 50.0)], 10.0) == [8.0]


def test_two_equal_transfers_take_twice_as_long() -> None:
    assert ends([(0.0, 50.0), (0.0, 50.0)], 10.0) == [10.0, 10.0]


def test_a_second_transfer_halves_the_pace_of_the_first() -> None:
    assert ends([(0.0, 50.0), (2.0, 50.0)], 10.0) == [8.0, 10.0]


def test_the_oldest_of_those_that_tie_ends_first() -> None:
    link = FairLink(10.0, {7: 50.0, 8: 50.0})
    assert link.next_end() == (10.0, 7)
