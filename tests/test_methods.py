"""What every method must pass, found by its file's name; then what is particular to one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from worlds import (
    Inline,
    Quadratic,
    linear_task,
    model_of,
    plain,
    simulator,
    small,
    watch_calls,
    workers_of,
)

from archipel import methods, simulation
from archipel.actor import (
    Joined,
    Lost,
    Message,
    NodeId,
    Refused,
    Start,
    Trained,
    WorkerSpec,
    World,
)
from archipel.collective import Member
from archipel.errors import TrainingError
from archipel.methods import halos, noloco
from archipel.parameter_server import Delta
from archipel.recipe import parse_recipe
from archipel.run import wire
from archipel.run.census import Plan
from archipel.run.codec import CODECS, Codec
from archipel.run.node import Node
from archipel.sim import trouble
from archipel.sim.clock import Simulator
from archipel.sim.events import Fail, Return
from archipel.sim.faults import FaultsConfig
from archipel.sim.schedule import make_faults
from archipel.sim.topology import Profile, Topology, load_topology
from archipel.train.replica import Run
from archipel.train.task import Schedule
from archipel.train.trainer import Done
from archipel.vector import Layout

ALL = methods.names()
ALLOWED_IMPORTS = {
    "archipel.actor",
    "archipel.vector",
    "archipel.outer",
    "archipel.parameter_server",
    "archipel.collective",
}
WORLDS = {
    "one worker": Topology(regions={"a": [1.0]}),
    "two workers": Topology(regions={"a": [1.0, 0.3]}),
    "an odd world": Topology(
        regions={"a": [1.0, 0.5], "b": [0.7]}, default={"bandwidth_gbit_s": 1.0}
    ),
    "a region with one worker and one without": Topology(
        regions={"a": [1.0], "empty": [], "b": [0.2, 0.9, 0.9, 0.4]},
        default={"bandwidth_gbit_s": 0.1, "latency_ms": 30, "jitter": 0.5},
    ),
    "published": load_topology("halos-4x4"),
    "shared links": load_topology("uneven-2-6").model_copy(update={"sharing": "fair"}),
    "a tree": load_topology("two-regions").model_copy(update={"collective": "tree"}),
}

W0 = NodeId("a", "w0")


def workers_of_one_region(count: int) -> tuple[WorkerSpec, ...]:
    return Topology(regions={"a": [1.0] * count}).workers


@dataclasses.dataclass
class Post:
    """A context that keeps what an actor asks of it.

    Attributes:
        sent: messages, and to whom.
        after_a_while: messages to itself.
        progress: told with each request for inner steps.
    """

    sent: list[tuple[NodeId, Message]] = dataclasses.field(default_factory=list)
    after_a_while: list[Message] = dataclasses.field(default_factory=list)
    progress: list[int] = dataclasses.field(default_factory=list)

    def train(self, theta: torch.Tensor, steps: int, progress: int) -> None:
        self.progress.append(progress)

    def after(self, seconds: float, message: Message) -> None:
        self.after_a_while.append(message)

    def send(self, to: NodeId, message: Message) -> Message:
        self.sent.append((to, message))
        return message

    def to(self, node: NodeId) -> list[Any]:
        return [message for to, message in self.sent if to == node]


class Steps(Quadratic):
    """Every inner step moves all weights by one."""

    def train(self, worker: NodeId, theta: Any, steps: int, progress: int, due_s: float) -> Done:
        return Done(Trained(theta + steps, steps, (1.0,) * steps))


@pytest.mark.parametrize("name", ALL)
def test_it_imports_the_contract_and_nothing_else_of_the_house(name: str) -> None:
    tree = ast.parse(Path(inspect.getfile(methods.load(name))).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {module for module in imported if module.startswith("archipel")} <= ALLOWED_IMPORTS


@pytest.mark.parametrize("name", ALL)
def test_its_settings_are_described_frozen_and_strict(name: str) -> None:
    config_type = methods.load(name).Config
    assert all(field.description for field in config_type.model_fields.values())
    with pytest.raises(ValidationError):
        config_type(no_such_setting=1)
    for key, field in config_type.model_fields.items():
        with pytest.raises(ValidationError):
            config_type(**{key: "text" if field.annotation is not str else 1})
        with pytest.raises(ValidationError):
            setattr(config_type(), key, field.default)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ALL)
def test_it_trains_in_every_world(name: str, world: str) -> None:
    """The loss of a quadratic falls; the plan is met; whom it talks to is whom it said; bytes are
    those of its messages.
    """
    sim = simulator(
        name, Quadratic(lr=0.02), topology=WORLDS[world], settings=small(name), steps=600
    )
    peers = {(actor.me, peer) for actor in sim.actors.values() for peer in actor.peers()}
    sent: list[tuple[NodeId, NodeId]] = []
    watch_calls(sim, "send", lambda sender, to, message: sent.append((sender, to)))
    assert sim.run() == "steps"
    assert sim.inner_steps >= 600
    assert set(sent) <= peers
    first, last = sim.recorder.evaluations[0], sim.recorder.evaluations[-1]
    assert last.loss < 0.8 * first.loss
    assert first.sent_bytes == 0
    assert last.slow_link_bytes <= last.sent_bytes


@pytest.mark.parametrize("name", ALL)
def test_its_actors_are_dataclasses_whose_fields_are_their_whole_state(name: str) -> None:
    sim = simulator(name, Quadratic(), topology="halos-4x4", settings=small(name), steps=500)
    sim.run()
    for actor in sim.actors.values():
        assert set(vars(actor)) == {field.name for field in dataclasses.fields(actor)}


@pytest.mark.parametrize("name", ALL)
def test_it_never_changes_a_vector_that_it_has_sent(name: str) -> None:
    """What a context is given is compared with a copy of itself when the run is over."""
    sim = simulator(name, Quadratic(), topology="halos-4x4", settings=small(name), steps=300)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(vectors: list[Any]) -> None:
        kept.extend(
            (vector, vector.clone()) for vector in vectors if isinstance(vector, torch.Tensor)
        )

    watch_calls(sim, "send", lambda sender, to, message: keep(wire.vectors(message)))
    watch_calls(sim, "all_reduce", lambda me, group, vector, *_: keep([vector]))
    sim.run()
    assert kept
    assert all(torch.equal(vector, copy) for vector, copy in kept)


@pytest.mark.parametrize("name", ALL)
def test_one_seed_gives_one_run(name: str) -> None:
    def run() -> tuple[float, int, list[float], torch.Tensor]:
        sim = simulator(
            name,
            Quadratic(),
            topology=WORLDS["a region with one worker and one without"],
            settings=small(name),
            steps=400,
        )
        sim.run()
        return (
            sim.now,
            sim.recorder.messages,
            [evaluation.loss for evaluation in sim.recorder.evaluations],
            model_of(sim),
        )

    first, second = run(), run()
    assert first[:3] == second[:3]
    assert torch.equal(first[3], second[3])


@pytest.mark.parametrize(
    "name", [name for name in ALL if "dynamic_steps" in methods.load(name).Config.model_fields]
)
def test_dynamic_steps_follow_the_speeds(name: str) -> None:
    module = methods.load(name)
    topology = Topology(regions={"a": [0.2, 0.4, 0.05, 0.39]})
    actors = module.build(
        module.Config(inner_steps=8, dynamic_steps=True),
        World(topology.workers, 4, 0),
        torch.zeros(4),
    )
    steps = {actor.me.name: actor.steps for actor in actors if actor.me.name.startswith("w")}
    assert steps == {"w0": 4, "w1": 8, "w2": 1, "w3": 8}


@pytest.mark.parametrize("name", ALL)
def test_one_worker_with_plain_settings_is_plain_training(name: str) -> None:
    """An independent loop of PyTorch's own parts: the same initial weights and batches, AdamW,
    clipping, warm-up and cosine.
    """
    task, steps = linear_task(), 40
    model = task.seeded_model(0)
    optimizer = task.optimizer(model)
    shard = Inline(task, Run(steps, 1, 0), [NodeId("r0", "w0")]).shard(0)
    for step in range(steps):
        factor = (
            (step + 1) / 4
            if step < 3
            else 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 4) / 36))
            if step > 4
            else 1.0
        )
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * factor
        optimizer.zero_grad()
        task.loss(model, task.batches(shard, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    trainer = Inline(task, Run(steps, 1, 0), workers_of(load_topology("one-node")))
    settings = plain(name)
    sim = simulator(name, trainer, steps=steps, settings=settings)
    sim.run()
    assert sim.inner_steps == steps, (
        f"{name} with {settings} is not plain training: if it has settings of other names that "
        "scale or delay what workers do, add their plain values to PLAIN in worlds.py"
    )
    torch.testing.assert_close(model_of(sim), Layout.of(model).read(model), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("restart_after_s", [5.0, None])
@pytest.mark.parametrize("name", ALL)
def test_it_answers_lost_and_joined(name: str, restart_after_s: float | None) -> None:
    """One of three workers crashes, and comes back or not: the others go on, and so does it."""
    crash = {"kind": "crash", "node": "b/w0", "at_s": 10.5, "restart_after_s": restart_after_s}
    recipe = parse_recipe(
        {
            "method": {"name": name, **small(name)},
            "topology": {
                "regions": {"a": [1.0, 1.0], "b": [1.0]},
                "default": {"bandwidth_gbit_s": 1.0},
            },
            "profile": {"model_bytes": 1_000_000, "step_time_s": 1.0},
            "task": "none",
            "run": {"steps": 10**6, "seconds": 200.0},
            "faults": {"schedule": [crash], "save_every_s": 2.0, "deadline_s": 2.0},
        }
    )
    try:
        assert simulation.make_simulator(recipe, None).run() == "seconds"
    except TrainingError as error:
        pytest.fail(
            f"{name}: {error}. A method must answer `Lost` and `Joined`, also its own: see "
            "actor.py. After a loss a collective is of those in `Reduced.group` alone. "
            "`collective.Member` does all this for methods with an all-reduce"
        )


@pytest.mark.slow
def test_the_method_in_contributing_passes_what_every_method_must(tmp_path: Path) -> None:
    """It is put into a copy of the house, as its reader would, and gets no entry in any table."""
    root = Path(__file__).parents[1]
    text = (root / "CONTRIBUTING.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shutil.copytree(root / "src", tmp_path / "src")
    shutil.copytree(root / "tests", tmp_path / "tests")
    shutil.copy(root / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "archipel" / "methods" / "local_sgd.py").write_text(code)
    tests = [f"tests/{name}.py" for name in ("test_methods", "test_faults", "test_odd_worlds")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(
        [*command, "-k", "local_sgd and not async_local_sgd"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


# Synchronous SGD


def test_synchronous_sgd_on_four_workers_is_one_worker_on_the_joined_batch() -> None:
    task, topology = linear_task(), load_topology("two-regions")
    workers, steps = workers_of(topology), 15
    trainer = Inline(task, Run(steps * len(workers), len(workers), 0), workers)
    model = task.seeded_model(0)
    optimizer = task.optimizer(model)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * task.schedule.factor(step, steps)
        batches = [task.batches(trainer.shard(rank), step) for rank in range(len(workers))]
        joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        task.loss(model, joined).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    sim = simulator("sync_sgd", trainer, topology=topology, steps=steps * len(workers))
    sim.run()
    torch.testing.assert_close(model_of(sim), Layout.of(model).read(model), rtol=1e-4, atol=1e-5)


# DiLoCo


def test_diloco_takes_torchs_nesterov_step_on_the_mean_displacement() -> None:
    """On a quadratic the inner steps are a closed form, so that the whole method is a few lines of
    torch.optim.
    """
    theta = torch.nn.Parameter(torch.arange(1.0, 9.0))
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(12):
        theta.grad = theta.detach() - theta.detach() * 0.95**5
        optimizer.step()
    sim = simulator(
        "diloco",
        Quadratic(lr=0.05),
        topology="two-regions",
        theta=torch.arange(1.0, 9.0),
        settings={"inner_steps": 5},
        steps=12 * 5 * 8,
    )
    sim.run()
    assert sim.holders()[0].outer_steps == 12
    torch.testing.assert_close(model_of(sim), theta.detach(), rtol=1e-5, atol=1e-6)


# NoLoCo


def test_noloco_never_calls_a_collective_or_asks_for_a_gradient() -> None:
    trainer = Quadratic()
    sim = simulator(
        "noloco", trainer, topology="halos-4x4", settings={"inner_steps": 3}, steps=2000
    )
    sim.all_reduce = lambda *_: pytest.fail("NoLoCo called all_reduce")  # type: ignore[method-assign]
    sim.run()
    assert set(trainer.calls) == {"train"}
    assert not any(span.what == "all_reduce" for span in sim.recorder.spans)


def test_noloco_goes_down_and_with_the_printed_sign_it_would_go_up() -> None:
    losses = {}
    for sign in (1, -1):
        sim = simulator(
            "noloco", Quadratic(), topology="halos-4x4", settings={"inner_steps": 5}, steps=1000
        )
        if sign < 0:
            for actor in sim.actors.values():
                actor.config = actor.config.model_copy(update={"beta": -0.7})
        sim.run()
        losses[sign] = sim.recorder.evaluations[-1].loss
    assert losses[1] < 0.1 < 4.0 < losses[-1]


def test_two_noloco_workers_with_equal_seeds_and_data_stay_identical() -> None:
    task, topology = linear_task(), Topology(regions={"a": [1.0, 1.0]})
    trainer = Inline(task, Run(200, 2, 0), workers_of(topology), shards=[0, 0])
    sim = simulator(
        "noloco",
        trainer,
        topology=topology,
        settings={"inner_steps": 10},
        steps=200,
        evaluate_every=50,
    )
    sim.run()
    first, second = sim.parts()
    assert torch.equal(first, second)
    assert [evaluation.replica_std for evaluation in sim.recorder.evaluations] == [0.0] * 5


@pytest.mark.parametrize(
    ("count", "size"), [(1, 2), (2, 2), (5, 2), (16, 2), (7, 3), (8, 3), (4, 9)]
)
def test_groups_are_a_partition_that_every_worker_agrees_on(count: int, size: int) -> None:
    workers = tuple(NodeId("a", f"w{i}") for i in range(count))
    for step in range(20):
        groups = noloco.groups(workers, size, seed=3, outer_step=step)
        assert set(groups) == set(workers)
        assert all(
            member in group and groups[other] == group
            for member, group in groups.items()
            for other in group
        )
        sizes = sorted(len(group) for group in set(groups.values()))
        assert sum(size_ != size for size_ in sizes) <= 1  # only what is left over
        assert max(sizes) <= size


def test_every_pair_meets_equally_often() -> None:
    workers = tuple(NodeId("a", f"w{i}") for i in range(6))
    meetings = dict.fromkeys([(a, b) for a in workers for b in workers if a < b], 0)
    for step in range(3000):
        for group in set(noloco.groups(workers, 2, seed=0, outer_step=step).values()):
            meetings[min(group), max(group)] += 1
    assert max(abs(count - 600) for count in meetings.values()) < 5 * np.sqrt(3000 * 0.2 * 0.8)


def test_a_noloco_worker_left_over_steps_alone() -> None:
    """With one worker the averaging has nobody to average with: φ ← φ + αδ + βΔ."""
    sim = simulator(
        "noloco",
        Quadratic(lr=0.1),
        settings={"inner_steps": 1, "gamma": 0.9},
        theta=torch.ones(1),
        steps=3,
    )
    sim.run()
    phi, velocity = 1.0, 0.0
    for _ in range(3):
        velocity = 0.5 * velocity + 0.7 * (phi * 0.9 - phi)
        phi += velocity
    assert float(model_of(sim)) == pytest.approx(phi, rel=1e-6)


@pytest.mark.parametrize("name", ["noloco", "diloco"])
def test_with_dynamic_steps_all_workers_follow_one_learning_rate_schedule(name: str) -> None:
    """The published speeds, 10,000 steps: everybody's last inner steps are at the end of the plan,
    whose factor is a tenth.
    """
    told: dict[NodeId, int] = {}

    class Listening(Quadratic):
        def train(self, worker, theta, steps, progress, due_s):
            told[worker] = progress
            return super().train(worker, theta, steps, progress, due_s)

    settings = {"dynamic_steps": True}
    sim = simulator(name, Listening(), topology="halos-4x4", settings=settings, steps=10_000)
    sim.run()
    factors = [Schedule().factor(progress / 16, 10_000 / 16) for progress in told.values()]
    assert len(factors) == 16
    assert factors == pytest.approx([0.1] * 16, abs=0.01)


def test_noloco_counts_the_inner_steps_of_all_who_are_there_or_out_of_reach() -> None:
    """By hand: workers that take 4, 2 and 1 inner steps in an outer step, seen by the second one
    with no momentum to lose and nobody to wait for.
    """
    topology = Topology(regions={"a": [1.0, 0.5, 0.25]})
    config = noloco.Config(inner_steps=4, dynamic_steps=True, group_size=1)
    first, me, last = noloco.build(config, World(topology.workers, 1, 0), torch.zeros(1))
    post = Post()

    def told_after_an_outer_step(*before: Message) -> int:
        for message in before:
            me.upon(message, me.me, post)
        me.upon(Trained(torch.zeros(1), 2, ()), me.me, post)
        me.upon(post.after_a_while.pop(), me.me, post)
        return post.progress[-1]

    me.upon(Start(), me.me, post)
    assert post.progress == [0]
    assert told_after_an_outer_step() == 7
    assert told_after_an_outer_step(Lost(last.me)) == 7 + 6
    assert told_after_an_outer_step(Lost(first.me, unreachable=True)) == 7 + 6 + 6
    assert told_after_an_outer_step(Joined(last.me)) == 7 + 6 + 6 + 7
    last.upon(Joined(last.me), last.me, post)
    [request] = post.to(first.me)
    assert isinstance(request, noloco.SlowWeightsRequest)
    me.upon(request, last.me, post)
    last.upon(post.to(last.me)[-1], first.me, post)
    assert post.progress[-1] == 7 + 6 + 6 + 7


# HALoS


def test_halos_servers_per_group_of_workers() -> None:
    topology = load_topology("uneven-2-6")
    sim = simulator("halos", Quadratic(), topology=topology, settings={"workers_per_server": 2})
    servers = [actor for actor in sim.actors.values() if actor.me.name.startswith("server")]
    assert [len(server.workers) for server in servers] == [2] * 8
    assert [server.me.region for server in servers] == [
        "r0",
        "r1",
        "r1",
        "r1",
        "r2",
        "r3",
        "r3",
        "r3",
    ]
    assert all(worker.region == server.me.region for server in servers for worker in server.workers)


def test_halos_has_one_report_of_a_server_in_flight_at_a_time() -> None:
    sim = simulator(
        "halos", Quadratic(), topology="halos-4x4", settings={"accumulate": 4}, steps=5000
    )
    in_flight: dict[NodeId, int] = {}

    def watch(sender: NodeId, to: NodeId, message: Any) -> None:
        if to.name == "global":
            in_flight[sender] = in_flight.get(sender, 0) + 1
            assert in_flight[sender] == 1
        if sender.name == "global":
            in_flight[to] -= 1

    watch_calls(sim, "send", watch)
    sim.run()
    assert len(in_flight) == 4


@pytest.mark.parametrize("report_since", ["merge", "send"])
def test_halos_reports_displacements_since_the_merge_or_since_the_last_report(
    report_since: str,
) -> None:
    """Summed over a run, reports since the last report leave nothing out but what is still
    unreported; since the merge they do.
    """
    settings = {**plain("halos"), "inner_steps": 1, "report_since": report_since}
    topology = Topology(
        regions={"a": [1.0], "b": [1.0]}, links=[{"between": ["a", "b"], "bandwidth_gbit_s": 0.5}]
    )
    sim = simulator("halos", Quadratic(), topology=topology, settings=settings, steps=200)
    reported = torch.zeros(8)

    def watch(sender: NodeId, to: NodeId, message: Any) -> None:
        if to.name == "global" and sender.region == "b":
            reported.add_(message.gradient)

    watch_calls(sim, "send", watch)
    sim.run()
    server = sim.actors[NodeId("b", "server0")]
    moved = 1.0 - server.base if report_since == "send" else 1.0 - server.theta
    if report_since == "send":
        torch.testing.assert_close(reported, moved)
    else:
        assert float(reported.sum()) < 0.8 * float(moved.sum())


def test_a_halos_server_blends_the_arriving_model_into_its_own() -> None:
    """`merge_weight` weighs what arrives: 0.25 keeps three quarters."""
    sim = simulator("halos", Quadratic(), topology="halos-4x4")
    server = sim.actors[NodeId("r1", "server0")]
    message_type = sim.actors[NodeId("r0", "global")].__class__.__module__
    model = vars(__import__(message_type, fromlist=["Model"]))["Model"]
    server.upon(
        model(torch.full((8,), 5.0), 100), NodeId("r0", "global"), sim.engine.contexts[server.me]
    )
    torch.testing.assert_close(server.theta, torch.full((8,), 0.75 * 1.0 + 0.25 * 5.0))
    torch.testing.assert_close(server.base, server.theta)
    assert server.progress == 100


def test_halos_tells_workers_the_progress_that_its_server_knows_of() -> None:
    """With one worker and one server that is the worker's own count, also while a report is in
    flight.
    """
    told: list[int] = []

    class Listening(Quadratic):
        def train(self, worker, theta, steps, progress, due_s):
            told.append(progress)
            return super().train(worker, theta, steps, progress, due_s)

    sim = simulator("halos", Listening(), settings={"inner_steps": 4, "accumulate": 3}, steps=120)
    sim.run()
    assert told == [4 * i for i in range(len(told))]


@pytest.mark.parametrize(("report_since", "absorbed"), [("merge", 6 + 10), ("send", 6 + 11)])
def test_halos_absorbs_the_inner_steps_that_are_in_a_report_and_plans_by_all(
    report_since: str, absorbed: int
) -> None:
    """By hand, K = 2: updates of 3 and 3 steps are reported; one of 1 step comes while the report
    is in flight; after the merge 5 and 5 are reported.
    """
    world = World(workers_of_one_region(2), 1, 0)
    config = halos.Config(**plain("halos") | {"report_since": report_since})
    global_server, server, *_ = halos.build(config, world, torch.zeros(1))
    post = Post()
    for steps in (3, 3, 1):
        server.upon(Delta(torch.tensor([float(steps)]), steps), W0, post)
    [report] = post.to(global_server.me)
    global_server.upon(report, server.me, post)
    assert (global_server.absorbed, global_server.trained) == (6, 6)
    [model] = post.to(server.me)
    server.upon(model, global_server.me, post)
    for steps in (5, 5):
        server.upon(Delta(torch.tensor([float(steps)]), steps), W0, post)
    _, report = post.to(global_server.me)
    global_server.upon(report, server.me, post)
    assert (global_server.absorbed, global_server.trained) == (absorbed, 6 + 1 + 10)
    assert float(global_server.theta) == -absorbed  # each step moved its model by one


@pytest.mark.parametrize("report_since", ["merge", "send"])
def test_halos_absorbs_what_its_model_has_moved_by(report_since: str) -> None:
    """Where every inner step moves by one and the servers add up, the model itself is the count."""
    sim = simulator(
        "halos",
        Steps(),
        topology="halos-4x4",
        settings={**plain("halos"), "accumulate": 3, "report_since": report_since},
        theta=torch.zeros(1),
        steps=5000,
    )
    assert sim.run() == "steps"
    server = sim.actors[NodeId("r0", "global")]
    assert server.absorbed == float(server.theta)
    assert server.trained >= 5000
    assert (server.absorbed == server.trained) == (report_since == "send")


def test_halos_forgets_a_report_that_is_refused_or_lost() -> None:
    """What was in it is in no later report, so that it is neither absorbed nor planned by."""
    world = World(workers_of_one_region(1), 1, 0)
    config = halos.Config(**plain("halos") | {"accumulate": 1, "report_since": "merge"})
    global_server, server, *_ = halos.build(config, world, torch.zeros(1))
    post = Post()
    server.upon(Delta(torch.ones(1), 4), W0, post)
    [report] = post.to(global_server.me)
    global_server.upon(Refused(report), server.me, post)
    server.upon(post.to(server.me)[-1], global_server.me, post)
    server.upon(Delta(torch.ones(1), 5), W0, post)  # its report is lost
    global_server.upon(Joined(global_server.me), global_server.me, post)
    server.upon(post.to(server.me)[-1], global_server.me, post)
    server.upon(Delta(torch.ones(1), 7), W0, post)
    global_server.upon(post.to(global_server.me)[-1], server.me, post)
    assert (global_server.absorbed, global_server.trained) == (7, 7)


def test_stop_by_seconds_leaves_every_method_at_that_time() -> None:
    for name in ALL:
        sim = simulator(name, Quadratic(), topology="halos-4x4", plan=Plan(seconds=50.0))
        assert sim.run() == "seconds"
        assert sim.now == 50.0


# In fewer bits


def apart(sim: Simulator) -> None:
    """Replicas that begin far from each other."""
    for rank, actor in enumerate(sim.actors.values()):
        assert isinstance(actor, noloco.Worker)
        actor.phi += torch.randn(len(actor.phi), generator=torch.Generator().manual_seed(rank))


@dataclasses.dataclass
class Kicks(Quadratic):
    """Inner steps move a worker's weights by numbers that do not depend on them."""

    numel: int = 40
    size: float = 1.0
    kicks: dict[NodeId, int] = dataclasses.field(default_factory=dict)

    def train(self, worker: NodeId, theta: Any, steps: int, progress: int, due_s: float) -> Done:
        self.kicks[worker] = count = self.kicks.get(worker, 0) + 1
        seed = sum(map(ord, str(worker))) * 1000 + count
        moved = torch.randn(len(theta), generator=torch.Generator().manual_seed(seed))
        return Done(Trained(theta + self.size * moved, steps, (1.0,) * steps))


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_noloco_pulls_replicas_together_without_moving_their_mean(
    codec: Codec, group_size: int
) -> None:
    """Nothing is trained, and replicas that begin apart come together in their mean. If a member
    reckoned with its own φ as it is and not as the others got it, the mean would move by 1/512.
    """
    settings = {"inner_steps": 1, "group_size": group_size}
    topology = Topology(regions={"a": [1.0] * 6})
    sim = simulator(
        "noloco", Kicks(size=0.0), topology=topology, settings=settings, steps=90, wire=codec
    )
    apart(sim)
    before = model_of(sim)
    spread = float(torch.stack(sim.parts()).std(dim=0).mean())
    sim.run()
    assert float((model_of(sim) - before).abs().max()) < 2e-6
    assert float(torch.stack(sim.parts()).std(dim=0).mean()) < 0.05 * spread


