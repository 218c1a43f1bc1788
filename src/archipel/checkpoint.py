"""Checkpoints: a run's whole state on disk, and back, to the bit.

What belongs here: how state becomes JSON and safetensors, how these files come on disk so that a
crash leaves them whole or leaves none, and how a damaged one is told from a sound one. What does
not: what a run's state is (the engines), when it is saved and what it is laid over
(`experiment.py`).

A run directory has them in `checkpoint/event-000000001234/`, named by the number of events that had
happened:

- `tensors.safetensors` has the memory of every tensor, named by where it was met first;
- `state.json` has everything else, in the form that `Encoder` describes;
- `manifest.json` has the sizes and SHA-256 of both, and says which run and which event they are of.

Nothing is unpickled and nothing is imported: reading makes objects of a few kinds only, see
`class_of`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from torch import Tensor

import archipel
from archipel.actor import NodeId
from archipel.errors import TrainingError, UserError

FORMAT = 1
KEPT = 2
"""So many of the newest checkpoints are kept: if the last one is damaged, there is another."""
STATE, TENSORS, MANIFEST = "state.json", "tensors.safetensors", "manifest.json"

# When


@dataclass(frozen=True)
class Every:
    """How often a run is saved: after so many tokens that the model to take home has absorbed, or
    so many seconds here.
    """

    tokens: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        """As `parse_every` reads it."""
        return (
            f"{self.tokens}"
            if self.seconds is None
            else f"{np.format_float_positional(self.seconds, trim='-')}s"
        )


def parse_every(text: str) -> Every:
    """`1000000` are tokens, `600s` seconds.

    Raises:
        UserError: it is neither, or not above 0.
    """
    match re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)(s?)", text.strip()):
        case re.Match() as found if found[2] and float(found[1]) > 0:
            return Every(seconds=float(found[1]))
        case re.Match() as found if "." not in found[1] and int(found[1]) > 0:
            return Every(tokens=int(found[1]))
    raise UserError(
        f"--checkpoint-every {text}: expected tokens, such as 1000000, or seconds on this machine, "
        "such as 600s"
    )


# Values as JSON and tensors


@dataclass(frozen=True)
class Surroundings:
    """What a state stands in and does not contain.

    Attributes:
        things: objects that the state refers to and that are there already when it is read, by
            name.
        modules: modules whose dataclasses may be made, besides archipel's own: the file of a method
            of the user's.
    """

    things: Mapping[str, object]
    modules: Sequence[ModuleType] = ()


class Refused(Exception):
    """A checkpoint is not sound, or not of this run; the text says which file and why."""


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

# On disk


def save(
    folder: Path,
    event: int,
    state: Any,
    surroundings: Surroundings,
    recipe: str,
    every: Every | None = None,
) -> Path:
    """Encode `state` as it is after `event` events of the run of `recipe`, and write it; where.

    Raises:
        UserError, TrainingError: see `encode` and `write`.
    """
    return write(folder, event, encode(state, surroundings), recipe, every)


@dataclass(frozen=True)
class Encoded:
    """A state as the bytes of its files, which nothing changes any more."""

    document: bytes
    tensors: bytes


def encode(state: Any, surroundings: Surroundings) -> Encoded:
    """`state` as bytes.

    Raises:
        UserError: the state contains something that a checkpoint cannot hold.
    """
    encoder = Encoder(surroundings)
    document = {"state": encoder.encode(state, "state"), "classes": encoder.classes}
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return Encoded(text.encode(), safetensors.torch.save(encoder.tensors))


def write(
    folder: Path, event: int, encoded: Encoded, recipe: str, every: Every | None = None
) -> Path:
    """Write a checkpoint of the run of `recipe` after `event` events; older ones but one go. Its
    directory.

    `every` is noted, so that the run is saved as often when it goes on.

    It appears whole or not at all: written under another name, flushed, renamed.

    Raises:
        TrainingError: it cannot be written. The checkpoints that were there are still there.
    """
    directory = folder / f"event-{event:012}"
    try:
        verify(directory, recipe)
    except Refused:
        _write(directory, event, encoded.document, encoded.tensors, recipe, every)
    numbers = {path: int(path.name.removeprefix("event-")) for path in checkpoints(folder)}
    # Those of later events have been refused: this run came by again.
    kept = [path for path, number in numbers.items() if number <= event][-KEPT:]
    for path in {*numbers} - {*kept}:
        shutil.rmtree(path, ignore_errors=True)
    return directory


def load(folder: Path, surroundings: Surroundings, recipe: str) -> Any:
    """The state in the newest sound checkpoint of the run of `recipe`; warns about each one that is
    refused on the way.

    Raises:
        UserError: there is none.
    """
    refused = []
    for directory in reversed(checkpoints(folder)):
        try:
            state = _read(directory, surroundings, recipe)
        except Refused as error:
            refused.append(str(error))
            continue
        for text in refused:
            warnings.warn(f"checkpoint refused: {text}; going on from {directory}", stacklevel=2)
        return state
    found = "; ".join(refused) or "there is none"
    raise UserError(f"no checkpoint to go on from in {folder}: {found}")


def noted_every(folder: Path) -> Every | None:
    """How often the run was saved whose checkpoints are in `folder`, as the newest one says that
    can be asked.
    """
    for directory in reversed(checkpoints(folder)):
        with contextlib.suppress(Refused, UserError, *MALFORMED):
            every = json.loads(_bytes(directory / MANIFEST))["every"]
            return every and parse_every(every)
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, sound or not, oldest first."""
    return sorted(
        path for path in folder.glob("event-*") if re.fullmatch(r"event-\d{12}", path.name)
    )


