"""Faults on purpose: what each one does to each method, counted by hand; the invariants, each shown
to fail; the fuzzer.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import TINY, Quadratic, ledger_of, plain, small, train_with, workers_of

from archipel import experiment, fuzz, methods, report, simulation
from archipel.actor import Joined, Lost, Message, NodeId, Trained, World
from archipel.disk import rundir
from archipel.errors import TrainingError, UserError
from archipel.methods import async_local_sgd
from archipel.parameter_server import Delta, Model
from archipel.recipe import Recipe, parse_recipe
from archipel.run import invariants
from archipel.run.census import Plan
from archipel.run.invariants import Ledger, Violation
from archipel.run.metrics import Recorder
from archipel.sim import schedule as schedules
from archipel.sim.clock import Simulator
from archipel.sim.engine import Engine
from archipel.sim.events import Deliver
from archipel.sim.faults import Crash, RandomFaults, Slow
from archipel.sim.network import Network
from archipel.sim.schedule import Faults
from archipel.sim.topology import Topology
from archipel.train.trainer import Done, NoTraining
from archipel.yamlfile import parse

ALL = methods.names()
A, B = "a/w0", "b/w0"
KINDS: dict[str, dict[str, Any]] = {
    "slow": {"kind": "slow", "node": B, "at_s": 7, "for_s": 20, "factor": 3},
    "crash": {"kind": "crash", "node": B, "at_s": 7},
    "restart": {"kind": "crash", "node": B, "at_s": 7, "restart_after_s": 13},
    "restart before the deadline": {"kind": "crash", "node": B, "at_s": 7, "restart_after_s": 2},
    "crash of the first": {"kind": "crash", "node": A, "at_s": 7, "restart_after_s": 13},
    "loss": {"kind": "loss", "at_s": 0, "for_s": 30, "probability": 0.5},
    "delay": {"kind": "delay", "at_s": 0, "for_s": 30, "extra_s": 3},
    "duplicate": {"kind": "duplicate", "at_s": 0, "for_s": 30, "probability": 1},
    "link down": {"kind": "link_down", "between": ["a", "b"], "at_s": 7, "for_s": 6},
    "partition": {"kind": "partition", "regions": ["b"], "at_s": 7, "for_s": 20},
    "leave": {"kind": "leave", "node": B, "at_s": 7},
    "join": {"kind": "join", "node": B, "at_s": 7},
}


def floats(fault: dict[str, Any]) -> dict[str, Any]:
    return {key: float(value) if isinstance(value, int) else value for key, value in fault.items()}


def recipe(name: str, *schedule: dict[str, Any], seconds: float = 60.0, **fields: Any) -> Recipe:
    """Two workers in two regions. An inner step takes 1 s, a vector 1 s between the regions and
    0.01 s inside one.
    """
    return parse_recipe(
        {
            "method": {"name": name, **small(name, inner_steps=4)},
            "topology": {
                "regions": {"a": [1.0], "b": [1.0]},
                "local": {"bandwidth_gbit_s": 0.8},
                "default": {"bandwidth_gbit_s": 0.008},
            },
            "profile": {"name": "tiny", "model_bytes": 1_000_000, "step_time_s": 1.0},
            "task": "none",
            "run": {"steps": 1_000_000, "seconds": seconds},
            "faults": {
                "schedule": [floats(fault) for fault in schedule],
                "save_every_s": 5.0,
                "deadline_s": 10.0,
            },
            **fields,
        }
    )


def simulated(*arguments: Any, **fields: Any) -> Simulator:
    sim = simulation.make_simulator(recipe(*arguments, **fields), None)
    assert sim.run() == "seconds"
    return sim


# What each fault does to each method, by hand. The recipe's comments say what takes how long; the
# deadline is 10 s, and nodes save every 5 s.

CRASH, CRASH_A = KINDS["crash"], {**KINDS["crash"], "node": A}
BY_HAND: list[tuple[str, dict[str, Any], float, int]] = [
    # A round is 4 s of inner steps and 1 s of all-reduce. a waits from 9 s to the deadline, 17 s,
    # then its rounds take 4 s.
    ("diloco", CRASH, 20.5, 8 + 4),
    ("diloco", CRASH, 21.5, 8 + 4 + 4),
    # The holder crashes; b has the same model and goes on. At 20 s a says hello, at 21 s b's round
    # ends and the next begins, and θ and momentum reach a at 23 s; their common round ends at 28 s.
    ("diloco", KINDS["crash of the first"], 16.5, 8),
    ("diloco", KINDS["crash of the first"], 17.5, 8 + 4),
    ("diloco", KINDS["crash of the first"], 27.5, 8 + 4 + 4),
    ("diloco", KINDS["crash of the first"], 28.5, 8 + 4 + 4 + 8),
    # The all-reduce that begins at 9 s stands still until 27 s. Nothing is lost.
    ("diloco", KINDS["partition"], 27.5, 8),
    ("diloco", KINDS["partition"], 28.5, 16),
    ("diloco", KINDS["link down"], 13.5, 8),
    ("diloco", KINDS["link down"], 14.5, 16),
    # Nobody waits for one that says goodbye.
    ("diloco", KINDS["leave"], 9.5, 8 + 4),
    # a alone takes rounds of 4 s; the newcomer's first round begins at 8 s, reaches it at 10 s, and
    # ends at 15 s.
    ("diloco", KINDS["join"], 14.5, 4 + 4),
    ("diloco", KINDS["join"], 15.5, 4 + 4 + 8),
    # From 5 s to 7 s two steps, then two of 3 s.
    ("diloco", KINDS["slow"], 13.5, 8),
    ("diloco", KINDS["slow"], 14.5, 16),
    # A round is 1 s of gradient and 1 s of all-reduce. The fourth all-reduce would begin at 7 s; a
    # waits until 17 s.
    ("sync_sgd", CRASH, 16.5, 6),
    ("sync_sgd", CRASH, 17.5, 6 + 1),
    ("sync_sgd", CRASH, 18.5, 6 + 2),
    # It has begun when b crashes: it begins again at 17.5 s, without b's gradient.
    ("sync_sgd", {**CRASH, "at_s": 7.5}, 17, 6),
    ("sync_sgd", {**CRASH, "at_s": 7.5}, 18, 6 + 1),
    ("sync_sgd", KINDS["leave"], 10.5, 6 + 4),
    ("sync_sgd", KINDS["partition"], 27.5, 6),
    ("sync_sgd", KINDS["partition"], 28.5, 8),
    # a's steps are applied at 4.02 s, 8.04 s, …, b's at 6 s, 12 s, …; b's next model is lost with
    # it at 7 s.
    ("async_local_sgd", CRASH, 30.5, 7 * 4 + 4),
    # The server sends a model at 20 s; its displacement is there at 26 s.
    ("async_local_sgd", KINDS["restart"], 26.5, 6 * 4 + 2 * 4),
    # The displacement that b sends at 11 s is lost with the connection at 17 s; the server sends a
    # model at 27 s.
    ("async_local_sgd", KINDS["partition"], 33.5, 8 * 4 + 2 * 4),
    # At 25 s 24 + 16 inner steps are applied, at its save of 25 s too; 30 s: the models reach a at
    # 30.01 s and b at 31 s.
    (
        "async_local_sgd",
        {**CRASH, "node": "a/server", "at_s": 25, "restart_after_s": 5},
        34.5,
        40 + 4,
    ),
    # The save of 20 s has 16 + 12. What came later is lost, and counted as long as the server is
    # down.
    ("async_local_sgd", {**CRASH, "node": "a/server", "at_s": 24.5, "restart_after_s": 5}, 29, 40),
    ("async_local_sgd", {**CRASH, "node": "a/server", "at_s": 24.5, "restart_after_s": 5}, 30, 28),
    (
        "async_local_sgd",
        {**CRASH, "node": "a/server", "at_s": 24.5, "restart_after_s": 5},
        34,
        28 + 4,
    ),
    # An outer step is 4 s of inner steps and 2 s of exchange. The survivor steps alone at 17 s, 21
    # s, …; the dead are not counted.
    ("noloco", CRASH, 16.5, 4),
    ("noloco", CRASH, 17.5, 8),
    ("noloco", CRASH, 21.5, 12),
    ("noloco", KINDS["leave"], 10.5, 8),
    # b asks at 20 s and begins outer step 2 at 21 s. a waits for it from 21 s on; b has a's
    # exchange when it is done, at 25 s. b's save of 5 s had no outer step.
    ("noloco", KINDS["restart"], 25.5, 8 + 4),
    ("noloco", KINDS["restart"], 27.5, 12 + 4),
    # Both sides go on alone at 17 s, 21 s and 25 s, and exchange again at 31 s.
    ("noloco", KINDS["partition"], 17.5, 2 * 8),
    ("noloco", KINDS["partition"], 30.5, 2 * 16),
    ("noloco", KINDS["partition"], 31.5, 2 * 20),
    # The exchanges that are sent at 10 s arrive at 15 s.
    ("noloco", KINDS["link down"], 14.5, 2 * 4),
    ("noloco", KINDS["link down"], 15.5, 2 * 8),
    # a alone until its step at 4 s; b asks at 7 s, has φ at 8 s and trains for step 1 until 12 s.
    # a, done with its inner steps at 8 s, has b's exchange at 14 s.
    ("noloco", KINDS["join"], 13.5, 4 + 4),
    ("noloco", KINDS["join"], 14.5, 8 + 4),
    # A worker's steps are applied by its local server at 4.02 s, 8.04 s, …; a's reports are applied
    # at 8.05 s, 16.09 s, …, b's at 9.04 s, 17.08 s, …
    ("halos", CRASH, 30, 3 * 8),
    (
        "halos",
        KINDS["restart"],
        33,
        4 * 8 + 8,
    ),  # b's steps count from 20 s on: 4 + 8 reach its server, 24.05 s to 28.07 s
    # Of b's local server: the report of 8.04 s is lost with it; from 12 s on it reports what comes
    # after its save.
    ("halos", {**CRASH, "node": "b/server0", "at_s": 9, "restart_after_s": 3}, 18, 2 * 8 + 8),
    # Of the global server: its save of 5 s has nothing. b's report of 8.04 s is lost on its way. a
    # has been answered: it reports again at 16.08 s. b blends the model of 12 s in at 13 s; its
    # report of 20.1 s tells of three updates.
    ("halos", {**CRASH, "node": "a/global", "at_s": 9, "restart_after_s": 3}, 11, 8),
    ("halos", {**CRASH, "node": "a/global", "at_s": 9, "restart_after_s": 3}, 12.5, 0),
    ("halos", {**CRASH, "node": "a/global", "at_s": 9, "restart_after_s": 3}, 20.5, 8),
    ("halos", {**CRASH, "node": "a/global", "at_s": 9, "restart_after_s": 3}, 22, 8 + 12),
    # b's report of 8.04 s is lost at 17 s; the model of 27 s is an answer too, and the report of
    # 32.16 s tells of six updates.
    ("halos", KINDS["partition"], 33.5, 4 * 8 + 24),
]


@pytest.mark.parametrize(("method", "fault", "seconds", "absorbed"), BY_HAND)
def test_what_is_counted_by_hand(
    method: str, fault: dict[str, Any], seconds: float, absorbed: int
) -> None:
    assert simulated(method, fault, seconds=float(seconds)).inner_steps == absorbed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ALL)
def test_who_is_there_goes_on_and_the_invariants_hold(method: str, kind: str) -> None:
    """The books are checked when anything happens and at the end; and everybody who is there has
    begun inner steps lately.
    """
    sim = simulated(method, KINDS[kind], seconds=100.0)
    there = {"b/w0"} & {KINDS[kind].get("node")} if kind in ("crash", "leave") else set()
    for worker in sim.engine.setting.step_time_s:
        assert (ledger_of(sim).began_s[worker] > 85) == (str(worker) not in there), worker


@pytest.mark.parametrize("kind", ["loss", "delay", "duplicate", "slow", "link down"])
@pytest.mark.parametrize("method", ALL)
def test_what_the_transport_absorbs_is_never_told(
    method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Message] = []
    handle = Engine.handle
    monkeypatch.setattr(
        Engine,
        "handle",
        lambda sim, to, message, sender: (told.append(message), handle(sim, to, message, sender)),
    )
    sim = simulated(method, KINDS[kind])
    assert not any(isinstance(message, Lost | Joined) for message in told)
    plain = simulated(method)
    assert sim.inner_steps <= plain.inner_steps
    if kind == "duplicate":
        assert sim.inner_steps == plain.inner_steps


def test_a_duplicate_costs_bytes_and_nothing_else() -> None:
    sim, plain = simulated("noloco", {**KINDS["duplicate"], "for_s": 1000}), simulated("noloco")
    assert sim.recorder.sent_bytes == 2 * plain.recorder.sent_bytes
    assert ledger_of(sim).lost_bytes == plain.recorder.sent_bytes


def test_a_delay_is_added_to_each_message() -> None:
    """6 s of an outer step become 9 s."""
    assert [
        simulated("noloco", KINDS["delay"], seconds=seconds).inner_steps
        for seconds in (8.5, 9.5, 17.5, 18.5)
    ] == [0, 8, 8, 16]


def test_a_lost_message_is_sent_again_after_the_timeout() -> None:
    """Everything is lost until 2.5 s, or nearly: the model that reaches b at 1 s, and again at 1 +
    1 + 1 = 3 s.
    """
    loss = {**KINDS["loss"], "for_s": 2.5, "probability": 0.999999, "between": ["a", "b"]}
    sim = simulated("async_local_sgd", loss, seconds=8.5)
    assert sim.inner_steps == 2 * 4 + 4  # b's are there at 3 + 4 + 1 s
    assert ledger_of(sim).lost_bytes == 1_000_000


@pytest.mark.parametrize("method", ALL)
def test_an_empty_schedule_changes_nothing(method: str) -> None:
    """The same events, times and bytes as without."""
    runs = []
    for given in (recipe(method), recipe(method, faults=None)):
        sim = simulation.make_simulator(given, None)
        sim.run()
        runs.append(
            (
                sim.now,
                sim.state.events,
                sim.state.number,
                sim.inner_steps,
                sim.recorder.spans,
                sim.recorder.sent_bytes,
            )
        )
    assert runs[0] == runs[1]


def test_messages_keep_their_order_on_a_shared_link() -> None:
    """NoLoCo's `Passed` has no bytes, and must not overtake the exchange before it: found by the
    fuzzer.
    """
    topology = {
        "regions": {"r0": [0.4], "r1": [1.0, 1.0]},
        "local": {"bandwidth_gbit_s": 0.8},
        "default": {"bandwidth_gbit_s": 0.016},
        "sharing": "fair",
    }
    method = {"name": "noloco", "inner_steps": 2, "dynamic_steps": True, "group_size": 3}
    crash = {"kind": "crash", "node": "r1/w0", "at_s": 15, "restart_after_s": 1}
    sim = simulation.make_simulator(
        recipe("noloco", crash, seconds=400.0, topology=topology, method=method), None
    )
    assert sim.run() == "seconds"


# Who is told what


def told(
    method: str, *schedule: dict[str, Any], seconds: float, to: str
) -> list[tuple[float, str]]:
    sim = simulation.make_simulator(recipe(method, *schedule, seconds=seconds), None)
    heard: list[tuple[float, str]] = []
    handle = sim.engine.handle

    def listen(node: NodeId, message: Message, sender: NodeId) -> None:
        if isinstance(message, Lost | Joined) and str(node) == to:
            unreachable = (
                " (unreachable)" if isinstance(message, Lost) and message.unreachable else ""
            )
            heard.append((sim.now, f"{type(message).__name__} {message.node}{unreachable}"))
        handle(node, message, sender)

    sim.engine.handle = listen  # type: ignore[method-assign]
    sim.run()
    return heard


def test_a_crash_is_told_after_the_deadline_and_a_restart_at_once() -> None:
    assert told("noloco", KINDS["restart"], seconds=30.0, to=A) == [
        (17.0, "Lost b/w0"),
        (20.0, "Joined b/w0"),
    ]
    assert told("noloco", KINDS["restart"], seconds=30.0, to=B) == [(20.0, "Joined b/w0")]
    early = KINDS["restart before the deadline"]
    assert told("noloco", early, seconds=30.0, to=A) == [(9.0, "Lost b/w0"), (9.0, "Joined b/w0")]
    assert told("noloco", KINDS["leave"], seconds=30.0, to=A) == [(7.0, "Lost b/w0")]
    assert told("noloco", KINDS["join"], seconds=30.0, to=A) == [
        (0.0, "Lost b/w0"),
        (7.0, "Joined b/w0"),
    ]


def test_a_partition_is_told_to_both_sides_after_the_deadline() -> None:
    for me, other in ((A, B), (B, A)):
        expected = [(17.0, f"Lost {other} (unreachable)"), (27.0, f"Joined {other}")]
        assert told("noloco", KINDS["partition"], seconds=30.0, to=me) == expected
    assert told("noloco", {**KINDS["partition"], "for_s": 10}, seconds=30.0, to=A) == []


def test_one_that_restarts_is_told_who_is_not_there() -> None:
    crashes = (KINDS["restart"], {**CRASH_A, "at_s": 8})
    assert told("noloco", *crashes, seconds=30.0, to=B) == [
        (20.0, "Joined b/w0"),
        (20.0, "Lost a/w0"),
    ]


def test_only_peers_are_told() -> None:
    assert told("halos", CRASH, seconds=30.0, to="b/server0") == [(17.0, "Lost b/w0")]
    assert told("halos", CRASH, seconds=30.0, to="a/server0") == []


# Restarts and newcomers


def test_all_members_of_a_collective_may_crash() -> None:
    """The one whose save has most rounds begins: b's is of 10 s, two rounds; a's of 5 s, one."""
    crashes = (
        {**CRASH_A, "at_s": 9, "restart_after_s": 20},
        {**CRASH, "at_s": 29.5, "restart_after_s": 3},
    )
    sim = simulated("diloco", *crashes, seconds=80.0)
    assert {str(actor.me): actor.outer_steps for actor in sim.actors.values()} == dict.fromkeys(
        (A, B), sim.holders()[0].outer_steps
    )
    assert len([actor for actor in sim.actors.values() if actor.model() is not None]) == 1


def test_noloco_workers_that_all_crash_go_on_from_their_saves() -> None:
    both = [{**CRASH, "node": node, "at_s": 20, "restart_after_s": 5} for node in (A, B)]
    sim = simulated("noloco", *both, seconds=36.5)
    # Saved at 20 s: three outer steps each. They ask each other at 25 s, are answered at 26 s, and
    # step at 32 s.
    assert sim.inner_steps == 2 * (3 * 4 + 4)


def test_a_run_in_which_nobody_is_left_ends_and_says_so() -> None:
    sim = simulation.make_simulator(recipe("noloco", CRASH, CRASH_A), None)
    with pytest.raises(
        TrainingError, match=r"^deadlock at 17 s after 8 inner steps: a/w0 is lost, b/w0 is lost$"
    ):
        sim.run()


def test_a_run_whose_server_is_gone_for_good_ends_and_says_so() -> None:
    sim = simulation.make_simulator(recipe("async_local_sgd", {**CRASH, "node": "a/server"}), None)
    with pytest.raises(
        TrainingError,
        match=r"^deadlock .* a/server is lost, "
        r"a/w0 waits for a model from a/server since it was told `Lost`, b/w0 waits",
    ):
        sim.run()


def test_workers_that_train_on_while_the_global_server_is_gone_are_stopped_and_told_why() -> None:
    sim = simulation.make_simulator(
        recipe("halos", {**CRASH, "node": "a/global"}, run={"steps": 100}), None
    )
    with pytest.raises(
        TrainingError,
        match=r"^the model to take home has not changed for [\d,]+ inner steps, and a/global is "
        r"lost",
    ):
        sim.run()


# Every update once, shown on vectors: the n-th job of all moves coordinate n by 1


class OneHot(Quadratic):
    def __init__(self) -> None:
        super().__init__(numel=6000)
        self.steps: list[int] = []

    def _job(self, steps: int) -> Tensor:
        vector = torch.zeros(self.numel)
        vector[len(self.steps)] = 1.0
        self.steps.append(steps)
        return vector

    def train(self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float) -> Done:
        return Done(Trained(theta + self._job(steps), steps, ()))

    def gradient(self, worker: NodeId, theta: Tensor, due_s: float) -> Done:
        answer = super().gradient(worker, theta, due_s).value
        return Done(type(answer)(-self._job(1), 0.0))

    def apply(
        self, worker: NodeId, theta: Tensor, gradient: Tensor, progress: int, due_s: float
    ) -> Done:
        return Done(Trained(theta - gradient, 1, ()))

    def evaluate(self, theta: Tensor, due_s: float) -> Done:
        return Done(0.0)


TROUBLE = RandomFaults(
    until_s=200.0,
    mean_s=15.0,
    slow_per_hour=30,
    crashes_per_hour=150,
    losses_per_hour=30,
    delays_per_hour=30,
    duplicates_per_hour=30,
    links_down_per_hour=30,
    partitions_per_hour=30,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ALL)
def test_no_update_is_applied_twice(method: str, seed: int) -> None:
    """Plain settings add up displacements: a coordinate says how often its job is in the model, a
    mean's share of 1.
    """
    topology = Topology(
        regions={"a": [1.0, 0.7], "b": [0.9]},
        local={"bandwidth_gbit_s": 0.8},
        default={"bandwidth_gbit_s": 0.016},
    )
    module, trainer = methods.load(method), OneHot()
    actors = module.build(
        module.Config(**plain(method)),
        World(topology.workers, trainer.numel, 0),
        torch.zeros(trainer.numel),
    )
    nodes = [actor.me for actor in actors]
    drawn = schedules.draw(
        TROUBLE.model_copy(update={"seed": seed}), nodes, workers_of(topology), ("a", "b")
    )
    schedule = Faults(tuple(drawn), tuple(nodes), ("a", "b"), save_every_s=10.0, deadline_s=5.0)
    sim = Simulator(
        actors,
        topology.workers,
        Network(topology, np.random.default_rng(0)),
        TINY,
        trainer,
        Recorder(),
        Plan(seconds=300.0, tokens_per_step=1),
        numel=trainer.numel,
        parameters=trainer.numel,
        seed=0,
        faults=schedule,
        observers=[Ledger(frozenset(workers_of(topology)))],
    )
    assert sim.run() == "seconds"
    steps = torch.tensor(trainer.steps + [0] * (trainer.numel - len(trainer.steps)))
    parts = sim.parts()
    assert len(drawn) > 10
    if len(parts) > 1:  # replicas, of which no two need hold the same
        assert all(float(part.max()) <= 1.0 for part in parts)
        return
    [model] = parts
    assert int(steps[model != 0].sum()) == sim.inner_steps
    assert {round(1 / float(value), 3) for value in model[model != 0]} <= (
        {1.0} if "server" in str(nodes) else {1.0, 2.0, 3.0}
    )


def test_inner_steps_of_a_worker_that_crashes_are_waited_for_and_thrown_away() -> None:
    """A process may still be computing them, in memory that the worker needs again when it
    restarts.
    """
    log: list[str] = []

    class Lazy(NoTraining):
        def train(
            self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float
        ) -> Any:
            job = f"{worker} due {due_s:g}"
            log.append(f"give {job}")

            class Promise:
                def result(self) -> Trained:
                    log.append(f"take {job}")
                    return Trained(torch.empty(0), steps, ())

            return Promise()

    sim = simulation.make_simulator(
        recipe("async_local_sgd", {**KINDS["restart"], "at_s": 3}, seconds=17.5), None
    )
    train_with(sim, Lazy())
    sim.run()
    of_b = [entry for entry in log if B in entry]
    assert of_b == ["give b/w0 due 5", "take b/w0 due 5", "give b/w0 due 21"]
    assert sim.inner_steps == 4 * 4  # of a; what b's job said was heard by nobody


class Reader(NoTraining):
    """Each worker reads its batches one after the other. `began` says who began where, and when it
    must be done.
    """

    def __init__(self) -> None:
        self.cursors: Counter[NodeId] = Counter()
        self.began: list[tuple[str, int, float]] = []

    def train(self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float) -> Any:
        self.began.append((str(worker), self.cursors[worker], due_s))
        self.cursors[worker] += steps
        return super().train(worker, theta, steps, progress, due_s)

    def state_of(self, worker: NodeId) -> Any:
        return self.cursors[worker]

    def put(self, worker: NodeId, state: Any) -> None:
        self.cursors[worker] = state

    def state(self) -> Any:
        return dict(self.cursors), [*self.began]

    def restore(self, state: Any) -> None:
        self.cursors, self.began = Counter(state[0]), state[1]


# b has a model at 1 s, 7 s, 13 s, …; its four inner steps end at 5 s, 11 s, …. It crashes at 16 s
# and has a model again at 21 s.
@pytest.mark.parametrize(
    ("save_every_s", "batch"),
    [
        (4.5, 8),  # saved at 13.5 s, in its third job, which is lost
        (12.0, 8),  # at 12 s, between its second job and the third
        (10.0, 4),  # at 10 s, in its second job: the others have it, and it has not
        (20.0, 0),  # at the start
    ],
)
@pytest.mark.parametrize("stop_s", [None, 2.0, 13.7, 17.0])
def test_a_worker_that_restarts_reads_on_from_its_save(
    save_every_s: float, batch: int, stop_s: float | None, tmp_path: Path
) -> None:
    """Also if the run is stopped before, and goes on from a checkpoint."""
    section = {
        "schedule": [floats({**CRASH, "at_s": 16, "restart_after_s": 4})],
        "save_every_s": save_every_s,
        "deadline_s": 10.0,
    }
    given = recipe("async_local_sgd", seconds=26.5, faults=section)

    def made() -> Simulator:
        sim = simulation.make_simulator(given, None)
        train_with(sim, Reader())
        return sim

    sim = made()
    if stop_s is not None:
        assert sim.run(lambda: sim.now >= stop_s) is None
        rundir.start(tmp_path / "run", given)
        simulation.save_checkpoint(tmp_path / "run", given, sim, 0.0)
        sim = made()
        simulation.load_checkpoint(tmp_path / "run", given, sim)
    sim.run()
    of_b = [
        (first, due_s) for worker, first, due_s in sim.engine.setting.trainer.began if worker == B
    ]  # type: ignore[attr-defined]
    assert of_b == [(0, 5.0), (4, 11.0), (8, 17.0), (batch, 25.0)]


# Invariants, each shown to fail


def broken(method: str, *schedule: dict[str, Any], seconds: float = 100.0) -> Simulator:
    return simulation.make_simulator(recipe(method, *schedule, seconds=seconds), None)


def test_update_fails_if_the_engine_delivers_twice() -> None:
    sim = broken("async_local_sgd")
    push = sim.engine.push
    sim.engine.push = lambda time_s, event: [  # type: ignore[method-assign]
        push(time_s, event)
        for _ in range(2 if isinstance(event, Deliver) and isinstance(event.message, Delta) else 1)
    ]
    with pytest.raises(
        Violation,
        match=r"^invariant update: Delta from a/w0 reaches a/server a second time, or was never "
        r"sent$",
    ):
        sim.run()


def test_update_fails_if_messages_overtake_each_other() -> None:
    sim = broken("halos")
    sender, to = NodeId("b", "server0"), NodeId("b", "w0")
    first, second = Model(torch.empty(0), 0), Model(torch.empty(0), 1)
    for message in (first, second):
        ledger_of(sim).sends(sender, to, message)
    with pytest.raises(
        Violation, match=r"^invariant update: Model from b/server0 reaches b/w0 before its turn$"
    ):
        ledger_of(sim).delivers(sender, to, second)


def test_tokens_fail_if_a_server_counts_an_update_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    count_twice(monkeypatch)
    with pytest.raises(
        Violation,
        match=r"^invariant tokens: the model has absorbed 8 inner steps, and 4 have been taken$",
    ):
        broken("async_local_sgd").run()


def count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    upon = async_local_sgd.Server.upon

    def twice(server: async_local_sgd.Server, message: Message, sender: NodeId, ctx: Any) -> None:
        upon(server, message, sender, ctx)
        server.absorbed += message.steps if isinstance(message, Delta) else 0

    monkeypatch.setattr(async_local_sgd.Server, "upon", twice)


def test_bytes_fail_if_what_a_crash_takes_is_not_counted() -> None:
    sim = broken("noloco", {**CRASH, "at_s": 11})
    ledger_of(sim).loses = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(
        Violation,
        match=r"^invariant bytes: 8,000,000 are sent; 4,000,000 delivered, 0 lost and 0 in flight "
        r"make 4",
    ):
        sim.run()


def test_clock_fails_if_an_event_lies_in_the_past() -> None:
    sim = broken("noloco")
    push = sim.engine.push
    sim.engine.push = lambda time_s, event: push(time_s - 5 if time_s == 10.0 else time_s, event)  # type: ignore[method-assign]
    with pytest.raises(Violation, match=r"^invariant clock: an event of 5.0 s comes after 6.0 s$"):
        sim.run()


def test_progress_fails_if_an_actor_forgets_an_outer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    upon = async_local_sgd.Server.upon

    def forgetful(
        server: async_local_sgd.Server, message: Message, sender: NodeId, ctx: Any
    ) -> None:
        upon(server, message, sender, ctx)
        server.outer_steps = min(server.outer_steps, 2) if sender.region == "a" else 0

    monkeypatch.setattr(async_local_sgd.Server, "upon", forgetful)
    with pytest.raises(
        Violation, match=r"^invariant progress: the outer steps of a/server fall from 1 to 0$"
    ):
        broken("async_local_sgd").run()


@pytest.mark.parametrize("seconds", [200.0, 20.0])
def test_liveness_fails_if_a_worker_is_forgotten(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not answer one that comes back. Before that can be told from an honest wait,
    it is none.
    """
    upon = async_local_sgd.Server.upon
    monkeypatch.setattr(
        async_local_sgd.Server,
        "upon",
        lambda server, message, sender, ctx: (
            None if isinstance(message, Joined) else upon(server, message, sender, ctx)
        ),
    )
    sim = broken("async_local_sgd", KINDS["restart"], seconds=seconds)
    if seconds == 20.0:
        assert sim.run() == "seconds"
        return
    with pytest.raises(
        Violation,
        match=r"^invariant liveness: b/w0 has begun no inner step for 170 s; at most 36 s can be "
        r"explained$",
    ):
        sim.run()


