"""What an inner optimizer keeps from step to step, wherever it keeps it.

What belongs here: finding that out, and moving it in and out of an optimizer that serves many
workers in turn. What does not: the optimizer's step, or what a worker keeps besides.

The state of an optimizer is found by looking through all that hangs on it: `state`, the groups,
attributes, lists, and other optimizers inside it. Tensors and numbers in there are a worker's own.
Whatever holds them (dicts, lists) stays the same object, so that two optimizers that share a dict
go on sharing it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from archipel.errors import UserError
from archipel.train.task import blaming

Path = tuple[Any, ...]
"""The way from the optimizer to something in it: names of attributes, keys, numbers in a list."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one tensor of a worker's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Container:
    """A dict or a list in an optimizer, as it is between two steps of a worker that has begun.

    Attributes:
        path: where it is.
        place: the container itself.
        content: what is in it, with None in the place of what is a worker's own.
        before: what is there before a worker's first step: the keys of a dict, or the length of a
            list.
        tensors, numbers: for each of a worker's tensors and numbers in it, its key and its index.
    """

    path: Path
    place: Any
    content: Any
    before: Any
    tensors: list[tuple[Any, int]] = field(default_factory=list)
    numbers: list[tuple[Any, int]] = field(default_factory=list)

    def leave_out(self, key: Any) -> None:
        """This worker has nothing there yet: neither has the container, or it has None."""
        if isinstance(self.place, dict) and key not in self.before:
            del self.place[key]


