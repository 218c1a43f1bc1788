"""`live/all_reduce.py` alone: nodes in one thread, whose messages and news come in any order that a
network allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from archipel import outer
from archipel.actor import Group, Message, NodeId, Reduced
from archipel.errors import TrainingError
from archipel.live.all_reduce import AllReduces
from archipel.live.sums import AllReduceMessage
from archipel.run.codec import BLOCK, Codec
from archipel.run.wire import Coder
from archipel.sim import routes
from archipel.sim.collectives import Complete, Contribution, reduced

NODES = tuple(NodeId("a" if i < 3 else "b", f"w{i}") for i in range(6))
ROUNDS = 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SMALLEST", 2)
    monkeypatch.setattr(routes, "BOTH_WAYS", 2)


def vector(node: NodeId, round: int) -> Tensor:
    """(5,): three chunks. What their sum is depends on the order, in its last bits."""
    generator = torch.Generator().manual_seed(NODES.index(node) * 100 + round)
    return torch.randn(5, generator=generator) * 10 ** NODES.index(node)


def difference(node: NodeId, round: int) -> Tensor:
    """(300,): three chunks of whole blocks, of which the last 20 entries are statistics."""
    return torch.randn(
        300, generator=torch.Generator().manual_seed(NODES.index(node) * 100 + round)
    )


@dataclass
class Lost:
    node: NodeId


@dataclass
class World:
    """Nodes that take `ROUNDS` rounds together. Between two nodes messages keep their order, as do
    the news that each is told. `reverse`: the chain has the members behind the first in reverse.
    """

    size: int
    reverse: bool = False
    wire: Codec = "fp32"
    nodes: dict[NodeId, AllReduces] = field(default_factory=dict)
    under_way: dict[tuple[NodeId, NodeId], deque[Message]] = field(default_factory=dict)
    news: dict[NodeId, deque[Lost]] = field(default_factory=dict)
    got: dict[NodeId, list[Reduced]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        group = NODES[: self.size]
        for node in group:
            self.got[node], self.news[node] = [], deque()
            self.nodes[node] = AllReduces(
                node, self._sender(node), self._finisher(node), self.chain, Coder(self.wire, 280)
            )

    def chain(self, group: Group) -> Group:
        return (group[0], *reversed(group[1:])) if self.reverse else group

    def _sender(self, me: NodeId):  # type: ignore[no-untyped-def]
        return lambda to, message: (
            self.under_way.setdefault((me, to), deque()).append(message)
            if to in self.nodes
            else None
        )

    def _finisher(self, me: NodeId):  # type: ignore[no-untyped-def]
        return lambda reduced, since_s: self.got[me].append(reduced)

    def lose(self, node: NodeId) -> None:
        del self.nodes[node]
        for pair in [pair for pair in self.under_way if node in pair]:
            del self.under_way[pair]
        for other in self.nodes:
            self.news[other].append(Lost(node))

    def possible(self) -> list[tuple[str, NodeId, NodeId]]:
        """What can happen next: a node calls for its next round, or is told of a loss, or a message
        arrives.
        """
        calls = [
            ("call", n, n)
            for n, state in self.nodes.items()
            if not state.waiting and len(self.got[n]) < ROUNDS
        ]
        told = [("news", node, node) for node in self.nodes if self.news[node]]
        return [
            *calls,
            *told,
            *[("mail", *pair) for pair, messages in self.under_way.items() if messages],
        ]

    def call(self, node: NodeId, group: Group, round: int) -> None:
        coded = self.wire != "fp32"
        given = difference(node, round) if coded else vector(node, round)
        self.nodes[node].call(group, given, round, 0.0, difference=coded)

    def happen(self, what: str, a: NodeId, b: NodeId) -> None:
        match what:
            case "call":
                round = len(self.got[a])
                group: Group = tuple(
                    node for node in NODES[: self.size] if node not in self.nodes[a].gone
                )
                self.call(a, group, round)
            case "news":
                self.nodes[a].lost(self.news[a].popleft().node)
            case "mail":
                message = self.under_way[a, b].popleft()
                assert isinstance(message, AllReduceMessage)
                self.nodes[b].receive(message, a)


def check(world: World) -> None:
    """All who are there have all means, and those of one round are one mean: that of the members it
    names.

    Who has got a mean and is lost before anybody else has got it takes it along.
    """
    for round in range(ROUNDS):
        means = [world.got[node][round] for node in world.nodes if len(world.got[node]) > round]
        assert len({told.group for told in means}) == 1
        for told in means:
            assert told.round == round
            chain = world.chain(told.group)
            assert torch.equal(told.mean, mean([vector(node, round) for node in chain]))
    for node in world.nodes:
        assert len(world.got[node]) == ROUNDS, world.nodes[node].waits_for()


def mean(vectors: list[Tensor]) -> Tensor:
    """Of three chunks of two entries the second one is summed from the last member on."""
    up, down = outer.mean(vectors), outer.mean(vectors[::-1])
    return torch.cat([up[:2], down[2:4], up[4:]])


def check_coded(world: World) -> None:
    """As `check`: those who are there have, to the bit, the means of the simulator's collectives,
    and as much left over.
    """
    coders = {node: Coder(world.wire, 280) for node in NODES[: world.size]}
    for round in range(ROUNDS):
        means = [world.got[node][round] for node in world.nodes]
        [group] = {one.group for one in means}
        calls = [
            Contribution(group, difference(node, round), round, difference=True) for node in group
        ]
        told = reduced(Complete(group, calls), [coders[node] for node in group])
        for node, call in zip(group, calls, strict=True):
            coders[node].keep(call.left)
        for one in means:
            assert torch.equal(one.mean, told.mean)
    for node, state in world.nodes.items():
        assert state.coder.left.keys() == coders[node].left.keys()
        for key, left in state.coder.left.items():
            assert torch.equal(left, coders[node].left[key])


@given(st.data(), st.sampled_from(["bf16", "int8", "int4"]))
@settings(max_examples=150, deadline=None)
def test_in_fewer_bits_too_the_others_get_one_mean(data: st.DataObject, wire: Codec) -> None:
    """An attempt that comes to nothing leaves nothing over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "SMALLEST", BLOCK)
        world = World(data.draw(st.integers(2, len(NODES))), wire=wire)
        run(world, data)
        check_coded(world)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("out", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_in_fewer_bits_too_a_refused_vector_is_not_in_the_mean(
    wire: Codec, out: tuple[int, ...], reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as in the simulator; with what is left of a first mean, in which all were."""
    monkeypatch.setattr(routes, "SMALLEST", BLOCK)
    world, group = World(3, reverse, wire), NODES[:3]
    coders = [Coder(wire, 280) for _ in group]
    for round, refused in ((0, ()), (1, out)):
        calls = []
        for place, node in enumerate(group):
            is_out = place in refused
            given = torch.full((300,), torch.nan) if is_out else difference(node, round)
            calls.append(Contribution(group, given, round, refused=is_out, difference=True))
            world.nodes[node].call(group, given, round, 0.0, refused=is_out, difference=True)
        while possible := [one for one in world.possible() if one[0] == "mail"]:
            world.happen(*possible[0])
        told = reduced(Complete(group, calls), coders, world.chain(group))
        for coder, call in zip(coders, calls, strict=True):
            coder.keep(call.left)
        for place, node in enumerate(group):
            assert torch.equal(world.got[node][round].mean, told.mean)
            assert world.got[node][round].refused == told.refused
            left = world.nodes[node].coder.left
            assert left.keys() == coders[place].left.keys()
            assert all(torch.equal(left[key], coders[place].left[key]) for key in left)
        assert told.mean.isfinite().all()


def test_alone_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SMALLEST", BLOCK)
    world = World(1, wire="int4")
    while possible := world.possible():
        world.happen(*possible[0])
    for round, one in enumerate(world.got[NODES[0]]):
        assert torch.equal(one.mean, difference(NODES[0], round))


def test_what_is_no_difference_travels_as_it_is() -> None:
    """Its members go on from it, and nobody would know what rounding has taken."""
    world, group = World(3, wire="int4"), NODES[:3]
    for node in group:
        world.nodes[node].call(group, vector(node, 0), 0, 0.0)
    while possible := [one for one in world.possible() if one[0] == "mail"]:
        world.happen(*possible[0])
    for node in group:
        assert torch.equal(world.got[node][0].mean, mean([vector(n, 0) for n in group]))
        assert world.nodes[node].coder.left == {}


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_whoever_is_lost_whenever_the_others_get_one_mean(data: st.DataObject) -> None:
    world = World(data.draw(st.integers(2, len(NODES))), data.draw(st.booleans()))
    run(world, data)
    check(world)


def run(world: World, data: st.DataObject) -> None:
    """Whatever can happen, in any order, with some losses."""
    losses = data.draw(st.lists(st.integers(0, 60), max_size=world.size - 1))
    rng = data.draw(st.randoms(use_true_random=False))
    step = 0
    while True:
        possible = world.possible()
        for _ in range(losses.count(step)):
            if len(world.nodes) > 1:
                world.lose(rng.choice(list(world.nodes)))
                possible = world.possible()
        if not possible and step > max(losses, default=0):
            break
        if possible:
            world.happen(*rng.choice(possible))
        step += 1


def test_it_has_the_bits_of_the_mean_and_the_order_of_the_group() -> None:
    world = World(4)
    while possible := world.possible():
        world.happen(*possible[0])
    check(world)
    assert [reduced.group for reduced in world.got[NODES[0]]] == [NODES[:4]] * ROUNDS


def test_the_leader_names_a_newcomer_that_the_others_have_not_heard_of() -> None:
    world = World(3)
    a, b, c = NODES[:3]
    world.nodes[b].call((a, b), vector(b, 0), 0, 0.0)
    world.nodes[c].call((a, b, c), vector(c, 0), 0, 0.0)
    world.nodes[a].call((a, b, c), vector(a, 0), 0, 0.0)
    while possible := [one for one in world.possible() if one[0] == "mail"]:
        world.happen(*possible[0])
    assert [got[0].group for got in world.got.values()] == [(a, b, c)] * 3


def test_two_groups_with_one_leader_do_not_mix() -> None:
    """A method may reduce in a region first, and then among the regions' leaders."""
    world = World(4)
    a, b, c, d = NODES[:4]
    for node, group in ((a, (a, b)), (b, (a, b)), (c, (c, d)), (d, (c, d))):
        world.nodes[node].call(group, vector(node, 0), 0, 0.0)
    while possible := [one for one in world.possible() if one[0] == "mail"]:
        world.happen(*possible[0])
    world.nodes[a].call((a, c), vector(a, 0), 0, 0.0)
    world.nodes[c].call((a, c), vector(c, 0), 0, 0.0)
    while possible := [one for one in world.possible() if one[0] == "mail"]:
        world.happen(*possible[0])
    assert [[reduced.group for reduced in got] for got in world.got.values()] == [
        [(a, b), (a, c)],
        [(a, b)],
        [(c, d), (a, c)],
        [(c, d)],
    ]


def test_a_refused_vector_is_not_in_the_mean() -> None:
    world = World(3)
    a, b, c = group = NODES[:3]
    for node in group:
        world.nodes[node].call(
            group,
            torch.full((5,), torch.nan) if node == b else vector(node, 0),
            0,
            0.0,
            refused=node == b,
        )
    while possible := [one for one in world.possible() if one[0] == "mail"]:
        world.happen(*possible[0])
    for got in world.got.values():
        assert torch.equal(got[0].mean, mean([vector(a, 0), vector(c, 0)]))
        assert got[0].group == group


def test_calling_twice_is_refused() -> None:
    world = World(2)
    world.nodes[NODES[0]].call(NODES[:2], vector(NODES[0], 0), 7, 0.0)
    with pytest.raises(
        TrainingError, match=r"^a/w0 called for all-reduce 7 while it waits for it$"
    ):
        world.nodes[NODES[0]].call(NODES[:2], vector(NODES[0], 0), 7, 0.0)
