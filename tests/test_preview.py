"""What `archipel check` says of a recipe, held against runs, real models and figures by hand."""

from __future__ import annotations

import importlib
import json
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from archipel import experiment, memory, methods, simulation
from archipel.errors import UserError
from archipel.memory import machine_bytes, memory_of
from archipel.preview import learning_rates, preview
from archipel.recipe import Recipe, parse_recipe
from archipel.sim.network import Network
from archipel.sim.topology import RegionLink, Topology
from archipel.train.configs import CausalLmTask, SyntheticTask, TaskConfig
from archipel.train.footprint import bytes_of, footprint_of, look
from archipel.train.pool import Pool
from archipel.train.replica import Replica, Run
from archipel.train.task import CPU, Schedule, Task, make_task

SMALL = {"name": "synthetic", "layers": 1, "width": 16, "sequence": 16, "valid_sequences": 8}
MODEL_BYTES = 281_706_496
STEP_S = 0.238391


def recipe_of(method: str = "diloco", **sections: Any) -> Recipe:
    return parse_recipe(
        {"method": method, "topology": "two-regions", "task": SMALL, "run": {"steps": 600}}
        | sections
    )


# Modelled: times and bytes


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, {"wire": "int4"}], ids=["fp32", "int4"])
@pytest.mark.parametrize("method", methods.names())
def test_what_is_modelled_is_what_a_run_with_gradients_models(
    method: str, sections: Any, pools: Callable[..., Pool | None], tmp_path: Path
) -> None:
    recipe = recipe_of(method, **sections)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few steps are no training
        ran = simulation.simulate(recipe, pools(recipe), tmp_path / "run")
    modelled = preview(recipe).modelled
    assert modelled is not None
    # By int4, the last block of this model's 4,400 entries is not full, and has a whole scale.
    near = 1e-9 if recipe.wire == "fp32" else 2e-3
    for key in ("time_s", "idle_fraction", "sent_bytes", "slow_link_bytes"):
        assert getattr(modelled, key) == pytest.approx(ran[key], rel=near), key
    assert modelled.stopped == ran["stopped"]
    assert modelled.by_link == {"east – west": modelled.slow_link_bytes}


def test_diloco_by_hand() -> None:
    """Three rounds of 2 steps on 3 workers in three regions, one of them of half the speed."""
    topology = {
        "regions": {"a": [1.0], "b": [1.0], "c": [0.5]},
        "links": [
            {"between": ["a", "b"], "bandwidth_gbit_s": 1.0},
            {"between": ["b", "c"], "bandwidth_gbit_s": 0.5},
            {"between": ["c", "a"], "bandwidth_gbit_s": 2.0},
        ],
    }
    recipe = recipe_of(
        method={"name": "diloco", "inner_steps": 2}, topology=topology, run={"steps": 18}
    )
    modelled = preview(recipe).modelled
    assert modelled is not None
    ring_s = 2 * 2 / 3 * MODEL_BYTES * 8 / 0.5e9
    assert modelled.time_s == pytest.approx(3 * (2 * STEP_S / 0.5 + ring_s))
    busy_s = 3 * 2 * STEP_S * (1 + 1 + 2)
    assert modelled.idle_fraction == pytest.approx(1 - busy_s / (3 * modelled.time_s))
    assert modelled.steps_of == {"a/w0": 6, "b/w0": 6, "c/w0": 6}
    a_link = round(3 * 4 / 3 * MODEL_BYTES)  # each of three carries 2(n − 1) parts of 1/n a round
    assert modelled.by_link == {"a – b": a_link, "b – c": a_link, "a – c": a_link}
    assert modelled.slow_link_bytes == modelled.sent_bytes == 3 * a_link


def test_a_tree_does_not_say_which_links_it_takes(archipel: Any, tmp_path: Path) -> None:
    recipe = recipe_of(topology={"name": "two-regions", "collective": "tree"})
    modelled = preview(recipe).modelled
    assert modelled is not None
    assert modelled.by_link == {}
    assert modelled.slow_link_bytes > 0
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    said = archipel("check", tmp_path / "recipe.yaml").out
    assert "on links that the model does not name: " in said


