"""A model's weights as one vector.

What belongs here: the map between a `torch.nn.Module` and one flat fp32 tensor, and arithmetic that
has to know where the parameters in it end. What does not: optimizers, messages, anything about a
particular model.

A vector holds the trainable parameters first, each once however often it is tied, then the
floating-point buffers (BatchNorm's running statistics). Buffers are averaged and never given
momentum. Integer buffers travel beside the vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archipel.actor import Block

COMPILE_PREFIX = "_orig_mod."


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the vector: entries `start` to `start + numel`, in row-major order."""

    name: str
    shape: torch.Size
    start: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, vector: Tensor) -> Tensor:
        """This tensor inside `vector`, shape `self.shape`, sharing its memory."""
        return vector[self.start : self.start + self.numel].view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a module lies in its vector.

    Attributes:
        slots: trainable parameters, then floating-point buffers.
        parameters: entries that are parameters.
        numel: entries in all.
        integers: the names of the integer and boolean buffers, which travel beside the vector.
    """

    slots: tuple[Slot, ...]
    parameters: int
    numel: int
    integers: tuple[str, ...]

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """The layout of `module`.

        Raises:
            ValueError: two parameters are not the same object but share memory, so that a vector
                would untie them; or a parameter is complex.
        """
        for name, parameter in parameters(module).items():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype}; only floating-point parameters can "
                    "be trained here"
                )
        _check_apart({_name(name): parameter for name, parameter in module.named_parameters()})
        tensors: dict[str, Tensor] = {**parameters(module), **float_buffers(module)}
        slots, start = [], 0
        for name, tensor in tensors.items():
            slots.append(Slot(name, tensor.shape, start))
            start += tensor.numel()
        count = sum(tensor.numel() for tensor in parameters(module).values())
        return Layout(tuple(slots), count, start, tuple(integer_buffers(module)))

    def read(self, module: nn.Module) -> Tensor:
        """The weights of `module` as a new fp32 vector, shape (numel,)."""
        vector = torch.empty(self.numel, dtype=torch.float32)
        for slot, tensor in zip(self.slots, self._tensors(module), strict=True):
            slot.view(vector).copy_(tensor.detach())
        return vector

    def write(self, module: nn.Module, vector: Tensor) -> None:
        """Copy `vector`, shape (numel,), into the weights of `module`, rounding to their own type.

        Raises:
            ValueError: the vector has another length.
        """
        if vector.shape != (self.numel,):
            raise ValueError(
                f"the vector has shape {tuple(vector.shape)}, this model's weights need "
                f"({self.numel},)"
            )
        with torch.no_grad():
            for slot, tensor in zip(self.slots, self._tensors(module), strict=True):
                tensor.copy_(slot.view(vector))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The tensors by name, and their entries in the vector."""
        return tuple(Block(slot.name, slot.start, slot.start + slot.numel) for slot in self.slots)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """`vector` cut into one tensor per name; names carry no trace of torch.compile."""
        return {slot.name: slot.view(vector) for slot in self.slots}

    def _tensors(self, module: nn.Module) -> Iterator[Tensor]:
        yield from parameters(module).values()
        yield from float_buffers(module).values()


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once, frozen ones left out."""
    return {
        _name(name): tensor for name, tensor in module.named_parameters() if tensor.requires_grad
    }


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers by name, those that `state_dict` leaves out (masks, rotary tables)
    left out.
    """
    return {_name(name): tensor for name, tensor in _buffers(module) if tensor.is_floating_point()}


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Integer and boolean buffers by name."""
    return {
        _name(name): tensor for name, tensor in _buffers(module) if not tensor.is_floating_point()
    }


def buffer_places(module: nn.Module, *, floating: bool) -> list[tuple[nn.Module, str]]:
    """Owner and name of each floating-point buffer, or of each other one; in the order of
    `float_buffers`, `integer_buffers`.
    """
    places = []
    for path, tensor in _buffers(module):
        if tensor.is_floating_point() == floating:
            owner, _, name = path.rpartition(".")
            places.append((module.get_submodule(owner), name))
    return places


def largest(buffers: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of each buffer the largest values that any worker has, for a model to take home; not every
    worker has every buffer.
    """
    found: dict[str, Tensor] = {}
    for one in buffers:
        for name, tensor in one.items():
            found[name] = torch.maximum(found[name], tensor) if name in found else tensor
    return found


def outer_gradient(start: Tensor, end: Tensor, parameters: int) -> Tensor:
    """What a stretch of training from `start` to `end` says to an outer optimizer, shape (numel,).

    The first `parameters` entries are `start − end`, the sign of a gradient. Buffers are not
    differences: they carry their new value `end`, so that whoever receives them can average and
    never extrapolate (an extrapolated running variance can turn negative).
    """
    delta = start - end
    if parameters < delta.numel():
        delta[parameters:] = end[parameters:]
    return delta


def _check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if two of `tensors` share memory."""
    # From the first byte of each to the byte behind its last one; in this order only neighbours can
    # overlap first.
    extents = []
    for place, (name, tensor) in enumerate(tensors.items()):
        if tensor.numel() and (start := tensor.data_ptr()):
            last = sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            extents.append((start, start + (last + 1) * tensor.element_size(), place, name))
    extents.sort()
    for (_, end, place, name), (start, _, other_place, other) in itertools.pairwise(extents):
        if start < end:
            first, second = (name, other) if place < other_place else (other, name)
            raise ValueError(
                f"parameters {first!r} and {second!r} share memory but are two objects; "
                "tie them by assigning the same nn.Parameter to both places"
            )


def _name(name: str) -> str:
    return name.replace(COMPILE_PREFIX, "")


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    for name, tensor in module.named_buffers():
        if name in kept:
            yield name, tensor
