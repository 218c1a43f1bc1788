"""`sim/outages.py` alone: who can reach whom, and who is told what, from the definitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.actor import Actor, Context, Joined, Lost, Message, NodeId
from archipel.sim.outages import News, Outages, peers_of

SERVER = NodeId("a", "server")
A, B, B1, C = (NodeId(name[0], name) for name in ("a0", "b0", "b1", "c0"))
NODES = (SERVER, A, B, B1, C)


def outages(peers: dict[NodeId, Sequence[NodeId]], down: Sequence[NodeId] = ()) -> Outages:
    """Those in `down` have been so since 1 s, and their peers know."""
    made = Outages(
        {node: dict.fromkeys(theirs) for node, theirs in peers.items()},
        np.random.default_rng(0),
        dict.fromkeys(down, 1.0),
    )
    made.lost.update(dict.fromkeys(down))
    return made


def around_a_server() -> Outages:
    """Workers that talk to a server alone."""
    workers = (A, B, B1, C)
    return outages({SERVER: workers} | dict.fromkeys(workers, (SERVER,)))


def all_to_all(*down: NodeId) -> Outages:
    """Nodes that talk to all others; each names itself too, as members of a collective do."""
    return outages(dict.fromkeys(NODES, NODES), down)


def text(news: Iterable[News]) -> list[str]:
    """`who hears what`, short: `a0 hears Lost b0`."""
    heard = []
    for to, message in news:
        assert isinstance(message, Lost | Joined)
        far = " (unreachable)" if isinstance(message, Lost) and message.unreachable else ""
        heard.append(f"{to.name} hears {type(message).__name__} {message.node.name}{far}")
    return heard


# Nodes


def test_a_node_that_fails_gets_nothing_and_nobody_knows_yet() -> None:
    made = all_to_all()
    assert not made.begun
    made.fail(B, 7.0)
    assert made.begun
    assert made.down == {B: 7.0}
    assert not made.lost
    assert not made.reachable(A, B)
    assert not made.reachable(B, A)
    assert made.reachable(A, C)
    assert made.connected(A, B)  # it is the node that is gone, and not the link


def test_only_peers_that_are_there_are_told_of_a_loss() -> None:
    made = around_a_server()
    made.fail(B, 1.0)
    assert text(made.lose(B)) == ["server hears Lost b0"]
    assert list(made.lost) == [B]
    made.fail(SERVER, 2.0)
    assert text(made.lose(SERVER)) == [f"{name} hears Lost server" for name in ("a0", "b1", "c0")]


def test_nobody_is_told_of_its_own_loss() -> None:
    made = all_to_all()
    made.fail(A, 1.0)
    heard = text(made.lose(A))
    assert heard == [f"{name} hears Lost a0" for name in ("server", "b0", "b1", "c0")]


def test_one_that_is_back_is_told_who_is_not_there() -> None:
    """C is lost, and B1's silence is not known yet."""
    made = all_to_all(B, C)
    made.fail(B1, 2.0)
    made.rejoin(B)
    assert B not in made.down
    assert B not in made.lost
    assert text(made.news_of_rejoining(B)) == [
        "server hears Joined b0",
        "a0 hears Joined b0",
        "b0 hears Lost c0",
    ]


def test_one_that_is_back_behind_a_cut_is_joined_on_its_own_side_only() -> None:
    """On the other side it is no longer one that has crashed, but one that cannot be reached."""
    made = all_to_all(B)
    made.cut(("a", "b"))
    made.rejoin(B)
    assert text(made.news_of_rejoining(B)) == [
        "server hears Lost b0 (unreachable)",
        "a0 hears Lost b0 (unreachable)",
        "b1 hears Joined b0",
        "c0 hears Joined b0",
        "b0 hears Lost server (unreachable)",
        "b0 hears Lost a0 (unreachable)",
    ]


# Links


peer_lists = st.lists(st.sampled_from(NODES), unique=True)


