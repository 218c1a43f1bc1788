"""A run's state as JSON and tensors, and back.

What belongs here: which values a checkpoint can hold, and how each one is written. What does not:
files (`checkpoint.py`), and what a run's state is (the engines).

Nothing is unpickled and nothing is imported: reading makes objects of a few kinds only, see
`class_of`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from torch import Tensor

from archipel.actor import NodeId
from archipel.errors import UserError


@dataclass(frozen=True)
class Surroundings:
    """What a state refers to and does not contain.

    Attributes:
        things: objects, by name, that already exist when the state is read; the state refers to
            them by these names.
        modules: modules whose dataclasses may be made, besides archipel's own: the file of a method
            of the user's.
    """

    things: Mapping[str, object]
    modules: Sequence[ModuleType] = ()


def class_of(name: str, modules: Sequence[ModuleType]) -> type | None:
    """The class called `module:Name`, if a checkpoint may hold one; else None.

    It may if it is a dataclass or a pydantic model, is defined in the module that it is said to be
    in, and that module is archipel's own or one of `modules`, and loaded already.
    """
    place, _, qualname = name.partition(":")
    own = {place: sys.modules.get(place)} if place.split(".")[0] == "archipel" else {}
    found: Any = ({module.__name__: module for module in modules} | own).get(place)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if (
        isinstance(found, type)
        and found.__module__ == place
        and (is_dataclass(found) or issubclass(found, BaseModel))
    ):
        return found
    return None


def field_names(kind: type) -> list[str]:
    """The fields of a dataclass or pydantic model."""
    return (
        list(kind.model_fields)
        if issubclass(kind, BaseModel)
        else [part.name for part in fields(cast(Any, kind))]
    )


class Encoder:
    """Turns a state into what JSON can hold, and collects its tensors.

    None, booleans, integers, strings and finite floats stand for themselves, a JSON array for a
    list. All else is an object with one key, which says what it is: `{"tuple": […]}`, `{"dict":
    [[key, value], …]}`, `{"archipel.outer:Nesterov": [field, …]}`. Whatever could be changed, or is
    large, is written once: where it comes again stands `{"ref": n}` for the n-th of those written
    so far. So what was one object is one object again, and vectors that share memory share it
    again.

    Attributes:
        tensors: the memory of each tensor, 1-D, by name. These are not copies: write them before
            anything changes.
        classes: the fields of each class in the state.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.classes: dict[str, list[str]] = {}
        self._modules = surroundings.modules
        self._things = {id(thing): name for name, thing in surroundings.things.items()}
        self._numbers: dict[int, int] = {}
        self._met: list[object] = []  # a number is its object's as long as that one lives
        self._memory: dict[tuple[int, torch.dtype], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        """`value` for JSON; `path` says where it was met.

        Raises:
            UserError: it is, or contains, something that a checkpoint cannot hold.
        """
        kind = type(value)
        if kind in (type(None), bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if id(value) in self._things:
            return {"thing": self._things[id(value)]}
        if id(value) in self._numbers:
            return {"ref": self._numbers[id(value)]}
        self._numbers[id(value)] = len(self._met)
        self._met.append(value)
        if kind is list:
            return self._all(value, path)
        if kind in (tuple, set, frozenset):
            return {kind.__name__: self._all(value, path)}
        if kind is dict:
            return {
                "dict": [
                    [self.encode(key, path), self.encode(entry, f"{path}.{key}")]
                    for key, entry in value.items()
                ]
            }
        if kind is NodeId:
            return {"node": list(value)}
        if (
            kind is Tensor
            and value.device.type == "cpu"
            and value.layout == torch.strided
            and not value.requires_grad
        ):
            return {
                "tensor": [
                    self._name(value, path),
                    list(value.shape),
                    list(value.stride()),
                    value.storage_offset(),
                ]
            }
        if kind is np.random.Generator and type(value.bit_generator) is np.random.PCG64:
            return {"generator": [value.bit_generator.state, value.bit_generator.seed_seq.state]}  # type: ignore[attr-defined]
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
            array = np.asarray(value)
            entries = [self.encode(entry, path) for entry in array.ravel().tolist()]
            return {
                "scalar" if isinstance(value, np.generic) else "array": [
                    array.dtype.str,
                    list(array.shape),
                    entries,
                ]
            }
        name = f"{kind.__module__}:{kind.__qualname__}"
        if class_of(name, self._modules) is not kind:
            raise UserError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
                "hold; it can hold plain values, "
                "tuples, lists, sets, dicts, tensors, numpy's numbers, arrays and generators, and "
                "dataclasses of the method's file"
            )
        names = self.classes.setdefault(name, field_names(kind))
        return {name: [self.encode(getattr(value, field), f"{path}.{field}") for field in names]}

    def _all(self, values: Any, path: str) -> list[Any]:
        return [self.encode(value, f"{path}.{i}") for i, value in enumerate(values)]

    def _name(self, tensor: Tensor, path: str) -> str:
        """The name of the memory that `tensor` lies in."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.dtype
        if key not in self._memory:
            self._memory[key] = name = (
                f"{path}#{len(self.tensors)}" if path in self.tensors else path
            )
            self.tensors[name] = torch.empty(0, dtype=tensor.dtype).set_(storage)
        return self._memory[key]


class Decoder:
    """Makes the state again that an `Encoder` has seen. What is wrong raises any of the errors in
    `MALFORMED`.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        tensors: Mapping[str, Tensor],
        classes: Mapping[str, list[str]],
    ) -> None:
        self._surroundings, self._tensors = surroundings, tensors
        self._kinds = {name: self._kind(name, names) for name, names in classes.items()}
        self._met: list[Any] = []

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict | list):
            return value
        if isinstance(value, list):
            result: Any = self._meet([])
            result += [self.decode(entry) for entry in value]
            return result
        [(tag, content)] = value.items()
        match tag:
            case "float":
                return float(content)
            case "thing":
                return self._surroundings.things[content]
            case "ref":
                return self._met[content]
            case "dict":
                result = self._meet({})
                result.update((self.decode(key), self.decode(entry)) for key, entry in content)
                return result
            case "set":
                result = self._meet(set())
                result.update(self.decode(entry) for entry in content)
                return result
            case name if (kind := self._kinds.get(name)) and is_dataclass(kind):
                result = self._meet(
                    object.__new__(kind)
                )  # not by its constructor: this one had its start already
                for field, entry in zip(field_names(kind), content, strict=True):
                    object.__setattr__(result, field, self.decode(entry))
                return result
        place = len(self._met)
        self._meet(None)
        self._met[place] = result = self._unchanging(tag, content)
        return result

    def _unchanging(self, tag: str, content: Any) -> Any:
        match tag:
            case "tuple":
                return tuple(self.decode(entry) for entry in content)
            case "frozenset":
                return frozenset(self.decode(entry) for entry in content)
            case "node":
                return NodeId(*content)
            case "tensor":
                name, shape, stride, offset = content
                return self._tensors[name].as_strided(shape, stride, offset)
            case "generator":
                state, sequence = content
                bits = np.random.PCG64(np.random.SeedSequence(**sequence))
                bits.state = state
                return np.random.Generator(bits)
            case "array" | "scalar":
                dtype, shape, entries = content
                array = np.array(
                    [self.decode(entry) for entry in entries], np.dtype(dtype)
                ).reshape(shape)
                return array if tag == "array" else array[()]
        kind: Any = self._kinds[tag]
        return kind.model_validate(
            {
                name: self.decode(entry)
                for name, entry in zip(field_names(kind), content, strict=True)
            }
        )

    def _meet(self, value: Any) -> Any:
        self._met.append(value)
        return value

    def _kind(self, name: str, names: list[str]) -> type:
        kind = class_of(name, self._surroundings.modules)
        if kind is None:
            raise TypeError(f"there is no {name!r} that may be made")
        if field_names(kind) != names:
            raise TypeError(
                f"{name!r} has the fields {', '.join(names)} there and "
                f"{', '.join(field_names(kind))} here"
            )
        return kind


MALFORMED = (AttributeError, LookupError, RuntimeError, TypeError, ValueError, SafetensorError)
"""What `Decoder.decode` raises where a state is not as an `Encoder` writes it."""