@pytest.mark.parametrize("codec", CODECS)
def test_the_mean_of_noloco_moves_by_what_is_trained_alone(codec: Codec) -> None:
    """Whatever the pull is, and but for what senders still have to say."""

    def run(gamma: float) -> tuple[torch.Tensor, Simulator]:
        settings = {"inner_steps": 1, "alpha": 0.0, "beta": 1.0, "gamma": gamma}
        topology = Topology(regions={"a": [1.0] * 6})
        sim = simulator(
            "noloco", Kicks(), topology=topology, settings=settings, steps=90, wire=codec
        )
        apart(sim)
        sim.run()
        return model_of(sim), sim

    pulled, sim = run(0.7)
    alone, _ = run(0.0)
    torch.testing.assert_close(pulled, alone, rtol=0, atol=2e-5)
    plain = Kicks()
    kicks = [
        plain.train(actor.me, torch.zeros(40), 1, 0, 0.0).result().theta
        for actor in sim.actors.values()
        for _ in range(actor.outer_steps)
    ]
    first = simulator("noloco", Kicks(), topology=Topology(regions={"a": [1.0] * 6}))
    apart(first)
    left = [node.coder.left.get("Exchange.gradient", torch.zeros(40)) for node in nodes_of(sim)]
    expected = model_of(first) + (sum(kicks) + sum(left)) / 6
    if codec != "bf16":  # which keeps nothing of what it rounds
        torch.testing.assert_close(pulled, expected, rtol=0, atol=2e-5)
    else:
        torch.testing.assert_close(pulled, expected, rtol=0, atol=0.02)


