"""Bad updates, and losses that are not finite: what is refused, who is named, and that training
goes on as if it had not been.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from worlds import (
    TINY,
    Inline,
    Quadratic,
    ledger_of,
    linear_task,
    model_of,
    plain,
    simulator,
    small,
    train_with,
    workers_of,
)

from archipel import methods, report, simulation
from archipel.actor import Gradient, NodeId, Trained
from archipel.disk import checkpoint, rundir
from archipel.errors import Diverged, TrainingError, UserError
from archipel.methods import noloco
from archipel.parameter_server import Delta
from archipel.recipe import Recipe, load_recipe, parse_recipe
from archipel.run import wire
from archipel.run.census import Plan
from archipel.run.metrics import Recorder, merged
from archipel.run.screening import Screen, ScreeningConfig
from archipel.sim.clock import Simulator
from archipel.sim.topology import Topology
from archipel.train.pool import Pool
from archipel.train.replica import Run
from archipel.train.trainer import Done, NoTraining

ALL = methods.names()
A, B, C = (NodeId("r", f"w{i}") for i in range(3))
BAD = NodeId("r", "w1")
TWO, THREE = (Topology(regions={"r": [1.0] * n}, local={"bandwidth_gbit_s": 0.8}) for n in (2, 3))
QUICK = ScreeningConfig(warm_up=2)
# That something is refused or restarted is said by a warning, which tests elsewhere would take for
# an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore:an update of"),
    pytest.mark.filterwarnings("ignore:worker "),
]


# The rule


def vector(norm: float) -> Tensor:
    return torch.tensor([0.0, norm, 0.0])


def test_the_median_by_hand() -> None:
    screen = Screen(ScreeningConfig(multiple=10.0, window=4, warm_up=3))
    for norm in (1.0, 1000.0, 2.0):  # the first three are taken as they are
        assert screen.refuses([vector(norm)], 3) is None
    # The median of 1, 2 and 1000 is 2.
    assert (
        screen.refuses([vector(20.5)], 3)
        == "its norm 20.5 is 10.2 times the running median 2 of the last 3"
    )
    assert screen.refuses([vector(20.0)], 3) is None
    # Of 1, 1000, 2 and 20 it is 11; what was refused is not among them, and the window is full.
    assert (
        screen.refuses([vector(112.0)], 3)
        == "its norm 112 is 10.2 times the running median 11 of the last 4"
    )
    assert screen.refuses([vector(4.0)], 3) is None
    # Of 1000, 2, 20 and 4 it is 12.
    assert (
        screen.refuses([vector(121.0)], 3)
        == "its norm 121 is 10.1 times the running median 12 of the last 4"
    )
    assert screen.norms == [1000.0, 2.0, 20.0, 4.0]


@given(
    st.lists(st.sampled_from([0.0, 1e-3, 1.0, 2.0, 30.0, 1e4, math.nan, math.inf]), max_size=40),
    st.floats(1.5, 200),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_the_rule_is_that_of_a_few_lines_of_numpy(
    norms: list[float], multiple: float, window: int, warm_up: int
) -> None:
    screen = Screen(ScreeningConfig(multiple=multiple, window=window, warm_up=warm_up))
    accepted: list[float] = []
    for norm in norms:
        large = len(accepted) >= warm_up and 0 < multiple * np.median(accepted[-window:]) < norm
        refused = not np.isfinite(norm) or large
        assert (screen.refuses([vector(norm)], 3) is not None) == refused
        accepted += [] if refused else [float(np.float32(norm))]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_all_vectors_must_be_finite_from_the_first_update_on(value: float) -> None:
    screen, bad, good = Screen(ScreeningConfig()), torch.tensor([1.0, value]), torch.ones(2)
    for update in (Delta(bad, 4), noloco.Exchange(bad, good, 0), noloco.Exchange(good, bad, 0)):
        assert screen.refuses(wire.vectors(update), 1) == "it is not finite"
    assert screen.refuses(wire.vectors(noloco.Exchange(good, good, 0)), 1) is None
    assert screen.norms == [1.0]


def test_buffers_have_no_usual_size() -> None:
    screen = Screen(QUICK)
    for variance in (1.0, 1.0, 1.0, 1e9):
        assert screen.refuses([torch.tensor([1.0, variance])], 1) is None


def test_as_long_as_nothing_has_moved_nothing_is_too_large() -> None:
    screen = Screen(QUICK)
    for norm in (0.0, 0.0, 0.0, 1.0):
        assert screen.refuses([vector(norm)], 3) is None


def test_a_number_whose_square_is_no_number_is_large_and_finite() -> None:
    screen = Screen(QUICK)
    for _ in range(2):
        screen.refuses([vector(1.0)], 3)
    assert (
        screen.refuses([vector(1e30)], 3)
        == "its norm 1e+30 is 1e+30 times the running median 1 of the last 2"
    )


def test_empty_vectors_are_fine() -> None:
    screen = Screen(QUICK)
    assert [screen.refuses([torch.empty(0)], 0) for _ in range(4)] == [None] * 4


# One worker's bad updates are left out: shown on vectors. The n-th job of all moves coordinate n by
# 1, and plain settings add up displacements. So a coordinate says how much of its job is in the
# model.


class Marked(Quadratic):
    """`poison` (worker, number of its job) is added to what that job moves."""

    def __init__(self, poison: dict[tuple[NodeId, int], float], numel: int = 400) -> None:
        super().__init__(numel=numel)
        self.poison, self.jobs = poison, list[tuple[NodeId, int]]()

    def _job(self, worker: NodeId) -> Tensor:
        job = worker, sum(other == worker for other, _ in self.jobs)
        moved = torch.zeros(self.numel)
        moved[len(self.jobs)] = 1.0
        self.jobs.append(job)
        return moved + self.poison.get(job, 0.0)

    def train(self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float) -> Done:
        return Done(Trained(theta + self._job(worker), steps, ()))

    def gradient(self, worker: NodeId, theta: Tensor, due_s: float) -> Done:
        return Done(Gradient(-self._job(worker), 0.0))

    def apply(
        self, worker: NodeId, theta: Tensor, gradient: Tensor, progress: int, due_s: float
    ) -> Done:
        return Done(Trained(theta - gradient, 1, ()))

    def evaluate(self, theta: Tensor, due_s: float) -> Done:
        return Done(0.0)


POISON = {"nan": math.nan, "inf": math.inf, "too large": 1e6}


def marked(method: str, poison: dict[tuple[NodeId, int], float], **more: Any) -> Simulator:
    trainer = Marked(poison)
    fields = {
        "topology": THREE,
        "profile": TINY,
        "settings": plain(method),
        "plan": Plan(seconds=60.0),
    } | more
    sim = simulator(method, trainer, theta=torch.zeros(trainer.numel), **fields)
    assert sim.run() == "seconds"
    return sim


def shares(sim: Simulator, part: Tensor) -> dict[tuple[NodeId, int], float]:
    """How much of each job is in a model."""
    assert not part[len(sim.engine.setting.trainer.jobs) :].any()  # type: ignore[attr-defined]
    return {
        job: round(float(share), 4)
        for job, share in zip(sim.engine.setting.trainer.jobs, part, strict=False)
        if share
    }  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", POISON)
@pytest.mark.parametrize("method", ["async_local_sgd", "halos"])
def test_a_server_does_without_a_bad_update(method: str, kind: str) -> None:
    """It answers it as ever, so all else happens at the same times: the model is that of the clean
    run, less the one job.
    """
    clean, sim = marked(method, {}), marked(method, {(BAD, 5): POISON[kind]}, screening=QUICK)
    expected, found = shares(clean, clean.parts()[0]), shares(sim, sim.parts()[0])
    assert sim.engine.setting.trainer.jobs == clean.engine.setting.trainer.jobs  # type: ignore[attr-defined]
    if method == "async_local_sgd":
        assert found == {job: share for job, share in expected.items() if job != (BAD, 5)}
        assert sim.inner_steps == clean.inner_steps - 4
    else:  # one update later than in the clean run the server has K of them
        assert (BAD, 5) in expected
        assert (BAD, 5) not in found
        assert set(found.values()) == {1.0}
        assert sim.inner_steps == 4 * len(found)
        assert (
            sum(actor.local_updates for actor in sim.actors.values())
            == sum(a.local_updates for a in clean.actors.values()) - 1
        )
    assert sim.recorder.refused == {BAD: 1}
    assert clean.recorder.refused == {}


@pytest.mark.parametrize("kind", POISON)
@pytest.mark.parametrize("method", ["diloco", "sync_sgd"])
def test_a_collective_does_without_a_bad_contribution(method: str, kind: str) -> None:
    """In its round the mean is that of the other two. The sender stays a member, and its inner
    steps are not counted.
    """
    clean, sim = marked(method, {}), marked(method, {(BAD, 5): POISON[kind]}, screening=QUICK)
    rounds = max(number for _, number in shares(clean, clean.parts()[0])) + 1
    assert rounds > 10
    expected = {(worker, number): 0.3333 for worker in (A, B, C) for number in range(rounds)}
    expected |= {(A, 5): 0.5, (C, 5): 0.5}
    del expected[BAD, 5]
    assert shares(sim, sim.parts()[0]) == expected
    steps = plain(method).get("inner_steps", 1)
    assert (sim.inner_steps, clean.inner_steps) == (steps * (3 * rounds - 1), steps * 3 * rounds)
    assert sim.recorder.refused == {BAD: 1}
    assert sim.recorder.spans == clean.recorder.spans


@pytest.mark.parametrize("kind", POISON)
def test_noloco_does_without_a_bad_exchange(kind: str) -> None:
    """The partner takes the step alone, the sender as if its own inner steps had not moved it; then
    they go on together.
    """
    clean, sim = (
        marked("noloco", poison, topology=TWO, screening=QUICK)
        for poison in ({}, {(BAD, 5): POISON[kind]})
    )
    one, other = (shares(sim, part) for part in sim.parts())
    steps = max(number for _, number in shares(clean, clean.parts()[0])) + 1
    assert steps > 10
    both = {(worker, number): 0.5 for worker in (A, B) for number in range(steps)}
    del both[BAD, 5]
    assert one == both | {(A, 5): 1.0}
    assert other == both
    assert [actor.absorbed for actor in sim.actors.values()] == [4 * steps, 4 * (steps - 1)]
    assert sim.recorder.refused == {BAD: 2}  # by its partner and by itself
    assert sim.recorder.spans == clean.recorder.spans


@pytest.mark.parametrize("early", [True, False])
def test_a_bad_exchange_that_comes_early_is_not_waited_for(early: bool) -> None:
    """The other worker is slower, or faster: it is refused before or after it has done its own
    inner steps.
    """
    topology = Topology(
        regions={"r": [0.5, 1.0] if early else [1.0, 0.5]}, local={"bandwidth_gbit_s": 0.8}
    )
    clean, sim = (
        marked("noloco", poison, topology=topology, screening=QUICK)
        for poison in ({}, {(BAD, 3): math.nan})
    )
    assert shares(sim, sim.parts()[0])[A, 3] == 1.0
    assert (BAD, 3) not in shares(sim, sim.parts()[0])
    assert sim.recorder.spans == clean.recorder.spans


def test_a_worker_of_noloco_that_is_alone_refuses_its_own() -> None:
    sim = marked(
        "noloco", {(A, 3): math.nan}, topology=Topology(regions={"r": [1.0]}), screening=QUICK
    )
    found = shares(sim, sim.parts()[0])
    assert set(found.values()) == {1.0}
    assert (A, 3) not in found
    assert (A, 4) in found
    assert sim.inner_steps == 4 * len(found)


@pytest.mark.parametrize("method", ["diloco", "sync_sgd"])
def test_if_all_are_refused_there_is_no_step_in_that_round(method: str) -> None:
    """With momentum, and with buffers behind the parameters: the model is that of one round
    less.
    """

    class Poisoned(Quadratic):
        def __init__(self, bad: int | None) -> None:
            super().__init__()
            self.count = Counter[NodeId]()
            self.bad = bad

        def _bad(self, worker: NodeId, result: Tensor) -> Tensor:
            self.count[worker] += 1
            return result * math.nan if self.count[worker] == self.bad else result

        def train(
            self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float
        ) -> Done:
            answer = super().train(worker, theta, steps, progress, due_s).value
            return Done(Trained(self._bad(worker, answer.theta), steps, answer.losses))

        def gradient(self, worker: NodeId, theta: Tensor, due_s: float) -> Done:
            answer = super().gradient(worker, theta, due_s).value
            return Done(Gradient(self._bad(worker, answer.vector), answer.loss))

    def run(bad: int | None) -> Simulator:
        settings = {"inner_steps": 4, "outer_lr": 0.1} if method == "diloco" else {}
        steps = 6 * 3 * settings.get("inner_steps", 1)
        sim = simulator(
            method,
            Poisoned(bad),
            topology=THREE,
            profile=TINY,
            settings=settings,
            steps=steps,
            screening=QUICK,
            parameters=5,
        )
        assert sim.run() == "steps"
        return sim

    clean, sim = run(None), run(3)
    assert torch.equal(model_of(sim), model_of(clean))
    assert sim.inner_steps == clean.inner_steps
    assert sim.actors[A].round == clean.actors[A].round + 1  # type: ignore[attr-defined]
    assert sim.recorder.refused == dict.fromkeys((A, B, C), 1)
    if method == "diloco":
        assert torch.equal(sim.actors[A].outer.velocity, clean.actors[A].outer.velocity)  # type: ignore[attr-defined]


def test_a_report_of_halos_can_be_refused_and_is_answered() -> None:
    """Once, a local server reports nonsense. The answer comes, the next report is fine; what was in
    the bad one is in no other.
    """
    fields = {
        "topology": THREE,
        "profile": TINY,
        "settings": plain("halos"),
        "plan": Plan(seconds=60.0),
        "theta": torch.zeros(400),
    }
    clean, sim = (simulator("halos", Marked({}), screening=QUICK, **fields) for _ in range(2))
    clean.run()
    assert sim.run(lambda: sim.now > 20.0) is None
    sim.actors[NodeId("r", "server0")].base[-1] = 1e6  # type: ignore[attr-defined]
    assert sim.run() == "seconds"
    assert sim.recorder.refused == {NodeId("r", "server0"): 1}
    expected, found = shares(clean, clean.parts()[0]), shares(sim, sim.parts()[0])
    assert found.items() < expected.items()
    assert sim.inner_steps == 4 * len(found)
    assert sim.state.events == clean.state.events


def test_without_screening_a_bad_update_is_in_the_model() -> None:
    sim = marked("async_local_sgd", {(BAD, 5): math.nan})
    assert bool(torch.isnan(sim.parts()[0]).all())


def test_the_first_refusal_of_a_sender_is_said() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        marked("async_local_sgd", {(BAD, 5): math.nan, (BAD, 6): 1e6, (A, 8): 1e6}, screening=QUICK)
    assert [str(warning.message) for warning in said] == [
        "an update of r/w1 is refused after 24.1 s: it is not finite; more of them are only "
        "counted",
        "an update of r/w0 is refused after 36.2 s: its norm 2e+07 is 2e+07 times the running "
        "median 1 of the last 22; "
        "more of them are only counted",
    ]


# Losses that are not finite


class Failing(Quadratic):
    """`when(worker, number of its job)` says whose loss is not finite."""

    def __init__(self, when: Callable[[NodeId, int], bool]) -> None:
        super().__init__()
        self.when, self.count, self.resets = when, Counter[NodeId](), list[NodeId]()

    def _checked(self, worker: NodeId, answer: Done) -> Any:
        number = self.count[worker]
        self.count[worker] += 1
        return Raises(worker, number) if self.when(worker, number) else answer

    def train(self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float) -> Any:
        return self._checked(worker, super().train(worker, theta, steps, progress, due_s))

    def gradient(self, worker: NodeId, theta: Tensor, due_s: float) -> Any:
        return self._checked(worker, super().gradient(worker, theta, due_s))

    def reset_optimizer(self, worker: NodeId) -> None:
        self.resets.append(worker)


class Raises:
    def __init__(self, worker: NodeId, number: int) -> None:
        self.worker, self.number = worker, number

    def result(self) -> Any:
        raise Diverged(
            f"worker {self.worker}: the training loss is nan at its inner step {self.number}"
        )


def failing(
    method: str, when: Callable[[NodeId, int], bool], seconds: float = 100.0, **more: Any
) -> Simulator:
    trainer = Failing(when)
    return simulator(
        method,
        trainer,
        topology=THREE,
        profile=TINY,
        settings=small(method, inner_steps=4),
        plan=Plan(seconds=seconds),
        **more,
    )


@pytest.mark.parametrize("method", ALL)
def test_one_worker_with_a_loss_that_is_not_finite_begins_again(method: str) -> None:
    sim = failing(method, lambda worker, number: worker == BAD and number == 3)
    assert sim.run() == "seconds"
    assert sim.recorder.restarted == {BAD: 1}
    assert sim.engine.setting.trainer.resets == [BAD]  # type: ignore[attr-defined]
    last = {
        worker: max(t.time_s for t in sim.recorder.trainings if t.node == worker)
        for worker in sim.engine.setting.step_time_s
    }
    assert min(last.values()) > 90
    assert bool(torch.isfinite(model_of(sim)).all())
    usual = failing(method, lambda worker, number: False)
    usual.run()
    steps = methods.load(method).Config.model_fields.get("inner_steps")
    assert 0 < usual.inner_steps - sim.inner_steps <= 3 * (4 if steps else 1) * (1 if steps else 3)


@pytest.mark.parametrize("method", ["async_local_sgd", "halos"])
def test_the_others_do_not_notice(method: str) -> None:
    runs = [
        failing(method, lambda worker, number, bad=bad: (worker, number) == (bad, 3))
        for bad in (None, BAD)
    ]
    for sim in runs:
        sim.run()
    usual, sim = ([span for span in run.recorder.spans if span.node in (A, C)] for run in runs)
    assert sim == usual


def test_by_hand_async() -> None:
    """Inner steps of 4 s, 0.01 s each way. The 4th job of the bad one ends in nothing at 16.07 s; a
    model is there 0.01 s later.
    """
    sim = failing("async_local_sgd", lambda worker, number: (worker, number) == (BAD, 3))
    sim.run()
    began = [
        round(span.start_s, 6)
        for span in sim.recorder.spans
        if span.node == BAD and span.what == "compute"
    ]
    assert began[:6] == [0.01, 4.03, 8.05, 12.07, 16.08, 20.1]


def test_by_hand_diloco() -> None:
    """Rounds of 4 s and the all-reduce. In the 4th one the bad one's loss is lost with its steps;
    the two others end the round.
    """
    sim = failing("diloco", lambda worker, number: (worker, number) == (BAD, 3))
    sim.run()
    losses = [(training.node, round(training.time_s, 3)) for training in sim.recorder.trainings][
        :16
    ]
    three = 3 * [4 * 1.0]
    assert [node for node, _ in losses[:9]] == 3 * [A, B, C]
    assert [node for node, _ in losses[9:11]] == [A, C]
    assert sum(three) < losses[9][1] < sum(three) + 4.2
    assert {node for node, _ in losses[11:14]} == {A, B, C}


@pytest.mark.parametrize("method", ALL)
def test_strict_stops_at_the_first_one(method: str) -> None:
    sim = failing(method, lambda worker, number: worker == BAD and number == 3, strict=True)
    with pytest.raises(
        Diverged,
        match=r"^worker r/w1: the training loss is nan at its inner step 3, after .* s on the "
        r"virtual clock; try a lower learn",
    ):
        sim.run()


@pytest.mark.parametrize("method", ALL)
def test_three_in_a_row_stop(method: str) -> None:
    sim = failing(method, lambda worker, number: worker == BAD and number >= 3)
    with pytest.raises(
        Diverged,
        match=r"^worker r/w1: the training loss is nan at its inner step 5, after .* clock, 3 "
        r"times in a row; try a lower ",
    ):
        sim.run()
    assert sim.recorder.restarted == {BAD: 2}


@pytest.mark.parametrize("method", ALL)
def test_now_and_then_does_not_stop(method: str) -> None:
    sim = failing(method, lambda worker, number: worker == BAD and number % 3 > 0)
    assert sim.run() == "seconds"
    assert sim.recorder.restarted[BAD] > 10


@pytest.mark.parametrize("method", ALL)
def test_all_at_once_begin_again(method: str) -> None:
    """Nobody has a newer model; they go on from what there is."""
    sim = failing(method, lambda worker, number: number == 3)
    assert sim.run() == "seconds"
    assert sim.recorder.restarted == dict.fromkeys((A, B, C), 1)
    assert max(training.time_s for training in sim.recorder.trainings) > 90


def test_the_inner_optimizer_begins_anew() -> None:
    """A batch that is not finite leaves moments that are not: the run ends well only if they are
    gone.
    """
    task = linear_task()
    usual = task.batches

    def batches(shard: Any, index: int) -> Any:
        x, y = usual(shard, index)
        return (x * math.nan if (shard.split, shard.index, index) == ("train", 1, 9) else x), y

    object.__setattr__(task, "batches", batches)
    trainer = Inline(task, Run(600, 3, 0), workers_of(THREE))

    class Polite(Inline):  # as a pool: it fails when it is asked for the result
        def train(
            self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float
        ) -> Any:
            try:
                return super().train(worker, theta, steps, progress, due_s)
            except ArithmeticError:
                self.cursors[self.rank[worker]] += steps
                return Raises(worker, 9)

    trainer.__class__ = Polite
    sim = simulator(
        "diloco", trainer, topology=THREE, profile=TINY, settings={"inner_steps": 4}, steps=600
    )
    assert sim.run() == "steps"
    assert sim.recorder.restarted == {BAD: 1}
    first, last = sim.recorder.evaluations[0].loss, sim.recorder.evaluations[-1].loss
    assert first is not None
    assert last is not None
    assert last < first / 2


def test_in_stages_it_ends_the_run() -> None:
    given = parse_recipe(
        {
            "method": "diloco",
            "task": "none",
            "topology": {"regions": {"r": [1.0] * 4}},
            "pipeline": {"stages": 2},
            "run": {"steps": 200},
        }
    )
    sim = simulation.make_simulator(given, None)

    class Trainer(NoTraining):
        def train_stages(self, team: Any, thetas: Any, *_: Any) -> Any:
            return [Raises(NodeId("r", f"w{i}"), 7) for i in range(len(thetas))]

    train_with(sim, Trainer())
    with pytest.raises(
        Diverged,
        match=r"^worker r/w\d: the training loss is nan at its inner step 7, after .* clock; try a "
        r"lower lea",
    ):
        sim.run()


@pytest.mark.parametrize("seed", [0, 1, 2, 8, 18, 30, 59])
@pytest.mark.parametrize("method", ALL)
def test_the_books_hold_whatever_is_not_finite(method: str, seed: int) -> None:
    """Crashes, restarts and a partition; and one loss in ten is not finite, but never three in a
    row. With seeds from 8 on, two members have once begun a term side by side.
    """
    schedule = [
        {"kind": "crash", "node": "a/w0", "at_s": 50.0, "restart_after_s": 20.0},
        {"kind": "crash", "node": "b/w1", "at_s": 90.0},
        {"kind": "partition", "regions": ["b"], "at_s": 130.0, "for_s": 30.0},
    ]
    given = parse_recipe(
        {
            "method": {"name": method, **small(method, inner_steps=2)},
            "topology": {
                "regions": {"a": [1.0, 0.5], "b": [0.7, 1.0]},
                "default": {"bandwidth_gbit_s": 0.016},
            },
            "profile": {"name": "tiny", "model_bytes": 1_000_000, "step_time_s": 1.0},
            "task": "none",
            "run": {"steps": 10**6, "seconds": 400.0},
            "faults": {"schedule": schedule, "save_every_s": 10.0, "deadline_s": 10.0},
        }
    )
    sim = simulation.make_simulator(given, None)
    rng, row = np.random.default_rng(seed), Counter[NodeId]()

    class Trainer(NoTraining):
        def _maybe(self, worker: NodeId, usual: Any) -> Any:
            row[worker] = row[worker] + 1 if rng.random() < 0.1 and row[worker] < 2 else 0
            return Raises(worker, 0) if row[worker] else usual

        def train(self, worker: NodeId, *arguments: Any) -> Any:
            return self._maybe(worker, super().train(worker, *arguments))

        def gradient(self, worker: NodeId, *arguments: Any) -> Any:
            return self._maybe(worker, super().gradient(worker, *arguments))

    train_with(sim, Trainer())
    assert sim.run() == "seconds"
    assert sum(sim.recorder.restarted.values()) > 5
    assert all(
        ledger_of(sim).began_s[worker] > 370
        for worker in sim.engine.setting.step_time_s
        if str(worker) != "b/w1"
    )


def test_a_member_is_in_one_all_reduce_at_a_time() -> None:
    sim = failing("diloco", lambda worker, number: False)
    sim.engine.contexts[A].all_reduce((A, B), torch.zeros(8), 0)
    with pytest.raises(
        TrainingError,
        match=r"^r/w0 called all_reduce while it waits in one: a member is in one all-reduce at a "
        r"time$",
    ):
        sim.engine.contexts[A].all_reduce((A, B), torch.zeros(8), 1)


# Records


def test_several_recorders_are_added_up() -> None:
    one, other = (
        Recorder(refused={A: 1, B: 2}, restarted={B: 1}),
        Recorder(refused={B: 3}, restarted={B: 2, C: 1}),
    )
    whole = merged([one, other], 1.0)
    assert (whole.refused, whole.restarted) == ({A: 1, B: 5}, {B: 3, C: 1})


def test_what_a_report_says_of_it() -> None:
    def run(label: str, refused: dict[str, int], restarted: dict[str, int]) -> report.Result:
        return report.Result(
            Path(), {"label": label, "refused_updates": refused, "restarts": restarted}, []
        )

    old = report.Result(Path(), {"label": "old"}, [])
    runs = [
        run("halos", {"paris/w0": 3}, {}),
        run("halos", {}, {"paris/w1": 1}),
        run("diloco", {"a/w0": 1}, {"a/w0": 2}),
        old,
    ]
    assert report.incidents(runs) == [
        "halos: 3 updates of paris/w0 refused",
        "halos: paris/w1 restarted once after a loss that was not finite",
        "diloco: 1 update of a/w0 refused",
        "diloco: a/w0 restarted 2 times after a loss that was not finite",
    ]


# Recipes


def test_each_engine_has_its_default_and_a_recipe_can_say_otherwise() -> None:
    def screening(**fields: Any) -> tuple[Any, Any]:
        given = parse_recipe({"method": "halos", "task": "none", **fields})
        assert parse_recipe({**_yaml(given.to_yaml())}) == given
        return given.screening(live=False), given.screening(live=True)

    assert screening() == screening(bad_updates=None) == (None, ScreeningConfig())
    assert screening(bad_updates=False) == (None, None)
    assert screening(bad_updates={}) == (ScreeningConfig(), ScreeningConfig())
    assert screening(bad_updates={"multiple": 20}) == (ScreeningConfig(multiple=20.0),) * 2


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (True, "bad_updates = True: expected false, or keys such as `multiple: 1000`"),
        ("off", "bad_updates = 'off': expected false, or keys such as `multiple: 1000`"),
        (
            {"multiples": 3.0},
            "bad_updates.multiples: unknown key 'multiples' (did you mean "
            "'multiple'?); "
            "allowed: multiple, window, warm_up",
        ),
        ({"multiple": 1.0}, "bad_updates.multiple = 1.0: should be greater than 1"),
        ({"window": 0}, "bad_updates.window = 0: should be greater than or equal to 1"),
        ({"warm_up": 1.5}, "bad_updates.warm_up = 1.5: should be a valid integer"),
    ],
)
def test_a_section_that_is_wrong(section: Any, text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_recipe({"method": "halos", "bad_updates": section})
    assert str(error.value) == text


@pytest.mark.parametrize(
    "written", ["", "bad_updates: null", "bad_updates: false", "bad_updates: {window: 32}"]
)
def test_one_setting_can_be_laid_over_a_recipe(written: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"method: halos\n{written}\n")
    window = 32 if "window" in written else 64
    assert load_recipe(path, {"bad_updates.multiple": 20}).bad_updates == ScreeningConfig(
        multiple=20.0, window=window
    )


# With real gradients: a task of the user's, in which one batch of one worker is not finite, and
# another one has a finite loss whose gradient is not

TASK = """
import torch
from torch import nn
from archipel import Task

