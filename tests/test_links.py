"""`sim/links.py` alone: the order of arrivals, links shared as a fluid, and what is void, each
against a reference that looks at everything again from the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.actor import NodeId, Start
from archipel.sim.events import Deliver, Drain, Event, Finish, PassEnd, Tally
from archipel.sim.links import Links, under_way
from archipel.sim.network import Network
from archipel.sim.topology import Link, RegionLink, Topology
from archipel.train.trainer import Done

A, A1 = NodeId("a", "w0"), NodeId("a", "w1")
B, B1 = NodeId("b", "w0"), NodeId("b", "w1")
C = NodeId("c", "w0")
NODES = (A, A1, B, B1, C)


def links(sharing: str = "none", latency_ms: float = 0.0) -> Links:
    """1 byte a second between `a` and `b`, 2 bytes a second between `c` and either."""
    topology = Topology(
        regions={"a": [1.0] * 2, "b": [1.0] * 2, "c": [1.0]},
        links=[RegionLink(between=("a", "b"), bandwidth_gbit_s=8e-9, latency_ms=latency_ms)],
        default=Link(bandwidth_gbit_s=16e-9, latency_ms=latency_ms),
        sharing=sharing,
    )
    return Links(Network(topology, np.random.default_rng(0)))


def letter(sender: NodeId = A, to: NodeId = B, size_bytes: float = 0.0) -> Deliver:
    return Deliver(to, Start(), sender, size_bytes)


# Order


plans = st.lists(
    st.tuples(st.sampled_from([(A, B), (B, A), (A, B1), (A1, B)]), st.integers(0, 9)), max_size=30
)


@pytest.mark.parametrize("forget_above", [0, 1000])
@given(plans)
def test_a_message_arrives_no_earlier_than_those_before_it_between_the_same_two(
    forget_above: int, sent: list[tuple[tuple[NodeId, NodeId], int]]
) -> None:
    """One leaves each second and takes 0 to 9 s: its arrival is the largest end so far of its
    sender to its receiver. To forget those that are over changes nothing.
    """
    made = links()
    made.forget_above = forget_above
    ends: dict[tuple[NodeId, NodeId], list[int]] = {}
    for now, (pair, seconds) in enumerate(sent):
        ends.setdefault(pair, []).append(now + seconds)
        arrival_s = made.arrival_s(letter(*pair), now + seconds, now, now)
        assert arrival_s == max(ends[pair])
        if not forget_above:
            made.forget_above = 0


def test_arrivals_that_are_over_are_forgotten() -> None:
    """Of a thousand pairs; otherwise a run over months would keep all pairs that ever spoke."""
    made = links()
    for i in range(1000):
        made.arrival_s(letter(NodeId("a", f"w{i}")), 1.0 if i else 5000.0, 0.0, i)
    assert len(made.last) == 1000
    made.arrival_s(letter(B, A), 3000.0, 2000.0, 1000)
    assert set(made.last) == {(A, B), (B, A)}


def test_what_is_lost_holds_nobody_back() -> None:
    """The first would arrive at 9 s and is lost; the next one need not wait for it."""
    made = links()
    assert made.arrival_s(letter(), 9.0, 0.0, 4) == 9.0
    made.lose_node(B, 1.0, 5)
    assert made.arrival_s(letter(), 3.0, 2.0, 5) == 3.0
    assert made.arrival_s(letter(), 2.5, 2.5, 6) == 3.0  # but for this one it does


# Shared links


@pytest.mark.parametrize(
    ("sharing", "sender", "to", "shares"),
    [
        ("fair", A, B, True),
        ("fair", A, A1, False),
        ("fair", A, A, False),
        ("none", A, B, False),
        ("none", A, A1, False),
    ],
)
def test_only_links_between_regions_are_shared(
    sharing: str, sender: NodeId, to: NodeId, shares: bool
) -> None:
    assert links(sharing).shares(letter(sender, to)) is shares


@dataclass(frozen=True)
class Sent:
    """A message that starts on a shared link."""

    start_s: int
    sender: NodeId
    to: NodeId
    size_bytes: int


def arrivals(made: Links, sent: list[Sent]) -> list[tuple[float, Deliver, float]]:
    """All departures in the order in which the room gives them, as (end of its last byte, message,
    arrival): a heap of the room's own events, and nothing of the clock.
    """
    found: list[tuple[float, Deliver, float]] = []
    planned: list[tuple[float, int, Drain]] = []
    number = len(sent)

    def drain_until(limit_s: float) -> None:
        nonlocal number
        while planned and min(planned)[:2] <= (limit_s, math.inf):
            now, _, event = first = min(planned, key=lambda entry: entry[:2])
            planned.remove(first)
            departures, following = made.drain(event, now)
            for deliver, _start_s, arrival_s in departures:
                found.append((now, deliver, arrival_s))
            if following is not None:
                planned.append((following[0], number, following[1]))
                number += 1

    for i, one in enumerate(sent):
        drain_until(one.start_s)
        deliver = Deliver(one.to, Start(), one.sender, one.size_bytes)
        end_s, event = made.join(deliver, one.start_s, i)
        planned.append((end_s, number, event))
        number += 1
    drain_until(math.inf)
    return found


def fluid_ends(sent: list[Sent]) -> list[float]:
    """When the last byte of each has left, in small equal steps of what each direction passes: n
    transfers that have b bytes a second to share pass b/n bytes a second each.
    """
    left = [float(one.size_bytes) for one in sent]
    ends = [math.nan] * len(sent)
    clock = 0.0
    while any(math.isnan(end) for end in ends):
        going = [i for i, one in enumerate(sent) if one.start_s <= clock and math.isnan(ends[i])]
        ways = [(sent[i].sender.region, sent[i].to.region) for i in going]
        pace = {
            i: (2 if "c" in way else 1) / ways.count(way)
            for i, way in zip(going, ways, strict=True)
        }
        edges = [one.start_s for one in sent if one.start_s > clock]
        edges += [clock + left[i] / pace[i] for i in going]
        following = min(edges)
        for i in going:
            left[i] -= pace[i] * (following - clock)
            if left[i] <= 1e-9:
                ends[i] = following
        clock = following
    return ends


messages = st.lists(
    st.builds(
        Sent,
        st.integers(0, 6),
        st.sampled_from([A, A1, C]),
        st.sampled_from([B, B1]),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=8,
).map(lambda sent: sorted(sent, key=lambda one: one.start_s))


@given(messages)
def test_shared_links_are_fluids_that_keep_the_order_between_two_nodes(sent: list[Sent]) -> None:
    """A message departs when its own last byte has left, and that of all before it from the same
    sender to the same receiver; the latency comes on top.
    """
    ends = fluid_ends(sent)
    expected = [
        max(ends[j] for j in range(i + 1) if (sent[j].sender, sent[j].to) == (one.sender, one.to))
        for i, one in enumerate(sent)
    ]
    found = arrivals(links("fair", latency_ms=500), sent)
    assert len(found) == len(sent)
    for pair in {(one.sender, one.to) for one in sent}:
        of_pair = [i for i, one in enumerate(sent) if (one.sender, one.to) == pair]
        got = [entry for entry in found if (entry[1].sender, entry[1].to) == pair]
        assert [deliver.size_bytes for _, deliver, _ in got] == [
            sent[i].size_bytes for i in of_pair
        ]
        assert [end_s for end_s, _, _ in got] == pytest.approx([expected[i] for i in of_pair])
        assert [arrival_s - end_s for end_s, _, arrival_s in got] == pytest.approx([0.5] * len(got))


def test_a_small_message_waits_for_the_one_just_before_it_and_not_only_for_the_first() -> None:
    """10, 100 and 1 bytes at once on a byte a second. The last byte of the third has left at 3 s,
    of the first at 21 s, of the second at 111 s; the third departs behind the second.
    """
    sent = [Sent(0, A, B, size) for size in (10, 100, 1)]
    found = arrivals(links("fair"), sent)
    assert [(end_s, deliver.size_bytes) for end_s, deliver, _ in found] == [
        (pytest.approx(21.0), 10),
        (pytest.approx(111.0), 100),
        (pytest.approx(111.0), 1),
    ]


def test_an_end_that_another_start_has_moved_is_no_end() -> None:
    made = links("fair")
    end_s, first = made.join(letter(size_bytes=4), 0.0, 0)
    assert end_s == 4.0
    moved_s, second = made.join(letter(A1, B1, 9), 2.0, 1)
    assert moved_s == 6.0  # 2 bytes left at half a byte a second
    assert made.drain(first, 4.0) == ([], None)
    departures, following = made.drain(second, 6.0)
    assert [(deliver.to, start_s) for deliver, start_s, _ in departures] == [(B, 0.0)]
    assert following is not None
    assert following[0] == 13.0  # 7 bytes left, alone


@pytest.mark.parametrize(
    ("lost", "ends_s"),
    [
        ("sender", {("a", "b"): 10.0, ("c", "b"): 50.0}),
        ("receiver", {("a", "b"): 10.0}),
        ("link", {("c", "b"): 50.0}),
    ],
)
def test_transfers_that_are_lost_leave_the_link_to_the_others(
    lost: str, ends_s: dict[tuple[str, str], float]
) -> None:
    """8 and 8 bytes share a byte a second until 4 s; then the other one has 6 bytes left, alone.
    100 bytes from elsewhere have 2 bytes a second to themselves all the time.
    """
    made = links("fair")
    stale = [
        made.join(letter(A, B, 8), 0.0, 0)[1],
        made.join(letter(A1, B1, 8), 0.0, 1)[1],
        made.join(letter(C, B, 100), 0.0, 2)[1],
    ]
    match lost:
        case "sender":
            ends = made.lose_node(A, 4.0, 3)
        case "receiver":
            ends = made.lose_node(B, 4.0, 3)
        case _:
            ends = made.lose_link(("b", "a"), 4.0, 3)
    assert {event.direction: end_s for end_s, event in ends} == ends_s
    assert all(made.drain(event, 4.0) == ([], None) for event in stale)
    for end_s, event in ends:
        departures, following = made.drain(event, end_s)
        assert len(departures) == 1
        assert following is None


# What is void


Happening = tuple[str, tuple[NodeId, NodeId]]
histories = st.lists(
    st.tuples(
        st.sampled_from(["message", "message", "job", "lose node", "lose link", "void it"]),
        st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)),
    ),
    max_size=25,
)


@given(histories)
def test_an_event_is_void_if_one_of_its_ends_was_lost_after_it_had_been_planned(
    history: list[Happening],
) -> None:
    """The number of each event is its place in the history; the reference looks through all that
    came after it.
    """
    made = links()
    for number, (what, (node, other)) in enumerate(history):
        match what:
            case "lose node":
                made.lose_node(node, 0.0, number)
            case "lose link" if node.region != other.region:
                made.lose_link((node.region, other.region), 0.0, number)
            case "void it":  # the event before this one, whatever it is
                made.void_events.add(number - 1)
    assert made.anything_is_void == any(
        what == "lose node" or (what == "lose link" and node.region != other.region)
        for what, (node, other) in history
    )
    for number, (what, (node, other)) in enumerate(history):
        after = history[number + 1 :]
        lost = {one for kind, (one, _) in after if kind == "lose node"}
        cut = [{one.region, two.region} for kind, (one, two) in after if kind == "lose link"]
        if what == "message":
            voided = [kind for kind, _ in after[:1]] == ["void it"]
            expected = (
                voided
                or bool(lost & {node, other})
                or (node.region != other.region and {node.region, other.region} in cut)
            )
            assert made.is_void(number, letter(node, other)) == expected
        elif what == "job":
            finish = Finish(node, Done(None), 1, 0)
            assert made.is_void(number, finish) == (node in lost)


def test_a_node_that_is_back_sends_again() -> None:
    made = links()
    made.lose_node(A, 1.0, 7)
    assert made.is_void(6, letter())
    assert not made.is_void(7, letter())


@pytest.mark.parametrize("event", [Drain(("a", "b"), 1), PassEnd(A), Tally()])
def test_events_that_are_no_message_and_no_job_are_never_void(event: Event) -> None:
    made = links()
    made.lose_node(A, 0.0, 10)
    made.lose_link(("a", "b"), 0.0, 10)
    assert not made.is_void(3, event)


def test_messages_under_way_are_those_between_two_nodes_that_are_not_void() -> None:
    made = links()
    heap: list[tuple[float, int, Event]] = [
        (1.0, 0, letter(A, B)),
        (2.0, 1, letter(A1, B)),
        (3.0, 2, letter(A1, A1)),  # a timer
        (4.0, 3, Finish(B, Done(None), 1, 0)),
    ]
    made.lose_node(A, 0.5, 4)
    heap.append((5.0, 4, letter(A, B)))
    assert list(under_way(heap, made)) == [heap[1][2], heap[4][2]]
