"""`live/`: the same recipes on Ray. One Ray session serves most of these tests; what it must not
leave behind has its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_recipes import ONE, PROFILE, QUICK, TASK, TWO, recipe
from safetensors.torch import load_file

from archipel import simulation
from archipel.actor import NodeId
from archipel.disk.checkpoint import Every
from archipel.errors import Diverged, TrainingError, UserError
from archipel.train.pool import Pool

live = pytest.importorskip("archipel.live.launch")
rehearsal = pytest.importorskip("archipel.live.rehearsal")
cluster = pytest.importorskip("archipel.live.cluster")
pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with simulation.open_pool(recipe("diloco"), 1) as pool:
        assert pool is not None
        yield pool


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A private Ray that the launches of this module share."""
    with cluster.session(None):
        yield


def evaluations(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"]


def processes(name: str) -> set[int]:
    """Processes of Ray's whose command line has `name` in it."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if name in command:
                found.add(int(entry.name))
    return found


# Rehearsal


def test_a_rehearsal_says_what_each_holder_absorbs_until_each_mark() -> None:
    chosen = recipe("noloco", method={"name": "noloco", "inner_steps": 10})
    marks = rehearsal.rehearse(chosen, chosen.profile, 200)
    east, west = (
        [NodeId("east", f"w{i}") for i in range(2)],
        [NodeId("west", f"w{i}") for i in range(2)],
    )
    assert marks[0] == dict.fromkeys([*east, *west], 0)
    assert sum(marks[-1].values()) >= 200 > sum(marks[-2].values())
    assert [sum(mark.values()) for mark in marks] == sorted(sum(mark.values()) for mark in marks)


def test_a_method_with_one_model_ends_at_the_plan() -> None:
    chosen = recipe("halos")
    assert rehearsal.rehearse(chosen, chosen.profile, 200)[-1] == {NodeId("east", "global"): 200}


def test_a_method_that_would_never_end_is_refused_before_anything_starts() -> None:
    chosen = recipe("halos", method={"name": "halos", "accumulate": 10**6})
    with pytest.raises(UserError, match="outer steps come too seldom"):
        rehearsal.rehearse(chosen, chosen.profile, 200)


# Places

W = [NodeId("east", "w0"), NodeId("east", "w1"), NodeId("west", "w0")]
SERVER = NodeId("east", "server")


def machine(name: str, region: str | None = None, gpus: float = 0.0) -> Any:
    return cluster.Machine(name, f"10.0.0.{name}", region, gpus)


def test_one_private_machine_acts_all_regions() -> None:
    places = cluster.place([SERVER, *W], W, [machine("1")], 1.0, None)
    assert {place.id for place in places.values()} == {"1"}


def test_a_regions_workers_are_spread_over_its_machines() -> None:
    found = [machine("1", "east"), machine("2", "east"), machine("3", "west"), machine("4")]
    places = cluster.place([SERVER, *W], W, found, 1.0, "10.0.0.1:6379")
    assert [places[node].id for node in (SERVER, *W)] == ["1", "1", "2", "3"]


def test_a_region_without_a_machine_is_named_with_the_command_that_would_start_one() -> None:
    with pytest.raises(UserError) as error:
        cluster.place([SERVER, *W], W, [machine("1", "east"), machine("2")], 1.0, "10.0.0.1:6379")
    assert str(error.value) == (
        "region 'west' has no machine for west/w0: no Ray node has the label region=west (labels "
        "found: 'east'); on a machine of "
        "that region: ray start --address=10.0.0.1:6379 --labels=region=west"
    )


def test_gpus_take_as_many_workers_as_the_fraction_allows() -> None:
    found = [machine("1", "east", 1.0), machine("2", "east"), machine("3", "west", 2.0)]
    places = cluster.place([SERVER, *W], W, found, 0.5, "10.0.0.1:6379")
    assert [places[node].id for node in W] == ["1", "1", "3"]
    with pytest.raises(UserError) as error:
        cluster.place([SERVER, *W], W, found, 1.0, "10.0.0.1:6379")
    assert str(error.value) == (
        "region 'east' has GPUs for 1 workers, and none for east/w1: "
        "live.gpu_fraction = 1 of a GPU each; lower it, or add a machine"
    )


# The five methods


@pytest.mark.parametrize(
    ("method", "codec"),
    [
        ("sync_sgd", "fp32"),
        ("diloco", "fp32"),
        ("noloco", "fp32"),
        ("diloco", "int8"),
        ("noloco", "int4"),
    ],
)
def test_synchronous_methods_take_home_the_simulators_weights(
    method: str, codec: str, ray: None, pool: Pool, tmp_path: Path
) -> None:
    chosen = recipe(method, wire=codec)
    summary = live.launch(chosen, tmp_path / "live")
    modelled = simulation.simulate(chosen, pool, tmp_path / "simulated")
    for key in ("inner_steps", "outer_steps", "tokens", "stopped", "settings", "workers", "wire"):
        assert summary[key] == modelled[key]
    # What really crosses, and what is modelled, both in models. Some more is sent after the end.
    crossed = summary["sent_bytes"] / (4 * pool.replica.layout.numel)
    assert crossed == pytest.approx(modelled["sent_bytes"] / PROFILE["model_bytes"], rel=0.1)
    ours, theirs = (
        load_file(tmp_path / name / "weights.safetensors") for name in ("live", "simulated")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
    for here, there in zip(
        evaluations(tmp_path / "live"), evaluations(tmp_path / "simulated"), strict=True
    ):
        for key in ("inner_steps", "outer_steps"):
            assert here[key] == there[key]
        own = "loss" if there["replica_loss"] is None else "replica_loss"
        assert here[own] == pytest.approx(there[own], rel=1e-5)
    # Of several replicas, the mean is made and evaluated once, at the end.
    for key, rel in (("loss", 1e-5), ("replica_std", 1e-4)):
        assert here[key] == (there[key] and pytest.approx(there[key], rel=rel))
    holders = 4 if method == "noloco" else 1
    # A tied tensor has two names in the file, and travels once.
    assert summary["taken_home_bytes"] == 4 * pool.replica.layout.numel * holders
    assert {path.name for path in (tmp_path / "live").iterdir()} == {
        path.name for path in (tmp_path / "simulated").iterdir()
    }
    assert summary["modelled"] == ""
    assert summary["real"].endswith("; the clock and the bytes, measured on 1 machine")


OWN_TASK = """
import torch
from archipel import Task
from neighbour import Model

def batches(shard, index):
    seed = 10**9 + index if shard.split == "valid" else shard.index * 10**4 + index
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(dim=1, keepdim=True)

def make():
    return Task(
        Model,
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        batches,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    )
"""
NEIGHBOUR = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x):
        return self.out(self.norm(self.frozen(x))) + 0 * torch.softmax(self.mask, dim=-1).sum()
"""


@pytest.mark.parametrize("method", ["diloco", "halos"])
def test_a_whole_model_of_the_users_is_taken_home_and_measuring_the_pace_moves_no_weight(
    method: str, ray: None, tmp_path: Path
) -> None:
    """The task file imports a neighbour on the workers too; the mask is −inf to the bit."""
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "task.py").write_text(OWN_TASK)
    chosen = recipe(
        method,
        task=f"{tmp_path}/task.py:make",
        profile="measured",
        topology={"regions": {"east": [1.0, 1.0]}},
        run={"steps": 64, "evaluations": 1},
    )
    live.launch(chosen, tmp_path / "live")
    with simulation.open_pool(chosen, 1) as own:
        assert own is not None
        simulation.simulate(chosen, own, tmp_path / "simulated")
        first = own.replica.module.state_dict()
    here, there = (evaluations(tmp_path / name)[0] for name in ("live", "simulated"))
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-6)
    for name in ("live", "simulated"):
        weights = load_file(tmp_path / name / "weights.safetensors")
        assert weights.keys() == first.keys()
        for constant in ("frozen.weight", "frozen.bias", "mask"):
            assert torch.equal(weights[constant], first[constant])
        assert not torch.equal(weights["norm.running_mean"], torch.zeros(8))