@pytest.mark.parametrize("collective", ["ring", "chain"])
def test_the_parts_of_an_all_reduce_add_up(collective: Any) -> None:
    links = [
        RegionLink(between=pair, bandwidth_gbit_s=1.0)
        for pair in (("a", "b"), ("b", "c"), ("c", "a"))
    ]
    topology = Topology(
        regions={"a": [1.0] * 2, "b": [1.0], "c": [1.0]}, links=links, collective=collective
    )
    group = tuple(worker.id for worker in topology.workers)
    cost = Network(topology, np.random.default_rng(0)).all_reduce(group, 1e6)
    assert sum(cost.between.values()) == pytest.approx(cost.slow_link_bytes)
    assert len(cost.between) == {"ring": 3, "chain": 2}[collective]


def test_seconds_end_it_and_a_target_loss_does_not() -> None:
    modelled = preview(recipe_of(run={"steps": 600, "seconds": 5, "target_loss": 1.0})).modelled
    assert modelled is not None
    assert (modelled.stopped, modelled.time_s) == ("seconds", 5)


# Computed: steps, learning rates, bytes of a message


def test_the_plan_and_the_message() -> None:
    recipe = recipe_of("noloco", run={"tokens": 640_000}, wire="int8", topology="internet-4")
    found = preview(recipe)
    assert (found.steps, found.tokens) == (10_000, 640_000)
    assert found.slowest_link == "all regions: 0.2 Gbit/s, 50 ms"
    assert found.model is not None
    entries = 64 * 16 + 16 * 16 * 13 + 48  # tied; one table of positions is 16 x 16
    assert found.model.parameters == entries
    message = found.model.message
    assert message.fp32_bytes == 4 * entries
    assert message.value_bytes == 2 * entries
    assert message.difference_bytes == entries + 2 * -(-entries // 128)
    assert found.modelled is not None
    assert found.modelled.message.fp32_bytes == MODEL_BYTES


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 625.5])
@pytest.mark.parametrize(("warmup", "final"), [(0.05, 0.1), (0.0, 0.0), (1.0, 0.5), (0.3, 2.0)])
def testlearning_rates_are_those_of_all_steps(steps: float, warmup: float, final: float) -> None:
    schedule = Schedule(warmup, final)
    every = [0.5 * schedule.factor(step, steps) for step in range(int(np.ceil(steps)))]
    found = learning_rates(schedule, 0.5, steps)
    assert found == pytest.approx((every[0], max(every), every[-1]))
    assert learning_rates(None, 0.5, steps) == (0.5, 0.5, 0.5)


# Without values: what a worker takes


@pytest.mark.parametrize(
    "config",
    [
        SyntheticTask(layers=1, width=16, sequence=16),
        SyntheticTask(layers=2, width=8, sequence=8, tied=False, precision="bf16"),
    ],
)
def test_what_is_found_without_values_is_what_a_real_model_has(config: TaskConfig) -> None:
    task = make_task(config)
    real, found = Replica(task, Run(1, 1, 0), CPU), look(task)
    assert found is not None
    assert found.layout == real.layout
    tensors = sum(spec.size_bytes for spec in real.state_specs[2:])
    assert found.state_bytes == tensors  # without flags and numbers
    assert found.lr == 3e-3