def test_liveness_fails_in_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_local_sgd.Server, "upon", lambda server, message, sender, ctx: None)
    with pytest.raises(Violation, match=r"^invariant liveness: deadlock at 0 s"):
        broken("async_local_sgd").run()


# Saved and gone on with


@pytest.mark.parametrize("method", ALL)
def test_a_run_with_faults_goes_on_from_a_checkpoint_to_the_bit(
    method: str, tmp_path: Path
) -> None:
    schedule = [
        KINDS["restart"],
        KINDS["loss"],
        KINDS["partition"],
        {**KINDS["crash of the first"], "at_s": 33},
    ]
    given = recipe(method, *schedule, seconds=80.0)

    def left(sim: Simulator) -> Any:
        actors = [
            (actor.me, actor.absorbed, actor.outer_steps, actor.local_updates)
            for actor in sim.actors.values()
        ]
        heap = sorted(
            (time_s, number, type(event).__name__) for time_s, number, event in sim.state.heap
        )
        books = (
            ledger_of(sim).finished,
            ledger_of(sim).delivered_bytes,
            ledger_of(sim).lost_bytes,
            ledger_of(sim).began_s,
        )
        return (
            sim.now,
            sim.state.events,
            heap,
            actors,
            sim.recorder.spans,
            books,
            sim.state.outages.rng.bit_generator.state,
        )

    straight = simulation.make_simulator(given, None)
    straight.run()
    for stop in (straight.state.events // 5, straight.state.events // 2, straight.state.events - 3):
        directory = tmp_path / str(stop)
        sim = simulation.make_simulator(given, None)
        assert sim.run(lambda sim=sim, stop=stop: sim.state.events == stop) is None
        rundir.start(directory, given)
        simulation.save_checkpoint(directory, given, sim, 0.0)
        resumed = simulation.make_simulator(given, None)
        simulation.load_checkpoint(directory, given, resumed)
        resumed.run()
        assert left(resumed) == left(straight)


# Schedules


@pytest.mark.parametrize("method", ALL)
def test_a_recipe_may_leave_its_faults_to_chance(method: str) -> None:
    """The same seed, the same run; another one, another."""
    rates = {
        f"{kind}_per_hour": 60.0
        for kind in (
            "slow",
            "crashes",
            "losses",
            "delays",
            "duplicates",
            "links_down",
            "partitions",
        )
    }

    def ran(seed: int) -> tuple[int, int, float]:
        drawn = {"seed": seed, "until_s": 150.0, "mean_s": 10.0, **rates}
        sim = simulated(
            method, seconds=200.0, faults={"random": drawn, "deadline_s": 5.0, "save_every_s": 10.0}
        )
        assert sim.engine.setting.faults.faults
        assert {type(fault) for fault in sim.engine.setting.faults.faults} > {Crash, Slow}
        return sim.inner_steps, sim.state.events, sim.recorder.sent_bytes

    assert ran(0) == ran(0) != ran(1)


def test_a_recipe_with_faults_comes_back_from_its_yaml() -> None:
    import yaml

    given = recipe("halos", *(fault for fault in KINDS.values()))
    assert parse_recipe(yaml.safe_load(given.to_yaml())) == given


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            {"schedules": []},
            "faults.schedules: unknown key 'schedules' (did you mean 'schedule'?); "
            "allowed: schedule, random, "
            "save_every_s, deadline_s, retransmit_s",
        ),
        ("often", "faults = 'often': expected keys such as `schedule` or `random`"),
        ({"deadline_s": 0.0}, "faults.deadline_s = 0.0: should be greater than 0"),
        (
            {"schedule": [{"kind": "crsh", "at_s": 1.0}]},
            "faults.schedule.0.kind = 'crsh': allowed are slow, crash, leave, join, loss, "
            "duplicate, "
            "delay, link_down, partition "
            "(did you mean 'crash'?)",
        ),
        ({"schedule": [{"at_s": 1.0}]}, "faults.schedule.0.kind: this key is required"),
        (
            {"schedule": [{"kind": "crash", "node": "a/w0", "at_s": 1.0, "restart_afer_s": 1.0}]},
            "faults.schedule.0.crash.restart_afer_s: unknown key 'restart_afer_s' (did you mean "
            "'restart_after_s'?); allowed: kind, "
            "node, at_s, restart_after_s",
        ),
        (
            {
                "schedule": [
                    {"kind": "slow", "node": "a/w0", "at_s": 1.0, "factor": 2.0, "fors": 1.0}
                ]
            },
            "faults.schedule.0.slow.fors: unknown key 'fors' (did you mean 'for_s'?); allowed: "
            "kind, "
            "node, at_s, for_s, factor",
        ),
        (
            {"schedule": [{"kind": "crash", "node": "a/w7", "at_s": 1.0}]},
            "faults.schedule.0.node = 'a/w7': allowed are a/server, a/w0, b/w0 (did you mean "
            "'a/w0'?)",
        ),
        (
            {"schedule": [{"kind": "leave", "node": "a/server", "at_s": 1.0}]},
            "faults.schedule.0.node = 'a/server': allowed are a/w0, b/w0",
        ),
        (
            {"schedule": [{"kind": "partition", "regions": ["c"], "at_s": 1.0, "for_s": 1.0}]},
            "faults.schedule.0.regions = 'c': allowed are a, b",
        ),
        (
            {"schedule": [{"kind": "partition", "regions": ["b", "a"], "at_s": 1.0, "for_s": 1.0}]},
            "faults.schedule.0.regions = ['b', 'a']: these are all regions, so that no link is "
            "down; name those on one side",
        ),
        (
            {"schedule": [{"kind": "link_down", "between": ["a", "a"], "at_s": 1.0, "for_s": 1.0}]},
            "faults.schedule.0.between = ['a', 'a']: give two regions; the links in one are never "
            "down",
        ),
        (
            {"schedule": [{"kind": "join", "node": node, "at_s": 1.0} for node in (A, B)]},
            "faults.schedule: every worker joins later, so that nobody is there at the start; "
            "leave "
            "one out",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(section: Any, text: str) -> None:
    with pytest.raises(UserError) as error:
        simulation.make_simulator(recipe("async_local_sgd", faults=section), None)
    assert str(error.value) == text


def test_a_model_in_stages_has_no_faults_yet() -> None:
    with pytest.raises(
        UserError,
        match=r"^faults: a model in stages \(pipeline.stages = 2\) cannot have any yet; give "
        r"stages = 1$",
    ):
        recipe("diloco", pipeline={"stages": 2})


def test_a_fault_counts_as_one_that_happened_if_it_began_before_the_end(tmp_path: Path) -> None:
    """The run ends after 100 s: of the faults at 10, 99, 100 and 5000 s two have happened."""
    schedule = [
        {"kind": "slow", "node": "east/w0", "at_s": at_s, "for_s": 1, "factor": 2}
        for at_s in (10, 99, 100, 5000)
    ]
    recipe = {
        "method": "diloco",
        "topology": "two-regions",
        "task": "none",
        "run": {"steps": 10**6, "seconds": 100},
        "faults": {"schedule": schedule},
    }
    found = experiment.simulate(recipe, out=tmp_path)
    assert found.summary["time_s"] == 100
    assert (found.summary["faults_planned"], found.summary["faults_happened"]) == (4, 2)
    assert found.summary["modelled"].endswith(", 4 faults planned on purpose")
    assert report.incidents([found]) == [
        "diloco: 2 of 4 planned faults happened; the run ended before the others"
    ]


# Comparing

ONE_CRASH = (
    "schedule:\n- {kind: crash, node: NODE, at_s: 10, restart_after_s: 20}\nsave_every_s: 5\n"
)


def compared(archipel: Any, tmp_path: Path, faults: str, *more: object) -> Any:
    (tmp_path / "faults.yaml").write_text(faults)
    return archipel(
        *("compare", "--task", "none", "--steps", 2000, "--topology", "two-regions"),
        *("--methods", "halos,diloco", "--faults", tmp_path / "faults.yaml"),
        *("--out", tmp_path / "out", *more),
    )


def test_all_methods_of_a_comparison_have_the_same_faults(archipel: Any, tmp_path: Path) -> None:
    """As a recipe with these faults has."""
    told = compared(archipel, tmp_path, ONE_CRASH.replace("NODE", "east/w0"))
    assert told.code == 0, told.err
    assert "1 fault planned on purpose. 1 seed." in told.out
    for method in ("halos", "diloco"):
        recipe = {
            "method": method,
            "task": "none",
            "topology": "two-regions",
            "run": {"steps": 2000},
            "faults": parse(ONE_CRASH.replace("NODE", "east/w0")),
        }
        alone = experiment.simulate(recipe, out=tmp_path / "alone").directory
        [together] = (tmp_path / "out").glob(f"{method}-seed0")
        for name in ("recipe.yaml", "metrics.jsonl", "trace.json"):
            assert (together / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (
            ONE_CRASH.replace("NODE", "east/w9"),
            "faults.schedule.0.node = 'east/w9': allowed are east/global, ",
        ),
        (  # HALoS has it, DiLoCo does not
            ONE_CRASH.replace("NODE", "east/global"),
            "faults.schedule.0.node = 'east/global': allowed are east/w0, ",
        ),
        ("method: halos", "faults.method: unknown key 'method'; allowed: schedule, random, "),
        ("- crash", "faults file DIR/faults.yaml: expected `key: value` lines, found a list"),
    ],
)
def test_faults_that_one_of_the_methods_cannot_have_are_refused_before_any_runs(
    archipel: Any, tmp_path: Path, faults: str, text: str
) -> None:
    told = compared(archipel, tmp_path, faults)
    assert (told.code, told.out) == (2, "")
    assert told.err.replace(str(tmp_path), "DIR").startswith(f"archipel: {text}")
    assert not (tmp_path / "out").exists()