def verify(directory: Path, recipe: str) -> dict[str, bytes]:
    """The files of a checkpoint, and its manifest, as they were written.

    Raises:
        Refused: something is missing, truncated or altered, or is of another run or another event.
    """
    manifest = directory / MANIFEST
    try:
        said = json.loads(_bytes(manifest))
        file_format, event, recipe_sha256, files = (
            said["format"],
            said["event"],
            said["recipe_sha256"],
            said["files"],
        )
        expected = {
            name: (files[name]["bytes"], files[name]["sha256"]) for name in (STATE, TENSORS)
        }
    except MALFORMED as error:
        raise Refused(f"{manifest} is not a manifest: {type(error).__name__}: {error}") from None
    if file_format != FORMAT:
        raise Refused(
            f"{manifest} is of format {file_format!r}; this version of archipel reads {FORMAT}"
        )
    if f"event-{event:012}" != directory.name:
        raise Refused(f"{manifest} is that of event {event}, not of {directory.name}")
    if recipe_sha256 != _sha256(recipe.encode()):
        raise Refused(
            f"{manifest} is that of another run: its recipe is not this run's recipe.yaml"
        )
    contents = {MANIFEST: _bytes(manifest)}
    for name, (size_bytes, sha256) in expected.items():
        contents[name] = content = _bytes(directory / name)
        if len(content) != size_bytes:
            raise Refused(
                f"{directory / name} has {len(content):,} bytes and should have {size_bytes:,}"
            )
        if _sha256(content) != sha256:
            raise Refused(f"{directory / name} has been altered: its SHA-256 is not the manifest's")
    return contents


def _write(
    directory: Path, event: int, document: bytes, tensors: bytes, recipe: str, every: Every | None
) -> None:
    files = {STATE: document, TENSORS: tensors}
    manifest = {
        "format": FORMAT,
        "event": event,
        "recipe_sha256": _sha256(recipe.encode()),
        "files": {
            name: {"bytes": len(content), "sha256": _sha256(content)}
            for name, content in files.items()
        },
        "versions": _versions(),
        "every": every and str(every),
    }
    temporary = directory.with_name(f".{directory.name}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for left in directory.parent.glob(".event-*"):  # by a crash
            shutil.rmtree(left)
        temporary.mkdir()
        for name, content in files.items():
            write_file(temporary / name, content)
        write_file(temporary / MANIFEST, json.dumps(manifest, indent=2).encode())
        flush(temporary)
        if directory.exists():  # one that has been refused
            shutil.rmtree(directory)
        temporary.rename(directory)
        flush(directory.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        last = [path for path in checkpoints(directory.parent) if path != directory][-1:]
        rest = f"the last one, {last[0].name}, is whole" if last else "there is none before it"
        raise TrainingError(
            f"{directory}: this checkpoint cannot be written: {error.strerror or error}; {rest}"
        ) from None


def _read(directory: Path, surroundings: Surroundings, recipe: str) -> Any:
    contents = verify(directory, recipe)
    try:
        # In memory of their own: what is loaded shares one read-only buffer.
        tensors = {
            name: tensor.clone()
            for name, tensor in safetensors.torch.load(contents[TENSORS]).items()
        }
        document = json.loads(contents[STATE])
        state = Decoder(surroundings, tensors, document["classes"]).decode(document["state"])
    except MALFORMED as error:
        raise Refused(f"{directory / STATE} cannot be read: {error}") from None
    made_with = json.loads(contents[MANIFEST]).get("versions", {})
    changed = [
        f"{name} {made_with.get(name)} then and {now} now"
        for name, now in _versions().items()
        if made_with.get(name) != now
    ]
    if changed:
        warnings.warn(
            f"{directory}: the run may go on differently than it would have: {', '.join(changed)}",
            stacklevel=3,
        )
    return state


def _versions() -> dict[str, str]:
    return {
        "archipel": archipel.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(directory: Path) -> None:
    """Wait until what has been made or renamed in `directory` is on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