def user_task(model: Callable[[], nn.Module], optimizer: Any = None, loss: Any = None) -> Task:
    def batches(shard: Any, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(index))
        return x, x.sum(dim=1, keepdim=True)

    def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    return Task(
        model=model,
        loss=loss or squares,
        batches=batches,
        optimizer=optimizer or (lambda module: torch.optim.Adam(module.parameters(), lr=0.1)),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def test_activations_by_hand() -> None:
    """The batch, what ReLU gives, which is what the second layer takes, and what is squared."""
    found = look(user_task(perceptron))
    assert found is not None
    assert found.activation_bytes == 4 * 64 * (8 + 32 + 1)


def test_an_optimizer_without_memory_keeps_none() -> None:
    found = look(user_task(perceptron, lambda m: torch.optim.SGD(m.parameters(), lr=0.5)))
    assert found is not None
    assert (found.state_bytes, found.lr) == (0, 0.5)


def test_running_statistics_are_in_the_vector_and_constants_are_not() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        made.register_buffer("table", torch.ones(100))
        return made

    task = user_task(model)
    real, found = Replica(task, Run(1, 1, 0), CPU), look(task)
    assert found is not None
    assert found.layout == real.layout
    assert (found.layout.numel - found.layout.parameters, found.kept_bytes) == (8, 400)


def test_a_loss_that_looks_at_values_has_no_known_activations() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = (model(batch[0]) - batch[1]).square().mean()
        return value if float(value.detach()) < 1e9 else value * 0

    found = footprint_of(user_task(perceptron, loss=loss))
    assert found.activation_bytes is None
    assert found.layout.parameters == 8 * 32 + 32 + 32 + 1


def test_a_model_that_needs_values_is_made() -> None:
    def model() -> nn.Module:
        made = perceptron()
        assert float(next(made.parameters()).detach().abs().sum()) > 0
        return made

    assert look(user_task(model)) is None
    found = footprint_of(user_task(model))
    assert found.layout.parameters == 8 * 32 + 32 + 32 + 1
    assert found.lr == 0.1


def test_a_model_that_fails_is_told() -> None:
    def model() -> nn.Module:
        raise RuntimeError("no weights")

    with pytest.raises(UserError, match=r"^task\.model failed at .*: RuntimeError: no weights$"):
        footprint_of(user_task(model))


@pytest.mark.slow
def test_weights_on_disk_are_not_read(tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    shape = transformers.GPTNeoXConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    transformers.GPTNeoXForCausalLM(shape).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 400)
    task = make_task(
        CausalLmTask(
            model=str(tmp_path / "model"),
            data=str(tmp_path / "text.txt"),
            tokenizer="bytes",
            cache=str(tmp_path / "tokens"),
            sequence=16,
        )
    )
    real = Replica(task, Run(1, 1, 0), CPU)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"spoilt")
    found = look(task)
    assert found is not None
    assert found.layout == real.layout
    assert found.state_bytes == sum(spec.size_bytes for spec in real.state_specs[2:])


def test_a_large_model_is_told_without_making_it() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe = recipe_of("halos", task={"name": "stdlib", "layers": 24, "width": 2048, "heads": 16})
    found = preview(recipe)
    assert found.model is not None
    assert found.memory is not None
    assert found.model.parameters == 256 * 2048 + 64 * 2048 + 24 * (12 * 2048**2 + 4096) + 2048
    assert found.memory.worker_bytes == pytest.approx(12 * found.model.parameters, rel=1e-6)
    taken_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken_kb * 1024 < found.model.message.fp32_bytes / 4


# Memory


def test_memory_that_is_shared_counts_once() -> None:
    vector = torch.zeros(1000)
    assert bytes_of({"a": vector, "b": [vector[:10], (vector.view(10, 100),)]}) == 4000
    assert bytes_of([torch.zeros(10), torch.zeros(5, dtype=torch.int64), "x", None]) == 80


@pytest.mark.parametrize("method", methods.names())
def test_memory_grows_with_what_there_is(method: str) -> None:
    few = recipe_of(method, task=SMALL | {"width": 256}, topology="internet-4")
    many = recipe_of(method, task=SMALL | {"width": 256}, topology="internet-8")
    takes = footprint_of(make_task(few.task))
    one, two = memory_of(few, takes, 1), memory_of(few, takes, 2)
    vector, state = takes.vector_bytes, takes.state_bytes
    assert takes.activation_bytes is not None
    process = memory.PROCESS_BYTES + 3 * vector + state + takes.activation_bytes
    assert two.simulated_bytes - one.simulated_bytes == process
    assert one.worker_bytes == vector + state
    eight = memory_of(many, takes, 1)
    assert eight.simulated_bytes - one.simulated_bytes >= 4 * (vector + state + vector)
    assert eight.live_bytes - one.live_bytes >= 4 * (process - state)
    assert eight.host_bytes < eight.live_bytes / 8


