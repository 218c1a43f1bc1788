"""A worker of several processes: FSDP2 shards one copy of the model over them; to the rest of the
program it is one vector.

What belongs here: one process's part of such a worker's inner steps. What does not: who starts the
processes and tells them what to do next.

All processes of a worker make the same calls in the same order: the first one, which has the
vector, is its `Leader`, and tells the others what it is asked for. A batch is cut along its first
dimension, a part for each process, so that the worker takes the steps that one process would take
with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from archipel.errors import UserError
from archipel.train.batch import micro
from archipel.train.data import Shard
from archipel.train.replica import Run, add_gradient, finite, layout_of, set_learning_rate
from archipel.train.seeding import seed_everything, seed_step
from archipel.train.task import Task
from archipel.vector import integer_buffers, parameters, places


class ShardedReplica:
    """This process's part of one worker's model and inner optimizer. The process group is the
    worker's processes.

    Attributes:
        layout: of the whole model.
    """

    def __init__(self, task: Task, run: Run, device: torch.device, shard: Shard) -> None:
        self.task, self.run, self.device, self.shard = task, run, device, shard
        self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)  # type: ignore[arg-type]
        self.module = task.seeded_model(run.seed).to(device)
        self.layout = layout_of(task, self.module, device)
        shard_blocks(self.module, self.mesh)
        self.parameters = [
            parameter
            for parameter in parameters(self.module).values()
            if isinstance(parameter, DTensor)
        ]
        tail = self.layout.slots[len(self.parameters) :]
        owners = places(self.module, [slot.name for slot in tail])
        self.statistics = list(zip(tail, owners, strict=True))
        for slot, (owner, name) in self.statistics:
            if isinstance(getattr(owner, name), DTensor):
                raise UserError(
                    f"live.processes = {self.processes}: training changes the frozen parameter "
                    f"{slot.name!r}, of which each process would have a part only; make it a buffer"
                )
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Have the inner optimizer begin anew."""
        self.optimizer = self.task.optimizer_of(self.module)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    # What the worker is asked for. Vectors have shape (numel,) and are overwritten with the result,
    # in every process.

    def train(
        self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]
    ) -> list[float]:
        """See `Replica.train`.

        Raises:
            NonFiniteLoss: a loss is not finite.
        """
        with self._at(theta):
            losses = []
            for k in range(steps):
                losses.append(self._backward(cursor + k))
                self._step(progress + k * self.run.workers)
                after_step()
        return finite(losses, cursor)

    def gradient(self, theta: Tensor, cursor: int) -> list[float]:
        """See `Replica.gradient`.

        Raises:
            NonFiniteLoss: the loss is not finite.
        """
        with self._at(theta):
            loss = self._backward(cursor)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=False):
            gradient = slot.view(theta)
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(_whole(parameter.grad))
        return finite([loss], cursor)

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        """See `Replica.apply`."""
        dist.broadcast(gradient, 0)
        with self._at(theta):
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=False):
                part = slot.view(gradient)
                parameter.grad = self._part(part.to(self.device), parameter) if part.any() else None
            seed_everything(self.run.seed * 1_000_003 + progress, self.device)
            self._step(progress)
        theta[self.layout.parameters :] = gradient[self.layout.parameters :]
        return []

    def integers(self) -> dict[str, Tensor]:
        """The integer buffers of this process's model, by name."""
        return {name: tensor.clone() for name, tensor in integer_buffers(self.module).items()}

    def follow(self, what: str, arguments: tuple[int, ...]) -> None:
        """Do what the first process is asked for; vectors come from there."""
        theta = torch.empty(self.layout.numel)
        match what, arguments:
            case "train", (steps, progress, cursor):
                self.train(theta, steps, progress, cursor, lambda: None)
            case "gradient", (cursor,):
                self.gradient(theta, cursor)
            case "apply", (progress,):
                self.apply(theta, torch.empty(self.layout.numel), progress)
            case "reset_optimizer", ():
                self.reset_optimizer()
            case _:
                raise AssertionError(what)

    # How

    @contextmanager
    def _at(self, theta: Tensor) -> Iterator[None]:
        """Take the first process's `theta` as weights; afterwards it holds what has become of
        them.
        """
        dist.broadcast(theta, 0)
        slots = self.layout.slots
        with torch.no_grad():
            for slot, parameter in zip(slots, self.parameters, strict=False):
                parameter.copy_(self._part(slot.view(theta).to(self.device), parameter))
            for slot, (owner, name) in self.statistics:
                getattr(owner, name).copy_(slot.view(theta))
        yield
        with torch.no_grad():
            for slot, parameter in zip(slots, self.parameters, strict=False):
                slot.view(theta).copy_(_whole(parameter))
            # Each process has seen its part of the batches only.
            for slot, (owner, name) in self.statistics:
                mean = getattr(owner, name).float().cpu() / self.processes
                dist.all_reduce(mean)
                slot.view(theta).copy_(mean)

    def _backward(self, index: int) -> Tensor:
        shard = self.shard
        seed_step(self.run.seed, shard, index * self.processes + self.rank, self.device)
        self.optimizer.zero_grad()
        batch = micro(self.task.batches(shard, index), self.processes)[self.rank]
        loss = add_gradient(self.task, self.module, batch, self.device)
        mean = loss.float().cpu() / self.processes
        dist.all_reduce(mean)
        return mean

    def _step(self, progress: int) -> None:
        if self.task.gradient_clip is not None:
            gradients = [
                parameter.grad for parameter in self.parameters if parameter.grad is not None
            ]
            norm = _whole(torch.nn.utils.get_total_norm(gradients))
            factor = float(torch.clamp(self.task.gradient_clip / (norm + 1e-6), max=1.0))
            for gradient in gradients:
                gradient.mul_(factor)
        set_learning_rate(self.optimizer, self.task, self.run, progress)
        self.optimizer.step()

    def _part(self, whole: Tensor, parameter: DTensor) -> DTensor:
        """This process's part of a tensor that all processes have; no message."""
        return distribute_tensor(
            whole.to(parameter.dtype), self.mesh, parameter.placements, src_data_rank=None
        )


