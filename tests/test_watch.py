"""What the watch of a live run knows and decides, without Ray and without hosts: they are played by
what they would say.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
from torch import Tensor

from archipel.actor import NodeId, Start
from archipel.disk.checkpoint import Every
from archipel.errors import Diverged, TrainingError
from archipel.live import fleet
from archipel.live.course import Course
from archipel.live.evaluations import Evaluations
from archipel.live.fleet import Died, Fleet
from archipel.live.health import Health
from archipel.live.home import Home
from archipel.live.mail import Envelope, Inbox
from archipel.live.marks import COPIES, Marks
from archipel.live.notices import Notices
from archipel.live.protocol import Mark, Membership, News, Status, UnderWay
from archipel.live.restarts import Restarts
from archipel.live.saves import SaveSchedule
from archipel.run.census import Census, Plan
from archipel.run.metrics import Recorder

A, B, C = NodeId("east", "a"), NodeId("east", "b"), NodeId("west", "c")


# Marks


def mark(trained: int, *, loss: float | None = None, evaluated: bool = True) -> Mark:
    return Mark(float(trained), trained, trained, trained // 10, evaluated, loss)


def unevaluated(trained: int) -> Mark:
    return mark(trained, evaluated=False)


def test_a_mark_is_due_once_however_many_counts_are_passed() -> None:
    marks = Marks([0, 10, 20, 30], waits_for_release=False)
    assert marks.due(0) == 1
    marks.add(unevaluated(0), torch.zeros(1))
    assert (marks.due(9), marks.due(25)) == (0, 2)
    copy = marks.add(unevaluated(25), torch.ones(1), 2)
    marks.add(unevaluated(30), torch.full((1,), 2.0))
    assert marks.complete.is_set()
    marks.evaluated(copy, 3.5)
    assert [one.loss for one in marks.reached] == [None, 3.5, 3.5, None]
    assert [float(marks.vector(number)) for number in range(4)] == [0.0, 1.0, 1.0, 2.0]


def test_a_model_that_has_been_evaluated_makes_room_for_the_next_one() -> None:
    marks = Marks(range(100), waits_for_release=False)
    for number in range(50):
        marks.wait_for_room()
        marks.evaluated(marks.add(mark(number), torch.full((1,), number)), 1.0)
        assert float(marks.vector(number)) == number
    with pytest.raises(LookupError, match=r"^the model at mark 48 is not kept any more$"):
        marks.vector(48)


@pytest.mark.parametrize("way", ["evaluated", "closed"])
def test_a_handler_waits_while_too_many_models_wait_for_their_evaluation(way: str) -> None:
    marks = Marks(range(100), waits_for_release=False)
    copies = [marks.add(unevaluated(number), torch.zeros(1)) for number in range(COPIES)]
    handler = threading.Thread(target=marks.wait_for_room, daemon=True)
    handler.start()
    handler.join(0.05)
    assert handler.is_alive()
    if way == "evaluated":
        marks.evaluated(copies[0], 1.0)
    else:
        marks.close()
    handler.join(10)
    assert not handler.is_alive()


def test_a_model_at_which_the_run_may_end_is_kept_until_the_watch_has_seen_its_loss() -> None:
    marks = Marks(range(100), waits_for_release=True)
    for number in range(COPIES):
        marks.evaluated(marks.add(mark(number), torch.full((1,), number)), 1.0)
    assert float(marks.vector(0)) == 0
    marks.release(2)
    marks.wait_for_room()
    assert float(marks.vector(2)) == 2
    with pytest.raises(LookupError, match=r"^the model at mark 1 is not kept any more$"):
        marks.vector(1)


def test_marks_that_are_closed_are_only_made_when_asked_for() -> None:
    marks = Marks([0, 10], waits_for_release=False)
    marks.close()
    assert marks.due(100) == 0
    marks.add(mark(100), torch.zeros(1))
    marks.add(mark(101), torch.ones(1))
    assert not marks.complete.is_set()
    assert float(marks.vector(1)) == 1


# Restarts


def test_a_host_that_is_lost_and_joins_is_told_who_is_there() -> None:
    restarts = Restarts(3)
    assert restarts.lose(A, process=True) == News(A)
    assert restarts.lose(B, process=False) == News(B)
    assert restarts.begin_life(B) == Membership(1, {}, (A,), 2)
    assert restarts.join(B) == News(B, 1)
    assert restarts.begin_life(A) == Membership(1, {B: 1}, (), 2)
    assert restarts.join(A) == News(A, 1)
    assert list(restarts.gone) == []
    assert restarts.counts == {A: 1}


def test_of_a_host_that_begins_again_another_one_is_told_the_life_that_has_ended() -> None:
    """Else it would take the first messages of the new life for those of a lost one."""
    restarts = Restarts(3)
    for node in (A, B):
        restarts.lose(node, process=True)
    restarts.begin_life(A)
    there = restarts.begin_life(B)
    assert there == Membership(1, {}, (A,), 2)
    inbox = Inbox(epoch=1, life=there.life, lives=dict(there.lives), gone=set(there.gone))
    early = Envelope(A, 1, (1, 1), 0, 0.0, Start, ())
    assert inbox.accept(early) == []
    news = restarts.join(A)
    assert news.life is not None
    assert inbox.joined(A, news.life) == [early]


def test_a_host_that_dies_while_it_is_started_again_is_lost_once() -> None:
    """All hosts count losses, and must count the same ones."""
    restarts = Restarts(2)
    restarts.lose(A, process=False)
    restarts.begin_life(A)
    assert restarts.lose(A, process=True) is None
    assert restarts.begin_life(A) == Membership(2, {}, (), 1)
    assert restarts.may_restart(A)
    restarts.lose(A, process=True)
    assert not restarts.may_restart(A)


# Health


def status(trained: int = 0, **others: Any) -> Status:
    usual: dict[str, Any] = {
        "time_s": 10.0,
        "events": 1234,
        "quiet_s": 0.0,
        "compute_s": 4.0,
        "loss": None,
        "doing": "waits for better times",
        "holds": True,
        "saving": False,
        "refused": {},
        "messages": 0,
        "sent_bytes": 0.0,
        "slow_link_bytes": 0.0,
        "first_mark": 0,
        "marks": (),
    }
    return Status(trained=trained, **{**usual, **others})


def test_all_stand_still_if_nobody_has_done_anything_for_the_deadline() -> None:
    health = Health(5.0)
    health.hear(B, status(quiet_s=6.0), 1.0)
    health.hear(A, status(quiet_s=5.0), 1.0)
    assert health.standstill(1.0, []) is None
    health.hear(A, status(quiet_s=5.1), 1.0)
    assert health.standstill(1.0, [C]) == (
        "nothing has happened for 5 s (live.deadline_s): west/c is lost, and no machine of region "
        "'west' is there; east/a waits for better times; east/b waits for better times"
    )


def test_who_cannot_reach_somebody_does_not_stand_still_but_for_long() -> None:
    health = Health(5.0, cut_s=100.0)
    health.hear(A, status(quiet_s=60.0, cut_off=(C,)), 1.0)
    health.hear(C, status(quiet_s=60.0), 1.0)
    assert health.standstill(1.0, []) is None
    assert health.standstill(4.0, []) is not None  # C has been silent for a while: it may be dead
    health.hear(A, status(quiet_s=101.0, cut_off=(C,)), 1.0)
    health.hear(C, status(quiet_s=101.0), 1.0)
    assert health.standstill(1.0, []) == (
        "nothing has happened for 100 s (live.cut_s): east/a waits for better times; "
        "west/c waits for better times"
    )


def test_the_user_is_told_once_of_a_cut_and_of_its_end() -> None:
    health, recorder = Health(60.0), Recorder()
    notices = Notices(recorder, health)
    for node, off in ((A, (C,)), (B, (C,)), (C, (A,))):
        health.hear(node, status(cut_off=off), 1.0)
    with pytest.warns(UserWarning, match=r"^east/a cannot reach west/c any more, and the command"):
        assert notices.look(1.0)
    assert notices.look(2.0)
    for node in (A, B, C):
        health.hear(node, status(), 3.0)
    with pytest.warns(UserWarning, match=r"^east and west reach each other again, after 8.0 s$"):
        assert not notices.look(9.0)
    assert [(outage.time_s, outage.what, outage.who) for outage in recorder.outages] == [
        (1.0, "cut", "east – west"),
        (9.0, "mended", "east – west"),
    ]


def test_the_status_line_says_who_cannot_reach_whom() -> None:
    health = Health(60.0)
    health.hear(A, status(doing="waits; it cannot reach west/c", cut_off=(C,)), 1.0)
    health.hear(C, status(), 1.0)
    now = health.report(50, Plan(steps=200), 2.0, [A], starting=[], without_machine=[])
    assert now.late == "east/a waits; it cannot reach west/c"


def test_a_host_that_evaluates_does_not_stand_still() -> None:
    health = Health(5.0)
    health.hear(A, status(quiet_s=0.0), 1.0)
    health.hear(B, status(quiet_s=100.0), 1.0)
    assert health.standstill(1.0, []) is None


def test_the_report_says_how_the_run_stands() -> None:
    health = Health(60.0)
    health.hear(A, status(loss=2.0, compute_s=2.5), 1.0)
    health.hear(B, status(loss=3.0, quiet_s=30.0), 1.0)
    plan = Plan(steps=200, tokens_per_step=8)
    now = health.report(50, plan, 10.0, [A, B, C], starting=[], without_machine=[])
    assert (now.loss, now.tokens_per_s, now.idle) == (2.5, 40.0, {A: 0.75, B: 0.6})
    assert now.late == "east/b waits for better times"
    now = health.report(50, plan, 10.0, [A], starting=[C], without_machine=[])
    assert now.late == "west/c is being started again"


@pytest.mark.parametrize(
    ("left_s", "said"),
    [
        (31.0, "east/a → west/c 43%, 12 Mbit/s, 31 s to go"),
        (0.0, "east/a → west/c 43%, 12 Mbit/s, 0 s to go"),
        (None, "east/a → west/c 43%, nothing moves"),
    ],
)
def test_the_message_that_takes_longest_is_told(left_s: float | None, said: str) -> None:
    health = Health(60.0)
    health.hear(A, status(under_way=UnderWay(C, 0.43, 1.5e6, left_s)), 1.0)
    health.hear(B, status(), 1.0)
    plan = Plan(steps=200, tokens_per_step=8)
    now = health.report(50, plan, 10.0, [A, B], starting=[], without_machine=[])
    assert now.under_way == said


def test_last_words_are_those_of_the_last_status() -> None:
    health = Health(60.0)
    assert health.last_words(A) == "it had not said anything yet"
    health.hear(A, status(), 1.0)
    words = "last words, at 10.0 s: waits for better times, 1,234 events so far"
    assert health.last_words(A) == words


# When all are saved


def test_saves_are_due_after_so_many_tokens_or_seconds() -> None:
    by_tokens = SaveSchedule(Every(tokens=100))
    by_tokens.plan(250, 0.0)
    assert [by_tokens.is_due(tokens, 1e9) for tokens in (299, 300)] == [False, True]
    by_time = SaveSchedule(Every(seconds=10.0))
    by_time.plan(0, 25.0)
    assert [by_time.is_due(10**9, now_s) for now_s in (34.9, 35.0)] == [False, True]
    assert not SaveSchedule(None).is_due(10**9, 1e9)


# The course of a run


def course(*, marks: list[dict[NodeId, int]], plan: Plan, replica: Any = None) -> Course:
    health = Health(60.0)
    held: dict[tuple[NodeId, int], Tensor] = {}

    def fetch(node: NodeId, number: int) -> Tensor:
        if (node, number) not in held:
            raise Died("it is gone")
        return held[node, number]

    home = Home(fetch, replica, None, [A, B, C])
    made = Course(marks, Census(plan), health, Evaluations(Recorder()), home)
    made.held = held  # type: ignore[attr-defined]
    return made


class Distance:
    """In the place of a replica: the loss of a vector is the mean of its squares."""

    class layout:
        parameters = 1

    def evaluate(self, theta: Tensor) -> list[float]:
        return [float(theta.square().mean())]


MARKS = [{A: 0, B: 0}, {A: 10, B: 10}]
PLAN = Plan(steps=20, evaluate_every=10, tokens_per_step=4)


def test_an_evaluation_begins_when_all_holders_have_reached_its_mark() -> None:
    run = course(marks=MARKS, plan=PLAN)
    run.evaluations.hear(A, 0, [mark(0, loss=5.0), mark(10, evaluated=False)])
    run.begin_reached()
    assert run.begun == 0
    run.evaluations.hear(B, 0, [mark(0, loss=5.0), mark(11, loss=3.0)])
    run.begin_reached()
    assert run.begun == 2
    assert run.stop_rule() == "steps"
    run.evaluations.collect()
    [first] = run.evaluations.recorder.evaluations
    # At the start all replicas are equal, so the loss of their mean is known.
    assert (first.loss, first.replica_loss, first.replica_std) == (5.0, 5.0, 0.0)
    run.evaluations.hear(A, 1, [mark(10, loss=4.0)])
    run.evaluations.collect()
    last = run.evaluations.recorder.evaluations[-1]
    assert (last.inner_steps, last.tokens, last.time_s) == (21, 84, 11.0)
    assert (last.loss, last.replica_loss, last.replica_std) == (None, 3.5, None)


def test_a_target_goes_by_the_replicas_losses_where_their_means_is_not_known() -> None:
    run = course(marks=MARKS, plan=Plan(steps=20, evaluate_every=10, target_loss=3.5))
    for node in (A, B):
        run.evaluations.hear(node, 0, [mark(0, loss=5.0)])
    run.begin_reached()
    run.evaluations.collect()
    assert run.stop_rule() is None
    run.evaluations.hear(A, 1, [mark(10, loss=4.0)])
    run.evaluations.hear(B, 1, [mark(10, evaluated=False)])
    run.begin_reached()
    assert run.stop_rule() is None  # a loss is still to come
    run.evaluations.hear(B, 1, [mark(10, loss=3.0)])
    run.evaluations.collect()
    assert run.stop_rule() == "target_loss"
    assert run.taken is not None
    assert run.taken.marks == {A: 1, B: 1}


def test_a_loss_that_is_not_finite_ends_the_run_whoever_has_computed_it() -> None:
    for losses in ((float("nan"),), (1.0, float("inf"))):
        nodes = [A, B][: len(losses)]
        run = course(marks=[dict.fromkeys(nodes, 10)], plan=PLAN)
        for node, loss in zip(nodes, losses, strict=True):
            run.evaluations.hear(node, 0, [mark(10, loss=loss)])
        run.begin_reached()
        with pytest.raises(Diverged, match=r"^the validation loss is (nan|inf) at 10.0 s, after"):
            run.evaluations.collect()


def test_a_loss_that_cannot_be_computed_ends_the_run_with_the_reason() -> None:
    run = course(marks=[{A: 0}], plan=PLAN)
    failed = Mark(
        0.0, 0, 0, 0, evaluated=True, failure="east/a: the task failed at t.py:3: no data"
    )
    run.evaluations.hear(A, 0, [failed])
    run.begin_reached()
    with pytest.raises(TrainingError, match=r"^east/a: the task failed at t.py:3: no data$"):
        run.evaluations.collect()


def test_an_evaluation_that_waits_for_a_host_that_has_died_is_missing() -> None:
    run = course(marks=[{A: 0, B: 0}], plan=PLAN)
    run.evaluations.hear(A, 0, [mark(0, loss=5.0)])
    run.evaluations.hear(B, 0, [mark(0, evaluated=False)])
    run.leave_rehearsal()
    run.lose(B)
    assert run.taken is None
    run.evaluations.collect()
    assert run.evaluations.recorder.evaluations == []


def test_once_somebody_is_lost_marks_are_asked_for_when_the_plans_are_passed() -> None:
    run = course(marks=MARKS, plan=PLAN)
    for node in (A, B):
        run.evaluations.hear(node, 0, [mark(0, loss=5.0)])
    run.leave_rehearsal()
    run.evaluations.collect()
    assert [run.wants_mark(steps) for steps in (9, 10)] == [False, True]
    run.evaluations.hear(A, 7, [mark(12, evaluated=False)])
    run.begin({A: 7})
    assert [run.wants_mark(steps) for steps in (15, 19)] == [False, False]  # one at a time
    assert run.wants_mark(20)  # but the last one


def held(run: Course, **vectors: float) -> None:
    for name, value in vectors.items():
        node = NodeId("east" if name in "ab" else "west", name)
        run.held[node, 0] = torch.tensor([value])  # type: ignore[attr-defined]


def at_the_end(*nodes: NodeId) -> Course:
    run = course(marks=[dict.fromkeys(nodes, 10)], plan=PLAN, replica=Distance())
    for place, node in enumerate(nodes):
        run.evaluations.hear(node, 0, [mark(10 + place, loss=4.0 + place)])
    run.begin_reached()
    run.evaluations.collect()
    return run


def test_one_model_travels_once_and_is_not_evaluated_again() -> None:
    run = at_the_end(A)
    held(run, a=3.0)
    taken = run.take_home()
    assert (taken.loss, taken.replica_std) == (4.0, None)
    assert [model.tolist() for model in run.home.models()] == [[3.0]]
    assert run.home.received_bytes == 4


def test_of_several_replicas_the_mean_is_evaluated_when_it_is_taken_home() -> None:
    run = at_the_end(A, B)
    held(run, a=3.0, b=1.0)
    taken = run.take_home()
    assert (taken.inner_steps, taken.replica_loss) == (21, 4.5)
    assert (taken.loss, taken.replica_std) == (4.0, 1.0)  # of (3 + 1) / 2, and ±1 around it
    assert run.home.received_bytes == 8


def test_a_replica_that_is_lost_on_its_way_home_is_in_no_count() -> None:
    run = at_the_end(A, B, C)
    held(run, a=3.0, c=5.0)
    with pytest.warns(
        UserWarning,
        match=r"^the model that is taken home is the mean of 2 replicas instead of 3: east/b: it "
        r"is gone$",
    ):
        taken = run.take_home()
    assert (taken.inner_steps, taken.loss, taken.replica_loss) == (22, 16.0, 5.0)
    assert run.evaluations.recorder.evaluations == [taken]


def test_a_model_that_is_lost_on_its_way_home_is_an_error() -> None:
    with pytest.raises(
        TrainingError,
        match=r"^the model to take home was lost with east/a, who held it: east/a: it is gone$",
    ):
        at_the_end(A).take_home()
    run = course(marks=[{A: 0}], plan=PLAN)
    with pytest.raises(TrainingError, match=r"^nobody who holds the model was there when it was"):
        run.take_home()


# Parts of a model on slow links


@dataclass
class SlowRay:
    """In the place of Ray: a call is what it returns, and how often it is waited for in vain. A
    host that is gone answers nothing.
    """

    waited: list[float] = field(default_factory=list)
    gone: bool = False
    exceptions = ray.exceptions

    def wait(self, refs: list[Any], timeout: float, num_returns: int = 1) -> Any:
        [ref] = refs
        self.waited.append(timeout)
        if ref["late"] > 0 or self.gone:
            ref["late"] -= 1
            return [], refs
        return refs, []

    def get(self, ref: Any) -> Any:
        return ref["value"]

    def host(self, vector: Tensor, late: int) -> Any:
        def part(number: int, start: int, stop: int) -> Any:
            return {"value": vector[start:stop].numpy(), "late": late}

        def status(released: int) -> Any:
            return {"value": None, "late": 0}

        calls = {"part": part, "status": status}
        methods = {name: SimpleNamespace(remote=call) for name, call in calls.items()}
        return SimpleNamespace(**methods)


def fleet_on(slow: SlowRay, vector: Tensor, late: int, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(fleet, "ray", slow)
    monkeypatch.setattr(fleet, "CHUNK", 4)
    return Fleet(cast(Any, None), {}, hosts={A: slow.host(vector, late)})


@pytest.mark.parametrize("numel", [0, 3, 4, 8, 23])
@pytest.mark.parametrize("late", [0, 5])
def test_a_part_of_the_model_takes_as_long_as_it_takes(
    numel: int, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece comes after `late` deadlines, while the host answers all questions."""
    vector = torch.arange(float(numel))
    hosts = fleet_on(SlowRay(), vector, late, monkeypatch)
    assert torch.equal(hosts.fetch(A, 0, 2.0), vector)


def test_a_host_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(gone=True)
    hosts = fleet_on(slow, torch.zeros(8), 0, monkeypatch)
    with pytest.raises(Died, match=r"^it has not answered for 4 s$"):
        hosts.fetch(A, 0, 2.0)
    assert slow.waited == [2.0, 2.0]