@given(
    st.lists(peer_lists, min_size=5, max_size=5),
    st.sets(st.sampled_from(NODES)),
    st.permutations("abc"),
)
def test_both_sides_of_a_cut_are_told_of_each_peer_on_the_other_one(
    peers: list[list[NodeId]], down: set[NodeId], regions: list[str]
) -> None:
    """Each ordered pair of nodes that are there, of which the second is a peer of the first, and
    whose regions are the two ends of the link.
    """
    made = outages(dict(zip(NODES, peers, strict=True)), sorted(down))
    link = regions[0], regions[1]
    expected = {
        (one, other)
        for one, other in permutations(NODES, 2)
        if {one.region, other.region} == set(link)
        and other in peers[NODES.index(one)]
        and not down & {one, other}
    }
    lost = made.cut(link)
    assert len(lost) == len(expected)
    assert {(to, told.node) for to, told in lost if isinstance(told, Lost)} == expected
    assert all(isinstance(told, Lost) and told.unreachable for _, told in lost)
    for one, other in permutations(NODES, 2):
        severed = {one.region, other.region} == set(link)
        assert made.connected(one, other) == (not severed)
        assert made.reachable(one, other) == (not severed and not down & {one, other})
    joined = made.mend(link[::-1])
    assert len(joined) == len(expected)
    assert {(to, told.node) for to, told in joined if isinstance(told, Joined)} == expected
    assert all(made.connected(one, other) for one, other in permutations(NODES, 2))


def test_a_link_that_is_mended_leaves_another_one_cut() -> None:
    made = all_to_all()
    made.cut(("a", "b"))
    made.cut(("b", "c"))
    made.mend(("b", "a"))
    assert made.connected(A, B)
    assert not made.connected(C, B)


# Who may have to wait


@given(
    st.lists(peer_lists, min_size=5, max_size=5),
    st.sets(st.sampled_from(NODES)),
    st.booleans(),
)
def test_workers_may_wait_for_a_server_that_is_down_or_a_peer_behind_a_cut(
    peers: list[list[NodeId]], down: set[NodeId], cut: bool
) -> None:
    """Not for another worker that is down: no method may do that for ever."""
    made = outages(dict(zip(NODES, peers, strict=True)), sorted(down))
    if cut:
        made.cut(("a", "b"))
    workers = NODES[1:]
    assert made.excused(workers) == {
        node
        for node, theirs in zip(NODES, peers, strict=True)
        if node != SERVER
        and (
            (SERVER in theirs and SERVER in down)
            or (cut and any({node.region, peer.region} == {"a", "b"} for peer in theirs))
        )
    }


def test_a_worker_may_wait_for_a_server_of_which_nobody_knows_yet_that_it_is_down() -> None:
    made = around_a_server()
    made.fail(SERVER, 1.0)
    assert not made.lost
    assert made.excused((A, B)) == {A, B}


# Peers


@dataclass(kw_only=True)
class Speaker(Actor):
    """May send to those whom it is given."""

    to: Iterable[NodeId]

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        raise AssertionError

    def peers(self) -> Iterable[NodeId]:
        return self.to


def test_actors_that_give_one_object_share_one_answer() -> None:
    """Ten thousand nodes with a set of ten thousand each would be too many."""
    group, other = (C, A, B), (C, A, B)
    actors = [Speaker(me=A, to=group), Speaker(me=B, to=group)]
    found = peers_of([*actors, Speaker(me=C, to=list(other))])
    assert [list(peers) for peers in found.values()] == [[C, A, B]] * 3  # in the order given
    assert found[A] is found[B]
    assert found[C] is not found[A]


def test_peers_may_be_given_anew_each_time() -> None:
    """An object that is gone leaves its address in memory to the next one."""

    class Fresh(Speaker):
        def peers(self) -> Iterable[NodeId]:
            return (node for node in self.to)

    found = peers_of([Fresh(me=node, to=(other,)) for node, other in permutations(NODES, 2)])
    assert {node: list(peers) for node, peers in found.items()} == {
        node: [others[-1]]
        for node in NODES
        for others in [[other for one, other in permutations(NODES, 2) if one == node]]
    }


@pytest.mark.parametrize("given_peers", [(), [], dict.fromkeys(())])
def test_an_actor_without_peers_has_none(given_peers: Iterable[NodeId]) -> None:
    assert list(peers_of([Speaker(me=A, to=given_peers)])[A]) == []