OWN_SEED = """
import os, torch
from archipel import Task
from torch import nn

class Model(nn.Linear):
    def __init__(self):
        super().__init__(40, 200)
        with torch.no_grad():
            self.weight += os.getpid()

def make():
    return Task(
        Model,
        lambda model, batch: model(batch).square().mean(),
        lambda shard, index: torch.ones(2, 40),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
    )
"""


@pytest.mark.parametrize("method", ["diloco", "halos"])
def test_a_model_that_comes_out_different_on_each_machine_starts_from_the_commands(
    method: str, ray: None, tmp_path: Path
) -> None:
    """The hosts cannot make its weights, and are sent them: 8,200 entries and more."""
    (tmp_path / "task.py").write_text(OWN_SEED)
    chosen = recipe(
        method,
        task=f"{tmp_path}/task.py:make",
        run={"steps": 20, "evaluations": 1},
        profile=QUICK,
        **TWO,
    )
    live.launch(chosen, tmp_path / "live")
    weights = load_file(tmp_path / "live" / "weights.safetensors")
    first = (weights["weight"] - os.getpid()).abs().max()
    assert 0.1 < first < 0.2  # PyTorch's bound is 1/sqrt(40) = 0.158


STAGES: dict[str, Any] = {
    "task": {**TASK, "layers": 2, "width": 8},
    "pipeline": {"stages": 2, "micro_batches": 2},
}


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("noloco", STAGES),
        ("noloco", STAGES | {"pipeline": {"stages": 2, "routing": "fixed"}}),
        ("diloco", STAGES | {"topology": {"regions": {"east": [1.0] * 4}}}),
        (
            "noloco",
            {
                "live": {"processes": 2},
                "topology": {"regions": {"east": [1.0, 1.0]}},
                "run": {"steps": 100},
            },
        ),
        (
            "sync_sgd",
            {
                "live": {"processes": 2},
                "topology": {"regions": {"east": [1.0, 1.0]}},
                "run": {"steps": 20},
            },
        ),
    ],
)
def test_replicas_of_several_processes_take_home_the_simulators_weights(
    method: str, sections: dict[str, Any], ray: None, tmp_path: Path
) -> None:
    """Stages of a pipeline, each a process, and replicas that FSDP2 shards over two."""
    chosen = recipe(method, **{"run": {"steps": 100, "evaluations": 4}, **sections})
    with simulation.open_pool(chosen, 1) as staged:
        modelled = simulation.simulate(chosen, staged, tmp_path / "simulated")
    summary = live.launch(chosen, tmp_path / "live")
    for key in ("inner_steps", "outer_steps", "tokens", "settings"):
        assert summary[key] == modelled[key]
    assert summary["final_loss"] == pytest.approx(modelled["final_loss"], rel=1e-5)
    ours, theirs = (
        load_file(tmp_path / name / "weights.safetensors") for name in ("live", "simulated")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        if chosen.pipeline.stages > 1:  # the same sums in the same order
            np.testing.assert_array_equal(ours[name], theirs[name])
            continue
        scale = float(theirs[name].abs().max())
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5 * scale)
    if chosen.pipeline.stages > 1 and method == "noloco":
        # Activations, their gradients, norms and exchanges, and what is under way at the end.
        assert modelled["messages"] <= summary["messages"] <= 1.5 * modelled["messages"]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            STAGES | {"live": {"processes": 2}},
            "live.processes = 2: a stage of a pipeline is one process",
        ),
        (STAGES | {"task": {**TASK, "layers": 2, "tied": True}}, "is also in stage 0; untie them"),
    ],
)
def test_pipelines_that_cannot_be_launched(
    sections: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        live.launch(recipe("noloco", **sections), tmp_path / "live")
    assert text in str(error.value)


@pytest.mark.parametrize("method", ["async_local_sgd", "halos"])
def test_asynchronous_methods_do_as_the_simulator_does(
    method: str, ray: None, pool: Pool, tmp_path: Path
) -> None:
    """As many updates within a tenth, and a final loss within three standard deviations of five of
    the simulator's seeds.
    """
    summary = live.launch(recipe(method, live={"pace": "profile"}), tmp_path / "live")
    modelled = [
        simulation.simulate(recipe(method, seed=seed), pool, tmp_path / str(seed))
        for seed in range(5)
    ]
    for key in ("outer_steps", "local_updates"):
        if modelled[0][key]:
            assert summary[key] == pytest.approx(modelled[0][key], rel=0.1, abs=1)
    losses = [run["final_loss"] for run in modelled]
    assert abs(summary["final_loss"] - np.mean(losses)) < 3 * np.std(losses, ddof=1)
    assert summary["modelled"].startswith(
        "the pace: an inner step takes at least 30 ms ÷ its worker's speed"
    )


def test_halos_with_a_fixed_pace_has_the_simulators_order_of_events(
    ray: None, tmp_path: Path
) -> None:
    """Two servers of one worker each, whose steps end at moments that lie well apart."""
    chosen = recipe(
        "halos",
        topology={
            "regions": {"east": [1.0], "west": [0.77]},
            "default": {"bandwidth_gbit_s": 10.0},
        },
        profile={"name": "slow", "model_bytes": 1000, "step_time_s": 0.3},
        method={"name": "halos", "inner_steps": 2, "accumulate": 2, "dynamic_steps": False},
        task="none",
        run={"steps": 18},
        live={"pace": "profile"},
    )
    live.launch(chosen, tmp_path / "live")
    simulation.simulate(chosen, None, tmp_path / "simulated")

    def order(name: str) -> list[str]:
        events = json.loads((tmp_path / name / "trace.json").read_text())["traceEvents"]
        nodes = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["name"] == "thread_name"
        }
        ends = [
            (event["ts"] + event["dur"], nodes[event["tid"]])
            for event in events
            if event["name"] == "compute"
        ]
        return [node for _, node in sorted(ends)]

    assert order("live")[:8] == order("simulated")[:8]