def test_a_model_in_stages_is_compared_without_faults(archipel: Any, tmp_path: Path) -> None:
    faults, stages = ONE_CRASH.replace("NODE", "east/w0"), ("--set", "pipeline.stages=2")
    told = compared(archipel, tmp_path, faults, *stages, "--methods", "diloco")
    assert told.err.startswith("archipel: faults: a model in stages (pipeline.stages = 2) cannot")


def test_a_comparisons_faults_can_be_set_and_given_as_keys(tmp_path: Path) -> None:
    common: dict[str, Any] = {"topology": "two-regions", "task": "none", "steps": 1000}
    random = {"until_s": 60, "slow_per_hour": 600}
    given = experiment.compare(
        "diloco", faults={"random": random}, out=tmp_path / "a", **common
    ).results[0]
    put = experiment.compare(
        "diloco", settings={"faults.random": random}, out=tmp_path / "b", **common
    ).results[0]
    assert given.summary["faults_planned"] == put.summary["faults_planned"] > 0


# The fuzzer


def test_random_schedules_keep_the_invariants() -> None:
    """`.ci/run` has a hundred, docs/reliability.md a thousand."""
    assert fuzz.failures(fuzz.fuzz(10, 0)) == []


@pytest.mark.slow
def test_what_is_found_depends_on_the_seed_and_not_on_the_number_of_processes() -> None:
    here = fuzz.fuzz(4, 0)
    assert here == fuzz.fuzz(4, 0, processes=2)
    assert here != fuzz.fuzz(4, 1)


