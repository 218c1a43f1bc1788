"""What a worker of a task takes, found out without making anything as large as its model.

What belongs here: one worker's weights, what its inner optimizer keeps, what a batch leaves for the
backward pass. What does not: how many workers, processes and copies there are (`memory.py`).

One inner step is taken with torch's fake tensors, which have a size and no memory: a model of 10⁹
parameters takes seconds and some megabytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from archipel.train.batch import batch_of, first_part, loss_of
from archipel.train.data import Shard
from archipel.train.replica import Replica, Run
from archipel.train.seeding import seed_step, seeds_kept
from archipel.train.statistics import Written, of_norms
from archipel.train.task import CPU, Batch, Task
from archipel.vector import Layout, beside


@dataclass(frozen=True)
class Footprint:
    """What a worker takes.

    Attributes:
        layout: of the model. Its tensors may have no values.
        state_bytes: what the inner optimizer keeps from step to step.
        activation_bytes: what the forward pass leaves for the backward pass, of the part of a batch
            that goes through the model at once; None: not known.
        lr: the inner optimizer's largest learning rate, before any schedule.
    """

    layout: Layout
    state_bytes: int
    activation_bytes: int | None
    lr: float

    @property
    def vector_bytes(self) -> int:
        """Of one vector of all weights, as fp32."""
        return 4 * self.layout.numel

    @property
    def kept_bytes(self) -> int:
        """Of what training does not change, which each copy of the model has besides."""
        return sum(tensor.nbytes for tensor in self.layout.kept.values())


def footprint_of(task: Task) -> Footprint:
    """What a worker of `task` takes. If its functions need values, the model is made.

    Raises:
        UserError: the task cannot be trained like this.
    """
    return look(task) or _made(task)


def look(task: Task) -> Footprint | None:
    """What a worker of `task` takes; None: its functions need values."""
    try:
        with seeds_kept(CPU), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who makes the model will see them too
            shard = Shard(0, 1, 0, 1, seed=0)
            seed_step(0, shard, 0, CPU)
            batch = first_part(task, batch_of(task, shard, 0))
            with no_values():
                return _look(task, batch)
    except Exception:  # of the user's functions it can be anything
        return None


def no_values() -> FakeTensorMode:
    """Tensors that are made meanwhile have a size and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _look(task: Task, batch: Batch) -> Footprint:
    module = task.model()
    written, norms = Written(beside(module)), of_norms(module)
    activation_bytes, changing = None, None
    try:
        activation_bytes = _activation_bytes(task, module, batch)
    except Exception:  # the loss looks at values, and the rest can be told all the same
        pass
    else:
        changed = {name for name, tensor in beside(module).items() if written.has(name, tensor)}
        changing = changed | norms
    optimizer = task.optimizer_of(module)
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    state_bytes = bytes_of(list(optimizer.state.values()))
    return Footprint(Layout.of(module, changing), state_bytes, activation_bytes, lr)


def _activation_bytes(task: Task, module: nn.Module, batch: Batch) -> int:
    """What the forward pass keeps, without the model's own tensors; memory that several tensors
    share counts once.
    """
    own = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _memory(tensor) not in own:
            kept[_memory(tensor)] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(task, module, batch, CPU)
    return bytes_of(list(kept.values()))


def _made(task: Task) -> Footprint:
    replica = Replica(task, Run(1, 1, 0), CPU)
    groups = replica.optimizer.param_groups
    return Footprint(
        replica.layout,
        sum(spec.size_bytes for spec in replica.state_specs),
        None,
        max(float(group["initial_lr"]) for group in groups),
    )


def bytes_of(value: object) -> int:
    """Memory of all tensors in a value: in its dicts, lists, tuples and dataclasses. Memory that
    several of them share counts once.
    """
    memories = {_memory(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors_in(value)}
    return sum(memories.values())


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor is; one without values has a place too."""
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(value: object) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case dict():
            yield from _tensors_in(list(value.values()))
        case list() | tuple():
            for one in value:
                yield from _tensors_in(one)
        case _ if is_dataclass(value):
            for field in fields(value):
                yield from _tensors_in(getattr(value, field.name))