def nodes_of(sim: Simulator) -> list[Node]:
    return list(sim.state.nodes.values())


CODED = {"async_local_sgd", "diloco", "halos", "noloco", "sync_sgd"}
"""Methods whose vectors travel in fewer bits."""


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ALL)
def test_it_trains_in_fewer_bits_and_in_less_time(name: str, codec: Codec) -> None:
    """Rounded too, the loss of a quadratic falls as far as it does else."""
    slow = Topology(regions={"a": [1.0, 0.5], "b": [0.7, 0.7]}, default={"bandwidth_gbit_s": 0.001})

    def run(wire: Codec) -> Simulator:
        trainer = Quadratic(numel=300, lr=0.02)
        theta = torch.randn(300, generator=torch.Generator().manual_seed(0))
        sim = simulator(
            name, trainer, topology=slow, theta=theta, settings=small(name), steps=600, wire=wire
        )
        sim.run()
        return sim

    plain, rounded = run("fp32"), run(codec)
    losses = [sim.recorder.evaluations[-1].loss for sim in (plain, rounded)]
    first = plain.recorder.evaluations[0].loss
    assert losses[0] is not None
    assert losses[1] is not None
    assert first is not None
    assert losses[1] < losses[0] + 0.02 * first
    if name in CODED:
        assert rounded.recorder.sent_bytes < 0.55 * plain.recorder.sent_bytes
        assert rounded.now < plain.now
    else:  # a method whose messages name neither differences nor values
        assert rounded.recorder.sent_bytes == plain.recorder.sent_bytes
        assert losses[1] == losses[0]


