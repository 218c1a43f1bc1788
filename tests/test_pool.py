"""The pool: the same bytes whatever its size, errors that say whose they are, nothing left
behind.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from worlds import small

from archipel import methods, simulation
from archipel.errors import Diverged, TrainingError, UserError
from archipel.recipe import Recipe, parse_recipe
from archipel.train.configs import task_config
from archipel.train.pool import Pool, Process
from archipel.train.replica import Run

TASK = {
    "name": "synthetic",
    "layers": 1,
    "width": 16,
    "heads": 2,
    "sequence": 16,
    "valid_sequences": 8,
    "vocabulary": 16,
}
TOPOLOGY = {
    "regions": {"a": [1.0, 0.6], "b": [0.3, 0.8, 0.5]},
    "default": {"bandwidth_gbit_s": 1.0, "latency_ms": 40, "jitter": 0.4},
}


def recipe(name: str, **fields: Any) -> Recipe:
    return parse_recipe(
        {
            "method": {"name": name, **small(name, inner_steps=4, accumulate=3)},
            "topology": TOPOLOGY,
            "task": TASK,
            "run": {"steps": 150, "evaluations": 3},
        }
        | fields
    )


def files(directory: Path) -> dict[str, bytes]:
    return {
        name: (directory / name).read_bytes()
        for name in ("metrics.jsonl", "weights.safetensors", "trace.json", "recipe.yaml")
    }


@pytest.fixture(scope="module")
def left(
    pools: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, bytes]]:
    """The files of every method's run with one process, with two, and once more with two."""
    out = tmp_path_factory.mktemp("pool")
    found = {}
    for size, processes in (("one", 1), ("two", 2), ("again", 2)):
        for name in methods.names():
            simulation.simulate(recipe(name), pools(recipe(name), processes), out / size / name)
            found[size, name] = files(out / size / name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names())
