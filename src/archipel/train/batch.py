"""A batch of a task: drawing it, what is in it, moving it, cutting it, and the loss on it.

What belongs here: everything that looks into a batch, and the one way to call a task's `loss`. What
does not: gradients, and which worker gets which batch.

A batch may be any nesting of mappings, tuples, lists, named tuples and dataclasses around tensors
and NumPy arrays.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from archipel.errors import UserError
from archipel.train.data import Shard
from archipel.train.task import Batch, Task


def batch_of(task: Task, shard: Shard, index: int) -> Batch:
    """The task's batch number `index` of a shard.

    Raises:
        ValueError: there is nothing in it. Its loss would be no number, and a learning rate the
            last thing to look at.
    """
    batch = task.batches(shard, index)
    found = list(tensors(batch))
    if found and not any(tensor.numel() for tensor in found):
        where = (
            "the validation data"
            if shard.split == "valid"
            else f"shard {shard.index} of {shard.of}"
        )
        raise ValueError(
            f"batch {index} of {where} is empty; `batches` must give every shard some data"
        )
    return batch


def loss_of(task: Task, module: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """The task's loss of `module` on a batch, in the task's precision."""
    try:
        with torch.autocast(device.type, task.autocast, enabled=task.autocast is not None):
            return task.loss(module, to_device(batch, device))
    except IndexError as error:
        numbers = [
            tensor for tensor in tensors(batch) if tensor.numel() and not tensor.is_floating_point()
        ]
        # torch's words for an embedding without such a row
        if numbers and str(error) == "index out of range in self":
            least = min(int(tensor.min()) for tensor in numbers)
            most = max(int(tensor.max()) for tensor in numbers)
            error.args = (
                "an embedding has no such row: a token is outside the vocabulary, or a sequence "
                "longer than the context; "
                f"the numbers in the batch are from {least} to {most}",
            )
        raise


def check_loss(loss: Any) -> None:
    """Raise a `UserError` if a loss is no number, or there is no gradient to take of it where there
    should be.
    """
    number = isinstance(loss, Tensor) and not loss.ndim and not loss.is_complex()
    if not number or (torch.is_grad_enabled() and not loss.requires_grad):
        raise UserError(
            "task.loss must return a 0-d tensor that depends on the model's parameters, not "
            f"{_describe(loss)}"
        )


# Looking into a batch


def tensors(batch: Batch) -> Iterator[Tensor]:
    """All tensors in a batch."""
    match batch:
        case Tensor():
            yield batch
        case Mapping():
            for value in batch.values():
                yield from tensors(value)
        case tuple() | list():
            for value in batch:
                yield from tensors(value)
        case _ if _is_dataclass(batch):
            for name in _fields(batch):
                yield from tensors(getattr(batch, name))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    match batch:
        case Tensor():
            return batch.to(device, non_blocking=True)
        case Mapping() | tuple() | list():
            return _rebuilt(batch, lambda value: to_device(value, device))
        case _ if _is_dataclass(batch):
            return _rebuilt(batch, lambda value: to_device(value, device))
        case _:
            return batch.to(device) if hasattr(batch, "to") else batch


def micro(batch: Batch, parts: int) -> list[Batch]:
    """`batch` in equal parts: every tensor and array in it is cut along its first dimension, and so
    is a list of plain values with as many of them. Other plain values are in every part.

    Raises:
        UserError: a first dimension is not a multiple of `parts`, or something in the batch cannot
            be cut.
    """
    if parts == 1:
        return [batch]
    rows = next((len(tensor) for tensor in tensors(batch) if tensor.ndim), None)
    return [_piece(batch, i, parts, rows) for i in range(parts)]


def first_part(task: Task, batch: Batch) -> Batch:
    """The part of a training batch that goes through the model first.

    Raises:
        UserError: the batch cannot be cut like that.
    """
    parts = task.gradient_accumulation
    try:
        return micro(batch, parts)[0]
    except UserError as error:
        raise UserError(f"Task.gradient_accumulation = {parts}: {error}") from None


def _piece(batch: Batch, i: int, parts: int, rows: int | None) -> Batch:
    """Part `i` of a batch; its first tensor has `rows` rows."""
    match batch:
        case PackedSequence():
            raise UserError(f"a batch with a {type(batch).__name__} cannot be cut")
        case Tensor() | np.ndarray():
            if isinstance(batch, Tensor) and (batch.layout != torch.strided or batch.is_nested):
                raise UserError(f"a batch with a tensor of layout {batch.layout} cannot be cut")
            return _rows(batch, tuple(batch.shape), i, parts)
        case list() if len(batch) == rows and all(_is_plain(value) for value in batch):
            return type(batch)(_rows(batch, (len(batch),), i, parts))
        case Mapping() | tuple() | list():
            return _rebuilt(batch, lambda value: _piece(value, i, parts, rows))
        case _ if _is_dataclass(batch):
            return _rebuilt(batch, lambda value: _piece(value, i, parts, rows))
        case _ if _is_plain(batch):
            return batch
        case _:
            raise UserError(
                f"a batch with a {type(batch).__name__} cannot be cut; mappings, tuples, lists and "
                "dataclasses of tensors can"
            )


def _rows(values: Any, shape: tuple[int, ...], i: int, parts: int) -> Any:
    """Rows of part `i` of `values`."""
    if not shape or shape[0] % parts:
        raise UserError(f"{parts} equal parts cannot be made of a batch of shape {shape}")
    size = shape[0] // parts
    return values[i * size : (i + 1) * size]


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a batch of the same type, in which `change` has been made to every value."""
    match batch:
        case MutableMapping():  # a copy keeps what a class of the user's holds besides its items
            copied = copy.copy(batch)
            for key, value in list(batch.items()):
                copied[key] = change(value)
            return copied
        case Mapping():
            return type(batch)({key: change(value) for key, value in batch.items()})  # type: ignore[call-arg]
        case tuple() if hasattr(batch, "_fields"):  # a named tuple
            return type(batch)(*map(change, batch))
        case tuple() | list():
            return type(batch)(map(change, batch))
        case _:  # a dataclass
            copied = copy.copy(batch)
            for name in _fields(batch):
                # Also if it is frozen: nobody else has this copy yet.
                object.__setattr__(copied, name, change(getattr(batch, name)))
            return copied


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _fields(batch: Any) -> Sequence[str]:
    return [field.name for field in dataclasses.fields(batch)]


def _is_plain(value: Any) -> bool:
    """A value without rows: a number, a text, a name."""
    return value is None or isinstance(
        value, bool | int | float | complex | str | bytes | np.generic | torch.dtype | torch.device
    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + (
        "" if value.requires_grad else " without a gradient"
    )