def test_all_members_hold_one_model_in_fewer_bits() -> None:
    """Those who take the mean, and a newcomer, who gets the model as it is."""
    crash = {"kind": "crash", "node": "b/w0", "at_s": 10.5, "restart_after_s": 5.0}
    topology = Topology(regions={"a": [1.0, 1.0], "b": [1.0]}, default={"bandwidth_gbit_s": 1.0})
    workers = tuple(workers_of(topology))
    faults = make_faults(
        FaultsConfig.model_validate({"schedule": [crash], "save_every_s": 2.0, "deadline_s": 2.0}),
        topology,
        list(workers),
        0,
    )
    trainer = Kicks(size=0.1)
    profile = Profile(name="tiny", model_bytes=1_000_000, step_time_s=1.0)
    sim = simulator(
        "diloco",
        trainer,
        topology=topology,
        settings={"inner_steps": 2},
        plan=Plan(seconds=100.0),
        steps=None,
        profile=profile,
        wire="int4",
        faults=faults,
    )
    sim.run()
    members = [actor for actor in sim.actors.values() if isinstance(actor, Member)]
    assert all(len(member.group) == 3 for member in members)
    assert len({member.round for member in members}) == 1
    assert all(torch.equal(member.theta, members[0].theta) for member in members)


def test_a_restart_takes_up_what_was_left_over_at_the_save() -> None:
    """And what was saved does not change with what is sent later."""
    sim = simulator(
        "async_local_sgd",
        Kicks(),
        topology=WORLDS["two workers"],
        settings=small("async_local_sgd"),
        steps=60,
        wire="int4",
    )
    node = sim.state.nodes[W0]
    assert sim.run(lambda: "Delta.gradient" in node.coder.left) is None
    before = trouble.saved(sim.engine, W0)
    left = node.coder.left["Delta.gradient"].clone()
    count = sim.recorder.messages
    sim.run(lambda: sim.recorder.messages > count + 8)
    assert not torch.equal(node.coder.left["Delta.gradient"], left)
    assert torch.equal(before.left["Delta.gradient"], left)
    sim.state.outages.saves[W0] = before
    trouble.go_wrong(sim.engine, Fail(W0))
    trouble.go_wrong(sim.engine, Return(W0))
    assert torch.equal(node.coder.left["Delta.gradient"], left)
