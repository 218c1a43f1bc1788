"""`run/wire.py` and what both clocks make of it: what is sent is what counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import PROFILE, Quadratic, simulator

from archipel.actor import Actor, Context, Message, NodeId, Reduced, Start
from archipel.run import wire
from archipel.run.census import Plan
from archipel.sim.topology import Topology
from archipel.train.trainer import NoTraining

A, B = NodeId("a", "w0"), NodeId("b", "w0")
NUMEL = 8
PAIR = Topology(regions={"a": [1.0], "b": [1.0]}, default={"bandwidth_gbit_s": 1.0})
MODEL_S = PROFILE.model_bytes * 8 / 1e9
"""Seconds of a whole model on that link."""


@dataclass(frozen=True, eq=False, slots=True)
class Parcel(Message):
    """Whatever tensors it is given; it does not say what it weighs."""

    first: Tensor
    number: int = 7
    second: Tensor | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Quarter(Message):
    """A fragment that says so, for runs without gradients."""

    part: Tensor

    @property
    def weight(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("message", "trained", "untrained"),
    [
        (Parcel(torch.zeros(NUMEL)), 1.0, 1.0),
        (Parcel(torch.zeros(NUMEL), second=torch.zeros(NUMEL)), 2.0, 2.0),
        (Parcel(torch.zeros(2)), 0.25, 1.0),
        (Parcel(torch.zeros(NUMEL, dtype=torch.int8)), 0.25, 1.0),
        (Parcel(torch.zeros(NUMEL, dtype=torch.float64)), 2.0, 1.0),
        (Parcel(torch.zeros(0)), 0.0, 1.0),
        (Parcel(torch.zeros(())), 1 / NUMEL, 1.0),
        (Start(), 0.0, 0.0),
        (Quarter(torch.zeros(2)), 0.25, 0.25),
    ],
)
def test_a_message_weighs_what_its_tensors_do(
    message: Message, trained: float, untrained: float
) -> None:
    assert wire.weight(message, NUMEL) == trained
    assert wire.weight(message, 0) == untrained


def test_the_vectors_of_a_message_come_in_the_order_of_its_fields() -> None:
    one, other = torch.zeros(1), torch.zeros(2)
    assert [len(vector) for vector in wire.vectors(Parcel(one, 3, other))] == [1, 2]
    assert wire.vectors(Parcel(one)) == [one]


@pytest.mark.parametrize(
    ("entries", "numel", "share"), [(NUMEL, NUMEL, 1.0), (2, NUMEL, 0.25), (0, 0, 1.0)]
)
def test_a_vector_is_its_entries_part_of_the_whole(entries: int, numel: int, share: float) -> None:
    assert wire.share(torch.zeros(entries), numel) == share


@dataclass(kw_only=True)
class Sender(Actor):
    """Sends one message at the start."""

    message: Message

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        if isinstance(message, Start):
            ctx.send(B, self.message)

    def model(self) -> Tensor:
        return torch.zeros(NUMEL)

    def peers(self) -> tuple[NodeId, ...]:
        return (B,)


@dataclass(kw_only=True)
class Receiver(Actor):
    """Ends the run when something has come."""

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        if not isinstance(message, Start):
            self.absorbed = 1


@dataclass(kw_only=True)
class Reducer(Actor):
    """Averages a fragment once."""

    vector: Tensor
    share: float | None

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                ctx.all_reduce((A, B), self.vector, 0, self.share)
            case Reduced():
                self.absorbed = 1

    def model(self) -> Tensor:
        return torch.zeros(NUMEL)


def sent(actors: list[Actor], trainer: Any, numel: int) -> tuple[float, float]:
    """Bytes of a run of one inner step, in models, and the models that its time stands for."""
    sim = simulator(
        "none",
        trainer,
        topology=PAIR,
        theta=torch.zeros(numel),
        plan=Plan(steps=1),
        actors=actors,
    )
    sim.run()
    return sim.recorder.sent_bytes / PROFILE.model_bytes, sim.now / MODEL_S


@pytest.mark.parametrize(
    ("message", "models"),
    [
        (Parcel(torch.zeros(NUMEL)), 1.0),
        (Parcel(torch.zeros(2)), 0.25),
        (Parcel(torch.zeros(NUMEL, dtype=torch.int8)), 0.25),
        (Quarter(torch.zeros(2)), 0.25),
    ],
)
def test_a_fragment_costs_its_part_of_a_model(message: Message, models: float) -> None:
    actors = [Sender(me=A, message=message), Receiver(me=B)]
    assert sent(actors, Quadratic(), NUMEL) == pytest.approx((models, models), rel=1e-12)


def test_a_fragment_that_states_its_weight_costs_the_same_without_gradients() -> None:
    actors = [Sender(me=A, message=Quarter(torch.zeros(0))), Receiver(me=B)]
    assert sent(actors, NoTraining(), 0) == pytest.approx((0.25, 0.25), rel=1e-12)


@pytest.mark.parametrize(
    ("numel", "entries", "share"),
    [(NUMEL, 8, None), (NUMEL, 2, None), (0, 0, 0.25), (0, 0, None)],
)
def test_an_all_reduce_costs_its_share_of_a_model(
    numel: int, entries: int, share: float | None
) -> None:
    """A ring of two passes on the whole vector once in each direction: 2(n − 1)/n = 1."""
    expected = share if share is not None else (entries / numel if numel else 1.0)
    actors = [Reducer(me=me, vector=torch.zeros(entries), share=share) for me in (A, B)]
    trainer = Quadratic() if numel else NoTraining()
    bytes_sent, seconds = sent(actors, trainer, numel)
    assert bytes_sent == pytest.approx(2 * expected, rel=1e-12)
    assert seconds == pytest.approx(expected, rel=1e-12)