@dataclass(frozen=True)
class Leader:
    """The first process of a worker. It takes inner steps for all of the worker's processes: `tell`
    makes the others `follow` each call, without waiting for them.
    """

    replica: ShardedReplica
    tell: Callable[[str, tuple[int, ...]], None]
    state: Sequence[Tensor] = ()  # each process has a part of the optimizer's: none is saved

    def train(
        self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]
    ) -> list[float]:
        self.tell("train", (steps, progress, cursor))
        return self.replica.train(theta, steps, progress, cursor, after_step)

    def gradient(self, theta: Tensor, cursor: int) -> list[float]:
        self.tell("gradient", (cursor,))
        return self.replica.gradient(theta, cursor)

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        self.tell("apply", (progress,))
        return self.replica.apply(theta, gradient, progress)

    def reset_optimizer(self) -> None:
        self.tell("reset_optimizer", ())
        self.replica.reset_optimizer()

    def integers(self) -> dict[str, Tensor]:
        return self.replica.integers()

    def take_counts(self) -> tuple[int, int, int]:
        return 0, 0, 0  # FSDP does not say what it sends


def shard_blocks(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each child of `module` by itself, so that only one of them is whole at a time, and what
    remains with the root.

    A child that shares a parameter with another one belongs to the root, lest FSDP untie it.
    """
    seen: dict[int, int] = {}
    for child in module.children():
        for parameter in child.parameters():
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    for child in module.children():
        own = list(child.parameters())
        if own and all(seen[id(parameter)] == 1 for parameter in own):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _whole(tensor: Tensor | None) -> Tensor:
    """All of a tensor that is sharded over the processes."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()