class OptimizerState:
    """Takes a worker's part of `optimizer` out and puts it in again.

    A worker's part is a list of tensors, `specs`: flags, numbers, then one tensor for each that the
    optimizer keeps. The first flag says whether the worker has taken a step; the others which of
    its numbers and tensors are there: an optimizer has none of a parameter that it has not moved
    yet.

    Args:
        optimizer: as its maker has left it.
        others: tensors that are not the optimizer's own, weights and gradients; they stay.
        step: takes one step with a made-up gradient; called twice.

    Raises:
        UserError: its step fails, or it keeps something that cannot be moved in and out.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        others: Sequence[Tensor],
        step: Callable[[int], None],
    ) -> None:
        self.optimizer = optimizer
        self.others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self.fresh = [(place, _copied(place)) for _, place in _containers(optimizer)]
        self.fresh_tensors = {
            id(value): (value, value.clone())
            for _, content in self.fresh
            for _, value in _items(content)
            if self._is_own(value)
        }
        self._try(step, 0)
        once = self._found()
        self._try(step, 1)
        self._check_same(once, self._found())
        self.begun, tensors, self.types = self._begun()
        self.devices = [tensor.device for tensor in tensors]
        self.specs = [
            TensorSpec((1 + len(self.types) + len(tensors),), torch.bool),
            TensorSpec((len(self.types),), torch.float64),
            *(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors),
        ]
        self._start_anew()

    def put_in(self, state: Sequence[Tensor]) -> None:
        """Make the optimizer that of the worker with this `state`."""
        flags = state[0].tolist()
        if not flags[0]:
            self._start_anew()
            return
        there, numbers, tensors = flags[1:], state[1].tolist(), state[2:]
        moved = [
            tensor if device.type == "cpu" else tensor.to(device)
            for tensor, device in zip(tensors, self.devices, strict=True)
        ]
        for container in self.begun:
            place = container.place
            _fill(place, container.content)
            for key, i in container.numbers:
                if there[i]:
                    place[key] = self.types[i](numbers[i])
                else:
                    container.leave_out(key)
            for key, i in container.tensors:
                if there[len(numbers) + i]:
                    place[key] = moved[i]
                else:
                    container.leave_out(key)

    def take_out(self, state: Sequence[Tensor]) -> None:
        """Put what the optimizer now has into `state`.

        Raises:
            UserError: something is new since its first two steps.
        """
        numbers, tensors = [0.0] * len(self.types), state[2:]
        there = [False] * (len(numbers) + len(tensors))
        for container in self.begun:
            place = self._at(container.path)
            if place is None:
                continue
            if len(place) > len(container.content):
                raise UserError(
                    f"task.optimizer: {self._name(container.path)} holds more than after the first "
                    "two steps; what an optimizer keeps must be there from then on"
                )
            for key, i in container.numbers:
                value = _get(place, key)
                if value is not None:
                    numbers[i], there[i] = float(value), True
            for key, i in container.tensors:
                value = _get(place, key)
                if value is not None:
                    there[len(numbers) + i] = True
                    # On the CPU most optimizers have changed the worker's own tensor in place.
                    if value is not tensors[i]:
                        tensors[i].copy_(value)
        state[0].copy_(torch.tensor([True, *there]))
        state[1].copy_(torch.tensor(numbers, dtype=torch.float64))

    # Finding out

    def _try(self, step: Callable[[int], None], number: int) -> None:
        kind = type(self.optimizer).__name__
        try:
            with blaming(f"task.optimizer: a step of {kind}"):
                step(number)
        except UserError as error:
            hint = (
                "; an inner optimizer gets its gradients and no closure: take one whose step() "
                "needs none"
                if "closure" in str(error)
                else ""
            )
            raise UserError(f"{error}{hint}") from error

    def _found(self) -> dict[Path, Any]:
        """All that is in the optimizer by its path; of a tensor only its shape and type."""
        return {
            (*path, key): (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
            for path, place in _containers(self.optimizer)
            for key, value in _items(place)
            if not _is_container(value)
        }

    def _check_same(self, once: Mapping[Path, Any], twice: Mapping[Path, Any]) -> None:
        """Raise a `UserError` if the second step has changed anything but the values of tensors and
        numbers.
        """
        kind = type(self.optimizer).__name__
        for path in once.keys() ^ twice.keys():
            raise UserError(
                f"task.optimizer: {kind} keeps {self._name(path)} after one of its first two steps "
                "and not after the other; what workers keep must stay the same tensors and numbers"
            )
        for path, value in once.items():
            number = _is_number(value) and _is_number(twice[path])
            if not number and _is_plain(value) and value != twice[path]:
                raise UserError(
                    f"task.optimizer: {kind} changes {self._name(path)} from {value!r} to "
                    f"{twice[path]!r} in a step; only tensors and numbers can be kept for each "
                    "worker"
                )

    def _begun(self) -> tuple[list[Container], list[Tensor], list[type[Any]]]:
        """All containers of an optimizer that has taken steps; the tensors and the types of the
        numbers in them.
        """
        fresh = {id(place): content for place, content in self.fresh}
        containers: list[Container] = []
        tensors: dict[int, tuple[int, Tensor]] = {}
        types: list[type[Any]] = []
        for path, place in _containers(self.optimizer):
            container = Container(path, place, _copied(place), fresh.get(id(place), ()))
            for key, value in _items(place):
                if self._is_own(value):
                    # A tensor in two places is one tensor.
                    i, _ = tensors.setdefault(id(value), (len(tensors), value))
                    container.tensors.append((key, i))
                elif _is_number(value):
                    container.numbers.append((key, len(types)))
                    types.append(type(value))
                else:
                    continue
                container.content[key] = None
            containers.append(container)
        return containers, [tensor for _, tensor in tensors.values()], types

    def _start_anew(self) -> None:
        """Make the optimizer what its maker has left."""
        for place, content in self.fresh:
            _fill(place, content)
        for tensor, value in self.fresh_tensors.values():
            tensor.copy_(value)

    # Looking through

    def _at(self, path: Path) -> Any:
        """The container at a path; None if there is none now."""
        place: Any = vars(self.optimizer)
        for key in path:
            value = _get(place, key)
            if value is None:
                return None
            place = _inside(value)
        return place

    def _is_own(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and not isinstance(value, nn.Parameter)
            and value.untyped_storage().data_ptr() not in self.others
        )

    def _name(self, path: Path) -> str:
        keys = ["a parameter" if isinstance(key, Tensor) else str(key) for key in path]
        return repr(" / ".join(keys))


def swap(optimizer: torch.optim.Optimizer, masters: Mapping[int, nn.Parameter]) -> None:
    """Have an optimizer move other parameters: `masters` by the id of those that it was made
    with.
    """
    for _, place in list(_containers(optimizer)):
        for key, value in list(_items(place)):
            if isinstance(place, dict) and id(key) in masters:
                place[masters[id(key)]] = place.pop(key)
            elif id(value) in masters:
                place[key] = masters[id(value)]


def _containers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Path, Any]]:
    """Every dict and list in an optimizer by its path, once, and every object as the dict of its
    attributes; the optimizer first.
    """
    seen: set[int] = set()
    waiting: deque[tuple[Path, Any]] = deque([((), optimizer)])
    while waiting:
        path, value = waiting.popleft()
        place = _inside(value)
        if id(place) in seen:
            continue
        seen.add(id(place))
        if not isinstance(place, tuple):
            yield path, place
        for key, inner in list(_items(place)):
            if _is_container(inner):
                waiting.append(((*path, key), inner))


def _inside(value: Any) -> Any:
    return value if isinstance(value, dict | list | deque | tuple) else vars(value)


def _items(place: Any) -> Iterator[tuple[Any, Any]]:
    return iter(place.items()) if isinstance(place, dict) else enumerate(place)


def _get(place: Any, key: Any) -> Any:
    if isinstance(place, dict):
        return place.get(key)
    return place[key] if key < len(place) else None


def _copied(place: Any) -> Any:
    return dict(place) if isinstance(place, dict) else list(place)


def _fill(place: Any, content: Any) -> None:
    place.clear()
    if isinstance(place, dict):
        place.update(content)
    else:
        place.extend(content)


def _is_number(value: Any) -> bool:
    """A number that a float64 holds exactly."""
    return type(value) in (bool, int, float) and (value != value or float(value) == value)


def _is_plain(value: Any) -> bool:
    """Something that is compared by its value."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype)


def _is_container(value: Any) -> bool:
    """Something that an optimizer may keep its state in: not a function, a module, or a part of
    Python.
    """
    if isinstance(value, dict | list | deque | tuple):
        return not _is_plain(value)
    opaque = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, Enum, torch.Generator)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, opaque)
        and type(value).__module__.partition(".")[0] not in sys.stdlib_module_names
    )
