"""Checkpoints: a run's whole state on disk, and back, to the bit.

What belongs here: how often a run is saved, how its state is written so that a crash leaves a whole
checkpoint or none, and how a damaged checkpoint is told from a sound one. What does not: how state
becomes JSON and tensors (`encoding.py`), what a run's state is (the engines).

A run directory keeps checkpoints in `checkpoint/event-000000001234/`, named by the number of events
that had happened:

- `tensors.safetensors` has the memory of every tensor, named by where it was met first;
- `state.json` has everything else, in the form that `encoding.Encoder` describes;
- `manifest.json` has the sizes and SHA-256 of both, and names the run and the event that they
  belong to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import archipel
from archipel.disk.encoding import MALFORMED, Decoder, Encoder, Surroundings
from archipel.errors import TrainingError, UserError

FORMAT = 1
KEPT = 2
"""So many of the newest checkpoints are kept: if the last one is damaged, there is another."""
STATE, TENSORS, MANIFEST = "state.json", "tensors.safetensors", "manifest.json"

# When


@dataclass(frozen=True)
class Every:
    """How often a run is saved: after so many trained tokens, or so many seconds here."""

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


class Unsound(Exception):
    """A checkpoint is damaged, or belongs to another run; the text says which file and why."""


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
    """A state, turned into the bytes of its files: later changes of the run do not reach it."""

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
    except Unsound:
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
        except Unsound as error:
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
        with contextlib.suppress(Unsound, UserError, *MALFORMED):
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
        Unsound: something is missing, truncated or altered, or is of another run or another event.
    """
    manifest = directory / MANIFEST
    try:
        said = json.loads(_bytes(manifest))
        file_format = said["format"]
        event = said["event"]
        recipe_sha256 = said["recipe_sha256"]
        expected = {
            name: (said["files"][name]["bytes"], said["files"][name]["sha256"])
            for name in (STATE, TENSORS)
        }
    except MALFORMED as error:
        raise Unsound(f"{manifest} is not a manifest: {type(error).__name__}: {error}") from None
    if file_format != FORMAT:
        raise Unsound(
            f"{manifest} is of format {file_format!r}; this version of archipel reads {FORMAT}"
        )
    if f"event-{event:012}" != directory.name:
        raise Unsound(f"{manifest} is that of event {event}, not of {directory.name}")
    if recipe_sha256 != _sha256(recipe.encode()):
        raise Unsound(
            f"{manifest} is that of another run: its recipe is not this run's recipe.yaml"
        )
    contents = {MANIFEST: _bytes(manifest)}
    for name, (size_bytes, sha256) in expected.items():
        contents[name] = content = _bytes(directory / name)
        if len(content) != size_bytes:
            raise Unsound(
                f"{directory / name} has {len(content):,} bytes and should have {size_bytes:,}"
            )
        if _sha256(content) != sha256:
            raise Unsound(f"{directory / name} has been altered: its SHA-256 is not the manifest's")
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
        "versions": versions(),
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
        raise Unsound(f"{directory / STATE} cannot be read: {error}") from None
    made_with = json.loads(contents[MANIFEST]).get("versions", {})
    changed = [
        f"{name} {made_with.get(name)} then and {now} now"
        for name, now in versions().items()
        if made_with.get(name) != now
    ]
    if changed:
        warnings.warn(
            f"{directory}: the run may go on differently than it would have: {', '.join(changed)}",
            stacklevel=3,
        )
    return state


def versions() -> dict[str, str]:
    """The versions that the bits of a run depend on."""
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
        raise Unsound(f"{path}: {error.strerror}") from None


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
