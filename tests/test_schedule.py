"""`sim/schedule.py` alone: when faults happen and what they do to times, by hand and by integrating
over small pieces of time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.actor import NodeId
from archipel.sim import schedule as schedules
from archipel.sim.events import Event, Fail, Mend, Return, Save, Sever
from archipel.sim.faults import (
    Crash,
    Delay,
    Duplicate,
    Fault,
    Join,
    Leave,
    LinkDown,
    Loss,
    Partition,
    RandomFaults,
    Slow,
)
from archipel.sim.schedule import Faults, Window, end_s

A, B, C = (NodeId(region, "w0") for region in "abc")
NODES = (A, B, C)
REGIONS = ("a", "b", "c")


def faults(*schedule: Fault, **more: Any) -> Faults:
    """Nodes save every 5 s; the deadline is 10 s."""
    return Faults(schedule, NODES, REGIONS, **{"save_every_s": 5.0, "deadline_s": 10.0, **more})


# Work in windows


def test_work_in_windows() -> None:
    """2 s at full speed, 4 s at half speed: two more; where windows overlap, a quarter; at rate 0
    nothing moves.
    """
    assert end_s(0.0, 4.0, [Window(2.0, 6.0, 0.5)]) == 6.0
    assert end_s(0.0, 5.0, [Window(2.0, 6.0, 0.5)]) == 7.0
    assert end_s(3.0, 1.0, [Window(2.0, 8.0, 0.5), Window(3.0, 9.0, 0.5)]) == 7.0
    assert end_s(0.0, 1.0, [Window(0.5, 3.0, 0.0)]) == 3.5
    assert end_s(3.0, 1.0, [Window(0.5, 3.0, 0.0)]) == 4.0
    assert end_s(0.0, 0.0, [Window(0.0, 3.0, 0.0)]) == 3.0


windows = st.lists(
    st.tuples(st.integers(0, 10), st.integers(1, 6), st.sampled_from([0.0, 0.25, 0.5])).map(
        lambda drawn: Window(drawn[0], drawn[0] + drawn[1], drawn[2])
    ),
    max_size=4,
)


@given(st.integers(0, 40), st.integers(1, 40), windows)
def test_just_the_work_is_done_between_start_and_end(
    start: int, work: int, found: list[Window]
) -> None:
    """Summed over eighths of seconds, in each of which the pace is the product of the windows over
    it; windows begin and end at whole seconds, starts and work are given in quarters.
    """

    def done(until_s: float) -> float:
        pieces = np.arange(start / 4, until_s, 1 / 8)
        paces = [
            math.prod(one.rate for one in found if one.start_s <= piece < one.end_s)
            for piece in pieces
        ]
        lengths = np.minimum(until_s - pieces, 1 / 8)
        return float(np.dot(paces, lengths))

    end = end_s(start / 4, work / 4, found)
    assert done(end) == pytest.approx(work / 4)
    assert done(end - 0.01) < work / 4 - 1e-6


@given(windows)
def test_what_is_at_rest_waits_for_the_end_of_a_standstill(found: list[Window]) -> None:
    """A message of no bytes that arrives while a link is down arrives when that is up again."""
    still = [Window(one.start_s, one.end_s, 0.0) for one in found]
    end = end_s(3.0, 0.0, still)
    covered = {second for one in still for second in range(int(one.start_s), int(one.end_s))}
    assert end == next(second for second in range(3, 100) if second not in covered)


@pytest.mark.parametrize(
    ("node", "start_s", "seconds", "takes_s"),
    [
        (A, 0.0, 5.0, 5.0),  # over when it becomes slow
        (A, 8.0, 4.0, 10.0),  # 2 s, then 2 s of work at a quarter of the pace
        (A, 28.0, 4.0, 7.75),  # 2 s at an eighth, 4 s at a half, and 1.75 s are left
        (B, 8.0, 4.0, 4.0),
    ],
)
def test_inner_steps_on_a_slow_node(
    node: NodeId, start_s: float, seconds: float, takes_s: float
) -> None:
    """Four times as long from 10 s to 30 s, and twice as long from 28 s to 34 s: both multiply."""
    made = faults(
        Slow(node="a/w0", at_s=10.0, for_s=20.0, factor=4.0),
        Slow(node="a/w0", at_s=28.0, for_s=6.0, factor=2.0),
    )
    assert made.compute_s(node, start_s, seconds) == pytest.approx(takes_s)


# Links that are down


def test_links_that_are_down_twice_at_once_are_down_once() -> None:
    schedule = (
        LinkDown(between=("a", "b"), at_s=1.0, for_s=4.0),
        Partition(regions=["b", "c"], at_s=3.0, for_s=5.0),
        LinkDown(between=("a", "b"), at_s=20.0, for_s=1.0),
    )
    made = Faults(schedule, (), ("a", "b", "c"))
    assert (
        made.down["a", "b"]
        == made.down["b", "a"]
        == [Window(1.0, 8.0, 0.0), Window(20.0, 21.0, 0.0)]
    )
    assert made.down["a", "c"] == [Window(3.0, 8.0, 0.0)]
    assert ("b", "c") not in made.down


cuts = st.lists(
    st.one_of(
        st.builds(
            LinkDown,
            between=st.sampled_from([("a", "b"), ("c", "a")]),
            at_s=st.integers(0, 9).map(float),
            for_s=st.integers(1, 5).map(float),
        ),
        st.builds(
            Partition,
            regions=st.sampled_from([["a"], ["b", "c"], ["b"]]),
            at_s=st.integers(0, 9).map(float),
            for_s=st.integers(1, 5).map(float),
        ),
    ),
    max_size=5,
)


@given(cuts)
def test_a_link_is_down_while_any_fault_cuts_it(schedule: list[LinkDown | Partition]) -> None:
    """Asked at the half of each second; windows of one link do not touch each other."""
    made = faults(*schedule)
    for one, other in (("a", "b"), ("b", "a"), ("a", "c"), ("b", "c"), ("c", "b")):
        windows = made.down.get((one, other), [])
        for second in np.arange(0.5, 16):
            cut = any(
                fault.at_s < second < fault.at_s + fault.for_s
                and (
                    set(fault.between) == {one, other}
                    if isinstance(fault, LinkDown)
                    else (one in fault.regions) != (other in fault.regions)
                )
                for fault in schedule
            )
            assert any(window.start_s < second < window.end_s for window in windows) == cut
        assert all(before.end_s < after.start_s for before, after in itertools.pairwise(windows))
    pairs = ("a", "b"), ("a", "c"), ("b", "c")
    assert made.apart_s == sum(
        window.end_s - window.start_s for pair in pairs for window in made.down.get(pair, [])
    )


def test_a_collective_stands_still_while_any_of_its_links_is_down() -> None:
    """4 s from 8 s on: between a and b nothing passes from 10 s to 13 s, between b and c from 12 s
    to 20 s, so that 2 s are left at 20 s.
    """
    made = faults(
        LinkDown(between=("a", "b"), at_s=10.0, for_s=3.0),
        LinkDown(between=("b", "c"), at_s=12.0, for_s=8.0),
    )
    assert made.collective_end_s((A, B, C), 8.0, 4.0) == 22.0
    assert made.collective_end_s((A, B), 8.0, 4.0) == 15.0
    assert made.collective_end_s((A, C), 8.0, 4.0) == 12.0
    assert made.collective_end_s((B, NodeId("b", "w1")), 8.0, 4.0) == 12.0


# Messages


class Chances:
    """Gives these numbers one after the other, and no more."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