def test_stages_share_what_a_worker_has() -> None:
    whole = recipe_of("noloco", topology="internet-4", task=SMALL | {"tied": False})
    cut = recipe_of(
        "noloco", topology="internet-4", task=SMALL | {"tied": False}, pipeline={"stages": 2}
    )
    takes = footprint_of(make_task(whole.task))
    assert memory_of(cut, takes).worker_bytes == memory_of(whole, takes).worker_bytes // 2


def test_a_container_has_what_it_may_take(tmp_path: Path) -> None:
    whole = machine_bytes([])
    assert whole is not None
    for text, expected in (("max\n", whole), ("1000000\n", 1_000_000), (f"{2**62}\n", whole)):
        (tmp_path / "memory.max").write_text(text)
        assert machine_bytes([tmp_path / "memory.max"]) == expected
    assert machine_bytes([tmp_path / "none"]) == whole


@pytest.fixture
def tiny_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("archipel.memory.machine_bytes", "archipel.preview.machine_bytes"):
        monkeypatch.setattr(place, lambda: 1_000_000)


TOO_LARGE = (
    r"^diloco: a simulated run takes about \d+ MB of memory, as computed, and this machine has "
    r"1.00 MB \(see: archipel check\)$"
)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_machine")
def test_a_run_that_does_not_fit_is_warned_of_before_it_starts(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=TOO_LARGE):
        experiment.simulate(recipe_of(run={"steps": 64}), processes=1, out=tmp_path)


@pytest.mark.usefixtures("tiny_machine")
@pytest.mark.parametrize(("live", "kind"), [(False, "a simulated run"), (True, "a live run, all")])
def test_check_warns_of_it_too(live: bool, kind: str) -> None:
    [warning] = preview(recipe_of(), 1, live=live).warnings
    assert warning.startswith(f"{kind}")
    assert "this machine has 1.00 MB" in warning


@pytest.mark.usefixtures("tiny_machine")
def test_nothing_is_computed_where_nothing_is_trained(tmp_path: Path) -> None:
    experiment.simulate(recipe_of(task="none"), out=tmp_path)
    found = preview(recipe_of(task="none"))
    assert (found.model, found.memory, found.warnings) == (None, None, [])


# The command


