"""`sharded.py`: two processes that share one copy of a model take the steps of one process."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inline import linear_task
from torch import Tensor
from torch.distributed.tensor import DTensor

from archipel.data import Shard
from archipel.recipe import parse_recipe
from archipel.replica import Replica, Run
from archipel.sharded import ShardedReplica
from archipel.task import Task, make_task

CPU, RUN, SHARD = torch.device("cpu"), Run(40, 2, 3), Shard(1, 2, 0, 1, 3)


def task_called(name: str) -> Task:
    if name == "linear":
        return linear_task()
    sizes = {"layers": 2, "width": 8, "heads": 2, "sequence": 8, "batch_size": 4, "vocabulary": 16}
    return make_task(parse_recipe({"method": "noloco", "task": {"name": "synthetic", "tied": name == "tied", **sizes}}).task)


def calls(replica: Any, start: Tensor) -> tuple[Tensor, list[float]]:
    """A bit of everything that a worker is asked for."""
    theta = start.clone()
    losses = replica.train(theta, SHARD, 6, 3, 0)
    gradient = theta.clone()
    losses += replica.differentiate(gradient, SHARD, 6)
    replica.apply(theta, gradient, 15)
    losses += replica.train(theta, SHARD, 3, 17, 7)
    return theta, losses


class Whole:
    """A replica that keeps its worker's state to itself, as a sharded one does."""

    def __init__(self, task: Task) -> None:
        self.replica = Replica(task, RUN, CPU)
        self.state = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.replica.state_specs]
        self.replica.reset(self.state)

    def train(self, *arguments: Any) -> list[float]:
        return self.replica.train(self.state, *arguments)

    def differentiate(self, *arguments: Any) -> list[float]:
        return self.replica.differentiate(self.state, *arguments)

    def apply(self, *arguments: Any) -> list[float]:
        return self.replica.apply(self.state, *arguments)


def start_of(task: Task) -> Tensor:
    replica = Replica(task, RUN, CPU)
    return replica.layout.read(replica.module)


def process(name: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    task = task_called(name)
    replica = ShardedReplica(task, RUN, CPU)
    held = sum(p.to_local().numel() for p in replica.module.parameters() if isinstance(p, DTensor))
    theta = start_of(task)
    if rank:
        theta.fill_(9.0)  # only the first process knows where to start
    found, losses = calls(replica, theta)
    torch.save((found, losses, held), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "tied", "untied"])
def test_two_processes_take_the_steps_of_one(name: str, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=process, args=(name, rank, str(tmp_path))) for rank in range(2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(200)
        assert one.exitcode == 0
    task = task_called(name)
    expected, losses = calls(Whole(task), start_of(task))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for found, its_losses, _ in parts:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert its_losses == pytest.approx(losses, rel=1e-5)
    size = len(expected)
    assert [held for _, _, held in parts] != [size, size]
    assert sum(held for _, _, held in parts) == size
