"""`sim/collectives.py` alone: who is in a collective, when it can start, and what it comes to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from archipel.actor import Group, NodeId
from archipel.errors import TrainingError
from archipel.run.wire import Coder
from archipel.sim.collectives import Collectives, Complete, Contribution, reduced

A, B, C, D = NODES = tuple(NodeId("r", f"w{i}") for i in range(4))
MANY = tuple(NodeId("r", f"w{i}") for i in range(8))


def collectives() -> Collectives:
    return Collectives()


def gives(group: Group, value: float = 0.0, number: int = 0, refused: bool = False) -> Contribution:
    return Contribution(group, torch.full((3,), value), number, refused=refused)


def call(
    made: Collectives,
    node: NodeId,
    group: Group,
    number: int = 0,
    lost: Sequence[NodeId] = (),
    again: bool = False,
) -> Group | None:
    """The members of the collective that can start now."""
    complete = made.call(node, gives(group, number=number), lost, again=again)
    return complete and complete.group


# When it starts


@given(st.permutations(MANY), st.lists(st.integers(1, 4), min_size=8, max_size=8), st.randoms())
def test_each_group_starts_with_the_last_call_of_its_members(
    nodes: list[NodeId], sizes: list[int], chance: random.Random
) -> None:
    """Several groups that share nobody, calling in any order: whoever is last starts its own group
    and disturbs no other.
    """
    made, groups, rest = collectives(), [], list(nodes)
    for size in sizes:
        if rest:
            groups.append(tuple(sorted(rest[:size], key=MANY.index)))
            rest = rest[size:]
    calls = [(node, group) for group in groups for node in group]
    chance.shuffle(calls)
    missing = {group: set(group) for group in groups}
    for node, group in calls:
        missing[group].remove(node)
        started = call(made, node, group)
        assert started == (None if missing[group] else group)
    assert not made.waiting


def test_where_all_have_named_one_object_the_group_is_that_object() -> None:
    """Each member then sees at a glance that nobody is missing: 10,000 nodes need not compare."""
    group = (A, B, C)
    made = collectives()
    assert [call(made, node, group) for node in (B, C)] == [None, None]
    complete = made.call(A, gives(group), (), again=False)
    assert complete is not None
    assert complete.group is group


def test_what_each_gives_comes_in_the_order_in_which_the_first_names_them() -> None:
    made = collectives()
    for node, group, value in ((A, (C, A, B), 1.0), (C, (C, B, A), 3.0)):
        assert made.call(node, gives(group, value), (), again=False) is None
    complete = made.call(B, gives((C, A, B), 2.0), (), again=False)
    assert complete is not None
    assert complete.group == (C, B, A)
    assert [float(one.vector[0]) for one in complete.calls] == [3.0, 2.0, 1.0]


def test_one_alone_starts_at_once() -> None:
    assert call(collectives(), A, (A,)) == (A,)


def test_nobody_waits_for_those_who_are_lost() -> None:
    made = collectives()
    assert call(made, A, (A, B, C), lost=(C,)) is None
    assert call(made, B, (A, B, C), lost=(C,)) == (A, B)


def test_who_is_lost_elsewhere_makes_nobody_start_early() -> None:
    """As many are lost as are missing, but others."""
    made = collectives()
    assert call(made, A, (A, B), lost=(C, D)) is None
    assert call(made, B, (A, B), lost=(C, D)) == (A, B)


def test_a_newcomer_that_the_first_member_names_is_waited_for_by_all() -> None:
    """A has heard of C, and B has not."""
    made = collectives()
    assert call(made, A, (A, B, C)) is None
    assert call(made, B, (A, B)) is None
    assert call(made, C, (A, B, C)) == (A, B, C)


def test_nobody_waits_for_whom_another_one_than_the_first_names() -> None:
    """B has been invited by one that is lost, of which A has not heard: it waits by itself."""
    made = collectives()
    assert call(made, B, (A, B, C)) is None
    assert call(made, A, (A,)) == (A,)
    assert set(made.waiting) == {B}


@pytest.mark.parametrize("one_object", [True, False])
def test_members_of_another_round_are_waited_for(one_object: bool) -> None:
    made, group = collectives(), (A, B)
    other = group if one_object else (*group,)
    assert call(made, A, group, 4) is None
    assert call(made, B, other, 5, again=True) is None
    assert call(made, A, group, 5, again=True) == (A, B)


def test_a_member_waits_for_one_mean_at_a_time() -> None:
    made = collectives()
    call(made, A, (A, B))
    with pytest.raises(TrainingError) as error:
        call(made, A, (A, B))
    assert str(error.value) == (
        "r/w0 called all_reduce while it waits in one: a member is in one all-reduce at a time"
    )


def test_after_a_loss_the_last_call_of_a_member_counts() -> None:
    made = collectives()
    made.call(A, gives((A, B), 1.0, 0), (), again=True)
    made.call(A, gives((A, B), 2.0, 1), (), again=True)
    complete = made.call(B, gives((A, B), 4.0, 1), (), again=True)
    assert complete is not None
    assert [float(one.vector[0]) for one in complete.calls] == [2.0, 4.0]


def test_who_does_not_wait_completes_nothing() -> None:
    assert collectives().complete(A, ()) is None


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[tuple[NodeId, Group, int]], set[NodeId]]:
    """Calls of some nodes, each naming itself and others, for one of two rounds; and who is lost,
    none of whom calls.
    """
    some = MANY[:6]
    lost = draw(st.sets(st.sampled_from(some), max_size=2))
    there = [node for node in some if node not in lost]
    callers = draw(st.lists(st.sampled_from(there), unique=True))
    return [
        (
            node,
            tuple(sorted({node, *draw(st.sets(st.sampled_from(some), max_size=2))})),
            draw(st.sampled_from([7, 7, 7, 8])),
        )
        for node in callers
    ], lost


def led_by(
    first: NodeId, waiting: dict[NodeId, tuple[Group, int]], lost: set[NodeId]
) -> set[NodeId] | None:
    """By definition: whom a node names that is the first of its own group, if each of them has
    called for the same round, with a group of which that node is the first too.
    """
    if first not in waiting or waiting[first][0][0] != first:
        return None
    group, number = waiting[first]
    named = {node for node in group if node not in lost}
    agree = {
        node for node, (its, round_) in waiting.items() if its[0] == first and round_ == number
    }
    return named if named <= agree else None


@given(calls())
def test_a_collective_is_whom_the_first_of_a_group_names(
    given_calls: tuple[list[tuple[NodeId, Group, int]], set[NodeId]],
) -> None:
    made = collectives()
    waiting: dict[NodeId, tuple[Group, int]] = {}
    plan, lost = given_calls
    for node, group, number in plan:
        group = tuple(other for other in group if other not in lost)
        waiting[node] = group, number
        together = led_by(group[0], waiting, lost)
        if together is not None and node not in together:
            together = None  # it would have started before
        started = call(made, node, group, number, tuple(lost), again=True)
        assert (None if started is None else set(started)) == together
        for member in together or ():
            del waiting[member]
        assert set(made.waiting) == set(waiting)


# Who leaves


def under_way(group: Group) -> tuple[Collectives, Complete]:
    """A collective that has started; its means are events 10, 11, …"""
    made = collectives()
    for node in group[:-1]:
        assert made.call(node, gives(group, float(node.name[1:])), (), again=True) is None
    complete = made.call(group[-1], gives(group, float(group[-1].name[1:])), (), again=True)
    assert complete is not None
    made.starts(complete, 10)
    return made, complete


def test_a_mean_that_is_computed_with_one_who_leaves_is_void_and_begins_again() -> None:
    made, _ = under_way((A, B, C))
    assert {node: number for node, (_, number) in made.under_way.items()} == {A: 10, B: 11, C: 12}
    assert made.leave(B) == [10, 12]
    assert not made.under_way
    assert set(made.waiting) == {A, C}
    assert made.complete(A, ()) is None  # B may come back: nobody has been told of it
    again = made.complete(A, (B,))
    assert again is not None
    assert again.group == (A, C)
    assert [float(one.vector[0]) for one in again.calls] == [0.0, 2.0]


def test_a_member_waits_again_also_without_a_newcomer_that_it_had_not_named() -> None:
    """B has taken part with C because A named both."""
    made = collectives()
    for node, group in ((A, (A, B, C)), (C, (A, B, C))):
        assert made.call(node, gives(group), (), again=True) is None
    complete = made.call(B, gives((A, B)), (), again=True)
    assert complete is not None
    made.starts(complete, 10)
    assert made.leave(C) == [10, 11]
    assert set(made.waiting) == {A, B}


def test_who_has_its_mean_already_does_not_begin_again() -> None:
    made, _ = under_way((A, B, C))
    made.ends(A)
    assert made.leave(B) == [12]
    assert set(made.waiting) == {C}


def test_who_leaves_after_its_mean_spoils_nothing() -> None:
    made, _ = under_way((A, B, C))
    made.ends(B)
    assert made.leave(B) == []
    assert set(made.under_way) == {A, C}


def test_another_collective_goes_on() -> None:
    made, _ = under_way((A, B))
    other = made.call(C, gives((C,)), (), again=True)
    assert other is not None
    made.starts(other, 20)
    assert made.leave(A) == [11]
    assert set(made.under_way) == {C}


def test_who_leaves_while_it_waits_is_waited_for_until_it_is_forgotten() -> None:
    made = collectives()
    for node in (A, B):
        call(made, node, (A, B, C), again=True)
    assert made.leave(A) == []
    assert call(made, C, (A, B, C), again=True) is None
    made.forget(A)
    complete = made.complete(B, ())
    assert complete is not None
    assert complete.group == (B, C)


def test_members_that_name_one_object_go_on_naming_one() -> None:
    group = (A, B, C)
    made = collectives()
    for node in (A, B):
        call(made, node, group, again=True)
    made.forget(C)
    assert made.waiting[A].group == (A, B)
    assert made.waiting[A].group is made.waiting[B].group
    complete = made.complete(A, ())
    assert complete is not None
    assert complete.group == (A, B)


# What it comes to


@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_the_mean_is_that_of_those_who_are_not_refused(
    given_values: list[tuple[float, bool]], number: int
) -> None:
    group = NODES[: len(given_values)]
    parts = [gives(group, value, number, refused) for value, refused in given_values]
    told = reduced(Complete(group, parts), [Coder()] * len(group))
    kept = [value for value, refused in given_values if not refused]
    np.testing.assert_allclose(told.mean, np.full(3, np.mean(kept) if kept else 0.0), atol=1e-4)
    assert told.group == group
    assert told.round == number
    assert told.refused == tuple(
        node for node, (_, refused) in zip(group, given_values, strict=True) if refused
    )


def test_a_vector_that_is_not_finite_and_refused_is_not_in_the_mean() -> None:
    complete = Complete((A, B), [gives((A, B), 2.0), gives((A, B), float("nan"), 0, True)])
    told = reduced(complete, [Coder(), Coder()])
    assert told.mean.tolist() == [2.0] * 3
    assert told.refused == (B,)
