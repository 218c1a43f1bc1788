"""Which of a model's tensors training changes without an optimizer.

What belongs here: finding that out by one forward pass in training mode, and checking during a run
that it stays true. What does not: how such tensors travel (`vector.py`).

A running mean has to be averaged over the workers; a mask of −inf, a frozen table or a complex
rotary buffer must stay what it is. Both are buffers. What tells them apart is whether the model
writes to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn

from archipel.errors import UserError
from archipel.train.batch import batch_of, first_part, loss_of
from archipel.train.data import Shard
from archipel.train.seeding import seed_step, seeds_kept
from archipel.train.task import Task, blaming
from archipel.vector import COUNTING, beside, places


@cache
def changing(task: Task, device: torch.device) -> frozenset[str]:
    """The names of the floating-point buffers and frozen parameters that a training step of `task`
    changes: the first batch of a throw-away model is looked at.

    Raises:
        UserError: the task fails on it; or one that it changes can neither be averaged nor counted.
    """
    module = task.seeded_model(0).to(device)
    before = beside(module)
    if all(tensor.dtype in COUNTING for tensor in before.values()):
        return frozenset()
    # Of buffers also the values: torch does not count all that is written to them.
    buffers = {n: tensor for n, tensor in before.items() if not isinstance(tensor, nn.Parameter)}
    written, values = Written(before), {name: _bits(tensor) for name, tensor in buffers.items()}
    finite_before = {name for name, tensor in before.items() if _is_finite(tensor)}
    with seeds_kept(device):
        shard = Shard(0, 1, 0, 1, seed=0)
        seed_step(0, shard, 0, device)
        with blaming("task.batches"):
            batch = first_part(task, batch_of(task, shard, 0))
        with blaming("task.loss"):
            loss_of(task, module, batch, device)
    names = of_norms(module)
    for name, tensor in beside(module).items():
        moved = name in values and not torch.equal(_bits(tensor), values[name])
        if moved or written.has(name, tensor):
            names.add(name)
    for name, tensor in beside(module).items():
        if name not in names or tensor.dtype in COUNTING:
            continue
        if not tensor.is_floating_point():
            raise UserError(
                f"task.model: {name!r} is {tensor.dtype}, and training changes it; workers can "
                "average floating-point tensors only: keep it as such (a complex one as two), or "
                "register it with persistent=False"
            )
        if not (name in finite_before and _is_finite(tensor)):
            raise UserError(
                f"task.model: training writes to {name!r}, and not all of it is finite, so that "
                "workers cannot average it; give it finite values, write to it only when the model "
                "is made, or register it with persistent=False"
            )
    return frozenset(name for name in names if before[name].dtype not in COUNTING)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def of_norms(module: nn.Module) -> set[str]:
    """Running statistics of BatchNorm and its like, which torch writes to without counting it; in
    the first batch they may stay as they are.
    """
    norms = {
        id(tensor)
        for norm in module.modules()
        if isinstance(norm, nn.modules.batchnorm._NormBase) and norm.training
        for tensor in (norm.running_mean, norm.running_var)
    }
    return {name for name, tensor in beside(module).items() if id(tensor) in norms}


def _bits(tensor: Tensor) -> Tensor:
    """A copy of the bytes of a tensor, by which NaN equals NaN."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


class Written:
    """Tells whether tensors were written to, or replaced by others, since this object was made."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)  # kept alive, so that no other tensor gets one's id
        self.versions = {name: _version(tensor) for name, tensor in tensors.items()}

    def has(self, name: str, tensor: Tensor) -> bool:
        """Whether `tensor`, now in the place of `name`, is another or has been changed."""
        return tensor is not self.tensors[name] or _version(tensor) != self.versions[name]


class Unchanged:
    """Checks during a run that tensors which were found to be constant stay as they are."""

    def __init__(self, module: nn.Module, names: set[str]) -> None:
        self.places = dict(zip(names, places(module, names), strict=True))
        self.written = Written(self._now())

    def check(self) -> None:
        """Raise a `UserError` if one of them has been changed: each process has its own, and the
        change would be lost, or another worker's.
        """
        for name, tensor in self._now().items():
            if self.written.has(name, tensor):
                raise UserError(
                    f"task.model: {name!r} has been changed in training, and was not changed by "
                    "the first batch; a buffer of which workers share the average must change from "
                    "the first step on; one that need not be saved can have persistent=False"
                )

    def _now(self) -> dict[str, Tensor]:
        return {name: getattr(owner, attribute) for name, (owner, attribute) in self.places.items()}


def _version(tensor: Tensor) -> int:
    """How often a tensor has been written to. One made in inference mode does not count that, and
    cannot be written to outside of it.
    """
    return 0 if tensor.is_inference() else tensor._version
