"""`run/node.py` alone: what an engine sees to before and after one actor reacts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from archipel.actor import (
    Actor,
    Context,
    Gradient,
    Message,
    NodeId,
    Reduced,
    Refused,
    Trained,
    Update,
)
from archipel.errors import TrainingError
from archipel.run import wire
from archipel.run.metrics import Recorder, Training
from archipel.run.node import Node
from archipel.run.screening import Screen, ScreeningConfig

ME, PEER = NodeId("a", "w0"), NodeId("b", "w0")
NOT_FINITE = f"an update of {PEER} is refused after 7.0 s: it is not finite"


@dataclass(kw_only=True)
class Listener(Actor):
    """Writes down what it hears, from whom, and with which context."""

    heard: list[tuple[Message, NodeId, Any]] = field(default_factory=list)

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        self.heard.append((message, sender, ctx))


@dataclass(frozen=True, eq=False, slots=True)
class Pair(Update):
    """An update with a second vector."""

    momentum: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Note(Message):
    """No update, whatever it carries."""

    vector: Tensor


@dataclass
class Moment:
    """All of a context that a node itself looks at."""

    now: float = 7.0


def screened(parameters: int = 4, **config: Any) -> Node:
    return Node(
        Listener(me=ME), parameters=parameters, numel=4, screen=Screen(ScreeningConfig(**config))
    )


def hears(node: Node, message: Message, recorder: Recorder) -> Message:
    """What the actor is told when `message` comes from its peer."""
    ctx: Any = Moment()
    node.handle(message, PEER, ctx, recorder)
    [(told, sender, given)] = node.actor.heard  # type: ignore[attr-defined]
    assert sender == PEER
    assert given is ctx
    node.actor.heard.clear()  # type: ignore[attr-defined]
    assert node.told == type(told).__name__
    return told


# Updates that are refused


def test_a_sound_update_reaches_the_actor_as_it_is() -> None:
    recorder, update = Recorder(), Update(torch.ones(4))
    assert hears(screened(), update, recorder) is update
    assert recorder.refused == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_reaches_it_as_refused(bad: float) -> None:
    recorder, update = Recorder(), Update(torch.tensor([1.0, bad, 0.0, 0.0]))
    with pytest.warns(UserWarning, match=f"^{NOT_FINITE}; more of them are only counted$"):
        told = hears(screened(), update, recorder)
    assert isinstance(told, Refused)
    assert told.update is update
    assert recorder.refused == {PEER: 1}


def test_every_vector_of_an_update_is_judged() -> None:
    with pytest.warns(UserWarning, match=NOT_FINITE):
        told = hears(screened(), Pair(torch.ones(4), torch.tensor([math.nan])), Recorder())
    assert isinstance(told, Refused)


def test_a_message_that_is_no_update_is_never_judged() -> None:
    note = Note(torch.full((4,), math.nan))
    assert hears(screened(), note, Recorder()) is note


def test_without_a_screen_everything_is_accepted() -> None:
    update = Update(torch.full((4,), math.nan))
    node = Node(Listener(me=ME), parameters=4, numel=4)
    assert hears(node, update, Recorder()) is update
    assert not node.refuses([update.gradient], PEER, 0.0, Recorder())


def test_only_the_parameters_of_an_update_can_be_too_large() -> None:
    """10⁶ among the buffers is a value like any other; among the parameters it is absurd."""
    recorder, node = Recorder(), screened(parameters=2, multiple=10.0, warm_up=1)
    small = Update(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert hears(node, small, recorder) is small
    buffers = Update(torch.tensor([1.0, 0.0, 1e6, 0.0]))
    assert hears(node, buffers, recorder) is buffers
    with pytest.warns(UserWarning, match="its norm 1e\\+06 is 1e\\+06 times the running median 1 "):
        told = hears(node, Update(torch.tensor([0.0, 1e6, 0.0, 0.0])), recorder)
    assert isinstance(told, Refused)


def test_each_node_judges_by_what_it_has_seen_itself() -> None:
    one, other = screened(multiple=10.0, warm_up=1), screened(multiple=10.0, warm_up=1)
    assert not one.refuses([torch.ones(4)], PEER, 0.0, Recorder())
    assert not other.refuses([torch.ones(4) * 100], PEER, 0.0, Recorder())
    with pytest.warns(UserWarning, match="is refused after 3.5 s: its norm 200 is 100 times"):
        assert one.refuses([torch.ones(4) * 100], ME, 3.5, recorder := Recorder())
    assert recorder.refused == {ME: 1}  # what it gives to a collective: its own


# One job at a time


def test_a_worker_has_one_job_at_a_time() -> None:
    node = Node(Listener(me=ME))
    node.begin_job()
    with pytest.raises(TrainingError) as error:
        node.begin_job()
    assert str(error.value) == (
        "a/w0 asked to train while it is training: a method's worker has one job at a time"
    )
    node.end_job(Trained(torch.empty(0), 1, ()), 0.0, 0, Recorder(), losses_count=True)
    node.begin_job()


@pytest.mark.parametrize("steps", [0, -1])
def test_a_worker_that_asks_for_no_inner_steps_is_named(steps: int) -> None:
    with pytest.raises(TrainingError) as error:
        Node(Listener(me=ME)).check_steps(steps)
    assert str(error.value) == f"{ME} asked to train for {steps} inner steps: at least 1 is needed"
    Node(Listener(me=ME)).check_steps(1)


# What came of inner steps


@pytest.mark.parametrize("losses_count", [True, False])
@pytest.mark.parametrize("losses", [(), (2.0,), (3.0, 1.0, 0.5)])
def test_the_mean_loss_of_inner_steps_is_put_down(
    losses: tuple[float, ...], losses_count: bool
) -> None:
    node, recorder = Node(Listener(me=ME), busy=True), Recorder()
    answer = Trained(torch.empty(0), 3, losses)
    loss = node.end_job(answer, 12.5, 40, recorder, losses_count=losses_count)
    assert not node.busy
    if losses:
        assert loss == pytest.approx(np.mean(losses))
        assert recorder.trainings == [Training(12.5, ME, 3, loss, 40)]
    else:
        assert loss is None
        assert recorder.trainings == []


@pytest.mark.parametrize("losses_count", [True, False])
def test_a_gradient_is_one_inner_step_if_something_is_trained(losses_count: bool) -> None:
    node, recorder = Node(Listener(me=ME), busy=True), Recorder()
    answer = Gradient(torch.empty(0), 0.0)
    loss = node.end_job(answer, 12.5, 40, recorder, losses_count=losses_count)
    assert not node.busy
    assert loss == (0.0 if losses_count else None)
    assert recorder.trainings == ([Training(12.5, ME, 1, 0.0, 40)] if losses_count else [])


# Vectors that others hold too


@dataclass(kw_only=True)
class Writer(Actor):
    """Does something with the first vector of what it hears."""

    does: Callable[[Tensor], object]

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        self.does(wire.vectors(message)[0])


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda vector: vector.add_(1),
    "an operator": lambda vector: operator.iadd(vector, 1),
    "a slice": lambda vector: vector[1:2].fill_(3.0),
    "an entry": lambda vector: vector.__setitem__(0, 3.0),
    "a view": lambda vector: vector.view(2, 2).zero_(),
    "copy_": lambda vector: vector.copy_(torch.ones(4)),
    "out=": lambda vector: torch.mul(vector, 2, out=vector),
    "without gradients": lambda vector: torch.no_grad()(vector.mul_)(2),
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize(
    ("kind", "sender"),
    [
        (Note, PEER),
        (Update, PEER),
        (lambda mean: Reduced(mean, (ME, PEER)), ME),
    ],
    ids=["a message", "an update", "a mean"],
)
def test_a_vector_that_others_hold_too_is_not_changed_in_place(
    how: str, kind: Callable[[Tensor], Message], sender: NodeId
) -> None:
    message, moment = kind(torch.zeros(4)), Moment()
    node = Node(Writer(me=ME, does=IN_PLACE[how]), parameters=4, numel=4)
    with pytest.raises(TrainingError) as error:
        node.handle(message, sender, moment, Recorder())  # type: ignore[arg-type]
    assert str(error.value) == (
        f"{ME} changed a vector in place that it was sent in {type(message).__name__} by {sender}: "
        "others may hold the same one; clone it before"
    )


@pytest.mark.parametrize(
    ("does", "message", "sender"),
    [
        (lambda vector: vector.clone().add_(1), Note(torch.zeros(4)), PEER),
        (lambda vector: vector + 1, Reduced(torch.zeros(4), (ME, PEER)), ME),
        (lambda vector: vector.add_(1), Trained(torch.zeros(4), 1, (2.0,)), ME),
        (lambda vector: vector.add_(1), Gradient(torch.zeros(4), 2.0), ME),
        (lambda vector: vector.add_(1), Note(torch.zeros(4)), ME),
    ],
    ids=["a clone", "a sum", "my inner steps", "my gradient", "my note to myself"],
)
def test_what_is_its_own_an_actor_may_change(
    does: Callable[[Tensor], object], message: Message, sender: NodeId
) -> None:
    node, moment = Node(Writer(me=ME, does=does), parameters=4, numel=4), Moment()
    node.handle(message, sender, moment, Recorder())  # type: ignore[arg-type]