LOSS = Loss(at_s=0.0, for_s=10.0, probability=0.5)
ARRIVALS: list[tuple[list[Fault], tuple[float, ...], float, float, int]] = [
    # faults, chances, when it leaves, when it arrives, how often it is sent. It takes 2 s.
    ([], (), 3.0, 5.0, 1),
    ([LinkDown(between=("a", "b"), at_s=4.0, for_s=6.0)], (), 3.0, 11.0, 1),
    ([LinkDown(between=("a", "b"), at_s=5.0, for_s=6.0)], (), 3.0, 5.0, 1),
    ([LinkDown(between=("a", "c"), at_s=4.0, for_s=6.0)], (), 3.0, 5.0, 1),
    ([Delay(at_s=0.0, for_s=5.0, extra_s=1.5)], (), 3.0, 6.5, 1),
    ([Delay(at_s=0.0, for_s=3.0, extra_s=1.5)], (), 3.0, 5.0, 1),  # it leaves too late for it
    ([Delay(at_s=4.0, for_s=3.0, extra_s=1.5)], (), 3.0, 5.0, 1),
    ([Delay(at_s=0.0, for_s=5.0, extra_s=1.5, between=("b", "a"))], (), 3.0, 6.5, 1),
    ([Delay(at_s=0.0, for_s=5.0, extra_s=1.5, between=("b", "b"))], (), 3.0, 5.0, 1),
    ([Duplicate(at_s=0.0, for_s=5.0, probability=0.3)], (0.2,), 3.0, 5.0, 2),
    ([Duplicate(at_s=0.0, for_s=5.0, probability=0.3)], (0.4,), 3.0, 5.0, 1),
    # Each loss costs the timeout of 1 s and the 2 s of another transmission.
    ([LOSS], (0.6,), 3.0, 5.0, 1),
    ([LOSS], (0.4, 0.6), 3.0, 8.0, 2),
    ([LOSS], (0.4, 0.4), 3.0, 11.0, 3),  # the third one arrives when nothing is lost any more
    ([LOSS, Delay(at_s=0.0, for_s=5.0, extra_s=1.5)], (0.4, 0.6), 3.0, 9.5, 2),
    # Lost at 5 s; sent again at 6 s, when the link has just gone down until 9 s.
    ([LOSS, LinkDown(between=("a", "b"), at_s=6.0, for_s=3.0)], (0.4,), 3.0, 11.0, 2),
]


