"""`stage.py`: stages that are processes of their own compute what `stages.py` computes in one, to
the bit.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worlds import linear_task

from archipel.actor import NodeId
from archipel.errors import TrainingError, UserError
from archipel.recipe import parse_recipe
from archipel.train.data import shards_of
from archipel.train.pipeline import Pipeline
from archipel.train.replica import Replica, Run
from archipel.train.stage import Stage
from archipel.train.stages import Stages
from archipel.train.task import Task, make_task

CPU = torch.device("cpu")
SEED, STEPS = 3, 6


def task_called(name: str) -> Task:
    if name == "linear":
        return linear_task()
    if name == "noisy":
        return replace(linear_task(), model=noisy, loss=noisy_loss)
    sizes = {"layers": 2, "width": 8, "heads": 2, "sequence": 8, "batch_size": 4, "vocabulary": 16}
    recipe = parse_recipe(
        {"method": "noloco", "task": {"name": "synthetic", "tied": False, **sizes}}
    )
    return make_task(recipe.task)


def noisy() -> nn.Module:
    """Random numbers in both stages, and statistics."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.2)
    ).append(nn.Linear(8, 1))


def noisy_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0] + 0.1 * torch.randn_like(batch[0])).squeeze(1)
    return (out - batch[1] + 0.1 * torch.randn_like(batch[1])).square().mean()


def pipe(stages: int, replicas: int, routing: str) -> Pipeline:
    regions = "ab" * stages * replicas
    nodes = [NodeId(regions[i], f"w{i}") for i in range(stages * replicas)]
    return Pipeline.of(nodes, stages, 2, routing)  # type: ignore[arg-type]


def fresh(replica: Replica, q: int) -> tuple[list[Tensor], Tensor]:
    """State and weights of replica q's stage; every replica starts elsewhere."""
    state = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in replica.state_specs]
    replica.reset(state)
    theta = replica.layout.read(replica.module)
    return state, theta + 0.05 * q


def node(name: str, shape: Pipeline, rank: int, folder: str, absent: bool) -> None:
    """A process: one stage; leaves its weights, losses and counts in `folder`."""
    torch.set_num_threads(1)
    world = shape.stages * shape.replicas
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    stage = Stage(
        task_called(name),
        Run(40, shape.replicas, SEED),
        CPU,
        shape,
        rank,
        shards_of(["a"] * shape.replicas, SEED),
        20,
    )
    _, theta = fresh(stage.replica, stage.me)
    if absent and rank == 1:
        return
    try:
        losses = stage.train(theta, STEPS - 2, 0, 0, lambda: None)
        losses += stage.train(theta, 2, (STEPS - 2) * shape.replicas, STEPS - 2, lambda: None)
    except TrainingError as error:
        (Path(folder) / f"{rank}.error").write_text(str(error))
        return
    torch.save(
        (theta, losses, stage.messages, stage.sent_bytes, stage.slow_link_bytes),
        f"{folder}/{rank}.pt",
    )
    dist.barrier()  # so that nobody closes a connection that another one still uses


def run_nodes(name: str, shape: Pipeline, folder: Path, absent: bool = False) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = range(shape.stages * shape.replicas)
    processes = [
        spawn.Process(target=node, args=(name, shape, rank, str(folder), absent)) for rank in ranks
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "replicas", "routing"),
    [
        ("linear", 2, 2, "random"),
        ("gpt", 3, 1, "fixed"),
        ("gpt", 2, 2, "random"),
        ("noisy", 2, 2, "random"),
    ],
)
def test_processes_compute_what_one_process_does(
    name: str, stages: int, replicas: int, routing: str, tmp_path: Path
) -> None:
    shape, task = pipe(stages, replicas, routing), task_called(name)
    run_nodes(name, shape, tmp_path)
    together = Stages(task, Run(40, replicas, SEED), CPU, shape)
    nodes = [fresh(one, q) for row in together.replicas for q, one in enumerate(row)]
    states, thetas = [state for state, _ in nodes], [theta for _, theta in nodes]
    losses = together.train(
        range(replicas),
        states,
        thetas,
        shards_of(["a"] * replicas, SEED),
        STEPS,
        [0] * len(nodes),
        0,
    )
    left = {rank: torch.load(tmp_path / f"{rank}.pt") for rank in range(stages * replicas)}
    for i, theta in enumerate(thetas):
        k, q = divmod(i, replicas)
        found, its_losses, *_ = left[q * stages + k]
        assert torch.equal(found, theta)
        assert its_losses == (losses[q] if k == stages - 1 else [])
    # Every micro-batch crosses every boundary once in each direction, and the norm once in each.
    crossings = 2 * (stages - 1) * replicas * STEPS
    assert sum(one[2] for one in left.values()) == crossings * 2 + crossings
    sizes = {
        "linear": 4 * 8 * 4,
        "noisy": 4 * 8 * 4,
        "gpt": 2 * 8 * 8 * 4,
    }  # a micro-batch's activations in fp32
    assert sum(one[3] for one in left.values()) == crossings * (2 * sizes[name] + 4)
    assert sum(one[4] for one in left.values()) > 0  # neighbours live in two regions


@pytest.mark.slow
def test_a_neighbour_that_is_gone_is_named(tmp_path: Path) -> None:
    run_nodes("linear", pipe(2, 1, "fixed"), tmp_path, absent=True)
    text = (tmp_path / "0.error").read_text()
    assert text.startswith("no gradient of micro-batch 0 of inner step 0 from b/w1 within 20 s: ")


def test_a_stage_gives_no_single_gradient() -> None:
    stage = Stage(linear_task(), Run(1, 1, 0), CPU, pipe(2, 1, "fixed"), 0, shards_of(["a"], 0), 1)
    with pytest.raises(UserError, match=r"^pipeline: this method asks for single gradients"):
        stage.gradient(torch.zeros(stage.replica.layout.numel), 0)
