"""A model's weights as one vector.

What belongs here: the map between a `torch.nn.Module` and one flat fp32 tensor, and arithmetic that
has to know where in it the parameters end. What does not: optimizers, messages, anything about a
particular model.

A vector holds the trainable parameters first, each once however often it is tied, then the
statistics: floating-point buffers that training changes (BatchNorm's running mean), and frozen
parameters that it changes all the same (the slow teacher of a self-supervised model). Statistics
are averaged and never given momentum. Integer buffers travel beside the vector. What training does
not change (frozen parameters, masks, rotary tables) does not travel at all: everybody has it, in
its own type and to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from archipel.actor import Block

COMPILE_PREFIX = "_orig_mod."
COUNTING = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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
        slots: trainable parameters, then statistics.
        parameters: entries that are trainable parameters.
        numel: entries in all.
        integers: the names of the integer and boolean buffers, which travel beside the vector.
        names: for each name in the module's state dict, the slot or integer buffer that it is a
            name of. A tied tensor has several.
        kept: the rest of the state dict, which training does not change, by name: the module's own
            tensors.
    """

    slots: tuple[Slot, ...]
    parameters: int
    numel: int
    integers: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    kept: Mapping[str, Tensor] = field(compare=False, repr=False)

    @staticmethod
    def of(module: nn.Module, changing: Collection[str] | None = None) -> Layout:
        """The layout of `module`.

        Args:
            changing: names of the floating-point buffers and frozen parameters that training
                changes; None: all such buffers.

        Raises:
            ValueError: two parameters are not the same object but share memory, so that a vector
                would untie them; or a parameter is complex.
        """
        trained = parameters(module)
        for name, parameter in trained.items():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype}; only floating-point parameters can "
                    "be trained here"
                )
        _check_apart({_name(name): parameter for name, parameter in module.named_parameters()})
        moving = {**trained, **statistics(module, changing)}
        slots, start = [], 0
        for name, tensor in moving.items():
            slots.append(Slot(name, tensor.shape, start))
            start += tensor.numel()
        beside_vector = integer_buffers(module)
        owners = {id(tensor): name for name, tensor in {**moving, **beside_vector}.items()}
        names: list[tuple[str, str]] = []
        kept = {}
        for name, tensor in _state(module):
            if id(tensor) in owners:
                names.append((_name(name), owners[id(tensor)]))
            else:
                kept[_name(name)] = tensor
        count = sum(tensor.numel() for tensor in trained.values())
        return Layout(tuple(slots), count, start, tuple(beside_vector), tuple(names), kept)

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
        """`vector` cut into one tensor per slot; names carry no trace of torch.compile."""
        return {slot.name: slot.view(vector) for slot in self.slots}

    def state_dict(self, vector: Tensor, integers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the module's own `state_dict` would be with the weights `vector`, shape (numel,),
        and the integer buffers `integers`: under every name that it has there, so that a strict
        load finds all of them. Trained tensors are fp32, whatever the module computes in. No tensor
        is a copy.
        """
        values = {**self.named(vector), **integers}
        found = {name: values[owner] for name, owner in self.names if owner in values}
        return found | {name: tensor.detach() for name, tensor in self.kept.items()}

    def _tensors(self, module: nn.Module) -> Iterator[Tensor]:
        trained = {slot.name for slot in self.slots}
        yield from parameters(module).values()
        yield from statistics(module, trained).values()


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once, frozen ones left out."""
    return {
        _name(name): tensor for name, tensor in module.named_parameters() if tensor.requires_grad
    }


def statistics(module: nn.Module, changing: Collection[str] | None = None) -> dict[str, Tensor]:
    """The floating-point tensors called `changing` that are not trained, by name: buffers and
    frozen parameters. None: all buffers that are in the state dict.
    """
    return {
        name: tensor
        for name, tensor in beside(module).items()
        if tensor.is_floating_point()
        and (not isinstance(tensor, nn.Parameter) if changing is None else name in changing)
    }


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Integer and boolean buffers by name: those types of which there is a largest value."""
    return {
        name: tensor
        for name, tensor in beside(module).items()
        if tensor.dtype in COUNTING and not isinstance(tensor, nn.Parameter)
    }


def beside(module: nn.Module) -> dict[str, Tensor]:
    """All that the state dict holds besides trainable parameters, by name: frozen parameters, then
    buffers, tied ones once. Buffers that it leaves out (`persistent=False`) are left out.
    """
    return {_name(path): tensor for path, tensor in _paths_beside(module)}


def places(module: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Owner and attribute of each of `names`, of which all are in `beside`: a model may put another
    tensor in the place of the one that is there.
    """
    paths = {_name(path): path for path, _ in _paths_beside(module)}
    found = []
    for name in names:
        owner, _, attribute = paths[name].rpartition(".")
        found.append((module.get_submodule(owner), attribute))
    return found


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

    The first `parameters` entries are `start − end`, the sign of a gradient. Statistics are not
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


def _paths_beside(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.requires_grad and path in kept:
            yield path, tensor


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the module's state dict, the module's own objects."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):  # `get_extra_state` may give anything
            yield name, tensor
