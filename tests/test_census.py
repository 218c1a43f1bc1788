"""`run/census.py` alone: totals, marks, stop rules and verdicts, by plain arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from archipel.actor import NodeId
from archipel.errors import Diverged, TrainingError, UserError
from archipel.run.census import (
    NOT_FINITE,
    PATIENCE,
    Census,
    Plan,
    holders,
    put_down,
    spread,
)
from archipel.run.metrics import Evaluation, Recorder

A, B, C = NODES = tuple(NodeId("r", f"w{i}") for i in range(3))


# Who holds the model


@pytest.mark.parametrize(
    ("holds", "down", "found"),
    [
        ({A: True, B: True, C: True}, {}, [A, B, C]),
        ({A: False, B: True, C: False}, {}, [B]),
        ({A: True, B: True, C: True}, {B: 5.0}, [A, C]),
        ({A: True, B: True, C: False}, {A: 5.0, B: 7.0}, [B]),  # the last that was there
        ({A: True, B: True, C: False}, {A: 7.0, B: 7.0, C: 9.0}, [A, B]),
        ({A: True, B: False, C: False}, {A: 5.0}, [A]),  # C is there, and holds nothing
        ({A: False, B: False, C: False}, {A: 5.0}, []),
        ({}, {}, []),
    ],
)
def test_those_who_are_there_hold_the_model_or_else_those_who_were_there_last(
    holds: dict[NodeId, bool], down: dict[NodeId, float], found: list[NodeId]
) -> None:
    assert holders(holds, down) == found


# Totals


counts = st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 50), st.booleans()), max_size=20)


@given(counts, st.integers(1, 4))
def test_the_total_is_the_sum_of_what_each_holder_says_last(
    said: list[tuple[NodeId, int, bool]], stages: int
) -> None:
    """A node may say less than before: it has restarted from its save. After a recount only those
    named in it hold the model.
    """
    census = Census(Plan(stages=stages))
    last: dict[NodeId, int] = {}
    for node, trained, alone in said:
        if alone:
            last = {node: trained}
            census.recount(last)
        else:
            last = {**last, node: trained}
            census.count(node, trained)
        assert census.total == sum(last.values())
        assert census.inner_steps == sum(last.values()) // stages


def test_a_recount_keeps_no_hold_of_what_it_was_given() -> None:
    census, given_counts = Census(Plan()), {A: 3}
    census.recount(given_counts)
    census.count(B, 4)
    assert given_counts == {A: 3}
    assert census.total == 7


# Marks


@given(st.integers(1, 30), st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_a_mark_is_passed_once_and_marks_passed_together_count_once(
    every: int, steps: list[int]
) -> None:
    """Marks lie at 0, every, 2 · every, …. One is passed if there is a mark above the highest one
    so far, and not above the inner steps.
    """
    census = Census(Plan(evaluate_every=every))
    passed: set[int] = set()
    total = 0
    for more in steps:
        total += more
        census.count(A, total)
        marks = set(range(0, total + 1, every))
        assert census.passes_mark() == bool(marks - passed)
        passed |= marks
        assert not census.passes_mark()


def test_a_mark_is_not_passed_again_when_steps_are_lost() -> None:
    census = Census(Plan(evaluate_every=10))
    found = []
    for trained in (0, 12, 5, 13, 19, 20):
        census.recount({A: trained})
        found.append(census.passes_mark())
    assert found == [True, True, False, False, False, True]


def test_marks_of_a_model_in_stages_count_a_replicas_step_once() -> None:
    census = Census(Plan(evaluate_every=10, stages=4))
    found = []
    for trained in (0, 39, 40):
        census.recount({A: trained})
        found.append(census.passes_mark())
    assert found == [True, False, True]


@pytest.mark.parametrize(("tokens_per_step", "tokens"), [(None, None), (64, 640)])
def test_an_evaluation_says_how_far_the_run_is(
    tokens_per_step: int | None, tokens: int | None
) -> None:
    census = Census(Plan(tokens_per_step=tokens_per_step, stages=2))
    census.count(A, 21)
    recorder = Recorder(sent_bytes=1000.6, slow_link_bytes=10.4)
    assert census.evaluation(7.5, 8, 3, recorder) == Evaluation(
        time_s=7.5,
        inner_steps=10,
        tokens=tokens,
        absorbed_steps=8,
        outer_steps=3,
        sent_bytes=1001,
        slow_link_bytes=10,
    )


# Stop rules


@pytest.mark.parametrize(
    ("plan", "steps", "loss", "reason"),
    [
        (Plan(steps=10), 9, None, None),
        (Plan(steps=10), 10, None, "steps"),
        (Plan(steps=10), 11, 0.1, "steps"),
        (Plan(target_loss=2.0), 10**9, 2.1, None),
        (Plan(target_loss=2.0), 0, 2.0, "target_loss"),
        (Plan(target_loss=2.0), 0, None, None),
        (Plan(target_loss=2.0), 0, math.nan, None),
        (Plan(steps=10, target_loss=2.0), 10, 1.9, "target_loss"),
        (Plan(steps=10, target_loss=2.0), 10, 2.1, "steps"),
        (Plan(steps=10, stages=2), 19, None, None),
        (Plan(steps=10, stages=2), 20, None, "steps"),
        (Plan(seconds=0.0), 10**9, 0.0, None),  # the engine's
    ],
)
def test_a_run_ends_at_the_first_of_its_stop_rules(
    plan: Plan, steps: int, loss: float | None, reason: str | None
) -> None:
    census = Census(plan)
    census.count(A, steps)
    assert census.reached(loss) == reason


# Runs that would never end


jobs = st.lists(
    st.tuples(st.sampled_from(NODES), st.sampled_from([0, 1, 300, 999, 1000, 4000]), st.booleans()),
    max_size=25,
)


@given(jobs, st.sampled_from([None, 30, 100, 500]), st.integers(1, 2))
def test_a_run_is_stuck_if_a_patient_worker_has_nothing_to_show_for_ten_plans(
    done: list[tuple[NodeId, int, bool]], plan: int | None, stages: int
) -> None:
    """Since the model last changed: a worker that has had 1,000 inner steps or more finishes
    others, and all together have had more than ten times the plan.
    """
    census = Census(Plan(steps=plan, stages=stages))
    since: list[tuple[NodeId, int]] = []
    for node, steps, changed in done:
        if changed:
            census.changed()
            since = []
        own = sum(count for who, count in since if who == node)
        total = sum(count for _, count in since)
        stuck = steps and plan is not None and own >= 1000 and total / stages > 10 * plan
        if stuck:
            with pytest.raises(UserError):
                census.finishes(node, steps, ())
            return
        census.finishes(node, steps, ())
        since.append((node, steps))
    assert census.steps_since_change == sum(count for _, count in since)


def test_the_patience_with_a_worker_is_over_all_its_jobs_since_the_last_change() -> None:
    census = Census(Plan(steps=30))
    for _ in range(10):
        census.finishes(A, PATIENCE // 10, ())
    with pytest.raises(UserError):
        census.finishes(A, 1, ())


def test_just_ten_plans_are_not_yet_too_many() -> None:
    census = Census(Plan(steps=100))
    census.finishes(A, 1000, ())
    census.finishes(A, 1, ())
    with pytest.raises(UserError):
        census.finishes(A, 1, ())


def test_who_is_stuck_is_told_how_to_go_on() -> None:
    census = Census(Plan(steps=30, stages=2))
    census.finishes(A, 1999, ())
    with pytest.raises(UserError) as error:
        census.finishes(A, 1, ())
    assert str(error.value) == (
        "the workers have taken 999 inner steps since the model to take home last changed, and the "
        "run is planned for 30: outer steps come too seldom; lower inner_steps or accumulate, or "
        "give it more steps"
    )


def test_who_is_stuck_because_a_server_is_lost_is_told_which() -> None:
    census = Census(Plan(steps=30))
    census.finishes(A, PATIENCE, (B, C))
    with pytest.raises(TrainingError) as error:
        census.finishes(A, 1, (B, C))
    assert str(error.value) == (
        "the model to take home has not changed for 1,000 inner steps, and r/w1, r/w2 is lost: it "
        "does not come back soon enough, or never"
    )


# Losses that are not finite


verdicts = st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(["bad", "good", "other"])))


@given(verdicts)
def test_three_bad_losses_of_one_worker_in_a_row_end_the_run(
    told: list[tuple[NodeId, str]],
) -> None:
    """Finished inner steps in between make a new start; an answer without any does not, nor does
    what others do.
    """
    census = Census(Plan())
    assert NOT_FINITE == 3
    history: dict[NodeId, str] = dict.fromkeys(NODES, "")
    for node, what in told:
        if what == "bad":
            history[node] += "b"
            if history[node].endswith("bbb"):
                with pytest.raises(Diverged):
                    census.bad_loss(node, "the loss is nan")
                return
            census.bad_loss(node, "the loss is nan")
        else:
            census.finishes(node, 5 if what == "good" else 0, ())
            history[node] += "g" if what == "good" else ""


@pytest.mark.parametrize("plan", [Plan(strict=True), Plan(stages=2)])
def test_the_first_bad_loss_ends_a_run_that_is_strict_or_in_stages(plan: Plan) -> None:
    with pytest.raises(Diverged) as error:
        Census(plan).bad_loss(A, "the loss is nan")
    assert str(error.value) == "the loss is nan; try a lower learning rate"


def test_the_third_bad_loss_says_how_often_it_was() -> None:
    census = Census(Plan())
    census.bad_loss(A, "the loss is inf")
    census.bad_loss(A, "the loss is inf")
    with pytest.raises(Diverged) as error:
        census.bad_loss(A, "the loss is nan")
    assert str(error.value) == "the loss is nan, 3 times in a row; try a lower learning rate"


# Evaluations


def test_the_spread_is_that_of_the_weights_and_not_of_buffers() -> None:
    """Of three replicas whose two last entries are buffers, far apart."""
    parts = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    parts[:, 5:] *= 1e6
    vectors = [torch.from_numpy(part) for part in parts]
    mean = torch.from_numpy(parts.mean(axis=0))
    weights = parts[:, :5].astype(np.float64)
    expected = np.sqrt(((weights - weights.mean(axis=0)) ** 2).mean())
    assert spread(vectors, mean, 5) == pytest.approx(expected, rel=1e-6)


def test_there_is_no_spread_of_one_replica_or_of_nothing() -> None:
    one = torch.ones(4)
    assert spread([one], one, 4) is None
    assert spread([], one, 4) is None
    assert spread([torch.empty(0)] * 2, torch.empty(0), 0) is None
    assert spread([one, one], one, 4) == 0.0


def at(time_s: float = 12.34, inner_steps: int = 4321) -> Evaluation:
    return Evaluation(time_s, inner_steps, None, inner_steps, 1, 0, 0)


@pytest.mark.parametrize(
    ("loss", "own", "replica_loss"),
    [(2.5, [], None), (2.5, [1.0, 2.0, 6.0], 3.0), (None, [], None), (None, [2.0, 4.0], 3.0)],
)
def test_losses_are_put_down(
    loss: float | None, own: list[float], replica_loss: float | None
) -> None:
    evaluation = at()
    put_down(evaluation, loss, own, "")
    assert (evaluation.loss, evaluation.replica_loss) == (loss, replica_loss)


@pytest.mark.parametrize(
    ("loss", "own", "shown"),
    [
        (math.nan, [], "nan"),
        (math.inf, [1.0], "inf"),
        (2.0, [1.0, math.inf], "inf"),
        (None, [math.nan, 1.0], "nan"),
    ],
)
def test_a_validation_loss_that_is_not_finite_ends_the_run(
    loss: float | None, own: list[float], shown: str
) -> None:
    evaluation = at()
    with pytest.raises(Diverged) as error:
        put_down(evaluation, loss, own, " on the virtual clock")
    assert str(error.value) == (
        f"the validation loss is {shown} at 12.3 s on the virtual clock, after 4,321 inner steps; "
        "try a lower learning rate, inner or outer"
    )
    assert evaluation.loss is None
    assert evaluation.replica_loss is None
