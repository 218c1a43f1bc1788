"""`live/sharded.py`: two processes that share one copy of a model take the steps of one process."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from worlds import linear_task

from archipel.recipe import parse_recipe
from archipel.train.data import Shard
from archipel.train.inner_steps import Solo
from archipel.train.replica import Replica, Run
from archipel.train.sharded import Leader, ShardedReplica
from archipel.train.task import Task, make_task

CPU, RUN, SHARD = torch.device("cpu"), Run(40, 2, 3), Shard(1, 2, 0, 1, 3)


def task_called(name: str) -> Task:
    if name == "linear":
        return linear_task()
    sizes = {"layers": 2, "width": 8, "heads": 2, "sequence": 8, "batch_size": 4, "vocabulary": 16}
    return make_task(
        parse_recipe(
            {"method": "noloco", "task": {"name": "synthetic", "tied": name == "tied", **sizes}}
        ).task
    )


def calls(replica: Any, start: Tensor) -> tuple[Tensor, list[float]]:
    """A bit of everything that a worker is asked for."""
    theta = start.clone()
    losses = replica.train(theta, 6, 3, 0, lambda: None)
    gradient = theta.clone()
    losses += replica.gradient(gradient, 6)
    replica.apply(theta, gradient, 15)
    losses += replica.train(theta, 3, 17, 7, lambda: None)
    return theta, losses


def start_of(task: Task) -> Tensor:
    replica = Replica(task, RUN, CPU)
    return replica.layout.read(replica.module)


def process(name: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    task = task_called(name)
    replica = ShardedReplica(task, RUN, CPU, SHARD)
    held = sum(p.to_local().numel() for p in replica.module.parameters() if isinstance(p, DTensor))
    if rank:  # the calls that the first process makes, which is the only one to know the vectors
        replica.follow("train", (6, 3, 0))
        replica.follow("gradient", (6,))
        replica.follow("apply", (15,))
        replica.follow("train", (3, 17, 7))
        torch.save(held, f"{folder}/1.pt")
    else:
        told: list[tuple[str, tuple[int, ...]]] = []
        found, losses = calls(Leader(replica, lambda *what: told.append(what)), start_of(task))
        torch.save((found, losses, held, told), f"{folder}/0.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "tied", "untied"])
def test_two_processes_take_the_steps_of_one(name: str, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=process, args=(name, rank, str(tmp_path))) for rank in range(2)
    ]
    for one in processes:
        one.start()
    for one in processes:
        one.join(200)
        assert one.exitcode == 0
    task = task_called(name)
    expected, losses = calls(Solo(Replica(task, RUN, CPU), SHARD), start_of(task))
    found, its_losses, held, told = torch.load(tmp_path / "0.pt")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert its_losses == pytest.approx(losses, rel=1e-5)
    assert told == [
        ("train", (6, 3, 0)),
        ("gradient", (6,)),
        ("apply", (15,)),
        ("train", (3, 17, 7)),
    ]
    rest = torch.load(tmp_path / "1.pt")
    assert held + rest == len(expected)  # together they hold the model, and neither has all of it
    assert 0 < rest < len(expected)