def test_ctrl_c_ends_a_fuzzer_with_what_it_has_found_so_far() -> None:
    def press(done: int, failed: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    assert fuzz.fuzz(50, 0, progress=press) == fuzz.fuzz(3, 0)


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_a_fuzzer_that_is_stopped_says_how_far_it_came(
    archipel: Any, monkeypatch: pytest.MonkeyPatch, json: tuple[str, ...]
) -> None:
    usual, calls = fuzz.outcome_of, itertools.count(1)

    def outcome_of(recipe: dict[str, Any]) -> fuzz.Outcome:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return usual(recipe)

    monkeypatch.setattr(fuzz, "outcome_of", outcome_of)
    told = archipel("fuzz", "--schedules", 2000, "--processes", 1, *json)
    assert told.code == 130
    said = "archipel: interrupted after 3 of 2,000 schedules, 0 violations\n"
    assert told.err == said
    if json:
        assert told.out == '{"schedules": 3, "violations": 0, "failures": []}\n'
    else:
        assert told.out.splitlines()[-1] == "3 schedules, 0 violations"


def outcome(
    method: str, kinds: set[str], checks: dict[str, int], failure: fuzz.Failure | None = None
) -> fuzz.Outcome:
    return fuzz.Outcome(method, frozenset(kinds), checks, failure)


def test_the_table_counts_schedules_checks_and_violations() -> None:
    wrong = fuzz.Failure("{}", "tokens", "invariant tokens: too many")
    outcomes = [
        outcome("halos", {"slow", "crash"}, {"clock": 1000, "tokens": 3}),
        outcome("halos", {"crash"}, {"clock": 500, "tokens": 4}, wrong),
        outcome("diloco", set(), {"clock": 20}),
    ]
    lines = list(fuzz.report(outcomes))
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert lines[0] == "invariant tokens: too many\n  echo '{}' | archipel run /dev/stdin"
    assert cells[1] == [
        "schedules with",
        "async_local_sgd",
        "diloco",
        "halos",
        "noloco",
        "sync_sgd",
        "all",
    ]
    assert ["slow", "0", "0", "1", "0", "0", "1"] in cells
    assert ["crash", "0", "0", "2 (1 violated)", "0", "0", "2 (1 violated)"] in cells
    assert ["any", "0", "1", "2 (1 violated)", "0", "0", "3 (1 violated)"] in cells
    assert ["clock", "0", "20", "1,500", "0", "0", "1,520"] in cells
    assert ["tokens", "0", "0", "7 (1 violated)", "0", "0", "7 (1 violated)"] in cells
    assert lines[-2].startswith(
        "of 270 combinations of invariant, fault and method, never checked: update × slow"
    )
    assert lines[-2].endswith(" and 258 more")
    assert lines[-1] == "3 schedules, 1 violations"


def test_the_table_says_when_all_was_checked() -> None:
    checks = dict.fromkeys(invariants.NAMES, 7)
    outcomes = [
        outcome(name, set(fuzz.KINDS), {**checks, "bytes": 5 if name == "halos" else 9})
        for name in ALL
    ]
    assert fuzz.coverage(outcomes) == (
        "all 270 combinations of invariant, fault and method were checked, each 5 times or more "
        "(bytes × slow × halos)"
    )


def test_a_method_that_falls_over_is_a_violation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_local_sgd.Server, "upon", lambda *_: 1 // 0)
    monkeypatch.setattr(methods, "names", lambda: ["async_local_sgd"])
    [found] = fuzz.fuzz(1, 0)
    assert found.failure is not None
    assert (found.failure.invariant, found.failure.message) == (
        "exception",
        "ZeroDivisionError: integer division or modulo by zero",
    )
    assert fuzz.table([found])[-1] == ["exception", "0 (1 violated)", "0 (1 violated)"]


def test_a_failure_is_shrunk_and_its_line_replays_it(
    archipel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that counts twice, but only after a restart: one worker and one crash are left."""
    upon = async_local_sgd.Server.upon

    def twice(server: async_local_sgd.Server, message: Message, sender: NodeId, ctx: Any) -> None:
        upon(server, message, sender, ctx)
        if isinstance(message, Joined) and message.node == server.me:
            server.absorbed += 1_000_000

    monkeypatch.setattr(async_local_sgd.Server, "upon", twice)
    monkeypatch.setattr(methods, "names", lambda: ["async_local_sgd"])
    crash = floats({**CRASH, "node": "r0/server", "at_s": 20, "restart_after_s": 5})
    drawn = fuzz.draw(np.random.default_rng(3))
    drawn["faults"]["schedule"].append(crash)
    found = fuzz.violation(drawn)
    assert found is not None
    small = fuzz.shrunk(drawn, found)
    assert small.invariant == "tokens"
    fields = json.loads(small.recipe)
    assert [fault["kind"] for fault in fields["faults"]["schedule"]] == ["crash"]
    assert [len(speeds) for speeds in fields["topology"]["regions"].values()] == [1]
    assert fuzz.violation(fields) == small
    assert "\n" not in small.recipe

    (tmp_path / "replay.yaml").write_text(small.recipe)
    code, _, err = archipel("run", tmp_path / "replay.yaml", "--out", tmp_path / "out")
    assert code == 1
    assert "archipel: invariant tokens: the model has absorbed" in err


def test_fuzz_on_the_command_line(archipel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ("fuzz", "--processes", "1", "--schedules")
    code, printed, _ = archipel(*one, 3, "--json")
    assert code == 0
    assert json.loads(printed) == {"schedules": 3, "violations": 0, "failures": []}
    code, printed, _ = archipel(*one, 3)
    assert code == 0
    assert printed.startswith("schedules with  async_local_sgd  diloco ")
    assert printed.splitlines()[-1] == "3 schedules, 0 violations"
    count_twice(monkeypatch)
    monkeypatch.setattr(methods, "names", lambda: ["async_local_sgd"])
    code, printed, _ = archipel(*one, 1, "--json")
    assert code == 1
    answer = json.loads(printed)
    assert list(answer) == ["schedules", "violations", "failures"]
    assert list(answer["failures"][0]) == ["recipe", "invariant", "message"]
    assert (answer["schedules"], answer["violations"], answer["failures"][0]["invariant"]) == (
        1,
        1,
        "tokens",
    )
    code, printed, _ = archipel(*one, 1)
    assert code == 1
    assert "archipel run /dev/stdin" in printed
    assert answer["failures"][0]["recipe"] in printed
    assert printed.splitlines()[-1] == "1 schedules, 1 violations"


def test_invariants_are_checked_on_request(
    archipel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count_twice(monkeypatch)
    path = tmp_path / "recipe.yaml"
    path.write_text("method: async_local_sgd\ntask: none\nrun: {steps: 100}\n")
    assert archipel("run", path, "--out", tmp_path / "unchecked").code == 0
    code, _, err = archipel("run", path, "--check-invariants", "--out", tmp_path / "checked")
    assert code == 1
    assert "archipel: invariant tokens:" in err


# What is booked


@pytest.mark.parametrize("method", ALL)
def test_nobody_is_busier_than_the_clock(method: str) -> None:
    """A job that is lost has taken no longer than until it was lost, however often that happens."""
    crashes = [
        {"kind": "crash", "node": node, "at_s": float(at_s), "restart_after_s": 0.5}
        for at_s in range(5, 60, 5)
        for node in (A, B)
    ]
    settings = {"name": method}
    if "inner_steps" in methods.load(method).Config.model_fields:
        settings["inner_steps"] = 40
    given = recipe(method, *crashes, seconds=60.0, method=settings)
    sim = simulation.make_simulator(given, None)
    sim.run()
    workers = list(sim.engine.setting.step_time_s)
    idle = sim.recorder.idle_fraction(workers, sim.now)
    assert idle is not None
    assert 0 <= idle <= 1
    busy_s = dict.fromkeys(workers, 0.0)
    for span in sim.recorder.spans:
        if span.what == "compute":
            busy_s[span.node] += min(span.end_s, sim.now) - span.start_s
    assert all(seconds <= sim.now for seconds in busy_s.values())
    assert idle == pytest.approx(1 - sum(busy_s.values()) / (len(workers) * sim.now), rel=1e-9)