# What goes wrong


FAILING = """
import torch
from archipel import Task

def make():
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    return Task(lambda: torch.nn.Linear(2, 1), loss, lambda shard, i: i, sgd)

def loss(model, batch):
    if batch == 3:
        raise ValueError("no more data")
    return model(torch.ones(1, 2)).sum()
"""


def test_a_task_that_fails_is_named_with_its_place(ray: None, tmp_path: Path) -> None:
    (tmp_path / "mytask.py").write_text(FAILING)
    with pytest.raises(
        TrainingError,
        match=r"^worker \w+/w\d: the task failed at .*mytask.py:13: ValueError: no more data$",
    ):
        live.launch(recipe("diloco", task=f"{tmp_path}/mytask.py:make", **ONE), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:worker")
def test_a_loss_that_is_not_finite_three_times_in_a_row_ends_the_run(
    ray: None, tmp_path: Path
) -> None:
    with pytest.raises(
        Diverged,
        match=r"^diloco: worker \w+/w0: the training loss is \w+ at its inner step \d+, after "
        r"[\d.]+ s, 3 times in a row; try a lower learning rate$",
    ):
        live.launch(
            recipe(
                "diloco",
                task={**TASK, "lr": 1e30, "gradient_clip": None},
                live={"max_restarts": 0},
                **TWO,
            ),
            tmp_path / "run",
        )


STUCK = """
from dataclasses import dataclass
from archipel.actor import Actor, MethodConfig, Start, Trained

class Config(MethodConfig):
    pass

@dataclass(kw_only=True)
class Worker(Actor):
    theta: object
    def upon(self, message, sender, ctx):
        match message:
            case Trained(steps=steps):
                self.absorbed += steps
        if self.absorbed < 20 or not len(self.theta):
            ctx.train(self.theta, 5, self.absorbed)
    def model(self):
        return self.theta
    def waits_for(self):
        return "better times"

def build(config, world, theta):
    return [Worker(me=worker.id, theta=theta) for worker in world.workers]
"""


def test_when_nothing_happens_any_more_it_says_who_waits_for_what(
    ray: None, tmp_path: Path
) -> None:
    """A method of the user's, which comes to its end only where nothing is trained."""
    (tmp_path / "stuck.py").write_text(STUCK)
    chosen = recipe(
        f"{tmp_path}/stuck.py",
        topology={"regions": {"a": [1.0], "b": [1.0]}},
        live={"deadline_s": 2.0},
    )
    with pytest.raises(TrainingError) as error:
        live.launch(chosen, tmp_path / "run")
    assert str(error.value) == (
        "nothing has happened for 2 s (live.deadline_s): a/w0 waits for better times; b/w0 waits "
        "for better times"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (
            signal.SIGKILL,
            r"^(east|west)/w\d in region '(east|west)' on [\d.]+ died; last words, at [\d.]+ s: .* "
            r"events so far; Ray says: ",
        ),
        (
            signal.SIGSTOP,
            r"^(east|west)/w\d in region '(east|west)' on [\d.]+ has not answered for \d s "
            r"\(live.deadline_s = 3\); last words",
        ),
    ],
)
def test_a_host_that_dies_or_falls_silent_is_named(
    sent: signal.Signals, said: str, ray: None, tmp_path: Path
) -> None:
    victims: list[int] = []
    before = processes("ray::RayHost")

    def strike(now: Any) -> None:
        if now.inner_steps and not victims:
            victims.append(min(processes("ray::RayHost") - before))
            os.kill(victims[0], sent)

    try:
        with pytest.raises(TrainingError, match=said):
            live.launch(
                recipe(
                    "diloco",
                    run={"steps": 10**5},
                    live={"deadline_s": 3.0, "max_restarts": 0},
                    **TWO,
                ),
                tmp_path / "run",
                progress=strike,
            )
    finally:
        for victim in victims:
            if sent == signal.SIGSTOP:
                os.kill(victim, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("method", ["halos", "diloco"])
def test_hosts_that_are_killed_are_started_again_and_take_part(
    method: str, ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are killed, whichever come first, servers or workers; Ctrl-C ends the run when both have
    been back for a while.
    """
    killed, back = [], dict[NodeId, float]()
    before, let_run = processes("ray::RayHost"), live.Watch._let_run

    def note(watch: Any, node: NodeId) -> None:
        let_run(watch, node)
        if killed:
            back[node] = watch.now
            back_at.append(watch.now_report().inner_steps)

    def strike(now: Any) -> None:
        there = processes("ray::RayHost") - before - set(killed)
        if now.inner_steps > 1000 * (1 + len(killed)) and len(killed) < 2 and there:
            killed.append(min(there))
            os.kill(killed[-1], signal.SIGKILL)
        if len(back_at) == 2 and now.inner_steps > max(back_at) + 3000:
            raise KeyboardInterrupt

    back_at: list[int] = []
    monkeypatch.setattr(live.Watch, "_let_run", note)
    chosen = recipe(
        method, run={"steps": 10**5}, live={"pace": "profile", "deadline_s": 60.0}, profile=QUICK
    )
    with (
        pytest.warns(
            UserWarning, match=r"^\w+/\w+ in region '\w+' on [\d.]+ died; .*; it is started again"
        ) as caught,
        pytest.raises(KeyboardInterrupt),
    ):
        live.launch(chosen, tmp_path / "run", every=Every(seconds=1.0), progress=strike)
    assert sum("it is started again" in str(warning.message) for warning in caught) == 2
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert sum(summary["restarts"].values()) == 2
    assert set(summary["restarts"]) == set(map(str, back))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert losses[-1] < losses[0]
    for worker in chosen.topology.workers:
        assert max(line["time_s"] for line in lines if line.get("node") == str(worker.id)) > max(
            back.values()
        )


BAD_BATCH = """
import torch
from archipel import Task

def make():
    def batches(shard, i):
        return shard.index, i

    return Task(lambda: torch.nn.Linear(2, 1), loss, batches, sgd, tokens_per_step=1)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.001)

def loss(model, batch):
    value = model(torch.ones(1, 2)).square().sum()
    return value * torch.nan if batch == (1, 13) else value
"""


def test_a_worker_whose_loss_is_not_finite_keeps_its_process_and_is_named(
    ray: None, tmp_path: Path
) -> None:
    """It goes on behind the bad batch, which it would else meet again and again. No process is
    started again, nor may be here.
    """
    (tmp_path / "once.py").write_text(BAD_BATCH)
    chosen = recipe(
        "async_local_sgd",
        task=f"{tmp_path}/once.py:make",
        run={"steps": 1000},
        live={"pace": "profile", "max_restarts": 0},
        profile=QUICK,
        topology={"regions": {"east": [1.0, 1.0]}},
    )
    with pytest.warns(
        UserWarning,
        match=r"^worker east/w1: the training loss is nan at its inner step 13, after [\d.]+ s; it "
        r"is restarted from the newest model$",
    ):
        summary = live.launch(chosen, tmp_path / "run")
    assert summary["restarts"] == {"east/w1": 1}
    assert summary["inner_steps"] >= 1000
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line["steps"] for line in lines if line.get("node") == "east/w1"]
    assert sum(steps) > 100  # it has trained on


def test_seconds_and_a_target_loss_end_a_run(ray: None, tmp_path: Path) -> None:
    summary = live.launch(
        recipe("noloco", run={"steps": 10**5, "seconds": 2.0}, **TWO), tmp_path / "seconds"
    )
    assert summary["stopped"] == "seconds"
    assert 2.0 <= summary["time_s"] < 3.0
    assert 0 < summary["inner_steps"] < 10**5
    summary = live.launch(
        recipe("diloco", run={"steps": 10**5, "evaluations": 500, "target_loss": 4.0}, **TWO),
        tmp_path / "target",
    )
    assert summary["stopped"] == "target_loss"
    assert summary["final_loss"] <= 4.0
    assert summary["inner_steps"] < 10**5


# The command, as a user runs it


def check_that_it_goes_on(run: Path, before: dict[str, Any]) -> None:
    """A live run that was stopped, from the parts that its nodes have saved."""
    command = [sys.executable, "-m", "archipel.cli", "resume", str(run)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    after = json.loads((run / "summary.json").read_text())
    assert after["stopped"] == "seconds"
    assert after["inner_steps"] > before["inner_steps"]
    assert after["time_s"] > 11.0  # of both processes together, on the clocks of the hosts
    lines = evaluations(run)
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    # Where the machine is slow, the first one comes after the stop.
    assert lines[0]["inner_steps"] < lines[-1]["inner_steps"]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert not (run / "checkpoint").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", ["Ctrl-C", "an error"])
def test_nothing_of_ray_is_left_behind(end: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        recipe("diloco", run={"steps": 10**5, "seconds": 12.0}).to_yaml()
    )
    wrong = {"Ctrl-C": [], "an error": ["--set", "task.lr=1e30", "--strict"]}[end]
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "archipel.cli",
        "launch",
        f"{tmp_path}/recipe.yaml",
        *wrong,
        "--out",
        str(out),
    ]
    # Ctrl-C reaches every process of a terminal: a session of its own, and the signal to all of its
    # group.
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        if end == "Ctrl-C":
            next(line for line in process.stderr if "steps" in line)
            assert processes(
                f"_{process.pid}/"
            )  # of the session, whose name ends in the number of the process
            os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read().strip().splitlines()[-1]
        code = process.wait(timeout=60)
    if end == "Ctrl-C":
        run = out / "diloco-seed0"
        goes_on = (
            f"`archipel resume {run}` goes on from here; `archipel report {run}` shows what "
            "happened until then"
        )
        assert (code, said) == (130, f"archipel: interrupted; {goes_on}")
        summary = json.loads((run / "summary.json").read_text())
        assert summary["stopped"] == "interrupted"
        assert load_file(run / "weights.safetensors")
        check_that_it_goes_on(run, summary)
    else:
        assert code == 2
        assert said.startswith("archipel: diloco: worker ")
        assert not out.exists()
    until = time.monotonic() + 10
    while (left := processes(f"_{process.pid}/")) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