@pytest.mark.parametrize(("schedule", "chances", "start_s", "arrival_s", "copies"), ARRIVALS)
def test_when_a_message_arrives_and_how_often_it_is_sent(
    schedule: list[Fault], chances: tuple[float, ...], start_s: float, arrival_s: float, copies: int
) -> None:
    rng: Any = Chances(*chances)
    found = faults(*schedule).arrival(rng, A, B, start_s, start_s + 2.0, 2.0)
    assert found == (pytest.approx(arrival_s), copies)
    assert rng.numbers == []
    assert faults(*schedule).disturb_messages == bool(schedule)


def test_faults_of_nodes_alone_disturb_no_message() -> None:
    assert not faults(Crash(node="a/w0", at_s=1.0), Join(node="b/w0", at_s=2.0)).disturb_messages


# Events


EVENTS: list[tuple[Fault, list[tuple[float, Event]]]] = [
    (Slow(node="a/w0", at_s=7.0, for_s=20.0, factor=3.0), []),
    (Crash(node="a/w0", at_s=7.0), [(7.0, Fail(A))]),
    (
        Crash(node="a/w0", at_s=12.0, restart_after_s=4.0),
        [(10.0, Save(A)), (12.0, Fail(A)), (16.0, Return(A))],  # the last of its saves
    ),
    (Leave(node="a/w0", at_s=7.0), [(7.0, Fail(A, leaves=True))]),
    (Join(node="a/w0", at_s=7.0), [(7.0, Return(A))]),
    (LinkDown(between=("b", "a"), at_s=7.0, for_s=10.0), []),  # over at the deadline
    (
        LinkDown(between=("b", "a"), at_s=7.0, for_s=11.0),
        [(17.0, Sever(("a", "b"))), (18.0, Mend(("a", "b")))],
    ),
    (
        Partition(regions=["b"], at_s=1.0, for_s=11.0),
        [
            (11.0, Sever(("a", "b"))),
            (11.0, Sever(("b", "c"))),
            (12.0, Mend(("a", "b"))),
            (12.0, Mend(("b", "c"))),
        ],
    ),
    (Loss(at_s=0.0, for_s=30.0, probability=0.5), []),
]


@pytest.mark.parametrize(("fault", "events"), EVENTS)
def test_what_happens_when(fault: Fault, events: list[tuple[float, Event]]) -> None:
    made = faults(fault)
    assert sorted(made.events(), key=lambda event: (event[0], repr(event[1]))) == events
    assert list(made.absent) == ([A] if isinstance(fault, Join) else [])


@pytest.mark.parametrize(
    ("fault", "now", "since_s"),
    [
        # The deadline, 10 s, after the last edge until now; those ahead do not count.
        (Crash(node="a/w0", at_s=7.0, restart_after_s=5.0), 6.0, 0.0),
        (Crash(node="a/w0", at_s=7.0, restart_after_s=5.0), 8.0, 17.0),
        (Crash(node="a/w0", at_s=7.0, restart_after_s=5.0), 30.0, 22.0),
        (Crash(node="a/w0", at_s=7.0), 30.0, 17.0),
        (Leave(node="a/w0", at_s=7.0), 30.0, 17.0),
        (Join(node="a/w0", at_s=7.0), 30.0, 17.0),
        # While it lasts nothing is quiet, until the last message that was lost is sent again.
        (LinkDown(between=("a", "b"), at_s=7.0, for_s=20.0), 7.0, 0.0),
        (LinkDown(between=("a", "b"), at_s=7.0, for_s=20.0), 9.0, 19.0),
        (LinkDown(between=("a", "b"), at_s=7.0, for_s=20.0), 40.0, 38.0),
        (Delay(at_s=7.0, for_s=20.0, extra_s=3.0), 40.0, 40.0),
    ],
)
def test_since_when_all_is_quiet(fault: Fault, now: float, since_s: float) -> None:
    assert faults(fault).quiet_since_s(now) == since_s


# Faults that are drawn


def test_random_faults_come_at_their_rates_and_from_their_seed() -> None:
    nodes = [NodeId("a", "w0"), NodeId("b", "w0")]
    config = RandomFaults(until_s=36_000.0, slow_per_hour=20.0, crashes_per_hour=40.0)
    drawn = schedules.draw(config, nodes, nodes, ("a", "b"))
    assert drawn == schedules.draw(config, nodes, nodes, ("a", "b"))
    assert drawn != schedules.draw(config.model_copy(update={"seed": 1}), nodes, nodes, ("a", "b"))
    count = Counter(type(fault) for fault in drawn)
    assert set(count) == {Slow, Crash}
    assert abs(count[Slow] - 200) < 5 * 200**0.5
    assert abs(count[Crash] - 400) < 5 * 400**0.5
    assert all(fault.at_s < 36_000 for fault in drawn)