def write(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return file


def test_what_is_printed(archipel: Any, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "method: {name: halos, accumulate: 8}\ntopology: two-regions\nwire: int8\n"
        "task: {name: synthetic, layers: 1, width: 16, sequence: 16}\nrun: {steps: 800}\n",
    )
    answer = archipel("check", file, "--set", "run.seed=1")
    assert (answer.code, answer.err) == (0, "")
    first, *lines = answer.out.splitlines()
    assert first == (
        "Computed, not run: nothing was trained or measured. Times, and bytes on links, are "
        "modelled."
    )
    said = dict(line.split("  ", 1) for line in lines if not line.startswith(" "))
    said = {name: text.strip() for name, text in said.items()}
    assert said["method"] == "halos: accumulate 8 (published: 32)"
    assert said["topology"] == "two-regions: 8 workers in 2 regions"
    assert said["slowest link"] == "east – west: 1 Gbit/s, 35 ms"
    assert said["parameters"] == "4,400"
    assert said["message, live"].startswith("17,600 bytes a vector of weights as fp32; by int8 4,")
    assert said["learning rate"].endswith("0.003 at most, 0.000301 at last, as planned")
    assert said["plan"] == (
        "800 inner steps of all workers together, 51,200 tokens; 100 steps a worker on average"
    )
    assert said["message, modelled"].endswith("(profile pythia-70m-h100)")
    assert "s until it ends by its steps, workers idle" in said["time, modelled"]
    assert "fastest worker 238.391 ms" in said["time, modelled"]
    assert "for a simulated run, of which a worker's weights" in said["memory, computed"]
    assert "east – west: " in answer.out.split("bytes, modelled")[1]


def test_json_has_the_same_figures(archipel: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "method: noloco\ntask: {name: synthetic, layers: 1}\n")
    answer = archipel("check", file, "--set", "noloco.gamma=9", "--json")
    found = json.loads(answer.out)
    assert (answer.code, answer.err) == (0, "")
    assert found["changed"] == {"gamma": [9, 0.7]}
    assert found["memory"]["simulated_bytes"] > found["memory"]["worker_bytes"]
    assert sum(found["modelled"]["steps_of"].values()) >= found["steps"] == 10_000
    assert [text.split(":")[0] for text in found["warnings"]] == ["noloco"]


def test_a_method_that_needs_values_is_told_without_its_memory(
    archipel: Any, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    diloco = Path(methods.__path__[0], "diloco.py").read_text()
    build = "    steps = world.inner_steps("
    assert build in diloco
    own.write_text(diloco.replace(build, f"    assert float(theta.sum()) < 1e9\n{build}"))
    file = write(tmp_path, f"method: {own}\ntask: {{name: synthetic}}\n")
    answer = archipel("check", file)
    assert (answer.code, answer.err) == (0, "")
    told = "memory             not known: the method's actors look at values when they are made\n"
    assert answer.out.endswith(told)


def test_what_run_warns_of_is_warned_of(archipel: Any, tmp_path: Path) -> None:
    (tmp_path / "mytask.py").write_text(
        "import torch\nfrom archipel import Task\n"
        "def make():\n"
        "    return Task(model=lambda: torch.nn.Linear(3, 1),\n"
        "        loss=lambda model, batch: model(batch).square().mean(),\n"
        "        batches=lambda shard, index: torch.ones(2, 3),\n"
        "        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    file = write(tmp_path, f"method: diloco\ntask: {tmp_path}/mytask.py:make\n")
    answer = archipel("check", file)
    assert answer.code == 0
    assert "parameters         4\n" in answer.out
    assert answer.err.startswith(
        "archipel: warning: profile pythia-70m-h100: messages are timed as 281,706,496 bytes"
    )


def test_a_measured_profile_is_measured_when_it_runs(archipel: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "method: diloco\nprofile: measured\ntask: {name: synthetic}\n")
    answer = archipel("check", file)
    assert answer.code == 0
    assert (
        "modelled           nothing yet: profile measured takes the time of a step, and the "
        "model's own bytes, when the run starts\n" in answer.out
    )
    assert json.loads(archipel("check", file, "--json").out)["modelled"] is None


@pytest.mark.parametrize(
    "text",
    [
        "method: halo\n",
        "method: halos\ntask: {name: synthetic, widht: 3}\n",
        "method: halos\ntask: {name: synthetic, width: 33}\n",
        "method: halos\nprofile: measured\ntask: none\n",
        "method: halos\ntask: none\nrun: {tokens: 100}\n",
        "method: halos\ntask: none\nrun: {target_loss: 1}\n",
        "method: halos\ntopology: two-regions\npipeline: {stages: 2}\ntask: none\n",
        "method: diloco\ntopology: {regions: {a: [1.0], b: [1.0]}}\ntask: none\n",
        "method: diloco\ntask: none\nfaults: {schedule: [{kind: leave, node: a/w9, at_s: 1}]}\n",
        "method: [diloco\n",
    ],
)
def test_a_wrong_recipe_is_told_as_run_tells_it(archipel: Any, tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    ran, checked = archipel("run", file, "--out", tmp_path / "out"), archipel("check", file)
    assert ran.code == 2
    assert (checked.code, checked.out, checked.err) == (2, "", ran.err)


def test_live_refuses_what_launch_refuses(archipel: Any, tmp_path: Path) -> None:
    slow = "{kind: slow, node: east/w0, at_s: 1, for_s: 2, factor: 3}"
    for more, told in (
        ("live: {processes: 2}\npipeline: {stages: 2}\n", "live.processes = 2: a stage of a pipe"),
        (f"faults: {{schedule: [{slow}]}}\n", "faults"),
    ):
        file = write(tmp_path, f"method: diloco\ntopology: two-regions\ntask: none\n{more}")
        assert archipel("check", file).code == 0
        refused = archipel("check", file, "--live")
        assert (refused.code, refused.out) == (2, "")
        assert refused.err.startswith(f"archipel: {told}")