def test_one_process_and_two_give_identical_files_and_so_do_two_runs(
    name: str, left: dict[tuple[str, str], dict[str, bytes]]
) -> None:
    assert left["one", name] == left["two", name] == left["again", name]


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names())
def test_it_learns(name: str, left: dict[tuple[str, str], dict[str, bytes]]) -> None:
    lines = [json.loads(line) for line in left["one", name]["metrics.jsonl"].splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


TASK_FILE = """
from pathlib import Path

import torch
from torch import nn
from archipel import Task

def batches(shard, index):
    generator = torch.Generator().manual_seed(shard.index * 1000 + index)
    y = torch.randint(0, 2, (8,), generator=generator)
    return torch.randn(8, 1, 6, 6, generator=generator) + y.view(8, 1, 1, 1), y

def loss(model, batch):
    how = Path(__file__ + ".how").read_text()
    if how == "an exception":
        raise KeyError('my mistake')
    if how == "a float":
        return 3.0
    if how == "a vector":
        return model(batch[0])
    if how == "shapes":
        return nn.functional.linear(batch[0], torch.zeros(3, 5)).sum()
    if how == "nan":
        return model(batch[0]).sum() * float("nan")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def make():
    return Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
        ),
        loss=loss,
        batches=batches,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5),
        valid_batches=2,
        description="bright or dark",
    )
"""


def line_of(text: str) -> str:
    """Where a line of the user's task is."""
    return f"mytask.py:{TASK_FILE.splitlines().index(text) + 1}"


class Own:
    """A user's task file: an image model with BatchNorm, whose loss is as `how` says."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mytask.py"
        self.path.write_text(TASK_FILE)

    def recipe(self, name: str, how: str = "sound") -> Recipe:
        self.path.with_name("mytask.py.how").write_text(how)
        return recipe(
            name, task={"name": f"{self.path}:make"}, run={"steps": 200, "evaluations": 2}
        )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Own:
    return Own(tmp_path_factory.mktemp("own"))


@pytest.mark.slow
def test_a_users_image_model_with_batchnorm(pools: Any, own: Own, tmp_path: Path) -> None:
    """It learns with every method; running statistics are averaged, and batches counted by the
    worker that saw most.

    All of it is the same with one process and with two, and so is what is left of a run whose
    workers are still training.
    """
    for name in methods.names():
        given = own.recipe(name)
        simulation.simulate(given, pools(given, 1), tmp_path / "one" / name)
        summary = simulation.simulate(given, pools(given, 2), tmp_path / name)
        weights = load_file(tmp_path / name / "weights.safetensors")
        assert summary["final_loss"] < 0.6, name
        assert float(weights["1.running_var"].min()) > 0, name
        assert 20 < int(weights["1.num_batches_tracked"]) <= 200, name
        assert not torch.equal(weights["1.running_mean"], torch.zeros(4)), name
        assert files(tmp_path / name) == files(tmp_path / "one" / name), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "an exception",
            line_of("        raise KeyError('my mistake')") + ": KeyError: 'my mistake'",
        ),
        (
            "a float",
            "task.loss must return a 0-d tensor that depends on the model's parameters, not a "
            "float",
        ),
        (
            "a vector",
            "task.loss must return a 0-d tensor that depends on the model's parameters, not a "
            "tensor of shape (8, 2)",
        ),
        (
            "shapes",
            line_of("        return nn.functional.linear(batch[0], torch.zeros(3, 5)).sum()")
            + ": RuntimeError: ",
        ),
    ],
)
def test_errors_of_the_task_name_worker_and_place(
    pools: Any, own: Own, tmp_path: Path, how: str, text: str
) -> None:
    """In the middle of a run: when it was tried out, the task was sound."""
    pool = pools(own.recipe("diloco"))
    pool.begin(Run(1, 5, 0))
    with pytest.raises(TrainingError, match=r"^worker [ab]/w") as error:
        simulation.simulate(own.recipe("diloco", how), pool, tmp_path / "run")
    assert text in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_that_is_there_from_the_start_is_told_before_the_run(
    own: Own, tmp_path: Path
) -> None:
    given = own.recipe("diloco", "a float")
    with simulation.open_pool(given, 1) as pool, pytest.raises(UserError) as error:
        simulation.simulate(given, pool, tmp_path / "run")
    assert str(error.value) == (
        "task.loss must return a 0-d tensor that depends on the model's parameters, not a float"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker .* it is restarted")
def test_a_pool_goes_on_after_a_run_that_diverged(
    pools: Any, left: dict[tuple[str, str], dict[str, bytes]], tmp_path: Path
) -> None:
    """The next run on it is as ever."""
    wild = recipe("diloco", method={"name": "diloco", "inner_steps": 4, "outer_lr": 1e30})
    with pytest.raises(Diverged):
        simulation.simulate(wild, pools(wild, 2), tmp_path / "wild")
    assert not (tmp_path / "wild").exists()
    simulation.simulate(recipe("sync_sgd"), pools(wild, 2), tmp_path / "after")
    assert files(tmp_path / "after") == left["one", "sync_sgd"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker .* it is restarted")
def test_a_loss_that_is_not_finite_names_worker_and_step(
    pools: Any, own: Own, tmp_path: Path
) -> None:
    given = own.recipe("diloco", "nan")
    with pytest.raises(Diverged) as error:
        simulation.simulate(given, pools(given), tmp_path / "run")
    assert "is nan at its inner step" in str(error.value)
    assert "3 times in a row" in str(error.value)
    assert str(error.value).startswith("diloco: ")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_process_that_is_killed_is_noticed_and_nothing_is_left_running() -> None:
    config = task_config("synthetic").model_validate(TASK)
    topology = recipe("diloco").topology
    workers = [worker.id for worker in topology.workers]
    with Pool(config, workers, 2) as pool:
        pool.begin(Run(10, len(workers), 0))
        processes = [process.popen for process in pool.processes]
        theta = pool.replica.layout.read(pool.replica.module)
        promises = [pool.train(worker, theta, 10_000, 0, 0.0) for worker in workers]
        os.kill(processes[0].pid, signal.SIGKILL)
        death = r"^a pool process died \(exit code -9\); the machine may be out of memory$"
        with pytest.raises(TrainingError, match=death):
            [promise.result() for promise in promises]
    assert all(process.poll() is not None for process in processes)


def test_ctrl_c_never_reaches_a_pool_process() -> None:
    """A terminal sends it to its group: a process that were still importing would end there."""
    process = Process.start(os.memfd_create("nothing"))
    with process.popen, process.connection:
        assert os.getpgid(process.popen.pid) == process.popen.pid != os.getpgid(0)
    assert process.popen.returncode == 0  # it ends when its connection does


@pytest.mark.slow
def test_the_measured_profile_is_of_this_task_on_this_machine(pools: Any) -> None:
    profile = simulation.measure_profile(pools(recipe("diloco")))
    parameters = (
        16 * 16 + 16 * 16 + 12 * 16 * 16 + 3 * 16
    )  # tied embeddings, positions, one block, norms
    assert profile.model_bytes == 4 * parameters
    assert 1e-4 < profile.step_time_s < 1.0


def test_a_pool_without_processes_is_refused() -> None:
    with (
        pytest.raises(UserError, match=r"^processes = 0: at least 1 is needed$"),
        simulation.open_pool(recipe("diloco"), 0),
    ):
        pass