def batches(shard, index):
    generator = torch.Generator().manual_seed(shard.index * 1000 + index)
    x = torch.randn(8, 4, generator=generator)
    if shard.split == "train" and shard.index == 1 and index in {bad}:
        x = x * float("nan")
    bad = shard.split == "train" and shard.index == 0 and index in {worse}
    return x, x.sum(dim=1, keepdim=True), bad

def loss(model, batch):
    x, y, worse = batch
    out = model(x)
    return (out - y).square().mean() + (torch.sqrt(0 * out.sum()) if worse else 0)

def make():
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)),
        loss=loss,
        batches=batches,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
        valid_batches=1,
    )
"""


def write_task(folder: Path, name: str, bad: str, worse: str = "()") -> str:
    (folder / f"{name}.py").write_text(TASK.replace("{bad}", bad).replace("{worse}", worse))
    return f"{folder}/{name}.py:make"


def real(method: str, task: str, **fields: Any) -> Recipe:
    base = {
        "method": {"name": method, **small(method)},
        "topology": {
            "regions": {"a": [1.0, 0.6], "b": [0.8]},
            "default": {"bandwidth_gbit_s": 1.0, "jitter": 0.4},
        },
        "task": task,
        "run": {"steps": 90, "evaluations": 3},
    }
    return parse_recipe(base | fields)


@pytest.fixture(scope="module")
def one_bad_batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Pool | None]]:
    task = write_task(tmp_path_factory.mktemp("task"), "one", "(7,)")
    with simulation.open_pool(real("halos", task), 1) as pool:
        yield task, pool


@pytest.mark.parametrize("method", ALL)
def test_a_task_with_one_bad_batch(
    method: str, one_bad_batch: tuple[str, Pool | None], tmp_path: Path
) -> None:
    task, pool = one_bad_batch
    with pytest.warns(
        UserWarning,
        match=r"^worker a/w1: the training loss is nan at its inner step 7, after .* s; it is "
        r"restarted from the newest model$",
    ):
        summary = simulation.simulate(real(method, task), pool, tmp_path / "run")
    assert summary["restarts"] == {"a/w1": 1}
    assert summary["refused_updates"] == {}
    assert summary["final_loss"] < 4.0
    assert summary["stopped"] == "steps"
    with pytest.raises(
        Diverged,
        match=rf"^{method}: worker a/w1: the training loss is nan at its inner step 7, after .* s "
        r"on the vir",
    ):
        simulation.simulate(real(method, task).strictly(), pool, tmp_path / "strict")
    assert not (tmp_path / "strict").exists()


@pytest.fixture(scope="module")
def several_bad_batches(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Pool | None]]:
    task = write_task(tmp_path_factory.mktemp("task"), "several", "(7,)", "(11,)")
    with simulation.open_pool(real("halos", task), 1) as pool:
        yield task, pool


@pytest.mark.parametrize("method", ALL)
def test_a_run_with_all_of_it_goes_on_from_a_checkpoint_to_the_bit(
    method: str, several_bad_batches: tuple[str, Pool | None], tmp_path: Path
) -> None:
    """Refused updates, workers that begin again, and a crash whose save is older than the
    checkpoint.

    A gradient that is not finite, in the last of three inner steps, makes an update that is
    refused. It is also in Adam's moments, which make the next loss but one not finite: so that
    worker begins again as well. In `sync_sgd` Adam has the mean alone.
    """
    task, pool = several_bad_batches
    crash = {"kind": "crash", "node": "b/w0", "at_s": 8.0, "restart_after_s": 1.5}
    given = real(
        method,
        task,
        bad_updates={"window": 8},
        faults={"schedule": [crash], "save_every_s": 7.0, "deadline_s": 1.0},
    )

    def files(directory: Path) -> dict[str, Any]:
        summary = json.loads((directory / "summary.json").read_text())
        del summary["wall_s"]
        found = {
            path.name: path.read_bytes()
            for path in directory.iterdir()
            if path.name != "summary.json"
        }
        return found | {"summary": summary}

    straight = simulation.make_simulator(given, pool)
    rundir.start(tmp_path / "straight", given)
    reason = straight.run()
    assert reason
    rundir.leave(tmp_path / "straight", given, simulation.ended(given, straight, pool), reason, 0.0)
    left = files(tmp_path / "straight")
    assert left["summary"]["refused_updates"] == {
        "a/w0": 1
    }  # in noloco it has no partner in that outer step
    assert left["summary"]["restarts"] == {"a/w1": 1} | (
        {} if method == "sync_sgd" else {"a/w0": 1}
    )
    assert left["summary"]["final_loss"] < 4.0
    assert straight.now > 11.0
    for number, stop in enumerate((0.3, 0.6, 0.9)):
        directory, at = tmp_path / str(number), int(stop * straight.state.events)
        sim = simulation.make_simulator(given, pool)
        rundir.start(directory, given)
        assert sim.run(lambda sim=sim, at=at: sim.state.events == at) is None
        simulation.save_checkpoint(directory, given, sim, 0.0)
        assert checkpoint.checkpoints(directory / "checkpoint")
        simulation.simulate(given, pool, directory, resume=True)
        assert files(directory) == left


def test_a_worker_of_a_pool_can_be_put_back(
    several_bad_batches: tuple[str, Pool | None],
) -> None:
    """Its moments and its place in the data: the same inner steps once more. None of its first
    nine batches is bad.
    """
    _, pool = several_bad_batches
    assert pool is not None
    worker = NodeId("a", "w0")
    pool.begin(Run(100, 3, 0))
    theta = pool.replica.layout.read(pool.replica.module)
    first = pool.train(worker, theta, 3, 0, 0.0).result()
    saved = pool.state_of(worker)
    once = pool.train(worker, first.theta, 3, 6, 0.0).result()
    later = pool.train(worker, first.theta, 3, 6, 0.0).result()
    assert not torch.equal(once.theta, later.theta)
    pool.put(worker, saved)
    again = pool.train(worker, first.theta, 3, 6, 0.0).result()
    assert again.losses == once.losses
    assert torch.equal(again.theta, once.theta)
    # A fresh optimizer is another one; the data go on.
    pool.put(worker, saved)
    pool.reset_optimizer(worker)
    fresh = pool.train(worker, first.theta, 3, 6, 0.0).result()
    assert fresh.losses[0] == once.losses[0]
    assert not torch.equal(fresh.theta, once.theta)


# The command line


@pytest.mark.slow
def test_it_is_said_on_the_terminal(archipel: Any, tmp_path: Path) -> None:
    task = write_task(tmp_path, "two", "(7,)")
    path = tmp_path / "recipe.yaml"
    path.write_text(real("async_local_sgd", task).to_yaml())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = archipel("run", path, "--out", tmp_path / "out", "--processes", "1")
    assert code == 0
    assert (
        "archipel: warning: worker a/w1: the training loss is nan at its inner step 7, after" in err
    )
    note = "async_local_sgd: a/w1 restarted once after a loss that was not finite."
    assert note in " ".join(out.split())
    assert note in (tmp_path / "out" / "report.html").read_text()
    code, out, _ = archipel("report", tmp_path / "out", "--json")
    assert json.loads(out)["runs"][0]["restarts"] == {"a/w1": 1}

    code, out, err = archipel(
        "run", path, "--strict", "--out", tmp_path / "strict", "--processes", "1"
    )
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "archipel: async_local_sgd: worker a/w1: the training loss is nan at its inner step 7, "
        "after"
    )


def test_a_comparison_can_refuse_and_be_strict(archipel: Any, tmp_path: Path) -> None:
    common = ("compare", "--methods", "halos", "--task", "none", "--steps", "100")
    refusing = ["--strict", "--set", "bad_updates.multiple=20"]
    for number, (options, strict, screening) in enumerate(
        [([], False, None), (refusing, True, ScreeningConfig(multiple=20.0))]
    ):
        assert archipel(*common, *options, "--out", tmp_path / str(number)).code == 0
        left = load_recipe(tmp_path / str(number) / "halos-seed0" / "recipe.yaml")
        assert (left.run.strict, left.bad_updates) == (strict, screening)
